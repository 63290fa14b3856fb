"""Weight-only quantized products (W8A16): weights in eight bits with row scales, activations in bfloat16."""
