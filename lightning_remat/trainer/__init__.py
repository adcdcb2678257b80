"""The side that knows Lightning: its loops, loaders and checkpoints. Nothing else in the package imports it."""
