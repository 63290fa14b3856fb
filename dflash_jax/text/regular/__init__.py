"""Grammars that are regular: from their own form by an automaton over bytes to one over a model's tokens."""
