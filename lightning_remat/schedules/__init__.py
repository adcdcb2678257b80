"""What a training step is, what a schedule of it costs, and the bounds that none can beat: no torch here."""
