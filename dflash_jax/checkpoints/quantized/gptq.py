"""`quant_method: "gptq"`: whole numbers of two, three, four or eight bits, packed along input channels.

    X.qweight  int32 [D * bits / 32, F], the first input channel in the lowest bits; of three bits 32 numbers in three words
    X.qzeros   int32 [G, F * bits / 32]: the zero minus 1, or itself with `checkpoint_format: "gptq_v2"`
    X.scales   float16 [G, F]
    X.g_idx    int32 [D], each input channel's group; in order where `desc_act` is false

Sources: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", arXiv 2210.17323; AutoGPTQ and
GPTQModel, the `QuantLinear` of torch.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dflash_jax.checkpoints.quantized.dequantized import Decoder, read_columns
from dflash_jax.checkpoints.quantized.grouped import SUFFIXES, Grouped, finder, widths_of
from dflash_jax.checkpoints.quantized.packed import unpacked, whole_numbers
from dflash_jax.checkpoints.quantized.release import Release, check_names, group_size, one_of, refuse_unknown
from dflash_jax.checkpoints.quantized.tuning import TUNING, check_tuning

BITS = (2, 3, 4, 8)
# What was done to find the numbers, and what engines would do with them. `dynamic` leaves modules out, which the tensors tell, or
# gives them other widths.
_KNOWN = (
    "act_group_aware adapter backend batch_size bits block_name_to_quantize cache_block_outputs checkpoint_format damp_percent "
    "dataset desc_act disable_exllama dynamic exllama_config format group_size is_marlin_format lm_head max_input_length meta "
    "method model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block modules_in_block_to_quantize "
    "modules_to_not_convert pack_dtype pad_token_id quant_method quantizer static_groups sym tokenizer true_sequential "
    "use_cuda_fp16 use_exllama version"
).split()


class FirstGptq(Grouped):
    """A matrix whose zeros are stored less 1."""

    less = 1

    def read_codes(self, first: int, last: int) -> tuple[np.ndarray, Decoder]:
        words = read_columns(self.codes, first, last)
        return np.ascontiguousarray(words.T).view(np.uint8), whole_numbers(self.bits)

    def read_zeros(self, first: int, last: int) -> np.ndarray:
        words, wanted = self.words(self.zeros, first, last)
        # AutoGPTQ stores a zero of 0 as all ones, and cuts it off to its bits again.
        numbers = np.ascontiguousarray(unpacked(words, self.bits)[:, wanted].T)
        return (numbers + np.uint8(self.less)) & np.uint8((1 << self.bits) - 1)


class SecondGptq(FirstGptq):
    """A matrix whose zeros are stored as they are."""

    less = 0


def read_gptq(said: Mapping[str, Any]) -> Release:
    """The release that a `quantization_config` of this method tells of. Raises ConfigError for what is not read."""
    refuse_unknown("GPTQ", said, [*_KNOWN, *TUNING])
    check_tuning(said)
    bits, size = one_of(said, "bits", BITS), group_size(said)
    one_of(said, "pack_dtype", (None, "int32"))
    one_of(said, "is_marlin_format", (None, False))
    check_names(said, "modules_to_not_convert")
    form = said.get("checkpoint_format")
    form = one_of(said, "format" if form is None else "checkpoint_format", (None, "gptq", "gptq_v2"))
    widths = [(bits, size), *widths_of(said, "dynamic", (bits, size), BITS)]
    make = SecondGptq if form == "gptq_v2" else FirstGptq
    groups = f"in groups of {size}" if size else "with a scale for each row"
    return Release(f"GPTQ, int{bits} {groups}", None, finder(make, widths, packed_inputs=True), SUFFIXES)
