"""Absorbed latent attention of each query token to rows of its own, which are named one by one."""
