"""Helpers of the readers of heads' keys."""

from collections.abc import Callable, Mapping

from dflash_jax.config import KeyReader
from dflash_jax.errors import ConfigError

# Where a key of a drafter's file is looked up.
type Source = Callable[[str], KeyReader]


def missing(keys: Mapping[str, KeyReader], said: Mapping[str, bool], part: str) -> None:
    """Raises ConfigError unless every one of `keys`, which `part` needs, is said."""
    if lacking := [key for key, there in said.items() if not there]:
        raise ConfigError(
            f"{keys[lacking[0]].subject}: {', '.join(lacking)} missing, though other keys or the tensors are those of {part}; "
            "take it from the drafter's training run"
        )
