"""Joining attention over two disjoint sets of keys into attention over both."""
