"""What a decode step or cycle takes at least on a GPU of this kind: bytes from memory, or products, whichever is longer."""

import math
from typing import Any

import jax
from card import card

from dflash_jax.cache.pages import layer_bytes
from dflash_jax.cache.specs import layer_specs
from dflash_jax.config import DecoderConfig
from dflash_jax.engine import Engine
from dflash_jax.models.dflash import HEAD_INDEX, SHARED_HEAD
from dflash_jax.models.heads import head_tables
from dflash_jax.models.registry import layer_traits
from dflash_jax.parallel.ranks import held_bytes, held_shape, share_config
from dflash_jax.quantization.weights import rounds


def stored(weights: object) -> int:
    """Bytes of all arrays, on each of the GPUs that share them."""
    return held_bytes(weights)


def floor_ms(engine: Engine, *, draft: bool, context: int, batch: int) -> float | None:
    """What target and drafter take at least, one after the other: bytes that must be read once, or products, whichever is longer.

    Bytes are weights, keys and values, recurrent states, and for a draft the head again, or the copy of it that proposals read. One
    token reads its own experts; None for more of them, as it is not known how many tokens of random weights take, and over several
    GPUs.
    """
    target = share_config(engine.target, engine.tp)
    drafter = None if engine.draft is None else share_config(engine.draft, engine.tp)
    rows = batch * (drafter.block_size if draft else 1)
    experts = layer_traits(engine.target).experts
    if experts is not None and (rows > 1 or engine.tp > 1):
        return None
    read = {name: w for name, w in engine.weights["target"].items() if name != "embed.weight" or target.tie_embeddings}
    pages = _context_bytes(target, context, engine.dtype, engine.cache_dtype)
    if experts is not None:
        all_of_them = [read.pop(name) for name in list(read) if ".experts." in name]
        took = stored(all_of_them) * experts.per_token / experts.count / card().bandwidth
    else:
        took = 0.0
    took += _pass_seconds(target, list(read.values()), pages, rows, context, batch)
    took += 2 * batch * engine.state_bytes / card().bandwidth  # read once, written once
    if draft:
        head = engine.weights["target"]["embed.weight" if target.tie_embeddings else "lm_head.weight"]
        # The rows of keys and values that the context's projection holds are read in place of the layers' own.
        left_out = {"context_kv_proj.weight", *(() if drafter.head is None else head_tables(drafter.head))}
        own = {name: weight for name, weight in engine.weights["draft"].items() if name not in left_out}
        read = [*own.values(), *([] if {SHARED_HEAD, HEAD_INDEX} & own.keys() else [head])]
        seen = context if engine.draft_window is None else min(context, engine.draft_window)
        pages = _context_bytes(drafter, seen, engine.dtype)
        took += _pass_seconds(drafter, read, pages, batch * drafter.block_size, seen, batch)
    return round(took * 1e3, 3)


def _context_bytes(config: DecoderConfig, context: int, dtype: jax.numpy.dtype, cache_dtype: Any = None) -> int:
    """Keys and values that one sequence's queries see, in all layers: of layers with a window no more than that."""
    of_token = layer_bytes(config, 1, dtype, cache_dtype=cache_dtype)
    windows = (spec.window for spec in layer_specs(config, cache_dtype))
    return sum(size * min(context, window or context) for size, window in zip(of_token, windows, strict=True))


def _pass_seconds(config: DecoderConfig, weights: list, pages: int, rows: int, context: int, batch: int) -> float:
    """The longer of reading weights and `pages`, bytes of each sequence's, of a pass, and of its products and attention."""
    # Matrix units multiply float8 by float8 at twice the rate, where weights round as many rows.
    halves = [1 if rounds(weight, rows) else 2 for weight in weights]
    matrices = sum(
        math.prod(held_shape(leaf)) * half / 2
        for weight, half in zip(weights, halves, strict=True)
        for leaf in jax.tree.leaves(weight)
        if leaf.ndim > 1
    )
    attention = 2 * context * config.num_heads * config.head_dim * config.cached_layers
    return max(
        (stored(weights) + batch * pages) / card().bandwidth,
        2 * rows * (matrices + attention) / card().products,
    )
