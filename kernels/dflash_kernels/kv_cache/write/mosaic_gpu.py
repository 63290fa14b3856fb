"""Cache writes on Hopper: what the kernels support, and their launches.

`qkv_write`, `kv_write`, `cache_write` and `latent_write` are one kernel, `mosaic_gpu_sm90`; `mla_write` is `mosaic_gpu_mla_sm90`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.core.device import require_hopper
from dflash_kernels.quantize.reference import E4M3


def qkv_write_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array, Array, Array | None]:
    """See `qkv_write`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch_qkv(*args, **options)


def kv_write_mosaic_gpu(
    *args: Any, eps: float
) -> tuple[tuple[Array, ...], tuple[Array, ...], tuple[Array, ...] | None]:
    """See `kv_write`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch_kv(*args, eps=eps)


def cache_write_mosaic_gpu(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p V"],
    k: Shaped[Array, "T K H"],
    v: Shaped[Array, "T K V"],
    slots: Int[Array, "T"],
) -> tuple[Shaped[Array, "P K p H"], Shaped[Array, "P K p V"]]:
    """See `cache_write`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    if k_pages.shape != v_pages.shape:  # a launch cuts all heads alike
        return launch_rows((k_pages,), (k,), slots)[0], launch_rows((v_pages,), (v,), slots)[0]
    k_pages, v_pages = launch_rows((k_pages, v_pages), (k, v), slots)
    return k_pages, v_pages


