"""Norm, rotation and write in one operation: the calls that its tests make, and what must come out, in float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.kv_cache.write.mosaic_gpu import launch_kv, launch_qkv
from dflash_kernels.kv_cache.write.reference import kv_write_reference, qkv_write_reference
from jax.experimental.pallas import mosaic_gpu as plgpu

BF16, F16, F32, FP8, INT8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.int8
E5M2 = jnp.float8_e5m2
SLOTS = (3, -1, 17, 79, 40, -2_147_483_648, 0)
GPU = pytest.mark.gpu
CANDIDATES = (
    "reference", "interpreted", pytest.param("mosaic_gpu", marks=GPU), pytest.param("reference", id="xla-on-gpu", marks=GPU),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    n: int = 4
    k: int = 2
    head_dim: int = 128
    half: int = 64
    dtype: Any = BF16
    pages: Any = None
    norm: bool = True
    slots: tuple[int, ...] = SLOTS
    layers: int = 1
    scalar: bool = False
    page_count: int = 5
    page_size: int = 16
    zero_centered: bool = False
    beside: int = 0
    value_dim: int | None = None
    wide_values: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Static arguments of the operation."""
        return {"zero_centered": self.zero_centered, "beside": self.beside} if self.layers == 1 else {}

    @property
    def values(self) -> int:
        """Head dim of the values."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def widths(self) -> list[int]:
        """Columns of queries, keys, values and what stands beside."""
        return [self.n * self.head_dim, self.k * self.head_dim, self.k * self.values, self.beside * self.head_dim]

    @property
    def pool(self) -> tuple[int, int, int, int]:
        return self.page_count, self.k, self.page_size, self.head_dim


CASES = {
    "plain": Case(),
    "one-token": Case(slots=(33,), half=0, norm=False),
    "nothing-written": Case(slots=(-1, -5, 80, 2_147_483_647)),
    "float32": Case(dtype=F32),
    "float16": Case(dtype=F16),
    "eight-heads": Case(n=32, k=8, slots=(5, -1, 9)),
    "odd-heads": Case(n=15, k=3, head_dim=64, half=32),
    "one-head": Case(n=1, k=1, head_dim=80, half=40),
    "head96-partial": Case(head_dim=96, half=12),
    "partial": Case(half=16, dtype=F32),
    "head256": Case(n=8, k=4, head_dim=256, half=128, page_size=8, slots=(1, 39)),
    # Of Gemma 4's layers without a window, whose heads are normed before.
    "head512": Case(n=8, k=4, head_dim=512, half=256, norm=False, slots=(1, 39, -1)),
    "gated": Case(n=4, k=2, head_dim=256, half=32, slots=(1, 39, -1), zero_centered=True, beside=4),
    "no-rotation": Case(half=0),
    "wide-to-narrow": Case(dtype=F32, pages=BF16),
    "fp8": Case(pages=FP8, scalar=True),
    "fp8-by-head": Case(pages=FP8, dtype=F32, k=4),
    "e5m2": Case(pages=E5M2, scalar=True),
    "e5m2-by-head": Case(pages=E5M2, dtype=F32, k=4),
    "values32": Case(half=16, value_dim=32, beside=1),
    "values96-fp8": Case(pages=FP8, head_dim=64, half=32, value_dim=96),
    "values24-int8": Case(pages=INT8, dtype=F16, head_dim=64, half=8, value_dim=24),
    "int8-keys": Case(pages=INT8, wide_values=True),
    "int8-keys-values32": Case(pages=INT8, dtype=F32, value_dim=32, wide_values=True),
    "int8": Case(pages=INT8),
    "int8-partial": Case(pages=INT8, dtype=F16, head_dim=64, half=8, k=1),
}  # fmt: skip


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Bit patterns as likely as one another, so NaNs are among them, with payloads but for bfloat16."""
    dtype = np.dtype(dtype)
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), shape, np.dtype(f"u{dtype.itemsize}"))
    if dtype == jnp.bfloat16:
        # XLA may take bfloat16 through float32 on a CPU: numbers below the normal ones, and on some NaNs' payloads, do not survive.
        bits |= np.where(bits & 0x7F80 == 0, 0x80, 0).astype(bits.dtype)
        bits = np.where((bits & 0x7F80 == 0x7F80) & (bits & 0x7F != 0), bits & 0x8000 | 0x7FC0, bits)
    return bits.view(dtype)


