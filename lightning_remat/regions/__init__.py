"""`rematerialize`: a module as a whole, or part by part under one budget."""
