"""Up-projection of MLA: keys and values of all heads from latent rows in pages."""
