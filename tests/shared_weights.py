"""Weights of random models, given to the ranks that share them as `load` gives a checkpoint's."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflash_jax.checkpoints.weights import completed
from dflash_jax.config import DecoderConfig
from dflash_jax.models.registry import Family
from dflash_jax.parallel.ranks import Ranks
from dflash_jax.quantization.weights import Weight


def shared_weights(
    models: Sequence[tuple[DecoderConfig, Family]], weights: Mapping[str, Mapping[str, Any]], ranks: Ranks
) -> dict[str, dict[str, Weight]]:
    """Declared arrays of a target and perhaps its drafter, whole and on the host, as `read_weights` gives them to ranks."""
    placed = {
        family.role: {
            one.name: ranks.placed(one, np.asarray(weights[family.role][one.name])) for one in family.parameters(config)
        }
        for config, family in models
    }
    return completed(models, placed, ranks)
