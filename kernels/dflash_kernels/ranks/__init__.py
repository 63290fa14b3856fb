"""Exchanges between GPUs inside kernels of this package: their memory, the gather of a few words of all, and sums."""
