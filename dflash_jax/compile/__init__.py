"""Ahead-of-time compilation: programs by shape, the cache of executables on disk, and patches of JAX."""
