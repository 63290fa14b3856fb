"""Latent attention of a few query tokens per sequence over rows kept in pages: every head reads the same keys."""
