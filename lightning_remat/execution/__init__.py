"""A module runs by a plan: its program, the executor, and the exchange of its forward."""
