"""Mixtures of experts for few rows: each expert that is taken is read once."""
