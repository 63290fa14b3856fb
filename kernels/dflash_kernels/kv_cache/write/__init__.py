"""Cache writes: finished rows, or norm, RoPE, quantization and the write in one launch; in place inside a donated program."""
