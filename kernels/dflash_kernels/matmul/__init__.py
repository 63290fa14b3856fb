"""Matrix products: dense, float8, weight-only eight-bit, grouped by expert."""
