"""Matrix products for tens to hundreds of rows with their epilogue in one launch: SwiGLU, residual and norm, argmax."""
