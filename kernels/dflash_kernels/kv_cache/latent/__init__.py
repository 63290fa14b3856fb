"""Latent rows of MLA: their formats in pages, 16 and 8 bits, and their gather."""
