"""Weights and KV pages in eight bits."""
