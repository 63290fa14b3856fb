"""A quantized output of a layer, and the product that reads it."""
