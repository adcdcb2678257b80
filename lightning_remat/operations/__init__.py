"""What an operation of a module is, and how one is run, alone or again."""
