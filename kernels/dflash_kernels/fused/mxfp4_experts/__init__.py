"""Mixture of experts in MXFP4: clamped SwiGLU with biases, four bits a weight."""
