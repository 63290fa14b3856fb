"""A layer from its projection of queries, keys and values to the next layer's, attention over pages included, as one launch."""
