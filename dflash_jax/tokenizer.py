"""Former place of `dflash_jax.text.tokenizer`, kept for programs that import it from here."""

from dflash_jax.text.tokenizer import Tokenizer, end_token_ids, tokenizer_notices

__all__ = ["Tokenizer", "end_token_ids", "tokenizer_notices"]
