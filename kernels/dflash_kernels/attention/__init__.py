"""Attention over packed and paged keys and values, and over MLA latents."""
