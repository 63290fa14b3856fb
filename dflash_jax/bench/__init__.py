"""Measuring a model as its users would: `dflash-jax bench`."""

from dflash_jax.bench.measure import Figures, measure, programs
from dflash_jax.bench.workload import Workload, random_pair, read_prompts, synthetic

__all__ = ["Figures", "Workload", "measure", "programs", "random_pair", "read_prompts", "synthetic"]
