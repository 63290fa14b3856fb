"""What a `quantization_config` tells of a release, whatever its format."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_jax.checkpoints.quantized.dequantized import Matrix
from dflash_jax.checkpoints.safetensors import Tensor
from dflash_jax.config import shown
from dflash_jax.errors import ConfigError

KEY = "quantization_config"


@dataclass(frozen=True)
class Found:
    """A quantized matrix among a folder's tensors.

    Attributes:
      matrix: None where it cannot be read, of which there is a problem then.
      names: of all tensors that belong to it and to nothing else.
    """

    matrix: Matrix | None
    names: Collection[str]


@dataclass(frozen=True)
class Release:
    """How the weights of a release are quantized.

    Attributes:
      what: the format, as a sentence names it.
      activations: what the release expects of activations beside that, as a sentence names it; None for nothing.
      find: the quantized matrices among tensors, by the names of what they stand for. Takes names of matrices that are to be left
        out because tensors of theirs are known to be in files that could not be read, and a list that takes problems.
      suffixes: ends of names of a matrix's tensors, and what stands there in the matrix's own.
    """

    what: str
    activations: str | None
    find: Callable[[Mapping[str, Tensor], Collection[str], list[str]], dict[str, Found]]
    suffixes: Mapping[str, str]

    def owner(self, name: str) -> str:
        """The name of the matrix that a tensor belongs to, its own for others."""
        for suffix, own in self.suffixes.items():
            if name.endswith(suffix):
                return name.removesuffix(suffix) + own
        return name


def refuse_unknown(method: str, said: Mapping[str, Any], known: Collection[str], where: str = KEY) -> None:
    """Raises ConfigError for keys that are not known of a method."""
    if unknown := sorted(map(str, said.keys() - set(known))):
        raise ConfigError(
            f"config.json sets keys of {where} that are not known of {method}: {', '.join(unknown)}. Take the published release, "
            "or remove them if they are only bookkeeping"
        )


def one_of(said: Mapping[str, Any], key: str, permitted: tuple[Any, ...], where: str = KEY) -> Any:
    """The value of a key that may have few. Raises ConfigError for any other."""
    value = said.get(key)
    if not any(value is one or value == one for one in permitted):
        expected = ", ".join(map(repr, permitted))
        raise ConfigError(
            f"config.json says {key}={shown(value)} in {where}, expected one of {expected}; take another release of the model"
        )
    return value


def check_names(said: Mapping[str, Any], *keys: str) -> None:
    """Raises ConfigError where what should be a list of modules is none. Which modules are quantized, the tensors say."""
    for key in keys:
        names = said.get(key)
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ConfigError(f"config.json: {key} in {KEY} must be a list of names, got {shown(names)}")


def positive_pair(value: Any) -> tuple[int, int] | None:
    """A list of two positive integers; None for anything else."""
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(one) is int and one > 0 for one in value):
        return value[0], value[1]
    return None


def group_size(said: Mapping[str, Any], where: str = KEY) -> int | None:
    """Columns of a group; None where all are in one. Raises ConfigError for what is no size."""
    size = said.get("group_size")
    if size is None or size == -1:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ConfigError(
            f"config.json: group_size in {where} must be a positive integer, or -1 for one group, got {shown(size)}"
        )
    return size
