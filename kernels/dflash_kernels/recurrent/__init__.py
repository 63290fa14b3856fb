"""Layers that keep a state of constant size in place of keys and values."""
