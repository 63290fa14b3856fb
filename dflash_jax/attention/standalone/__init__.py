"""Attention forms for use by themselves; no model of this library runs them."""
