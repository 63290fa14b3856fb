"""Products of blocks of rows with the matrix of each block's group: the experts of a mixture."""
