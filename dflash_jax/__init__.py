"""DFlash speculative decoding on NVIDIA GPUs in pure JAX.

    import dflash_jax as dj
    model = dj.load()
    print(dj.generate(model, "def quicksort(", dj.SamplingParams(max_tokens=128)).text)

Importing this package is cheap and starts no JAX backend; the names below load what they need on first use.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_convert.convert import convert

    from dflash_jax.cli.info import plan
    from dflash_jax.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        DeviceError,
        DFlashError,
        PairError,
        ParameterError,
        PromptError,
        TokenizerError,
        UnsupportedModelError,
    )
    from dflash_jax.generation import generate, stream
    from dflash_jax.interactive.chat import Chat
    from dflash_jax.interactive.show import show
    from dflash_jax.model import Model, load
    from dflash_jax.sampling_params import SamplingParams, Structured
    from dflash_jax.serving.async_engine import AsyncEngine, agenerate, astream
    from dflash_jax.text.completion import Completion, Piece, Stats, TokenLogprob

_HOME = {
    "dflash_convert.convert": ("convert",),
    "dflash_jax.cli.info": ("plan",),
    "dflash_jax.errors": (
        "CapacityError", "CheckpointError", "ConfigError", "DFlashError", "DeviceError", "PairError", "ParameterError",
        "PromptError", "TokenizerError", "UnsupportedModelError",
    ),
    "dflash_jax.generation": ("generate", "stream"),
    "dflash_jax.interactive.chat": ("Chat",),
    "dflash_jax.interactive.show": ("show",),
    "dflash_jax.model": ("Model", "load"),
    "dflash_jax.sampling_params": ("SamplingParams", "Structured"),
    "dflash_jax.serving.async_engine": ("AsyncEngine", "agenerate", "astream"),
    "dflash_jax.text.completion": ("Completion", "Piece", "Stats", "TokenLogprob"),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "AsyncEngine", "CapacityError", "Chat", "CheckpointError", "Completion", "ConfigError", "DFlashError", "DeviceError", "Model",
    "PairError", "ParameterError", "Piece", "PromptError", "SamplingParams", "Stats", "Structured", "TokenLogprob",
    "TokenizerError", "UnsupportedModelError", "agenerate", "astream", "convert", "generate", "load", "plan", "show", "stream",
]  # fmt: skip


def __getattr__(name: str):
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("dflash-jax")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dflash_jax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
