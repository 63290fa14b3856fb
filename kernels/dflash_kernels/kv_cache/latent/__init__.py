"""Latent rows in eight bits: how they are kept in pages, written and read."""
