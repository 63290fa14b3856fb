"""Scales of eight-bit pages in a file, so that they are found once: JSON, with a row of numbers for every layer and side."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.checkpoints.atomic import written_whole
from dflash_jax.config import DecoderConfig
from dflash_jax.errors import ParameterError
from dflash_jax.quantization.kv_formats import CacheScales, default_scales

_LARGEST_FILE = 64 << 20


def save_scales(path: str | Path, scales: CacheScales, cache_dtype: str) -> None:
    """Writes scales that `read_scales` reads, every number exactly."""
    sides = {side: [scale.tolist() for scale in getattr(scales, side)] for side in ("k", "v")}
    with written_whole(Path(path)) as scratch:
        scratch.write_text(json.dumps({"cache_dtype": cache_dtype, **sides}), "utf-8")


def read_scales(path: str | Path, config: DecoderConfig, cache_dtype: str) -> CacheScales:
    """The scales of a file, for pools of `config` that are kept so.

    Raises:
      ParameterError: there is no such file, it is none of `save_scales`, or it is of another model or format.
    """
    try:
        if Path(path).stat().st_size > _LARGEST_FILE:
            raise ValueError("it is too large")
        found: Any = json.loads(Path(path).read_text("utf-8"))
        kind, sides = found["cache_dtype"], [[np.array(one, np.float32) for one in found[side]] for side in ("k", "v")]
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
    if any(not (np.isfinite(scale) & (scale > 0)).all() for side in sides for scale in side):
        raise ParameterError(f"{path} has a scale that is not a positive number: find them anew, with calibration")
    return scales
