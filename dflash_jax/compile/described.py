"""What a program is made for and what it gives back, as JSON: pytrees of shapes, and the plain values beside them.

The text is a key, so two things that differ have different texts; what cannot be told apart this way is refused. It is also read
back, so that no pickle is needed to remember a pytree.
"""

import dataclasses
import importlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PACKAGE = "dflash_jax"


class NotDescribable(ValueError):
    """A value that has no description."""


def describe(value: Any) -> Any:
    """JSON for a tree of dataclasses, tuples, lists, mappings, plain values, dtypes, and arrays or their shapes.

    Of an array there is the shape, the dtype and whether the dtype is weak; a NumPy number is an array.

    Raises:
      NotDescribable: something else is in it.
    """
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return {"array": [list(value.shape), str(value.dtype), bool(getattr(value, "weak_type", False))]}
    if type(value) in (tuple, list):
        return {type(value).__name__: [describe(part) for part in value]}
    if isinstance(value, Mapping) and all(type(name) is str for name in value):
        return {"dict": {name: describe(value[name]) for name in sorted(value)}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        fields = {one.name: describe(getattr(value, one.name)) for one in dataclasses.fields(value)}
        return {"dataclass": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}
    raise NotDescribable(f"{type(value).__module__}.{type(value).__qualname__}")


def rebuild(described: Any) -> Any:
    """What `describe` gave this for, with `jax.ShapeDtypeStruct` in place of arrays.

    Raises:
      NotDescribable: `describe` cannot have given it, or it names a dataclass that is not this package's.
    """
    if not isinstance(described, dict):
        return described
    try:
        match described:
            case {"float": text}:
                return float(text)
            case {"dtype": name}:
                return jnp.dtype(name)
            case {"array": [shape, dtype, weak]}:
                return jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), weak_type=weak)
            case {"tuple": parts}:
                return tuple(rebuild(part) for part in parts)
            case {"list": parts}:
                return [rebuild(part) for part in parts]
            case {"dict": items}:
                return {name: rebuild(item) for name, item in items.items()}
            case {"dataclass": name, "fields": fields}:
                return _dataclass(name)(**{field: rebuild(item) for field, item in fields.items()})
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        raise NotDescribable(str(error)) from error
    raise NotDescribable(f"unknown entry {sorted(described)}")


def _dataclass(name: str) -> type:
    module, _, qualname = name.partition(":")
    if module.split(".")[0] != PACKAGE:
        raise NotDescribable(f"{name} is not of {PACKAGE}")
    found = getattr(importlib.import_module(module), qualname)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise NotDescribable(f"{name} is no dataclass")
    return found
