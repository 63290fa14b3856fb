"""Norm, rotation, the write to the pages and attention over them, from a projection to heads, in one operation."""
