"""Random configurations of targets with an indexer against float64, in pages: odd numbers of heads, prompts before and past what is
chosen, index keys in float32 and in float8.

`FAMILY_SIZES` of them; a few in the suite, as every one is compiled.
"""

import os
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import make_pages
from dflash_jax.decoding.prefill import Caches, prefill_chunk
from dflash_jax.decoding.state import Setup

from .golden_files import TOLERANCE, difference
from .sparse_reference import forward, random_file, random_tensors
from .test_parity_llama import opened

COUNT = int(os.environ.get("FAMILY_SIZES", "2"))
LONGEST, ROW, PAGE = 96, 16, 8
LEAST_GAP = 1e-4  # between scores: float32 leaves no doubt which are chosen


@pytest.mark.few("1")
@pytest.mark.parametrize("number", range(COUNT))
def test_a_drawn_model_is_that_of_float64(number: int, tmp_path: Path) -> None:
    """Logits after every row of a prompt in pieces, whose pages were NaN or held the rest of another text, and after short ones."""
    file, eight, ids = random_file(number), number % 4 in (0, 3), np.random.default_rng(number).integers(0, 61, LONGEST)
    for seed in count(100 * number):
        tensors = random_tensors(file, seed)
        logits, gap = forward(file, tensors, ids, eight=eight)
        if gap > LEAST_GAP:
            break
    checkpoint = opened(tmp_path, file, tensors)
    config, params = checkpoint.config, checkpoint.load("float32")
    rows, width = LONGEST // ROW, LONGEST // PAGE
    pages, other = (make_pages(config, width, PAGE, jnp.dtype(kind)) for kind in ("float32", "bfloat16"))
    pages = replace(pages, index=other.index, index_scale=other.index_scale) if eight else pages
    caches = Caches(*[jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), pages)] * 2)
    step, table = jax.jit(partial(prefill_chunk, Setup(config))), np.tile(np.arange(width, dtype=np.int32), (rows, 1))
    wrong = np.concatenate([ids[:50], (ids[50:] + 7) % 61])
    # The wrong end is written over from its first token on, as a block is after a rejection.
    for text, first, last in ((wrong, 0, LONGEST), (ids, 50, LONGEST), (ids, 0, config.index_topk), (ids, 3, 20)):
        lengths = np.clip(last - first - np.arange(rows) * ROW, 0, ROW)
        pieces = np.zeros((rows, ROW), int)
        pieces.reshape(-1)[: last - first] = text[first:last]
        starts = first + np.arange(rows) * ROW
        caches, after = step({"target": params}, table, caches, pieces, starts, lengths, np.zeros(rows, int))
        if text is ids:
            live = lengths > 0
            assert difference(np.asarray(after)[live, 0], logits[(starts + lengths - 1)[live]]) < TOLERANCE
    columns = config.index_topk // PAGE
    if number % 2 and columns:  # a table without room for more than is chosen: attention is dense
        lengths = np.full(1, columns * PAGE)
        options = (
            table[:1, :columns],
            caches,
            ids[None, : columns * PAGE],
            np.zeros(1, int),
            lengths,
            np.zeros(1, int),
        )
        _, after = step({"target": params}, *options)
        assert difference(np.asarray(after)[0, 0], logits[columns * PAGE - 1]) < TOLERANCE
