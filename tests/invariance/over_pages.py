"""Operations over pages of keys: attention, with projections and without, latent rows, and writes."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels import (
    cache_write,
    few_qkv_write,
    latent_decode,
    latent_encode,
    latent_expand,
    latent_write,
    mla_attention,
    mla_write,
    paged_attention,
    qkv_write,
)
from dflash_kernels.attention.mla import launch as of_mla
from dflash_kernels.attention.mla.mosaic_gpu import tuned as tuned_mla
from dflash_kernels.attention.paged.launch import Tuning
from dflash_kernels.attention.paged.mosaic_gpu import tuned
from dflash_kernels.fused.few_qkv.mosaic_gpu import launch as launch_few_qkv
from dflash_kernels.kv_cache.latent_expand.launch import Tuning as ExpandTuning
from dflash_kernels.kv_cache.latent_expand.mosaic_gpu import launch as launch_expand
from dflash_kernels.kv_cache.write.mosaic_gpu import launch_mla, launch_qkv, launch_rows
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_jax.execution.plan import EXACT_PRODUCTS
from dflash_jax.models.deepseek import MLAttention

from .people import MOST, PEOPLE, Call, Form, Operation, matrix, norm_weight, numbers

INTERPRET = plgpu.InterpretGPUParams()
EPS, PAGE = 1e-6, 64
FP8, INT8 = jnp.float8_e4m3fn, jnp.int8
REAL_MIDDLE = 1150


def width(middle: int) -> int:
    """Pages of the longest sequence."""
    return -(-(2 * middle + 2 * MOST) // PAGE)


def pages(middle: int) -> np.ndarray:
    """Everybody's pages, in no order."""
    return np.random.default_rng(0).permutation(PEOPLE * width(middle)).reshape(PEOPLE, -1).astype(np.int32)


def lengths(call: Call) -> dict[str, jax.Array]:
    """Keys and live queries of each slot."""
    live = call.first >= 0
    both = {"seq_lens": np.where(live, call.first + call.tokens, 0), "q_lens": np.where(live, call.tokens, 0)}
    return {name: jnp.asarray(array, jnp.int32) for name, array in both.items()}


