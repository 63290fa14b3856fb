"""From the projection to attention in one operation: RMS norm, RoPE, quantization and the write to the pages."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dflash_kernels.core.dispatch import first_fitting
from dflash_kernels.core.validation import FLOAT8, check_axes, check_floats, check_integers, is_wide
from dflash_kernels.kv_cache.write.mosaic_gpu import kv_write_mosaic_gpu, qkv_write_mosaic_gpu
from dflash_kernels.kv_cache.write.reference import kv_write_reference, qkv_write_reference

QKV_IMPLEMENTATIONS = {"mosaic_gpu": qkv_write_mosaic_gpu, "xla": qkv_write_reference}
KV_IMPLEMENTATIONS = {"mosaic_gpu": kv_write_mosaic_gpu, "xla": kv_write_reference}


class QkvWritten(NamedTuple):
    """Result of `qkv_write`: queries `[T, N, H]`, the pools, and keys' scales, new ones for int8 pools."""

    q: Array
    k_pages: Array
    v_pages: Array
    k_scale: Array | None


class KvWritten(NamedTuple):
    """Result of `kv_write`: every layer's pools, and its keys' scales, new ones for int8 pools."""

    k_pages: tuple[Array, ...]
    v_pages: tuple[Array, ...]
    k_scale: tuple[Array, ...] | None


