"""Keys and values of all heads, written out from latent rows in pages."""
