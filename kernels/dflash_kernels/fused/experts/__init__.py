"""Mixture of experts for few rows: the weights of each expert that is taken are read once."""
