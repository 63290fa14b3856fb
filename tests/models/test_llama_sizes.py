"""Random configurations of Llama, Qwen2 and Mistral targets against float64: odd numbers of heads, prompts of 1 to 300 tokens.

`FAMILY_SIZES` of each family; a few in the suite, as every one is compiled.
"""

import itertools
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.cache import make_pages
from dflash_jax.decoding.prefill import Caches, prefill_chunk
from dflash_jax.decoding.state import Setup

from .golden_files import TOLERANCE, difference
from .llama_reference import KINDS, forward, random_file, random_tensors
from .test_parity_llama import logits_and_taps, opened

COUNT = int(os.environ.get("FAMILY_SIZES", "2"))
# Most prompts: over several pieces of 40, and further than any window and the length that a rotation was stretched from.
LONGEST, ROW, PAGE = 300, 40, 16
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def drawn(kind: str, number: int) -> dict[str, Any]:
    """A `config.json`. Sizes are drawn; eight numbers in a row are all combinations of tied or not, a stretched rotation or not,
    and biases of all projections (Llama) or windows (Qwen2 and Mistral) or not; of two, each is in one. Of every two, one turns
    neighbours together."""
    tied, second, third = (bool(number >> bit & 1) for bit in range(3))
    own = tied != third
    changes = {"num_hidden_layers": 2, "tie_word_embeddings": tied, "rope_scaling": LLAMA3 if tied == second else None}
    if (number + KINDS.index(kind)) % 2:
        changes["is_neox_style"] = False
    changes |= {
        "Llama": {"attention_bias": own}, "Qwen2": {"use_sliding_window": own}, "Mistral": {"sliding_window": 13 if own else None},
    }[kind]  # fmt: skip
    return random_file(3 * number + KINDS.index(kind), **changes)


def test_what_is_drawn() -> None:
    for kind in KINDS:
        files = [drawn(kind, number) for number in range(8)]
        assert {file["model_type"] for file in files} == {kind.lower()}
        own = {"Llama": "attention_bias", "Qwen2": "use_sliding_window", "Mistral": "sliding_window"}[kind]
        kinds = {(file["tie_word_embeddings"], bool(file["rope_scaling"]), bool(file[own])) for file in files}
        assert kinds == set(itertools.product((False, True), repeat=3))
        assert sum("is_neox_style" in file for file in files) == 4
        assert any(file["num_attention_heads"] % 2 for file in files)


@pytest.mark.few("*-0")
@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.parametrize("kind", KINDS)
def test_a_drawn_model_is_that_of_float64(kind: str, number: int, tmp_path: Path) -> None:
    """Logits and taps after every one of 300 tokens; every other model also fills pages in pieces."""
    file, rng = drawn(kind, number), np.random.default_rng(number)
    # Those of other tests are sharp, for greedy choices to be stable: NumPy's float32 is off by up to 8e-5 there.
    tensors = {name: array / 2 if array.ndim > 1 else array for name, array in random_tensors(file, number).items()}
    checkpoint = opened(tmp_path, file, tensors)
    config, params = checkpoint.config, checkpoint.load("float32")
    ids = rng.integers(0, config.vocab_size, LONGEST)
    logits, taps = forward(file, tensors, ids.tolist())
    ours = logits_and_taps(config, params, ids.tolist())
    errors = [difference(ours[0], logits), difference(ours[1], taps)]
    if number % 2:
        counts = (1, int(rng.integers(2, LONGEST)), LONGEST)
        errors += [difference(last, logits[len(prompt) - 1]) for prompt, last in in_pages(config, params, ids, counts)]
    assert max(errors) < TOLERANCE, errors


def in_pages(
    config: Any, params: dict[str, jax.Array], ids: np.ndarray, counts: tuple[int, ...]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each of so many first tokens, and the logits `[V]` after the last of them; pages nobody wrote are NaN."""
    rows, width = -(-LONGEST // ROW), -(-LONGEST // PAGE)
    table, step = np.tile(np.arange(width, dtype=np.int32), (rows, 1)), jax.jit(partial(prefill_chunk, Setup(config)))
    pages = make_pages(config, width, PAGE, jnp.dtype("float32"))
    pages = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), pages)
    for count in counts:
        pieces, lengths = np.full((rows, ROW), config.vocab_size - 1), np.clip(count - np.arange(rows) * ROW, 0, ROW)
        pieces.reshape(-1)[:count] = ids[:count]
        caches, starts = Caches(pages, pages), np.arange(rows) * ROW
        _, last = step({"target": params}, table, caches, pieces, starts, lengths, np.zeros(rows, int))
        yield ids[:count], np.asarray(last)[(count - 1) // ROW, 0]