def latent_write_mosaic_gpu(
    latent_pages: Shaped[Array, "P 1 p C"], latents: Shaped[Array, "T C"], slots: Int[Array, "S"]
) -> Shaped[Array, "P 1 p C"]:
    """See `latent_write`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch_rows((latent_pages,), (latents[:, None],), slots)[0]


def mla_write_mosaic_gpu(*args: Any, **options: Any) -> tuple[Array, Array]:
    """See `mla_write`. Raises NotImplementedError for what it does not take."""
    require_hopper()
    return launch_mla(*args, **options)


def launch_qkv(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p V"],
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
    zero_centered: bool = False,
    beside: int = 0,
    interpret: Any = None,
) -> tuple[Array, Array, Array, Array | None]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    _require_heads(k_pages, v_pages, qkv, cos, [norm for norm in (q_norm, k_norm) if norm is not None])
    layer = (k_pages, v_pages, k_norm, k_scale, v_scale)
    q, ((k_pages, v_pages, k_scale),) = _write_heads(
        (layer,), qkv, slots, cos, sin, q_norm, eps=eps, zero_centered=zero_centered, beside=beside, interpret=interpret
    )
    return q, k_pages, v_pages, k_scale


def launch_kv(
    k_pages: tuple[Shaped[Array, "P K p H"], ...],
    v_pages: tuple[Shaped[Array, "P K p V"], ...],
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
    _require_heads(k_pages[0], v_pages[0], kv, cos, k_norm or ())
    none = (None,) * len(k_pages)
    layers = tuple(zip(k_pages, v_pages, k_norm or none, k_scale or none, v_scale or none, strict=True))
    _, written = _write_heads(layers, kv, slots, cos, sin, None, eps=eps, interpret=interpret)
    new_k, new_v, new_scales = zip(*written, strict=True)
    return new_k, new_v, None if k_scale is None else new_scales


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnames=("eps", "zero_centered", "beside", "interpret"))
def _write_heads(
    layers: tuple[tuple[Array | None, ...], ...], x: Array, slots: Array, cos: Array | None, sin: Array | None,
    q_norm: Array | None, *, eps: float, zero_centered: bool = False, beside: int = 0, interpret: Any,
) -> tuple[Array | None, tuple[tuple[Array | None, ...], ...]]:  # fmt: skip
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.kv_cache.write import mosaic_gpu_sm90 as kernel

    pool = layers[0][0]
    assert pool is not None
    _, kv_heads, page_size, head_dim = pool.shape
    tokens = x.shape[0]
    heads = x.reshape(tokens, -1, head_dim)
    queries = heads.shape[1] - 2 * kv_heads * len(layers) - beside
    half = head_dim // 2 if cos is None else cos.shape[1]
    inputs: dict[str, Any] = {"x": heads, "slots": slots.astype(jnp.int32)}
    if cos is not None and sin is not None:
        inputs |= {"cos": cos.astype(jnp.float32), "sin": sin.astype(jnp.float32)}
    pools: dict[str, Any] = {}
    segments, rotated, first = [], cos is not None, queries

    def named(name: str, array: Array | None, among: dict[str, Any]) -> str | None:
        if array is None:
            return None
        among[name] = array.reshape(-1) if array.ndim == 0 else array
        return name

    if queries:
        segments.append(kernel.Segment("x", "q", 0, queries, named("q_norm", q_norm, inputs), rotated, paged=False))
    for i, (k_pages, v_pages, k_norm, k_scale, v_scale) in enumerate(layers):
        pools |= {f"k{i}": k_pages, f"v{i}": v_pages}
        norm = named(f"k_norm{i}", k_norm, inputs)
        written = k_scale is not None and k_scale.ndim == 3
        k_by = named(f"k_scale{i}", k_scale, pools if written else inputs)
        v_by = named(f"v_scale{i}", v_scale, inputs)
        segments.append(kernel.Segment("x", f"k{i}", first, kv_heads, norm, rotated, paged=True, scale=k_by))
        segments.append(kernel.Segment("x", f"v{i}", first + kv_heads, kv_heads, None, False, paged=True, scale=v_by))
        first += 2 * kv_heads
    shape = jax.ShapeDtypeStruct((tokens, queries, head_dim), x.dtype) if queries else None
    q, pools = kernel.write(
        tuple(segments), kernel.Columns(half, head_dim), eps, page_size, inputs, pools, shape, interpret,
        zero_centered=zero_centered,
    )  # fmt: skip
    return q, tuple(
        (pools[f"k{i}"], pools[f"v{i}"], pools.get(f"k_scale{i}", layer[3])) for i, layer in enumerate(layers)
    )


def _require_heads(pool: Array, v_pages: Array, x: Array, cos: Array | None, norms: Any) -> None:
    """Raises NotImplementedError with the reason, for a call that the kernel does not support."""
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise NotImplementedError(f"takes bfloat16, float16 or float32, not {x.dtype}")
    if v_pages.shape != pool.shape:
        raise NotImplementedError(f"takes values of the keys' head dim {pool.shape[3]}, not {v_pages.shape[3]}")
    if jnp.float8_e5m2 in (pool.dtype, v_pages.dtype):
        raise NotImplementedError("takes no pools of float8_e5m2, to which Pallas converts no float32")
    if any(norm.dtype != x.dtype for norm in norms):
        raise NotImplementedError(f"takes norm weights in the projection's dtype, {x.dtype}")
    rotary = 0 if cos is None else 2 * cos.shape[1]
    if pool.shape[3] % 8 or rotary % 8:
        raise NotImplementedError(
            f"takes heads and rotary dims of a multiple of 8 dims, not {pool.shape[3]} and {rotary}"
        )
    if x.shape[0] == 0:
        raise NotImplementedError("takes one token or more")


def launch_rows(
    pools: tuple[Shaped[Array, "P K p H"], ...],
    rows: tuple[Shaped[Array, "T K H"], ...],
    slots: Int[Array, "S"],
    *,
    interpret: Any = None,
) -> tuple[Shaped[Array, "P K p H"], ...]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    for pool, new in zip(pools, rows, strict=True):
        floats = all(jnp.issubdtype(x.dtype, jnp.floating) and jnp.dtype(x.dtype).itemsize > 1 for x in (pool, new))
        if pool.dtype != new.dtype and not floats:
            raise NotImplementedError(f"takes no rows of {new.dtype} for a pool of {pool.dtype}")
        if pool.shape[3] % 8:
            raise NotImplementedError(f"takes rows of a multiple of 8 numbers, not {pool.shape[3]}")
    if slots.shape[0] == 0:
        raise NotImplementedError("takes one token or more")
    return _write_rows(pools, rows, slots, interpret=interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnames="interpret")
def _write_rows(
    pools: tuple[Array, ...], rows: tuple[Array, ...], slots: Array, *, interpret: Any
) -> tuple[Array, ...]:
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.kv_cache.write import mosaic_gpu_sm90 as kernel

    _, heads, page_size, width = pools[0].shape
    inputs = {f"rows{i}": new for i, new in enumerate(rows)} | {"slots": slots.astype(jnp.int32)}
    segments = tuple(
        kernel.Segment(f"rows{i}", f"pool{i}", 0, heads, None, False, paged=True) for i in range(len(pools))
    )
    held = {f"pool{i}": pool for i, pool in enumerate(pools)}
    _, held = kernel.write(segments, kernel.Columns(width // 2, width), 0.0, page_size, inputs, held, None, interpret)
    return tuple(held.values())


def launch_mla(
    latent_pages: Shaped[Array, "P 1 p stored"],
    rows: Float[Array, "T C"],
    q: Float[Array, "T N H"],
    slots: Int[Array, "T"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    norm: Float[Array, "R"],
    scale: Float[Array, ""],
    *,
    eps: float,
    interleaved: bool,
    interpret: Any = None,
) -> tuple[Float[Array, "T N H"], Shaped[Array, "P 1 p stored"]]:
    """The implementation without the device check: for tests on the CPU (`interpret`)."""
    if not interleaved:
        raise NotImplementedError("takes interleaved rotations only")
    # Float32 compiles, but gives wrong numbers on an H200 and then ends the process.
    if rows.dtype not in (jnp.bfloat16, jnp.float16) or {q.dtype, norm.dtype} != {rows.dtype}:
        raise NotImplementedError(
            f"takes bfloat16 or float16 throughout, not rows of {rows.dtype} with q {q.dtype} and norm {norm.dtype}; the "
            "implementation xla takes those"
        )
    if latent_pages.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, E4M3):
        raise NotImplementedError(f"takes no pool of {latent_pages.dtype}")
    rank, half = norm.shape[0], cos.shape[1]
    if rank % 64 or half % 16 or q.shape[2] % 2:
        raise NotImplementedError(
            f"takes latents of a multiple of 64 and rotary dims of a multiple of 32, not {rank} and {2 * half}"
        )
    if rows.shape[0] == 0:
        raise NotImplementedError("takes one token or more")
    return _write_mla(latent_pages, rows, q, slots, cos, sin, norm, scale, eps=eps, interpret=interpret)


# Compiled as a function of its own, so that the layers of a model share one trace and one lowering of the kernel.
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def _write_mla(
    pool: Array, rows: Array, q: Array, slots: Array, cos: Array, sin: Array, norm: Array, scale: Array, *, eps: float,
    interpret: Any,
) -> tuple[Array, Array]:  # fmt: skip
    # Not at the top: other machines need neither Pallas nor the time its import takes.
    from dflash_kernels.kv_cache.write import mosaic_gpu_mla_sm90 as kernel

    return kernel.write(pool, rows, q, slots, cos, sin, norm, scale, eps, interpret)
