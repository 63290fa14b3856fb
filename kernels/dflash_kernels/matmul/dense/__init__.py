"""Products with weights for a few hundred rows, and what follows each of them, as one launch."""
