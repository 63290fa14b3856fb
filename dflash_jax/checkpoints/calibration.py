"""Scales of float8 and int8 pools from what a model puts into its cache for given text.

    scales = calibrate(config, params, [tokenizer.encode(text) for text in texts])

Only tokens of the text count: rows that pad a shorter text are looked past, whatever they hold. Latent and rotated part share a
scale, so both count; a layer that shows nothing but zeros gets 1. Runs once, before anything is cached, because numbers kept on one
scale cannot be read on another.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from dflash_jax.attention.dense import DenseAttend
from dflash_jax.config import DecoderConfig
from dflash_jax.errors import ParameterError
from dflash_jax.models import bind
from dflash_jax.models.layers import Attention, Rotary
from dflash_jax.quantization.kv_formats import CacheScales, channel_scales_for, scale_for


class Observer(DenseAttend):
    """Dense attention that keeps the largest absolute key of live tokens for each layer and head, and value for each channel."""

    def __init__(self, live: Bool[Array, "B T"]):
        super().__init__(None, None)
        self.live = live
        self.keys: dict[int, Array] = {}
        self.values: dict[int, Array] = {}

    def __call__(self, layer: Attention, qkv: Array, rotary: Rotary) -> Array:
        _, k, v = layer.heads(qkv, rotary)
        self.keys[layer.index], self.values[layer.index] = self._largest(k), self._largest(v, axis=(0, 1))
        return super().__call__(layer, qkv, rotary)

    def latent(self, layer, q_nope: Array, q_pe: Array, kv_c: Array, k_pe: Array) -> Array:
        row = jnp.concatenate([kv_c, k_pe], axis=-1)[:, :, None]
        self.keys[layer.index] = self._largest(row)[0]
        return super().latent(layer, q_nope, q_pe, kv_c, k_pe)

    def _largest(self, x: Array, axis: tuple[int, ...] = (0, 1, 3)) -> Array:
        """`[B,T,K,H]` to `[K]`, in float32, or to what `axis` leaves."""
        size = jnp.where(self.live[:, :, None, None], jnp.abs(x.astype(jnp.float32)), 0.0)
        # A maximum may lose NaN in a compiled program.
        return jnp.where(jnp.isnan(size).any(axis=axis), jnp.nan, size.max(axis=axis))


def check_texts(config: DecoderConfig, texts: Sequence[Sequence[int]]) -> None:
    """Raises ParameterError unless calibration can run over these token ids."""
    if not any(len(text) for text in texts):
        raise ParameterError("calibration needs at least one text with a token")
    for place, text in enumerate(texts):
        if len(text) > config.max_position:
            raise ParameterError(
                f"calibration text {place} has {len(text)} tokens, the target takes {config.max_position}"
            )
        if wrong := next((token for token in text if not 0 <= token < config.vocab_size), None):
            raise ParameterError(
                f"calibration text {place} has token id {wrong}, the target's go from 0 to {config.vocab_size - 1}"
            )


def calibrate(
    config: DecoderConfig,
    params: Mapping[str, Array],
    texts: Sequence[Sequence[int]],
    *,
    cache_dtype: Literal["fp8", "int8"] = "fp8",
) -> CacheScales:
    """Scales under which the largest number of each layer (and key head) of `texts` lies at or below 200 of e4m3's 448, or the
    largest value of each channel at 100 of int8's 127.

    Args:
      params: of the model `config` describes.
      texts: token ids; the longer the text, the more memory this takes, as all of one text attends at once.
      cache_dtype: how the pools are kept.

    Raises:
      ParameterError: as `check_texts`, or a layer's numbers are not finite.
    """
    check_texts(config, texts)

    @jax.jit
    def observed(params: Mapping[str, Array], ids: Array, lens: Array) -> tuple[dict[int, Array], dict[int, Array]]:
        attend = Observer(jnp.arange(ids.shape[1]) < lens[:, None])
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        bind(config, params)(ids, positions, attend)
        return attend.keys, attend.values

    ids = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    found = observed(params, ids, np.array([len(text) for text in texts], np.int32))
    keys, values = jax.tree.map(np.asarray, found)
    if cache_dtype == "int8":
        return CacheScales((), tuple(channel_scales_for(values[i], f"values of layer {i}") for i in sorted(values)))
    return CacheScales(
        tuple(scale_for(keys[i], f"keys of layer {i}") for i in sorted(keys)),
        tuple(scale_for(values[i].max(axis=-1), f"values of layer {i}") for i in sorted(values)),
    )
