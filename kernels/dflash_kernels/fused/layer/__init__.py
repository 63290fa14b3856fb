"""Fused decoder layer: everything between one layer's attention and the next layer's, or from one QKV projection to the next."""
