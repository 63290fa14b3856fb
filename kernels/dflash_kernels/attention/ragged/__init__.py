"""Attention of packed sequences, each query over its own sequence's keys: prompts and encoders."""
