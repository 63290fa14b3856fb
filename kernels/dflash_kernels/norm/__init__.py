"""The norms at a model's two ends, each with the move that lies beside it."""
