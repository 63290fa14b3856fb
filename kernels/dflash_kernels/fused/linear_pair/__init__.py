"""Two matrix products with an RMS norm between them, fused for a few tokens."""
