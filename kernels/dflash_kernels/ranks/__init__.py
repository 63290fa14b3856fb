"""Exchanges between GPUs inside kernels of this package: their memory, and the gather of a few words of all."""
