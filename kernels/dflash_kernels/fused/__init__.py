"""Several ops of a layer in one launch."""
