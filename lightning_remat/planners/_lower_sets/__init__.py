"""The engine of kusumoto's planners: lower sets of a graph, and the dynamic program over them."""
