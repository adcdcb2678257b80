"""A graph and a budget become a plan, for one region or for all of a step: no torch here."""
