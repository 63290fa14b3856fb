"""Min-p, top-k and top-p sampling by the Gumbel-max trick."""
