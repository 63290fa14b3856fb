"""Releases whose weights are quantized: read as the tensors that they stand for, dequantized piece by piece while they are loaded.

A format is one file that reads its part of `config.json` and finds its tensors, and one row of `releases.FORMATS`.
"""
