"""Matrix products of a few rows with a bias, in one launch."""
