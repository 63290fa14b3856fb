"""Attention of a few query tokens per sequence over keys and values kept in pages."""
