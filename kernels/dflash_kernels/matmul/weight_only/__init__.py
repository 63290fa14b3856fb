"""Products with a matrix whose rows are eight bits and a scale."""
