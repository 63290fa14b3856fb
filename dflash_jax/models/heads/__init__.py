"""Draft heads, one file each, and their table: a new head is one file and one row. None of them is v1, whose drafts are the best
tokens by each place's own logits."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx

from dflash_jax.config import shown
from dflash_jax.errors import ConfigError
from dflash_jax.models.heads.base import Block, ConfidentHead, DraftHead, HeadConfig, Law, Pick, Sizes
from dflash_jax.models.heads.domino import Domino, DominoConfig, domino_parameters, domino_tables, read_domino
from dflash_jax.models.heads.lilicorr import (
    LiLiCorr,
    LiLiCorrConfig,
    lilicorr_parameters,
    lilicorr_tables,
    read_lilicorr,
)
from dflash_jax.models.heads.markov import Markov, MarkovConfig, markov_parameters, markov_tables, read_markov
from dflash_jax.models.heads.reading import Source
from dflash_jax.models.heads.selector import (
    Selector,
    SelectorConfig,
    read_selector,
    selector_parameters,
    selector_tables,
)
from dflash_jax.models.heads.xpress import XPress, XPressConfig, read_xpress, xpress_parameters, xpress_tables
from dflash_jax.models.parameters import Parameter


@dataclass(frozen=True)
class HeadKind:
    """One kind of head.

    Attributes:
      config_class: its configuration, whose `kind` names it.
      module: a `DraftHead` of a configuration.
      parameters: what it declares, by names inside of it.
      tables: its parameters of which a cycle reads a few rows alone.
      read: its configuration, or None, from a file's keys and the names of its tensors.
    """

    config_class: type[HeadConfig]
    module: Callable[[Any, Sizes], nnx.Module]
    parameters: Callable[[Any, Sizes], list[Parameter]]
    tables: Callable[[Any], tuple[str, ...]]
    read: Callable[[Source, Collection[str], Sizes], HeadConfig | None]


HEADS: Mapping[str, HeadKind] = {
    "selector": HeadKind(SelectorConfig, Selector, selector_parameters, selector_tables, read_selector),
    "markov": HeadKind(MarkovConfig, Markov, markov_parameters, markov_tables, read_markov),
    "xpress": HeadKind(XPressConfig, XPress, xpress_parameters, xpress_tables, read_xpress),
    "lilicorr": HeadKind(LiLiCorrConfig, LiLiCorr, lilicorr_parameters, lilicorr_tables, read_lilicorr),
    "domino": HeadKind(DominoConfig, Domino, domino_parameters, domino_tables, read_domino),
}
# What a module of a drafter calls its head, and so what its parameters' names begin with.
PREFIX = "head."


def read_head(source: Source, names: Collection[str], sizes: Sizes) -> HeadConfig | None:
    """The head of a drafter's file, told by keys and tensors; None for v1.

    Raises:
      ConfigError: keys are missing or cannot be, or are those of two heads.
    """
    found = [config for kind in HEADS.values() if (config := kind.read(source, names, sizes)) is not None]
    if len(found) > 1:
        kinds = " and ".join(one.kind for one in found)
        raise ConfigError(
            f"{source('dflash_config').subject}: keys or tensors are those of two draft heads, {kinds}; keep one's"
        )
    return found[0] if found else None


def head_from_dict(values: Any) -> HeadConfig | None:
    """The configuration with these fields. Raises ConfigError where they are none's."""
    if values is None:
        return None
    kind = HEADS.get(str(values.get("kind"))) if isinstance(values, Mapping) else None
    if kind is None:
        raise ConfigError(f"head must be one of {', '.join(HEADS)}, got {shown(values)}")
    return kind.config_class.from_dict(values)


def head_module(config: HeadConfig, sizes: Sizes) -> Any:
    """The head of a configuration."""
    return HEADS[config.kind].module(config, sizes)


def head_parameters(config: HeadConfig, sizes: Sizes) -> list[Parameter]:
    """Parameters of a head, by names in its drafter."""
    table = HEADS[config.kind].parameters(config, sizes)
    return [Parameter(f"{PREFIX}{one.name}", one.sources, one.dtype) for one in table]


def head_tables(config: HeadConfig) -> tuple[str, ...]:
    """Parameters of a head of which a cycle reads only a few rows, by names in its drafter."""
    return tuple(f"{PREFIX}{name}" for name in HEADS[config.kind].tables(config))


__all__ = [
    "HEADS", "Block", "ConfidentHead", "DominoConfig", "DraftHead", "HeadConfig", "HeadKind", "Law", "LiLiCorrConfig",
    "MarkovConfig", "Pick", "SelectorConfig", "Sizes", "Source", "XPressConfig", "head_from_dict", "head_module",
    "head_parameters", "head_tables", "read_head",
]  # fmt: skip
