"""Checkpoints: converted folders, Hugging Face folders, the hub, and weights on their way to the GPU."""
