"""Two products with a norm between them, for a few tokens."""
