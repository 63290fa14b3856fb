"""What AutoRound says beside a format: how it found the numbers, which is left alone, and what would change them, which is refused.

Source: AutoRound, `compressors/base.py: SerializedCompressorConfig` and `export/utils.py`.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoints.quantized.release import KEY, one_of

TUNING = (
    "act_bits act_data_type act_dynamic act_group_size act_sym amp autoround_version batch_size block_name_to_quantize data_type "
    "dataset enable_alg_ext enable_deterministic_algorithms enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input "
    "extra_config gradient_accumulate_steps iters low_cpu_mem_usage low_gpu_mem_usage lr minmax_lr nsamples provider "
    "quant_block_list scale_dtype seqlen static_attention_dtype static_attention_granularity static_kv_dtype "
    "static_kv_granularity super_bits super_group_size supported_types to_quant_block_names"
).split()
# Numbers of another kind, activations in fewer bits with codes of their own, biases of norms, scales of scales.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "data_type": (None, "int"), "act_bits": (None, 16, 32), "enable_norm_bias_tuning": (None, False), "super_bits": (None,),
    "super_group_size": (None,), "static_kv_dtype": (None,), "static_attention_dtype": (None,),
}  # fmt: skip


def check_tuning(said: Mapping[str, Any], where: str = KEY) -> None:
    """Raises ConfigError for what is not read."""
    for key, permitted in _NEUTRAL.items():
        one_of(said, key, permitted, where)