def qkv_write(
    k_pages: Shaped[Array, "P K p H"],
    v_pages: Shaped[Array, "P K p V"],
    qkv: Float[Array, "T F"],
    slots: Int[Array, "T"],
    cos: Float[Array, "T half"] | None = None,
    sin: Float[Array, "T half"] | None = None,
    *,
    q_norm: Float[Array, "H"] | None = None,
    k_norm: Float[Array, "H"] | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
    beside: int = 0,
    k_scale: float | Float[Array, "..."] | None = None,
    v_scale: float | Float[Array, "..."] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> QkvWritten:
    """Fused RMS norm, RoPE and KV-cache write of a layer's projection: writes keys and values to their slots, returns the queries.

    Each query and key head is normed (root mean square in float32, rounded to the projection's dtype, then times the weight) and
    rotated in its first `2 * half` dims, dim i with dim `half + i` (products in float32, rounded to the projection's dtype). Values
    are written as they are.

    Args:
      k_pages, v_pages: page pools; donate them to the surrounding jit and the write happens in place. Float8 (e4m3fn, e5m2) and
        int8 pools take scales. Keys may be kept in one dtype and values in another, and in another head dim V.
      qkv: the projection's output, `F = (N + K + beside) * H + K * V`: query heads, key heads, value heads, what is passed over.
      slots: int32, `page * p + row`; a negative slot, or one past the pool, writes nothing. No two tokens may share a slot.
      cos, sin: float32, of each token's angles and times any factor; None without RoPE.
      q_norm, k_norm: weights, or None for no norm.
      eps: added to the mean square.
      zero_centered: weights are offsets from 1, added to it in float32; a normed head is rounded after both, not before.
      beside: heads of the projection after the values', static.
      k_scale: for float8 pools what keys are divided by, one number or one for each head `[K]`, 1 where None; for int8 pools the
        scales `[P, K, p]` float32 of all rows, written in place: a key's largest magnitude over 127.
      v_scale: for float8 pools as for keys; for int8 pools one for each channel `[K, H]`, read only.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree, or scales and the pools' dtype do not.
      NoImplementationError: nothing named takes these arguments.
    """
    scales = _checked_scales(k_pages, v_pages, k_norm, k_scale, v_scale)
    _check_tokens(qkv, slots, cos, sin, k_pages.shape[3])
    kv_heads, head_dim, value_dim = *k_pages.shape[1::2], v_pages.shape[3]
    queries = qkv.shape[1] - (kv_heads + beside) * head_dim - kv_heads * value_dim
    if queries % head_dim or queries <= 0:
        beyond = f" + {beside}" if beside else ""
        wanted = (
            f"(N + 2 * {kv_heads}{beyond}) * {head_dim}"
            if value_dim == head_dim
            else f"(N + {kv_heads}{beyond}) * {head_dim} + {kv_heads} * {value_dim}"
        )
        raise ValueError(f"qkv {qkv.shape} must be [T, {wanted}] with a query head or more")
    check_floats(**{} if q_norm is None else {"q_norm": q_norm})
    if q_norm is not None and q_norm.shape != (head_dim,):
        raise ValueError(f"q_norm {q_norm.shape} must be one weight for each of {head_dim} dims")
    with jax.named_scope("qkv_write"):
        written = first_fitting(
            "qkv_write", QKV_IMPLEMENTATIONS, implementation, k_pages, v_pages, qkv, slots, cos, sin, q_norm, k_norm,
            *scales, eps=eps, zero_centered=zero_centered, beside=beside,
        )  # fmt: skip
    return QkvWritten(*written)


def kv_write(
    k_pages: tuple[Shaped[Array, "P K p H"], ...],
    v_pages: tuple[Shaped[Array, "P K p V"], ...],
    kv: Float[Array, "T F"],
    slots: Int[Array, "T"],
    cos: Float[Array, "T half"] | None = None,
    sin: Float[Array, "T half"] | None = None,
    *,
    k_norm: tuple[Float[Array, "H"], ...] | None = None,
    eps: float = 1e-6,
    k_scale: tuple[float | Float[Array, "..."], ...] | None = None,
    v_scale: tuple[float | Float[Array, "..."], ...] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> KvWritten:
    """Fused RMS norm, RoPE and KV-cache write of several layers at once, whose keys and values one projection gave; no queries.

    Args:
      k_pages, v_pages: one pool for each layer, all of one shape and dtype.
      kv: `F = L * K * (H + V)`: the first layer's key heads, its value heads, then the next layer's.
      slots, cos, sin, eps: as for `qkv_write`; the same for all layers.
      k_norm, k_scale, v_scale: as for `qkv_write`, one for each layer.
      implementation: a name, names to try in order, or None for the best that takes the call.

    Raises:
      ValueError: shapes do not agree, or scales and the pools' dtype do not.
      NoImplementationError: nothing named takes these arguments.
    """
    layers = len(k_pages)
    lengths = [len(given) for given in (v_pages, k_norm, k_scale, v_scale) if given is not None]
    if not layers or any(length != layers for length in lengths):
        raise ValueError(f"k_pages hold {layers} layers, the other arguments {lengths}; all must be one for each layer")
    scales = []
    for i in range(layers):
        given = (None if values is None else values[i] for values in (k_scale, v_scale))
        scales.append(_checked_scales(k_pages[i], v_pages[i], None if k_norm is None else k_norm[i], *given))
        if any(of[i].shape != of[0].shape or of[i].dtype != of[0].dtype for of in (k_pages, v_pages)):
            raise ValueError(f"the pools of layer {i}, {k_pages[i].shape}, are not like layer 0's, {k_pages[0].shape}")
    (_, kv_heads, _, head_dim), value_dim = k_pages[0].shape, v_pages[0].shape[3]
    _check_tokens(kv, slots, cos, sin, head_dim)
    if kv.shape[1] != layers * kv_heads * (head_dim + value_dim):
        both = (
            f"2 * {kv_heads} heads * {head_dim}"
            if value_dim == head_dim
            else f"{kv_heads} heads * ({head_dim} + {value_dim})"
        )
        raise ValueError(f"kv {kv.shape} must be [T, {layers} layers * {both}]")
    columns = [None if column[0] is None else column for column in zip(*scales, strict=True)]
    with jax.named_scope("kv_write"):
        written = first_fitting(
            "kv_write", KV_IMPLEMENTATIONS, implementation, tuple(k_pages), tuple(v_pages), kv, slots, cos, sin, k_norm,
            *columns, eps=eps,
        )  # fmt: skip
    return KvWritten(*written)


def _check_tokens(x: Any, slots: Any, cos: Any, sin: Any, head_dim: int) -> None:
    check_axes(projection=(x, "T F"), slots=(slots, "T"))
    check_floats(projection=x)
    check_integers(slots=slots)
    if slots.shape != x.shape[:1]:
        raise ValueError(f"slots {slots.shape} must hold one slot for each of {x.shape[0]} tokens")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin go together: give both or neither")
    if cos is None or sin is None:
        return
    check_axes(cos=(cos, "T half"), sin=(sin, "T half"))
    check_floats(cos=cos, sin=sin)
    if cos.shape != sin.shape or cos.shape[0] != x.shape[0] or not 0 < 2 * cos.shape[1] <= head_dim:
        raise ValueError(
            f"cos {cos.shape} and sin {sin.shape} must be [{x.shape[0]}, half] with at most {head_dim} rotary dims"
        )


def _checked_scales(
    k_pages: Any,
    v_pages: Any,
    k_norm: Array | None,
    k_scale: float | Array | None,
    v_scale: float | Array | None,
) -> tuple[Array | None, Array | None]:
    """A layer's scales as implementations get them: `[1]` or `[K]` with float8 pools, None with pools of plain numbers."""
    check_axes(k_pages=(k_pages, "P K p H"), v_pages=(v_pages, "P K p V"))
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ValueError(f"pools {k_pages.shape} and {v_pages.shape} must agree in all but the head dim [P, K, p, ...]")
    head_dim = k_pages.shape[3]
    check_floats(**{} if k_norm is None else {"k_norm": k_norm})
    if k_norm is not None and k_norm.shape != (head_dim,):
        raise ValueError(f"k_norm {k_norm.shape} must be one weight for each of {head_dim} dims")
    return (
        _checked_scale("k_scale", k_pages, k_scale, k_pages.shape[:3]),
        _checked_scale("v_scale", v_pages, v_scale, v_pages.shape[1::2]),
    )


def _checked_scale(name: str, pages: Any, scale: float | Array | None, int8_shape: tuple[int, ...]) -> Array | None:
    """One side's scale."""
    shape, heads = None if scale is None else jnp.shape(scale), (pages.shape[1],)
    if pages.dtype in FLOAT8:
        if shape not in (None, (), heads):
            raise ValueError(f"float8 pools take {name} of one number or {heads}, got {shape}")
        return jnp.asarray(1.0 if scale is None else scale, jnp.float32).reshape(-1)
    if pages.dtype == jnp.int8:
        if scale is None or shape != int8_shape:
            raise ValueError(f"int8 pools take {name} {int8_shape}, got {shape}")
        return jnp.asarray(scale, jnp.float32)
    if not is_wide(pages):
        raise ValueError(
            f"pools of {pages.dtype} are not known; use float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8"
        )
    if scale is not None:
        raise ValueError(f"pools of {pages.dtype} take no {name}, got {shape}")
    return None
