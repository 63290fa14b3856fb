"""Scales of float8 and int8 pools from what a model puts into its cache for given text.

    scales = calibrate(config, params, [tokenizer.encode(text) for text in texts])

Only tokens of the text count: rows that pad a shorter text are looked past, whatever they hold. Latent and rotated part share a
scale, so both count; a layer that shows nothing but zeros gets 1. Runs once, before anything is cached, because numbers kept on one
scale cannot be read on another.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from dflash_jax.attention.dense import DenseAttend
from dflash_jax.config import DecoderConfig
from dflash_jax.errors import ParameterError
from dflash_jax.models import bind
from dflash_jax.models.layers import Attention, Cache, IndexRows, Rotary
from dflash_jax.parallel.ranks import AXIS, Ranks, share_config
from dflash_jax.quantization.kv_formats import CALIBRATED_TO, CacheScales, channel_scales_for, scale_for

type Record = dict[int, dict[str, Array]]

CHOSEN, SHARED = -1, -2  # in place of a layer


class Observer(DenseAttend):
    """Dense attention whose cache is a record: the largest absolute key of live tokens for each layer and head, and the largest
    value for each channel, by layers."""

    def __init__(self, live: Bool[Array, "B T"]):
        super().__init__(None, None)
        self.live = live

    def __call__(self, layer: Attention, qkv: Array, rotary: Rotary, cache: Cache = None) -> tuple[Array, Record]:
        record = dict(cache or {})
        # Keys that later layers attend to as well go from layer to layer with the record.
        out, shared = super().__call__(layer, qkv, rotary, record.pop(SHARED, None))
        record |= {} if shared is None else {SHARED: shared}
        if layer.keeps:
            _, k, v = layer.heads(qkv, rotary)
            record[layer.index] = {"keys": self._largest(k), "values": self._largest(v, axis=(0, 1))}
        return out, record

    def latent(self, layer: Any, q: Array, row: Array, rotary: Rotary, cache: Cache = None) -> tuple[Array, Record]:
        q_nope, q_pe, kv_c, k_pe = layer.parts(q, row, rotary)
        latents = jnp.concatenate([kv_c, k_pe], axis=-1)[:, :, None]
        queries = self._largest(layer.absorb(q_nope, q_pe), axis=(0, 1, 2, 3))
        found = {"keys": self._largest(latents)[0], "queries": queries}
        return self.latent_parts(layer, q_nope, q_pe, kv_c, k_pe), {**(cache or {}), layer.index: found}

    def indexed(
        self, layer: Any, q: Array, row: Array, index: IndexRows | None, rotary: Rotary, cache: Any = None
    ) -> tuple[Array, Record]:
        """As `latent`; what the last indexer chose goes from layer to layer with the record."""
        record = dict(cache or {})
        before = record.pop(CHOSEN, {})
        out, visible = super().indexed(layer, q, row, index, rotary, before.get("visible"))
        _, _, kv_c, k_pe = layer.parts(q, row, rotary)
        found = {"keys": self._largest(jnp.concatenate([kv_c, k_pe], axis=-1)[:, :, None])[0]}
        return out, {**record, layer.index: found, CHOSEN: {"visible": visible}}

    def _largest(self, x: Array, axis: tuple[int, ...] = (0, 1, 3)) -> Array:
        """`[B,T,K,H]` to `[K]`, in float32, or to what `axis` leaves."""
        size = jnp.where(self.live[:, :, None, None], jnp.abs(x.astype(jnp.float32)), 0.0)
        # A maximum may lose NaN in a compiled program.
        return jnp.where(jnp.isnan(size).any(axis=axis), jnp.nan, size.max(axis=axis))


def _of_all_heads(config: DecoderConfig, record: Record) -> Record:
    """Ranks' records of their own key heads as one of all heads. What a latent row shows is the same on all; of queries of such
    rows the largest of all heads counts."""

    def of(place: int, own: Array) -> Array:
        if not own.ndim:
            return jax.lax.pmax(own, AXIS)
        everyones = jax.lax.all_gather(own, AXIS, tiled=True)
        return everyones[:: everyones.shape[0] // config.key_shapes[place][0]]  # of those that several have, one

    return {layer: jax.tree.map(partial(of, place), record[layer]) for place, layer in enumerate(sorted(record))}


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
    reach: tuple[float, float, float] | None = None,
    ranks: Ranks | None = None,
) -> CacheScales:
    """Scales under which the largest number of each layer (and key head) of `texts` lies at or below 200 of e4m3's 448, or the
    largest value of each channel at 100 of int8's 127; of latent attention's joined queries, too.

    Args:
      params: of the model `config` describes.
      texts: token ids; the longer the text, the more memory this takes, as all of one text attends at once.
      cache_dtype: how the pools are kept.
      reach: in place of 200, of queries, keys and values.
      ranks: devices that share `params`; scales are those of all heads.

    Raises:
      ParameterError: as `check_texts`, or a layer's numbers are not finite.
    """
    check_texts(config, texts)
    share = config if ranks is None else share_config(config, ranks.count)

    def observed(params: Mapping[str, Array], ids: Array, lens: Array) -> Record:
        attend = Observer(jnp.arange(ids.shape[1]) < lens[:, None])
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        record = bind(share, params)(ids, positions, attend)[2]
        return {layer: found for layer, found in record.items() if layer not in (SHARED, CHOSEN)}

    ids = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    lens = np.array([len(text) for text in texts], np.int32)
    if ranks is None:
        found = jax.jit(observed)(params, ids, lens)
    else:
        found = ranks.each(
            lambda own: _of_all_heads(config, observed(own, jnp.array(ids), jnp.array(lens))), params, axis=None
        )
    found = jax.tree.map(np.asarray, found)
    sides = "queries", "keys", "values"
    queries, keys, values = ({i: one[kind] for i, one in found.items() if kind in one} for kind in sides)
    if cache_dtype == "int8":
        return CacheScales((), tuple(channel_scales_for(values[i], f"values of layer {i}") for i in sorted(values)))
    of_q, of_k, of_v = (CALIBRATED_TO,) * 3 if reach is None else reach
    return CacheScales(
        tuple(scale_for(keys[i], f"keys of layer {i}", of_k) for i in sorted(keys)),
        tuple(scale_for(values[i].max(axis=-1), f"values of layer {i}", of_v) for i in sorted(values)),
        tuple(scale_for(queries[i], f"queries of layer {i}", of_q) for i in sorted(queries)),
    )
