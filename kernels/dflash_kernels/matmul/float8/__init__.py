"""Products of rows and weights that are both in float8."""
