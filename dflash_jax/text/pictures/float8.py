"""Float8 attention of a vision tower: queries, keys and values of every block rounded on scales of their own.

Scales come from a file, or from the largest numbers of the last calls: the newest one's are among them, so that nothing is ever cut
off. What pads a call counts nowhere. A file is JSON, with a row for each block:

    {"visual.blocks.0.attn": {"q": 0.01, "k": 0.02, "v": 0.005}, ...}

A number is what its float8 stands for times the scale. Source: vLLM's float8 attention of multimodal encoders, its history of 16
calls and its files, whose names may have more before `blocks` and behind it.
"""

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from dflash_kernels import dequantize_tensor, quantize_tensor
from jaxtyping import Array, Float, Int

from dflash_jax.checkpoints.atomic import written_whole
from dflash_jax.errors import ParameterError
from dflash_jax.models.qwen3_5_vision import Mixing
from dflash_jax.options import as_number

HISTORY = 16  # calls
SIDES = ("q", "k", "v")
_LARGEST = 448.0
_LARGEST_FILE = 1 << 20
_BLOCK = re.compile(r"(?:^|\.)blocks\.(\d{1,4})(?:\.|$)")


class Float8Mixing:
    """A `Mixing` of rounded numbers, called for one block after the other.

    Args:
      attend: of the same numbers in sixteen or 32 bits, which hold every float8 one times a scale as well as their own.
      numbers: scales of every block's queries, keys and values in float32; or, where they are found, largest numbers of before.
      found: whether scales follow from `numbers` and this call's own largest numbers.

    Attributes:
      largest: this call's largest numbers `[3]` of every block so far.
    """

    def __init__(self, attend: Mixing, numbers: Float[Array, "blocks 3"], *, found: bool):
        self.attend, self.numbers, self.found = attend, numbers, found
        self.largest: list[Array] = []

    def __call__(self, q: Array, k: Array, v: Array, cu_lens: Int[Array, "C"]) -> Array:
        live = (jnp.arange(len(q)) < cu_lens[-1])[:, None, None]
        sides = [jnp.where(live, x, jnp.zeros((), x.dtype)) for x in (q, k, v)]
        scales = self.numbers[len(self.largest)]
        self.largest.append(jnp.stack([jnp.max(jnp.abs(x)).astype(jnp.float32) for x in sides]))
        if self.found:
            top = jnp.maximum(scales, self.largest[-1])
            scales = jnp.where(top > 0, top, _LARGEST) / _LARGEST
        q, k, v = (
            dequantize_tensor(quantize_tensor(x, scale), scale, x.dtype) for x, scale in zip(sides, scales, strict=True)
        )
        return self.attend(q, k, v, cu_lens)


@dataclass
class VisionScales:
    """Where a tower's scales come from. May be asked from several threads.

    Attributes:
      blocks: of the tower.
      given: `[blocks, 3]` scales of a file; None where they are found.
      calls: calls that were seen so far.
    """

    blocks: int
    given: Float[np.ndarray, "blocks 3"] | None = None
    calls: int = 0
    _seen: Float[np.ndarray, "calls blocks 3"] = field(init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        self._seen = np.zeros((HISTORY, self.blocks, len(SIDES)), np.float32)

    @property
    def found(self) -> bool:
        return self.given is None

    @property
    def numbers(self) -> Float[np.ndarray, "blocks 3"]:
        """What the next call's `Float8Mixing` takes: scales, or the largest numbers of as many calls as stay beside it."""
        if self.given is not None:
            return self.given
        with self._lock:
            kept = np.arange(HISTORY) != self.calls % HISTORY
            return self._seen[kept].max(axis=0)

    def record(self, largest: Float[np.ndarray, "blocks 3"]) -> None:
        """Takes a call's largest numbers in place of those of the oldest one; what is not finite is left out."""
        with self._lock:
            self._seen[self.calls % HISTORY] = np.where(np.isfinite(largest), largest, 0)
            self.calls += 1

    def save(self, path: str | Path, margin: float) -> None:
        """Writes the scales of the calls that are remembered, `margin` times as large.

        Raises:
          ParameterError: no call was seen, or `margin` is not a number from 1 on.
        """
        if not self.found or not self.calls:
            raise ParameterError(
                'no scales were found: load with vision_attention_dtype="fp8" and without vision_scales, and show it pictures first'
            )
        if (by := as_number(margin)) is None or not 1 <= by < 1e6:
            raise ParameterError(
                f"margin must be a number from 1 on, by which scales are larger than needed, got {margin!r}"
            )
        with self._lock:
            top = self._seen.max(axis=0).astype(np.float64)
        scales = (np.where(top > 0, top, _LARGEST) / _LARGEST * by).astype(np.float32)
        rows = {
            f"visual.blocks.{i}.attn": dict(zip(SIDES, map(float, row), strict=True)) for i, row in enumerate(scales)
        }
        with written_whole(Path(path)) as scratch:
            scratch.write_text(json.dumps(rows, indent=1), "utf-8")


def read_vision_scales(path: str | Path, blocks: int) -> Float[np.ndarray, "blocks 3"]:
    """The scales of a file of `VisionScales.save`, or of vLLM's, for a tower of so many blocks.

    Raises:
      ParameterError: there is no such file, or it has not one positive number for each side of every block.
    """
    try:
        if Path(path).stat().st_size > _LARGEST_FILE:
            raise ValueError("it is too large")
        held: Any = json.loads(Path(path).read_text("utf-8"))
        rows: Mapping[str, Any] = dict(held)
        named = {int(match[1]): rows[name] for name in rows if (match := _BLOCK.search(name))}
        scales = np.array([[named[i][side] for side in SIDES] for i in range(blocks)], np.float32)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ParameterError(
            f"{path} holds no scales q, k and v of each of {blocks} blocks as save_vision_scales writes them: {error!r:.200}"
        ) from error
    if len(named) != blocks or not (np.isfinite(scales) & (scales > 0)).all():
        raise ParameterError(
            f"{path} has scales of {len(named)} blocks, this tower has {blocks}, and each must be a positive number: find them anew"
        )
    return scales
