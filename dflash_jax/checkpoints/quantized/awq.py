"""`quant_method: "awq"`: whole numbers of four bits, packed along output channels (`version: "gemm"`).

    X.qweight  int32 [D, F / 8]
    X.qzeros   int32 [G, F / 8]
    X.scales   float16 [G, F]

The eight numbers of a word are in an order of their own, `_CHANNELS`. Sources: "AWQ: Activation-aware
Weight Quantization for LLM Compression and Acceleration", arXiv 2306.00978; AutoAWQ, `WQLinear_GEMM`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.checkpoints.quantized.dequantized import Decoder
from dflash_jax.checkpoints.quantized.grouped import SUFFIXES, Grouped, finder
from dflash_jax.checkpoints.quantized.packed import whole_numbers
from dflash_jax.checkpoints.quantized.release import Release, check_names, group_size, one_of, refuse_unknown
from dflash_jax.checkpoints.quantized.tuning import TUNING, check_tuning
from dflash_jax.checkpoints.safetensors import Tensor

# What was done to find the numbers, and what engines would do with them.
_KNOWN = (
    "backend bits checkpoint_format desc_act do_fuse dynamic exllama_config format fuse_max_seq_len group_size ignore lm_head meta "
    "method modules_to_fuse modules_to_not_convert pack_dtype quant_method sym version zero_point"
).split()
# The output channels of a word's numbers, from the lowest bits on.
_CHANNELS = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq(Grouped):
    """A matrix packed along output channels, in the order of AWQ's kernels."""

    def read_codes(self, first: int, last: int) -> tuple[np.ndarray, Decoder]:
        return self._numbers(self.codes, first, last), whole_numbers(8)

    def read_zeros(self, first: int, last: int) -> np.ndarray:
        return self._numbers(self.zeros, first, last)

    def _numbers(self, tensor: Tensor, first: int, last: int) -> np.ndarray:
        """Columns of a packed tensor `[R, F / 8]` as rows, uint8 `[last - first, R]`."""
        words, wanted = self.words(tensor, first, last)
        halves = np.ascontiguousarray(words.T).view(np.uint8).reshape(words.shape[1], -1, 4)
        numbers = np.empty((len(halves), len(_CHANNELS), len(words)), np.uint8)
        for place, channel in enumerate(_CHANNELS):
            byte = halves[..., place // 2]
            numbers[:, channel] = byte >> 4 if place % 2 else byte & 15
        return numbers.reshape(-1, len(words))[wanted]


def read_awq(said: Mapping[str, Any]) -> Release:
    """The release that a `quantization_config` of this method tells of. Raises ConfigError for what is not read."""
    refuse_unknown("AWQ", said, [*_KNOWN, *TUNING])
    check_tuning(said)
    bits, size = one_of(said, "bits", (4,)), group_size(said)
    # AutoRound stores the zeros of symmetric numbers too.
    one_of(said, "zero_point", (None, True, False) if said.get("provider") == "auto-round" else (None, True))
    one_of(said, "pack_dtype", (None, "int32"))
    for key in ("version", "format", "checkpoint_format"):  # whichever a tool has
        one_of(said, key, (None, "gemm", "GEMM"))
    check_names(said, "modules_to_not_convert")
    groups = f"in groups of {size}" if size else "with a scale for each row"
    return Release(f"AWQ, int{bits} {groups}", None, finder(Awq, [(bits, size)], packed_inputs=False), SUFFIXES)
