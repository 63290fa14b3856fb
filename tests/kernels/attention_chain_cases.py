"""Calls of a whole layer as one operation, and what judges their results."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels import chain_stream, layer_chain, paged_attention, qkv_write
from dflash_kernels.fused.arguments import Heads
from dflash_kernels.fused.layer.arguments import Layer

from .drawn import drawn

EPS = 1e-6
UNUSED = 2147480000  # entries of page tables past a sequence's last page
QWEN3_4B = {"hidden": 2560, "inner": 9728, "heads": 32, "kv_heads": 8, "next": 6144}
QWEN3_8B = {"hidden": 4096, "inner": 12288, "heads": 32, "kv_heads": 8, "next": 6144}
LLAMA_8B = {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "next": 6144}
MIDDLE = {"hidden": 1024, "inner": 3072, "heads": 32, "kv_heads": 8, "next": 1024}
TINY = {"hidden": 128, "inner": 128, "heads": 2, "kv_heads": 1, "next": 128}


def make(
    tokens: int, seq_lens: list[int], q_lens: list[int], sizes: dict[str, int], *, page_size: int = 64, width: int = 0
) -> dict[str, Any]:
    """Arguments of a call: NaN in slots that hold no key, garbage in unused entries of the table, pages in no order."""
    d, f, n, k, h = *(sizes[name] for name in ("hidden", "inner", "heads", "kv_heads")), 128
    b, rng = len(seq_lens), np.random.default_rng(0)
    width = width or max(-(-max(seq_lens) // page_size), 1) + 1

    needed = [-(-length // page_size) for length in seq_lens]
    ids = rng.permutation(sum(needed) + 3)
    table = np.full((b, width), UNUSED, np.int32)
    pools = np.full((2, sum(needed) + 3, k, page_size, h), np.nan, np.float32)
    for i, (length, fresh) in enumerate(zip(seq_lens, q_lens, strict=True)):
        own, ids = ids[: needed[i]], ids[needed[i] :]
        table[i, : len(own)] = own
        for position in range(length - fresh):
            pools[:, own[position // page_size], :, position % page_size] = rng.normal(size=(2, k, h))
    positions = np.array(
        [[length - fresh + t for t in range(tokens)] for length, fresh in zip(seq_lens, q_lens, strict=True)]
    )
    angles = positions.reshape(-1, 1) * (10000.0 ** (-np.arange(h // 2) / (h // 2)))
    call = drawn(
        0, jnp.bfloat16, qkv=((b * tokens, (n + 2 * k) * h), 1.0, 0.0), q_norm=((h,), 0.1, 1.0), k_norm=((h,), 0.1, 1.0),
        stream=((b * tokens, d), 1.0, 0.0), o=((d, n * h), (n * h) ** -0.5, 0.0), post_norm=((d,), 0.1, 1.0),
        gate_up=((2 * f, d), d**-0.5, 0.0), down=((d, f), f**-0.5, 0.0), next_norm=((d,), 0.1, 1.0),
        following=((sizes["next"], d), d**-0.5, 0.0),
    )  # fmt: skip
    return call | {
        "k_pages": jnp.asarray(pools[0], jnp.bfloat16), "v_pages": jnp.asarray(pools[1], jnp.bfloat16),
        "page_table": jnp.asarray(table), "seq_lens": jnp.asarray(seq_lens, jnp.int32), "q_lens": jnp.asarray(q_lens, jnp.int32),
        "cos": jnp.asarray(np.cos(angles), jnp.float32), "sin": jnp.asarray(np.sin(angles), jnp.float32),
        "stream": chain_stream(call["stream"]),
    }  # fmt: skip


def without_norms(call: dict[str, Any]) -> dict[str, Any]:
    """The call of a model that does not norm its heads."""
    return {**call, "q_norm": None, "k_norm": None}


def arrays(call: dict[str, Any]) -> tuple[Heads, Layer]:
    """A call as implementations get it."""
    heads = {name: call[name] for name in Heads._fields if name in call}
    return Heads(**heads), Layer(**{name: array for name, array in call.items() if name not in heads})


def in_float8(call: dict[str, Any]) -> dict[str, Any]:
    """The call with pools in float8, on scales that are no powers of two."""
    kv_heads = call["k_pages"].shape[1]
    pools = {name: call[name].astype(jnp.float8_e4m3fn) for name in ("k_pages", "v_pages")}
    scales = {"k_scale": 1 + 0.3 * jnp.arange(1, kv_heads + 1), "v_scale": 0.7 + 0.1 * jnp.arange(kv_heads)}
    return {**call, **pools, **{name: scale.astype(jnp.float32) for name, scale in scales.items()}}


@functools.partial(jax.jit, static_argnames="causal")
def _separate(call: dict[str, Any], slots: Any, *, causal: bool) -> tuple[Any, ...]:
    b, rows = call["page_table"].shape[0], call["qkv"].shape[0]
    q, k, v, _ = qkv_write(
        call["k_pages"], call["v_pages"], call["qkv"], slots, call["cos"], call["sin"], q_norm=call["q_norm"],
        k_norm=call["k_norm"], eps=EPS, k_scale=call.get("k_scale"), v_scale=call.get("v_scale"), implementation="xla",
    )  # fmt: skip
    out: Any = paged_attention(
        q.reshape(b, rows // b, *q.shape[1:]), k, v, call["page_table"], call["seq_lens"], q_lens=call["q_lens"], causal=causal,
        k_scale=call.get("k_scale"), v_scale=call.get("v_scale"), implementation="xla",
    )  # fmt: skip
    layer = arrays(call)[1]._asdict()
    stream, projected = layer_chain(out.reshape(rows, -1), **layer, exchange=None, eps=EPS, implementation="xla")
    return stream, call["qkv"] if projected is None else projected, k, v


def separate(call: dict[str, Any], *, causal: bool, wide: bool) -> list[np.ndarray]:
    """Stream, projection and pools of the definitions of three operations, computed in float32 throughout with `wide`."""
    if wide:
        call = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, call)
    page_size, table, q_lens = call["k_pages"].shape[2], np.asarray(call["page_table"]), np.asarray(call["q_lens"])
    tokens = call["qkv"].shape[0] // len(table)
    slots = np.full((len(table), tokens), -1, np.int32)
    for i, t in np.ndindex(*slots.shape):
        position = int(call["seq_lens"][i]) - q_lens[i] + t
        if t < q_lens[i] and position // page_size < table.shape[1]:
            slots[i, t] = table[i, position // page_size] * page_size + position % page_size
    return [np.asarray(x, np.float64) for x in _separate(call, jnp.asarray(slots.reshape(-1)), causal=causal)]


def check(call: dict[str, Any], out: tuple[Any, ...], *, causal: bool = True) -> None:
    """Errors of at most twice those of separate operations and two units in the last place; NaN where nothing was written.

    What is rounded to float8 may be off by a unit in the last place of that, where separate operations round up and not down.
    """
    true, theirs = (separate(call, causal=causal, wide=wide) for wide in (True, False))
    if "k_scale" in call:
        for ours, near in zip(out[2:], theirs[2:], strict=True):
            ours = np.asarray(ours, np.float64)
            assert np.array_equal(np.isnan(ours), np.isnan(near))
            ours, near = np.nan_to_num(ours), np.nan_to_num(near)
            assert (np.abs(ours - near) <= np.maximum(np.abs(near) / 8, 2**-9)).all()
            assert (ours != near).mean() < 1e-3
        out, theirs, true = out[:2], theirs[:2], true[:2]
    for ours, near, exact in zip(out, theirs, true, strict=True):
        if ours is None:
            continue
        ours = np.asarray(ours, np.float64)
        assert np.array_equal(np.isnan(ours), np.isnan(exact))
        ours, near, exact = (np.nan_to_num(x) for x in (ours, near, exact))
        bound = 2 * np.abs(near - exact).max() + 2 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(exact).max()
        assert np.abs(ours - exact).max() <= bound
