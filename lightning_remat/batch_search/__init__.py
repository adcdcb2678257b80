"""What a training step needs at any batch size, and the search for the batch size: no Lightning here."""
