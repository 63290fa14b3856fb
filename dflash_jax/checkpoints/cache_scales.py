"""Scales of eight-bit pages, as they were found once: in a file of their own, or in the tensors of a checkpoint.

The file is JSON, with a row of numbers for every layer and side. Tensors are scales of float8 under the names that vLLM reads:

    model.layers.0.self_attn.k_scale, .v_scale               of compressed-tensors; vLLM's own modules have `.attn` before the last
    model.layers.0.self_attn.k_proj.k_scale, v_proj.v_scale  of ModelOpt
    model.layers.0.self_attn.k_proj.output_scale, v_proj...  of older compressed-tensors
    model.layers.0.self_attn.kv_scale                        one for both, of AutoFP8

A key or value is what its float8 stands for times the scale: of its layer, or of each of its layer's heads.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.checkpoints.atomic import written_whole
from dflash_jax.checkpoints.safetensors import Tensor, chunks
from dflash_jax.config import DecoderConfig
from dflash_jax.errors import CheckpointError, ParameterError
from dflash_jax.options import FLOAT_DTYPES
from dflash_jax.quantization.kv_formats import CacheScales, cached_places, default_scales

# In a converted folder.
CONVERTED_SCALES = "cache_scales.json"
_LARGEST_FILE = 64 << 20
_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d{1,9})\.(?:\w+\.)+"
    r"(?:(?P<side>q|k|v|kv|prob)_scale|(?P<projection>[qkv])_proj\.output_scale|prob_output_scale)$"
)


@dataclass(frozen=True)
class StoredScales:
    """Scales of float8 pages that a checkpoint's tensors hold.

    Attributes:
      scales: of every layer with pages.
      tensors: where they stand: each tensor, the place among the layers with pages, and "k" or "v".
    """

    scales: CacheScales
    tensors: tuple[tuple[Tensor, int, str], ...]


def is_scale(canonical: str | None) -> bool:
    """Whether a tensor of this canonical name is a scale of keys, values, queries or probabilities."""
    return canonical is not None and _NAME.search(canonical) is not None


def stored_scales(
    config: DecoderConfig, canonical: Callable[[str], str | None], tensors: Mapping[str, Tensor], problems: list[str]
) -> tuple[StoredScales | None, list[str]]:
    """The scales among a checkpoint's tensors, None without any; and names of scales that nothing here reads: of queries, of
    probabilities, of layers that attend to another layer's keys, of a latent's values.

    Where a layer has a scale of one side alone, it is that of both.

    Args:
      canonical: see `mapping.make_plan`; a tensor that it ignores is none of the model's.
      problems: takes what is wrong with them, one sentence each.
    """
    wanted, places = default_scales(config), {place: i for i, place in enumerate(cached_places(config))}
    found, unread, kept = dict[tuple[int, str], np.ndarray](), list[str](), list[tuple[Tensor, int, str]]()
    for name, tensor in tensors.items():
        known = canonical(name)
        match = None if known is None else _NAME.search(known)
        if match is None:
            continue
        side, place = match["side"] or match["projection"] or "prob", places.get(int(match["layer"]))
        if place is None or side in ("q", "prob") or (side == "v" and not wanted.v):
            unread.append(name)
            continue
        side = side[0]  # one for both stands with keys
        if (place, side) in found:
            problems.append(f"tensor {name} is a second scale of the same layer; keep one of them")
        values = _scale(tensor, getattr(wanted, side)[place].shape, problems)
        if values is not None:
            found[place, side] = values
            kept.append((tensor, place, side))
    layers = {place for place, _ in found}
    if not found or problems:
        return None, unread
    if lacking := [layer for layer, place in places.items() if place not in layers]:
        problems.append(
            f"layer {lacking[0]} has no scales of keys and values, though others have; fetch its tensors again"
        )
        return None, unread
    k = tuple(found[i, "k" if (i, "k") in found else "v"] for i in range(len(places)))
    v = tuple(found[i, "v" if (i, "v") in found else "k"] for i in range(len(wanted.v)))
    return StoredScales(CacheScales(k, v), tuple(kept)), unread


def _scale(tensor: Tensor, shape: tuple[int, ...], problems: list[str]) -> np.ndarray | None:
    """A tensor's scale for each head, or for a latent row, in float32; None with what is wrong with it in `problems`."""
    heads = shape[0] if shape else 1
    if (
        tensor.dtype_name not in FLOAT_DTYPES
        or tensor.size not in (1, heads)
        or max(tensor.shape, default=1) != tensor.size
    ):
        problems.append(
            f"tensor {tensor.name} is {tensor.dtype_name} {list(tensor.shape)}, expected one scale of its layer"
            + (f", or one for each of {heads} heads," if heads > 1 else "")
            + f" in {', '.join(FLOAT_DTYPES)}"
        )
        return None
    values = np.concatenate([piece.astype(np.float32).reshape(-1) for piece in chunks(tensor)])
    if not (np.isfinite(values) & (values > 0)).all():
        problems.append(f"tensor {tensor.name} has a scale that is not a positive number; fetch it again")
        return None
    return np.broadcast_to(values, (heads,)).reshape(shape)


