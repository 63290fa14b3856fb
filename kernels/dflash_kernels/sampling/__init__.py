"""Sampling with min_p, top_k and top_p: which tokens stay, and the one that noise chooses among them."""
