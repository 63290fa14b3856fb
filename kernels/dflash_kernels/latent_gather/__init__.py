"""Rows of a chunk of several sequences' contexts, out of their pages, one sequence after the other."""
