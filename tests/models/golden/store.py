"""A golden file: one compressed `.npz` with a Hugging Face config, its tensors, the inputs and what they must give.

Keys: `config` (the text of config.json), `tensor:NAME` (a checkpoint tensor), `in:NAME` (an input), `out:NAME` (a
float32 result). Weights and float inputs are drawn so that float16 holds them exactly: stored as float16 to halve the
files, computed with as float32.
"""

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

FOLDER = Path(__file__).parent


class Draw:
    """Random tensors of one case; the same name gives the same values whatever else the case draws."""

    def __init__(self, case: str):
        self.case = case

    def normal(self, name: str, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        """float32 `shape`, normal times `scale`, rounded to what float16 can hold."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.case}/{name}".encode()))
        return (torch.randn(shape, generator=generator) * scale).half().float()

    def integers(self, name: str, shape: tuple[int, ...], high: int) -> torch.Tensor:
        """int64 `shape`, uniform in [0, high)."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.case}/{name}".encode()))
        return torch.randint(0, high, shape, generator=generator)

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A weight that does something: norms around 1, biases and sinks around 0, matrices that keep the scale."""
        if name.endswith("norm.weight") or "layernorm" in name:
            return (1.0 + self.normal(name, shape, 0.3)).half().float()
        if name.endswith(("bias", "mask_embedding")):
            return self.normal(name, shape, 0.3)
        if "embed_tokens" in name:
            return self.normal(name, shape, 0.05)
        return self.normal(name, shape, 1.0 / math.sqrt(shape[-1]))


def save(
    case: str,
    config: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
    inputs: Mapping[str, torch.Tensor],
    outputs: Mapping[str, torch.Tensor],
) -> int:
    """Writes `CASE.npz` next to this file and returns its size in bytes."""
    arrays = {"config": np.array(json.dumps(config))}
    for prefix, group in (("tensor", tensors), ("in", inputs)):
        arrays |= {f"{prefix}:{name}": _exact(value) for name, value in group.items()}
    arrays |= {f"out:{name}": value.detach().numpy().astype(np.float32) for name, value in outputs.items()}
    path = FOLDER / f"{case}.npz"
    np.savez_compressed(path, **arrays)
    return path.stat().st_size


def _exact(value: torch.Tensor) -> np.ndarray:
    array = value.detach().numpy()
    if array.dtype.kind in "iu":
        return array.astype(np.int32)
    half = array.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), array):
        raise ValueError("a weight or input is not a float16 value, so the file would not hold what was computed with")
    return half