def bits(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}")


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of `qkv_write_reference`; with several layers of `kv_write_reference`."""
    rng = np.random.default_rng(seed)
    t, width = len(case.slots), sum(case.widths) if case.layers == 1 else sum(case.widths[1:3]) * case.layers
    angles = rng.uniform(-100, 100, (t, case.half))
    pools = [
        [
            random_bits(rng, (*case.pool[:3], case.head_dim), case.pages or case.dtype),
            random_bits(rng, (*case.pool[:3], case.values), (not case.wide_values and case.pages) or case.dtype),
        ]
        for _ in range(case.layers)
    ]

    def weight() -> np.ndarray | None:
        low = -0.5 if case.zero_centered else 0.5
        return rng.uniform(low, low + 1, case.head_dim).astype(case.dtype) if case.norm else None

    def scales() -> tuple[Any, Any]:
        if case.pages == INT8:
            rows = random_bits(rng, case.pool[:3], np.float32)
            if case.wide_values:
                return rows, None
            return rows, rng.uniform(0.005, 0.03, (case.k, case.values)).astype(np.float32)
        by_head = () if case.scalar else (case.k,)
        keys, values = (np.asarray(rng.uniform(0.004, 0.03, by_head), np.float32) for _ in range(2))
        if case.pages == E5M2:  # some numbers are past its range, too
            return keys / np.float32(128), values / np.float32(128)
        return (keys, values) if case.pages == FP8 else (None, None)

    x = 3 * rng.standard_normal((t, width)).astype(np.float32)
    made = {"slots": np.array(case.slots, np.int32), "cos": None, "sin": None}
    made["qkv" if case.layers == 1 else "kv"] = x.astype(case.dtype)
    if case.half:
        made |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    per_layer = [(k, v, weight(), *scales()) for k, v in pools]
    names = ("k_pages", "v_pages", "k_norm", "k_scale", "v_scale")
    if case.layers == 1:
        return made | {"q_norm": weight()} | dict(zip(names, per_layer[0], strict=True))
    columns = (None if column[0] is None else tuple(column) for column in zip(*per_layer, strict=True))
    return made | dict(zip(names, columns, strict=True))


@functools.partial(jax.jit, static_argnames=("candidate", "several", "zero_centered", "beside"))
def run(arguments: dict[str, Any], *, candidate: str, several: bool = False, **options: Any):
    if candidate == "reference":
        return (kv_write_reference if several else qkv_write_reference)(**arguments, eps=1e-6, **options)
    interpret = plgpu.InterpretGPUParams() if candidate == "interpreted" else None
    return (launch_kv if several else launch_qkv)(**arguments, eps=1e-6, interpret=interpret, **options)


def true_heads(case: Case, arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values in float64."""
    parts = np.split(arguments["qkv"].astype(np.float64), np.cumsum(case.widths)[:3], axis=1)[:3]
    dims = case.head_dim, case.head_dim, case.values
    q, k, v = (x.reshape(len(case.slots), -1, dim) for x, dim in zip(parts, dims, strict=True))

    def finished(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        if weight is not None:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (weight.astype(np.float64) + case.zero_centered)
        if not case.half:
            return x
        cos, sin = (arguments[name].astype(np.float64)[:, None] for name in ("cos", "sin"))
        first, second, rest = np.split(x, [case.half, 2 * case.half], axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    return finished(q, arguments["q_norm"]), finished(k, arguments["k_norm"]), v


def near(ours: Any, true: np.ndarray, dtype: Any, half: int, roundings: int = 6) -> None:
    """Within some roundings of the projection's dtype: of the number itself, or of the length of the pair it turned with."""
    size, step = np.abs(true), float(jnp.finfo(dtype).eps) / 2
    if half:
        length = np.hypot(true[..., :half], true[..., half : 2 * half])
        size = np.concatenate([length, length, size[..., 2 * half :]], axis=-1)
    assert (np.abs(np.asarray(ours, np.float64) - true) <= roundings * step * size).all()


def rows_of(pool: Any, slots: np.ndarray) -> np.ndarray:
    pool = np.asarray(pool)
    return pool[slots // pool.shape[2], :, slots % pool.shape[2]]


def untouched(case: Case, before: Any, after: Any) -> None:
    """All but the named rows keep their bits."""
    after, expected = bits(after).copy(), bits(before)
    for slot in case.slots:
        if 0 <= slot < case.page_count * case.page_size:
            after[slot // case.page_size, :, slot % case.page_size] = expected[
                slot // case.page_size, :, slot % case.page_size
            ]
    np.testing.assert_array_equal(after, expected)


def check_pools(case: Case, given: dict[str, Any], k_pages: Any, v_pages: Any, k_scale: Any, true: Any) -> None:
    live = (np.array(case.slots) >= 0) & (np.array(case.slots) < case.page_count * case.page_size)
    slots = np.array(case.slots)[live]
    true_k, true_v = (x[live] for x in true)
    untouched(case, given["k_pages"], k_pages)
    untouched(case, given["v_pages"], v_pages)
    k, v = rows_of(k_pages, slots), rows_of(v_pages, slots)
    if case.pages in (None, BF16):
        near(k, true_k, case.pages or case.dtype, case.half)
        assert (v == true_v.astype(case.dtype).astype(v.dtype)).all()
        return
    if case.pages == INT8:
        untouched(case, given["k_scale"], k_scale)
        scale = rows_of(np.asarray(k_scale)[..., None], slots)
        near(scale[..., 0], np.abs(true_k).max(-1) / 127, case.dtype, 0, roundings=8)
        k_step, v_scale = 0.5, np.ones(1, np.float32)
        if case.wide_values:
            true_v = true_v.astype(case.dtype).astype(np.float64)
            assert (v == true_v).all()
        else:
            v_scale = given["v_scale"]
            true_v = np.clip(true_v, -127 * v_scale.astype(np.float64), 127 * v_scale.astype(np.float64))
        assert (np.abs(k).max(-1) == 127).all()
        v_error = 0.5 * v_scale
    else:
        most, half = float(jnp.finfo(case.pages).max), float(jnp.finfo(case.pages).eps) / 2
        scale, v_scale = (np.asarray(given[name]).reshape(-1, 1) for name in ("k_scale", "v_scale"))
        true_k, true_v = (
            np.clip(x, -most * s.astype(np.float64), most * s) for x, s in ((true_k, scale), (true_v, v_scale))
        )
        k_step = np.maximum(np.abs(k.astype(np.float64)) * half, 2.0**-10)
        v_error = np.maximum(np.abs(v.astype(np.float64)) * half, 2.0**-10) * v_scale
    slack = 8 * float(jnp.finfo(case.dtype).eps) * np.abs(true_k).max()
    assert (np.abs(k.astype(np.float64) * scale - true_k) <= k_step * scale * 1.001 + slack).all()
    assert (np.abs(v.astype(np.float64) * v_scale - true_v) <= v_error * 1.001).all()
