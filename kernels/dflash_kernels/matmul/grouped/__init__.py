"""Grouped matrix products: blocks of rows, each with the matrix of its group, as of experts."""
