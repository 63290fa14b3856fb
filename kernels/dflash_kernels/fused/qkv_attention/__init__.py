"""Fused QK norm, RoPE, KV-cache write and paged attention."""