def save_scales(path: str | Path, scales: CacheScales, cache_dtype: str) -> None:
    """Writes scales that `read_scales` reads, every number exactly."""
    sides = {side: [scale.tolist() for scale in getattr(scales, side)] for side in ("k", "v", "q")}
    with written_whole(Path(path)) as scratch:
        scratch.write_text(json.dumps({"cache_dtype": cache_dtype, **sides}), "utf-8")


def stored_tensor(scales: CacheScales, place: int, side: str, shape: tuple[int, ...]) -> np.ndarray:
    """Inverse of `stored_scales`: the tensor of `shape` for the scale of a layer's side, in float32."""
    values = getattr(scales, side)[place].reshape(-1)
    return (values[:1] if shape == () or max(shape) == 1 else values).reshape(shape)


def read_converted_scales(folder: Path, config: DecoderConfig) -> CacheScales:
    """The scales that a conversion has put into a folder.

    Raises:
      CheckpointError: they are not what it wrote.
    """
    try:
        return read_scales(folder / CONVERTED_SCALES, config, "fp8")
    except ParameterError as error:
        raise CheckpointError(str(folder), f"{error}, or convert again") from error


def read_scales(path: str | Path, config: DecoderConfig, cache_dtype: str) -> CacheScales:
    """The scales of a file, for pools of `config` that are kept so.

    Raises:
      ParameterError: there is no such file, it is none of `save_scales`, or it is of another model or format.
    """
    try:
        if Path(path).stat().st_size > _LARGEST_FILE:
            raise ValueError("it is too large")
        found: Any = json.loads(Path(path).read_text("utf-8"))
        # Files of before had none of queries.
        kind, sides = found["cache_dtype"], [found["k"], found["v"], found.get("q", [])]
        sides = [[np.array(one, np.float32) for one in side] for side in sides]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ParameterError(f"{path} holds no scales as save_cache_scales writes them: {error!r:.200}") from error
    if kind != cache_dtype:
        raise ParameterError(
            f"{path} has scales for cache_dtype={kind!r}, asked for is {cache_dtype!r}: take those of that"
        )
    scales, wanted = CacheScales(*map(tuple, sides)), default_scales(config, cache_dtype)
    for side in ("k", "v"):
        shapes = [[scale.shape for scale in getattr(of, side)] for of in (scales, wanted)]
        if shapes[0] != shapes[1]:
            raise ParameterError(
                f"{path} has scales of shapes {shapes[0]!s:.80}, this target's are {shapes[1]!s:.80}: find them anew, with "
                "calibration"
            )
    if scales.q and [scale.shape for scale in scales.q] != [()] * len(scales.k):
        raise ParameterError(
            f"{path} has scales of queries that are not one for each layer: find them anew, with calibration"
        )
    if any(not (np.isfinite(scale) & (scale > 0)).all() for side in sides for scale in side):
        raise ParameterError(f"{path} has a scale that is not a positive number: find them anew, with calibration")
    return scales
