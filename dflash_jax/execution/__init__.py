"""How a stack of layers runs: the plain layers, or one of the fused paths."""
