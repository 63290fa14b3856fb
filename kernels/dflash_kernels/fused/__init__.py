"""Fused ops: several ops of a decoder layer in one launch."""
