"""W8A8 matrix products: activations and weights in float8 with row scales."""
