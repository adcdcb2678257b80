"""What was found and done, for people to read."""
