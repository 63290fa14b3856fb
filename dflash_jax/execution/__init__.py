"""Execution of a stack of layers: the plain layers, or one of the fused runners."""
