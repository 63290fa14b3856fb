"""Quantization of activations to float8 and NVFP4, for a layer whose output the next matrix reads quantized."""
