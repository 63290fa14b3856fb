"""Everything between one layer's attention and the next layer's, as one launch."""