def slots(call: Call, table: np.ndarray) -> jax.Array:
    """Where tokens are written, `[B * T]`; nowhere where nobody is."""
    positions = np.maximum(call.positions, 0)
    found = np.take_along_axis(table[call.who], positions // PAGE, axis=1) * PAGE + positions % PAGE
    return jnp.asarray(np.where(call.positions < 0, -1, found).reshape(-1), jnp.int32)


def read(pool: jax.Array, places: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """What stands in slots now: `[B, T, K, ...]`."""
    found = pool[jnp.maximum(places, 0) // PAGE, :, jnp.maximum(places, 0) % PAGE]
    return found.reshape(*shape, *found.shape[1:])


def pool(count: int, heads: int, dim: int, dtype: Any = jnp.bfloat16, *, salt: int = 0) -> jax.Array:
    found = jax.random.normal(jax.random.key(salt), (count, heads, PAGE, dim))
    return (jnp.round(found * 40) if dtype == INT8 else found).astype(dtype)


def attention(
    real: bool,
    *,
    stored: Any = jnp.bfloat16,
    splits: int = 2,
    window: int | None = None,
    sinks: bool = False,
    told: bool = True,
    few: bool = False,
) -> Form:
    """`told`: that rows are to know of no other, which kernels over pages in eight bits do not do by themselves. `few`: heads and
    pages of the pair that ships, of whose blocks a token's rows may lie in two CTAs, and whose splits have a tile each."""
    heads, kv_heads, dim, middle = (32, 8, 128, REAL_MIDDLE) if real else (4, 1, 64, 126)
    if few:
        heads, kv_heads, dim, middle = (5, 1, 64, 272) if real else (5, 1, 64, 80)
    table = pages(middle)
    k, v = (pool(table.size, kv_heads, dim, stored, salt=salt) for salt in range(2))
    given: Any = {
        "causal": True,
        "scale": 0.3,
        "window": (window, None),
        "sinks": jnp.arange(heads) / 8 if sinks else None,
        "batch_invariant": told,
    }
    if stored == INT8:
        of_keys = jax.random.uniform(jax.random.key(2), k.shape[:3], minval=0.01, maxval=0.03)
        given |= {"k_scale": of_keys, "v_scale": jnp.full((kv_heads, dim), 0.02)}
    elif stored == FP8:
        given |= {"k_scale": jnp.full(kv_heads, 0.5), "v_scale": jnp.full(kv_heads, 2.0)}

    def draw(call: Call) -> dict[str, jax.Array]:
        q = 3 * numbers(call, heads * dim).reshape(*call.shape, heads, dim)
        if stored != jnp.bfloat16:  # tokens of which one sees farther than the others of some blocks
            q *= jnp.asarray(2.0 ** (call.positions % 7 - 2), q.dtype)[..., None, None]
        return {"q": q, "page_table": jnp.asarray(table[call.who])} | lengths(call)

    def run(args: dict[str, jax.Array]) -> Any:
        q, *where = (args[name] for name in ("q", "page_table", "seq_lens", "q_lens"))
        if real:
            *where, live = where
            return paged_attention(q, k, v, *where, q_lens=live, implementation="mosaic_gpu", **given)
        how: Any = {"soft_cap": None, "tuning": Tuning(splits=splits), "interpret": INTERPRET}
        return tuned(q, k, v, *where, **how, **given)[0]

    return Form(draw, run, middle=middle)


def attention_of_xla(real: bool, *, kept: str) -> Form:
    """What no kernel takes: pages in formats of XLA's, and heads wider than other families have."""
    assert real
    heads, kv_heads, dim = (16, 2, 512) if kept == "wide heads" else (32, 8, 128)
    table = pages(REAL_MIDDLE)
    dtypes = {"fp8_e5m2": (jnp.float8_e5m2,) * 2, "int8_keys": (INT8, jnp.bfloat16)}.get(kept, (jnp.bfloat16,) * 2)
    k, v = (pool(table.size, kv_heads, dim, dtype, salt=salt) for salt, dtype in enumerate(dtypes))
    given: Any = {"batch_invariant": True, "implementation": "xla", "scale": 0.05}
    if kept == "int8_keys":
        given["k_scale"] = jax.random.uniform(jax.random.key(2), k.shape[:3], minval=0.01, maxval=0.03)

    def draw(call: Call) -> dict[str, jax.Array]:
        q = 3 * numbers(call, heads * dim).reshape(*call.shape, heads, dim)
        return {"q": q, "page_table": jnp.asarray(table[call.who])} | lengths(call)

    def run(args: dict[str, jax.Array]) -> Any:
        q, *where, live = (args[name] for name in ("q", "page_table", "seq_lens", "q_lens"))
        return paged_attention(q, k, v, *where, q_lens=live, **given)

    return Form(draw, run, EXACT_PRODUCTS, middle=REAL_MIDDLE)


def latent_products(real: bool, *, out: bool) -> Form:
    """Queries of latent rows, and values from averages over them: products of every head."""
    assert real
    heads, rank, nope, rotated = 16, 512, 128, 64
    layer: Any = SimpleNamespace(w_uk=matrix(heads, nope, rank), w_uv=matrix(heads, 128, rank))

    def draw(call: Call) -> dict[str, jax.Array]:
        width = rank if out else nope + rotated
        return {"x": numbers(call, heads * width).reshape(*call.shape, heads, width)}

    def run(args: dict[str, jax.Array]) -> Any:
        x = args["x"]
        return MLAttention.up(layer, x) if out else MLAttention.absorb(layer, x[..., :nope], x[..., nope:])

    return Form(draw, run, EXACT_PRODUCTS)


def latent_attention(real: bool, *, stored: Any = jnp.bfloat16, splits: int = 2, heads: int | None = None) -> Form:
    """Absorbed, over rows in sixteen bits and in float8; packed rows are unpacked first."""
    rank, rotated, middle = 512, 64, REAL_MIDDLE if real else 126
    heads, table = heads or (16 if real else 5), pages(middle)
    rows = jax.random.normal(jax.random.key(0), (table.size, 1, PAGE, rank + rotated))
    packed = latent_encode(rows.astype(jnp.bfloat16).reshape(-1, rank + rotated), jnp.uint8, kv_lora_rank=rank)
    kept = packed.reshape(table.size, 1, PAGE, -1) if stored == jnp.uint8 else rows.astype(stored)

    def draw(call: Call) -> dict[str, jax.Array]:
        q = numbers(call, heads * (rank + rotated)).reshape(*call.shape, heads, -1)
        return {"q": q, "page_table": jnp.asarray(table[call.who])} | lengths(call)

    def run(args: dict[str, jax.Array]) -> Any:
        q, *where = (args[name] for name in ("q", "page_table", "seq_lens", "q_lens"))
        own = latent_decode(kept, jnp.bfloat16, kv_lora_rank=rank) if stored == jnp.uint8 else kept
        how: Any = {"kv_lora_rank": rank, "scale": 0.06}
        how |= {"latent_scale": jnp.float32(0.5)} if stored == FP8 else {}
        if real:
            *where, live = where
            return mla_attention(q, own, *where, q_lens=live, implementation="mosaic_gpu", **how)
        return tuned_mla(
            q, own, *where, causal=True, tuning=of_mla.Tuning(splits=splits, min_tiles=1), interpret=INTERPRET, **how
        )[0]

    return Form(draw, run, middle=middle)


def expanded_latents(real: bool) -> Form:
    """Keys and values of every head out of latent rows, which prompts attend to in the other form."""
    heads, rank, middle = (16, 512, REAL_MIDDLE) if real else (1, 128, 128)
    table, count = pages(middle), 2 * PAGE
    rows = pool(table.size, 1, rank + 64)
    w_uk, w_uv = matrix(heads, 128, rank), matrix(heads, 128, rank, salt=1)

    def draw(call: Call) -> dict[str, jax.Array]:
        # Parts begin with a page.
        starts = np.maximum(call.first, 0) // PAGE * PAGE
        within = np.maximum(call.positions - starts[:, None], 0)
        lens = np.where(call.first < 0, 0, np.minimum(within[:, -1] + 1, count))
        return {
            "page_table": jnp.asarray(table[call.who]), "starts": jnp.asarray(starts, jnp.int32),
            "lens": jnp.asarray(lens, jnp.int32), "within": jnp.asarray(np.minimum(within, count - 1)),
        }  # fmt: skip

    def run(args: dict[str, jax.Array]) -> Any:
        where = args["page_table"], args["starts"], args["lens"]
        if real:
            both = latent_expand(rows, *where, w_uk, w_uv, rows=count, implementation="mosaic_gpu")
        else:
            how: Any = {"tuning": ExpandTuning(stages=2, cluster=1), "interpret": INTERPRET}
            both = launch_expand(rows, *where, w_uk, w_uv, rows=count, **how)
        return tuple(jnp.take_along_axis(each, args["within"][:, :, None, None], axis=1) for each in both)

    return Form(draw, run, middle=middle)


def angles(call: Call, half: int) -> dict[str, jax.Array]:
    turned = np.maximum(call.positions, 0).reshape(-1, 1) * (10_000.0 ** (-np.arange(half) / half))
    return {"cos": jnp.asarray(np.cos(turned), jnp.float32), "sin": jnp.asarray(np.sin(turned), jnp.float32)}


def norm_rotation_write(
    real: bool, *, stored: Any = jnp.bfloat16, values: Any = None, zero_centered: bool = False, xla: bool = False
) -> Form:
    """Norm and rotation of heads and their write: queries, and what stands in the pages then; `values` where these are kept in
    another dtype. `xla`: of formats that kernels do not write."""
    heads, kv_heads, dim, middle = (32, 8, 128, REAL_MIDDLE) if real else (2, 1, 64, 126)
    table = pages(middle)
    pools = tuple(jnp.zeros((table.size, kv_heads, PAGE, dim), dtype) for dtype in (stored, values or stored))
    norms, scales = (norm_weight(dim), norm_weight(dim, salt=1)), (None, None)
    if stored == INT8:
        scales = jnp.zeros((table.size, kv_heads, PAGE)), None if values else jnp.full((kv_heads, dim), 0.02)
    elif stored == FP8:
        scales = jnp.full(kv_heads, 0.5), jnp.full(kv_heads, 2.0)

    def draw(call: Call) -> dict[str, jax.Array]:
        qkv = numbers(call, (heads + 2 * kv_heads) * dim)
        return {"qkv": qkv, "places": slots(call, table)} | angles(call, dim // 2)

    def run(args: dict[str, jax.Array]) -> Any:
        (b, t, _), places = args["qkv"].shape, args["places"]
        rows = args["qkv"].reshape(b * t, -1), places, args["cos"], args["sin"]
        how: Any = {"eps": EPS, "zero_centered": zero_centered}
        if real or xla:
            more: Any = dict(zip(("q_norm", "k_norm", "k_scale", "v_scale"), (*norms, *scales), strict=True))
            op: Any = qkv_write
            q, k, v, of_keys = op(*pools, *rows, **more, **how, implementation="xla" if xla else "mosaic_gpu")
        else:
            op = launch_qkv
            q, k, v, of_keys = op(*pools, *rows, *norms, *scales, **how, beside=0, interpret=INTERPRET)
        found = [q.reshape(b, t, *q.shape[1:]), *(read(each, places, (b, t)) for each in (k, v))]
        return [*found, read(of_keys[..., None], places, (b, t))] if stored == INT8 else found

    return Form(draw, run, EXACT_PRODUCTS if real and xla else {}, middle=middle)


def projection_and_write(real: bool) -> Form:
    """Of a few rows, rotated."""
    heads, kv_heads, depth, middle = (64, 8, 2880, REAL_MIDDLE) if real else (2, 1, 128, 126)
    table = pages(middle)
    pools = tuple(jnp.zeros((table.size, kv_heads, PAGE, 64), jnp.bfloat16) for _ in range(2))
    features = (heads + 2 * kv_heads) * 64
    weights = matrix(features, depth), norm_weight(features)
    op: Any = few_qkv_write if real else partial(launch_few_qkv, interpret=INTERPRET)

    def draw(call: Call) -> dict[str, jax.Array]:
        return {"x": numbers(call, depth), "places": slots(call, table)} | angles(call, 32)

    def run(args: dict[str, jax.Array]) -> Any:
        (b, t, _), places = args["x"].shape, args["places"]
        q, *written = op(*pools, args["x"].reshape(b * t, -1), *weights, places, args["cos"], args["sin"])
        return [q.reshape(b, t, *q.shape[1:]), *(read(each, places, (b, t)) for each in written)]

    return Form(draw, run, middle=middle)


def write(real: bool) -> Form:
    """Of rows as they are, of heads."""
    heads, dim, middle = (8, 128, REAL_MIDDLE) if real else (2, 64, 126)
    table = pages(middle)
    pools = tuple(jnp.zeros((table.size, heads, PAGE, dim), jnp.bfloat16) for _ in range(2))

    def draw(call: Call) -> dict[str, jax.Array]:
        return {"k": numbers(call, heads * dim), "v": numbers(call, heads * dim, salt=1), "places": slots(call, table)}

    def run(args: dict[str, jax.Array]) -> Any:
        shape, places = args["k"].shape[:2], args["places"]
        rows = tuple(args[name].reshape(-1, heads, dim) for name in ("k", "v"))
        if real:
            op: Any = cache_write
            written = op(*pools, *rows, places, implementation="mosaic_gpu")
        else:
            written = launch_rows(pools, rows, places, interpret=INTERPRET)
        return [read(each, places, shape) for each in written]

    return Form(draw, run, middle=middle)


def latent_rows(real: bool, *, stored: Any = None) -> Form:
    """Norm, rotation and write of latent rows, with the queries; packed rows (uint8) are encoded before they are written."""
    heads, rank, rotated, nope, middle = (16, 512, 64, 128, REAL_MIDDLE) if real else (2, 128, 64, 24, 126)
    table, norm = pages(middle), norm_weight(rank)
    row = latent_encode(jnp.zeros((1, rank + rotated), jnp.bfloat16), jnp.uint8, kv_lora_rank=rank).shape[1]
    shape = (table.size, 1, PAGE, row if stored == jnp.uint8 else rank + rotated)
    kept, scale = jnp.zeros(shape, stored or jnp.bfloat16), jnp.float32(0.03)

    def draw(call: Call) -> dict[str, jax.Array]:
        given = {"rows": numbers(call, rank + rotated), "q": numbers(call, heads * (nope + rotated), salt=1)}
        return given | {"places": slots(call, table)} | angles(call, rotated // 2)

    def run(args: dict[str, jax.Array]) -> Any:
        (b, t, _), places = args["rows"].shape, args["places"]
        rows, q = args["rows"].reshape(b * t, -1), args["q"].reshape(b * t, heads, -1)
        where = places, args["cos"], args["sin"]
        if stored == jnp.uint8:
            given = latent_encode(rows, jnp.uint8, kv_lora_rank=rank)
            how: Any = {} if real else {"implementation": "xla"}
            return read(latent_write(kept, given, places, **how), places, (b, t))
        if real:
            more: Any = {"latent_scale": scale} if stored == FP8 else {}
            q, written = mla_write(kept, rows, q, *where, norm=norm, eps=EPS, interleaved=True, **more)
        else:
            op: Any = launch_mla
            q, written = op(kept, rows, q, *where, norm, scale, eps=EPS, interleaved=True, interpret=INTERPRET)
        return q.reshape(b, t, *q.shape[1:]), read(written, places, (b, t))

    return Form(draw, run, middle=middle)


TWO = ((3, 4), (1, 2))
OVER_PAGES = {
    "attention, one split": Operation(partial(attention, splits=1), real=()),
    "attention": Operation(attention),
    "attention, four splits": Operation(partial(attention, splits=4), real=()),
    "attention, window": Operation(partial(attention, window=100)),
    "attention, sinks": Operation(partial(attention, sinks=True)),
    "attention of prompts": Operation(attention, [(2, 32)], moves=False, real=[(8, 32), (16, 32)]),
    "attention over float8 pages": Operation(partial(attention, stored=FP8)),
    "attention over int8 pages": Operation(partial(attention, stored=INT8)),
    "attention over float8 pages, one split": Operation(partial(attention, stored=FP8, splits=1), real=()),
    "attention over int8 pages, one split": Operation(partial(attention, stored=INT8, splits=1), real=()),
    "attention over float8 pages, four splits": Operation(partial(attention, stored=FP8, splits=4), real=()),
    "attention over int8 pages, four splits": Operation(partial(attention, stored=INT8, splits=4), real=()),
    "attention over float8 pages, window": Operation(partial(attention, stored=FP8, window=100)),
    "attention over int8 pages, window and sinks": Operation(partial(attention, stored=INT8, window=100, sinks=True)),
    "attention of prompts over float8 pages": Operation(
        partial(attention, stored=FP8), [(2, 32)], moves=False, real=[(8, 32), (16, 32)]
    ),
    "attention of prompts over int8 pages": Operation(
        partial(attention, stored=INT8), [(2, 32)], moves=False, real=[(8, 32), (16, 32)]
    ),
    "attention of the shipped pair over float8 pages": Operation(
        partial(attention, stored=FP8, few=True), [(2, 16)], real=[(1, 16), (8, 16), (32, 16)]
    ),
    "attention of the shipped pair over int8 pages": Operation(
        partial(attention, stored=INT8, few=True), [(2, 16)], real=[(1, 16), (8, 16), (32, 16)]
    ),
    "attention of the shipped pair's prompts over float8 pages": Operation(
        partial(attention, stored=FP8, few=True), [], moves=False, real=[(8, 32), (16, 32)]
    ),
    "attention of the shipped pair's prompts over int8 pages": Operation(
        partial(attention, stored=INT8, few=True), [], moves=False, real=[(8, 32), (16, 32)]
    ),
    "attention over float8 pages, as others have it": Operation(partial(attention, stored=FP8, told=False), holds=False),
    "attention over int8 pages, as others have it": Operation(partial(attention, stored=INT8, told=False), holds=False),
    "attention over float8 pages, one split, as others have it": Operation(
        partial(attention, stored=FP8, splits=1, told=False), holds=False
    ),
    "attention over int8 pages, one split, as others have it": Operation(
        partial(attention, stored=INT8, splits=1, told=False), holds=False
    ),
    "attention of XLA over float8_e5m2 pages": Operation(partial(attention_of_xla, kept="fp8_e5m2"), []),
    "attention of XLA over int8 keys": Operation(partial(attention_of_xla, kept="int8_keys"), []),
    "attention of XLA, wide heads": Operation(partial(attention_of_xla, kept="wide heads"), []),
    "latent attention": Operation(latent_attention),
    "latent attention of prompts": Operation(latent_attention, [], moves=False, real=[(8, 32), (16, 32)]),
    "latent attention of prompts over float8 rows": Operation(
        partial(latent_attention, stored=FP8), [], moves=False, real=[(8, 32)]
    ),
    "queries of latent rows": Operation(partial(latent_products, out=False), []),
    "values of latent averages": Operation(partial(latent_products, out=True), []),
    "latent attention over float8 rows": Operation(partial(latent_attention, stored=FP8), [(2, 4)]),
    "latent attention over float8 rows, few queries": Operation(
        partial(latent_attention, stored=FP8, heads=2), [(2, 4)], holds=False, real=[(2, 8), (8, 4)]
    ),
    "latent attention over packed rows": Operation(partial(latent_attention, stored=jnp.uint8), [(2, 4)]),
    "latent rows expanded": Operation(expanded_latents, [(2, 4), (1, 3)], "TB"),
    "norm, rotation and write": Operation(norm_rotation_write, small=TWO, free="TB"),
    "projection, rotation and write": Operation(projection_and_write, small=[(3, 4)], free="TB", most=16),
    "norm, rotation and write, zero-centered": Operation(partial(norm_rotation_write, zero_centered=True), small=TWO, free="TB"),
    "norm, rotation and write to float8 pages": Operation(partial(norm_rotation_write, stored=FP8), small=TWO, free="TB"),
    "norm, rotation and write to int8 pages": Operation(partial(norm_rotation_write, stored=INT8), small=TWO, free="TB"),
    "norm, rotation and write to float8_e5m2 pages": Operation(
        partial(norm_rotation_write, stored=jnp.float8_e5m2, xla=True), small=TWO, free="TB"
    ),
    "norm, rotation and write to int8 keys": Operation(
        partial(norm_rotation_write, stored=INT8, values=jnp.bfloat16, xla=True), small=TWO, free="TB"
    ),
    "write": Operation(write, small=TWO, free="TB"),
    "latent rows' norm, rotation and write": Operation(latent_rows, small=TWO, free="TB"),
    "latent rows' norm, rotation and write, float8": Operation(partial(latent_rows, stored=FP8), small=TWO, free="TB"),
    "latent rows packed": Operation(partial(latent_rows, stored=jnp.uint8), small=TWO, free="TB"),
}  # fmt: skip
