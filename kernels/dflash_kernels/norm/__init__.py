"""RMS norms at a model's two ends, with the embedding lookup and of a transposed residual stream; and after a sum over devices."""
