"""The engine of the chain planners: a graph as a chain of stages, and the dynamic programs of beaumont2024."""
