"""A byte-level BPE tokenizer of the corpus's own."""

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dflash_jax.training.settings import EOS, EOS_ID

_SAMPLE_CHARACTERS = 60_000_000  # more text changes few of 4096 merges and takes minutes


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with the end-of-text token as id 0. Trains on evenly spaced files when there is much text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    stride = -(-sum(map(len, texts)) // _SAMPLE_CHARACTERS)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[::stride], trainer)
    return tokenizer


def encode_files(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Tokens of all texts in order, uint16, the end-of-text id after each."""
    pieces = []
    for start in range(0, len(texts), 512):
        for encoding in tokenizer.encode_batch(list(texts[start : start + 512])):
            pieces.append(np.array([*encoding.ids, EOS_ID], np.uint16))
    return np.concatenate(pieces)
