"""Writes to and reads from KV pages and MLA latent pages."""
