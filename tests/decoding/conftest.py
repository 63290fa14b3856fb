"""Fixtures of the small random pair."""

from ..random_pair import make_config, make_pair, make_prompts, pair

__all__ = ["make_config", "make_pair", "make_prompts", "pair"]
