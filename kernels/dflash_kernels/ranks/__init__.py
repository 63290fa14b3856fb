"""What GPUs tell one another in kernels of this package's own: memory for it, and words of all put side by side."""
