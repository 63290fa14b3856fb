"""Attention of one token with what comes before it and after it in a layer, in one launch."""
