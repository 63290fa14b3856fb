"""Norm, rotation and cache write on Hopper: what the kernel takes, and which heads go where."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.core.device import require_hopper


def qkv_write_mosaic_gpu(*args: Any, eps: float) -> tuple[Array, Array, Array, Array | None]:
    """See `qkv_write`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch_qkv(*args, eps=eps)


def kv_write_mosaic_gpu(
    *args: Any, eps: float
) -> tuple[tuple[Array, ...], tuple[Array, ...], tuple[Array, ...] | None]:
    """See `kv_write`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch_kv(*args, eps=eps)


def launch_qkv(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p H"],
    qkv: Float[Array, "T F"],
    slots: Int[Array, "T"],
    cos: Float[Array, "T half"] | None,
    sin: Float[Array, "T half"] | None,
    q_norm: Float[Array, "H"] | None,
    k_norm: Float[Array, "H"] | None,
    k_scale: Float[Array, "..."] | None,
    v_scale: Float[Array, "..."] | None,
    *,
    eps: float,
    interpret: Any = None,
) -> tuple[Array, Array, Array, Array | None]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    _refuse(k_pages, qkv, cos, [norm for norm in (q_norm, k_norm) if norm is not None])
    layer = (k_pages, v_pages, k_norm, k_scale, v_scale)
    q, ((k_pages, v_pages, k_scale),) = _write((layer,), qkv, slots, cos, sin, q_norm, eps=eps, interpret=interpret)
    return q, k_pages, v_pages, k_scale


def launch_kv(
    k_pages: tuple[Shaped[Array, "P K p H"], ...],
    v_pages: tuple[Shaped[Array, "P K p H"], ...],
    kv: Float[Array, "T F"],
    slots: Int[Array, "T"],
    cos: Float[Array, "T half"] | None,
    sin: Float[Array, "T half"] | None,
    k_norm: tuple[Float[Array, "H"], ...] | None,
    k_scale: tuple[Float[Array, "..."], ...] | None,
    v_scale: tuple[Float[Array, "..."], ...] | None,
    *,
    eps: float,
    interpret: Any = None,
) -> tuple[tuple[Array, ...], tuple[Array, ...], tuple[Array, ...] | None]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    _refuse(k_pages[0], kv, cos, k_norm or ())
    none = (None,) * len(k_pages)
    layers = tuple(zip(k_pages, v_pages, k_norm or none, k_scale or none, v_scale or none, strict=True))
    _, written = _write(layers, kv, slots, cos, sin, None, eps=eps, interpret=interpret)
    new_k, new_v, new_scales = zip(*written, strict=True)
    return new_k, new_v, None if k_scale is None else new_scales


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _write(
    layers: tuple[tuple[Array | None, ...], ...], x: Array, slots: Array, cos: Array | None, sin: Array | None,
    q_norm: Array | None, *, eps: float, interpret: Any,
) -> tuple[Array | None, tuple[tuple[Array | None, ...], ...]]:  # fmt: skip
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.kv_cache.write import mosaic_gpu_sm90 as kernel

    pool = layers[0][0]
    assert pool is not None
    _, kv_heads, page_size, head_dim = pool.shape
    tokens = x.shape[0]
    heads = x.reshape(tokens, -1, head_dim)
    queries = heads.shape[1] - 2 * kv_heads * len(layers)
    half = head_dim // 2 if cos is None else cos.shape[1]
    inputs: dict[str, Any] = {"x": heads, "slots": slots.astype(jnp.int32)}
    if cos is not None and sin is not None:
        inputs |= {"cos": cos.astype(jnp.float32), "sin": sin.astype(jnp.float32)}
    pools: dict[str, Any] = {}
    segments, turned, first = [], cos is not None, queries

    def named(name: str, array: Array | None, among: dict[str, Any]) -> str | None:
        if array is None:
            return None
        among[name] = array.reshape(-1) if array.ndim == 0 else array
        return name

    if queries:
        segments.append(kernel.Segment("x", "q", 0, queries, named("q_norm", q_norm, inputs), turned, paged=False))
    for i, (k_pages, v_pages, k_norm, k_scale, v_scale) in enumerate(layers):
        pools |= {f"k{i}": k_pages, f"v{i}": v_pages}
        norm = named(f"k_norm{i}", k_norm, inputs)
        written = k_scale is not None and k_scale.ndim == 3
        k_by = named(f"k_scale{i}", k_scale, pools if written else inputs)
        v_by = named(f"v_scale{i}", v_scale, inputs)
        segments.append(kernel.Segment("x", f"k{i}", first, kv_heads, norm, turned, paged=True, scale=k_by))
        segments.append(kernel.Segment("x", f"v{i}", first + kv_heads, kv_heads, None, False, paged=True, scale=v_by))
        first += 2 * kv_heads
    shape = jax.ShapeDtypeStruct((tokens, queries, head_dim), x.dtype) if queries else None
    q, pools = kernel.write(
        tuple(segments), kernel.Columns(half, head_dim), eps, page_size, inputs, pools, shape, interpret
    )
    return q, tuple(
        (pools[f"k{i}"], pools[f"v{i}"], pools.get(f"k_scale{i}", layer[3])) for i, layer in enumerate(layers)
    )


def _refuse(pool: Array, x: Array, cos: Array | None, norms: Any) -> None:
    """Raises NotImplementedError with the reason for a call the kernel cannot serve."""
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"takes bfloat16, float16 or float32, not {x.dtype}")
    if any(norm.dtype != x.dtype for norm in norms):
        raise NotImplementedError(f"takes norm weights in the projection's dtype, {x.dtype}")
    turned = 0 if cos is None else 2 * cos.shape[1]
    if pool.shape[3] % 8 or turned % 8:
        raise NotImplementedError(
            f"takes heads and turning parts of a multiple of 8 dims, not {pool.shape[3]} and {turned}"
        )
    if x.shape[0] == 0:
        raise NotImplementedError("takes one token or more")
