"""Projection of a few rows to queries, keys and values, their rotation, and the write to the pages, in one launch."""
