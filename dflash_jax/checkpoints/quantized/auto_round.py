"""`quant_method: "auto-round"`: AutoRound's whole numbers, stored as GPTQ's or as AWQ's.

    packing_format    "auto_round:auto_gptq" and "auto_round:gptq": zeros less 1; "auto_round", "auto_round:exllamav2" and
                      "auto_round:gptqmodel": zeros as they are; "auto_round:auto_awq": AWQ's order
    extra_config      modules that have other bits or groups, or none

Sources: "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs", arXiv 2309.05516; AutoRound,
`export/export_to_autoround/export.py` and `auto_round_extension/torch`.
"""

from collections.abc import Mapping
from typing import Any

from dflash_jax.checkpoints.quantized.awq import Awq
from dflash_jax.checkpoints.quantized.gptq import BITS, FirstGptq, SecondGptq
from dflash_jax.checkpoints.quantized.grouped import SUFFIXES, Grouped, finder, widths_of
from dflash_jax.checkpoints.quantized.release import KEY, Release, group_size, one_of, refuse_unknown
from dflash_jax.checkpoints.quantized.tuning import TUNING, check_tuning

_FORMATS: Mapping[str, type[Grouped]] = {
    "auto_round:auto_gptq": FirstGptq,
    "auto_round:gptq": FirstGptq,
    "auto_round": SecondGptq,
    "auto_round:exllamav2": SecondGptq,
    "auto_round:gptqmodel": SecondGptq,
    "auto_round:auto_awq": Awq,
}
_KNOWN = ("backend", "bits", "group_size", "packing_format", "quant_method", "sym", "vllm_backend", *TUNING)


def read_auto_round(said: Mapping[str, Any]) -> Release:
    """The release that a `quantization_config` of this method tells of. Raises ConfigError for what is not read."""
    refuse_unknown("AutoRound", said, _KNOWN)
    check_tuning(said)
    make = _FORMATS[one_of(said, "packing_format", tuple(_FORMATS))]
    permitted = (4,) if make is Awq else BITS
    bits, size = one_of(said, "bits", permitted), group_size(said)
    modules = said.get("extra_config")
    if isinstance(modules, Mapping):
        for name, own in modules.items():
            check_tuning(own if isinstance(own, Mapping) else {}, f"{KEY}.extra_config.{name}")
    widths = [(bits, size), *widths_of(said, "extra_config", (bits, size), permitted)]
    groups = f"in groups of {size}" if size else "with a scale for each row"
    find = finder(make, widths, packed_inputs=make is not Awq)
    return Release(f"AutoRound, int{bits} {groups}", None, find, SUFFIXES)
