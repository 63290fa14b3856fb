"""`quant_method: "awq"`: whole numbers of four bits, packed along output channels (`version: "gemm"`).

    X.qweight  int32 [D, F / 8]
    X.qzeros   int32 [G, F / 8]
    X.scales   float16 [G, F]

The eight numbers of a word are output channels 0, 2, 4, 6, 1, 3, 5 and 7, from the lowest bits on. Sources: "AWQ: Activation-aware
Weight Quantization for LLM Compression and Acceleration", arXiv 2306.00978; AutoAWQ, `WQLinear_GEMM`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.checkpoints.quantized.dequantized import Decoder, bytes_from, unpacked
from dflash_jax.checkpoints.quantized.grouped import SUFFIXES, Grouped, finder
from dflash_jax.checkpoints.quantized.release import Release, check_names, group_size, one_of, refuse_unknown

# What was done to find the numbers, and what engines would do with them.
_KNOWN = (
    "backend bits do_fuse exllama_config format fuse_max_seq_len group_size modules_to_fuse modules_to_not_convert quant_method "
    "version zero_point"
).split()
# Where in a word the output channels 0 to 7 stand.
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])


class _Awq(Grouped):
    """A matrix packed along output channels, in the order of AWQ's kernels."""

    def read_codes(self, first: int, last: int) -> tuple[np.ndarray, Decoder]:
        return np.ascontiguousarray(self._numbers(self.codes, first, last).T), bytes_from(0)

    def read_zeros(self, first: int, last: int) -> np.ndarray:
        return self._numbers(self.zeros, first, last)

    def _numbers(self, tensor: Any, first: int, last: int) -> np.ndarray:
        words, wanted = self.words(tensor, first, last)
        numbers = unpacked(words, self.bits).reshape(len(words), -1, len(_PLACES))[..., _PLACES]
        return numbers.reshape(len(words), -1)[:, wanted]


def read_awq(said: Mapping[str, Any]) -> Release:
    """The release that a `quantization_config` of this method tells of. Raises ConfigError for what is not read."""
    refuse_unknown("AWQ", said, _KNOWN)
    bits, size = one_of(said, "bits", (4,)), group_size(said)
    one_of(said, "zero_point", (None, True))
    one_of(said, "version" if said.get("version") is not None else "format", (None, "gemm", "GEMM"))
    check_names(said, "modules_to_not_convert")
    groups = f"in groups of {size}" if size else "with a scale for each row"
    return Release(f"AWQ, int{bits} {groups}", None, finder(_Awq, bits, size, packed_inputs=False), SUFFIXES)
