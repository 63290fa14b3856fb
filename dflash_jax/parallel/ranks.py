"""The GPUs that share a model, and what each of them holds of its arrays."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflash_jax.config import DecoderConfig
from dflash_jax.errors import ParameterError
from dflash_jax.parallel.cut import Cut

# The axis of a mesh along which ranks lie.
AXIS = "tp"


@runtime_checkable
class Declared(Protocol):
    """An array of a model, as `models.parameters.Parameter` declares it."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def cut(self) -> Cut | None: ...


@dataclass(frozen=True)
class Ranks:
    """Devices that share a model: a mesh of one axis, whose programs are `compile.over_ranks`'s. They are one process's, or all of
    several processes'.

    Attributes:
      mesh: of all of them, along `AXIS`; an abstract one of devices that are not here.
      dealt: ranks that keep the same keys and have a part each of every page of the target's; 1 where each has whole pages. They
        are neighbours.
    """

    mesh: Mesh | AbstractMesh
    dealt: int = 1

    @property
    def count(self) -> int:
        return self.mesh.shape[AXIS]

    @property
    def devices(self) -> tuple[Any, ...]:
        assert isinstance(self.mesh, Mesh), "an abstract mesh has no devices"
        return tuple(self.mesh.devices.flat)

    @property
    def own(self) -> dict[int, Any]:
        """The devices of this process, by rank."""
        here = jax.process_index()
        return {rank: device for rank, device in enumerate(self.devices) if device.process_index == here}

    @property
    def led(self) -> bool:
        """Whether other processes have some of the devices: all have to call the same programs then."""
        return isinstance(self.mesh, Mesh) and len(self.own) < self.count

    @cached_property
    def whole(self) -> NamedSharding:
        """Every rank has all of it."""
        return NamedSharding(self.mesh, P())

    def along(self, axis: int) -> NamedSharding:
        """Ranks' shares lie side by side along this axis."""
        return NamedSharding(self.mesh, P(*(None,) * axis, AXIS))

    def cut_of(self, parameter: Declared) -> Cut | None:
        """The cut of an array here; None if every rank has all of it."""
        cut = parameter.cut
        return None if cut is None or (cut.optional and not cut.divides(self.count)) else cut

    def own_shape(self, parameter: Declared) -> tuple[int, ...]:
        """The shape of a rank's share."""
        shape, cut = list(parameter.shape), self.cut_of(parameter)
        if cut is not None:
            shape[cut.axis] = cut.width(self.count)
        return tuple(shape)

    def axis_of(self, array: Any) -> int | None:
        """Along which axis an array is cut; None for one that all have whole."""
        spec = tuple(array.sharding.spec)
        return spec.index(AXIS) if AXIS in spec else None

    def share_of(self, parameter: Declared, dtype: Any) -> jax.ShapeDtypeStruct:
        """The shape over all ranks of an array, with its sharding."""
        cut = self.cut_of(parameter)
        own = jax.ShapeDtypeStruct(self.own_shape(parameter), dtype)
        return self.over(own, None if cut is None else cut.axis)

    def placed(self, parameter: Declared, array: np.ndarray) -> jax.Array:
        """An array of the host, cut, each rank's share on its device. It must not change while it travels."""
        cut = self.cut_of(parameter)
        if cut is None and self.led:
            copies = [jax.device_put(array, device) for device in self.own.values()]
            return jax.make_array_from_single_device_arrays(array.shape, self.whole, copies)
        if cut is None:
            # Over the bus once, from the first device to the others between the devices.
            return jax.device_put(jax.device_put(array, self.devices[0]), self.whole)
        return self.joined([cut.share(array, rank, self.count) for rank in range(self.count)], cut.axis)

    def joined(self, shares: Sequence[np.ndarray], axis: int) -> jax.Array:
        """Ranks' shares, in their order, as one array along `axis`; this process's shares are sent to their devices."""
        sent = [jax.device_put(shares[rank], device) for rank, device in self.own.items()]
        shape = list(sent[0].shape)
        shape[axis] *= self.count
        return jax.make_array_from_single_device_arrays(tuple(shape), self.along(axis), sent)

    def over(self, share: jax.ShapeDtypeStruct, axis: int | None) -> jax.ShapeDtypeStruct:
        """The shape over all ranks of arrays that have this one on each, cut along `axis`; None: all have all of it."""
        axis = (
            axis if axis is None or axis < len(share.shape) else None
        )  # a row's scale is the same whoever has its columns
        wide = [size * (self.count if at == axis else 1) for at, size in enumerate(share.shape)]
        sharding = self.whole if axis is None else self.along(axis)
        return jax.ShapeDtypeStruct(tuple(wide), share.dtype, sharding=sharding)

    def each(self, function: Callable[[Any], Any], arrays: Any, *, axis: int | None) -> Any:
        """Maps each rank's share of `arrays`; results lie side by side along `axis`, or are the same on all for None."""
        inputs, result = (
            jax.tree.map(lambda leaf: leaf.sharding.spec, arrays),
            self.whole if axis is None else self.along(axis),
        )
        shared = jax.shard_map(function, mesh=self.mesh, in_specs=(inputs,), out_specs=result.spec, check_vma=False)
        return jax.jit(shared)(arrays)


def local_ranks(count: int, *, dealt: int = 1) -> Ranks | None:
    """The first `count` devices of this process as ranks; None for one, which shares nothing. `dealt`: see `Ranks`.

    Where several processes have come together (`parallel.hosts.start`), the devices of all of them.

    Raises:
      ParameterError: there are fewer, or they are of several kinds.
    """
    if count == 1:
        return None
    together = jax.process_count()
    devices = jax.local_devices() if together == 1 else jax.devices()
    if together > 1 and count != len(devices):
        raise ParameterError(
            f"tp={count} must be the number of all devices of the {together} processes that have come together, {len(devices)}"
        )
    if count > len(devices):
        raise ParameterError(
            f"tp={count} needs as many devices, JAX sees {len(devices)} of kind {devices[0].device_kind}: lower tp, or let it see "
            "more (CUDA_VISIBLE_DEVICES)"
        )
    kinds = sorted({one.device_kind for one in devices[:count]})
    if len(kinds) > 1:
        raise ParameterError(
            f"tp={count} needs devices of one kind, the first {count} are {' and '.join(kinds)}: name alike ones in "
            "CUDA_VISIBLE_DEVICES"
        )
    return Ranks(Mesh(np.array(devices[:count]), (AXIS,)), dealt)


def share_config[C: DecoderConfig](config: C, ranks: int) -> C:
    """A rank's share of a model: of all heads and of dense feed-forwards' width. All else, experts too, is as of the whole."""
    if ranks == 1:
        return config
    heads = {name: max(1, getattr(config, name) // ranks) for name in config.key_head_counts}
    sizes = {name: getattr(config, name) for name in config.cut_sizes}
    divided = {
        name: tuple(one // ranks for one in size) if isinstance(size, tuple) else size // ranks
        for name, size in sizes.items()
    }
    return replace(config, **heads, **divided)


def pool_config[C: DecoderConfig](config: C, ranks: int) -> C:
    """A model as its page pools over all ranks see it: where it has fewer key heads than there are ranks, several hold the same."""
    if ranks == 1:
        return config
    heads = {name: max(getattr(config, name), ranks) for name in config.key_head_counts}
    return replace(config, **heads)


def held_shape(leaf: Any) -> tuple[int, ...]:
    """The share of an array, or of its shape, that one device holds."""
    sharding = getattr(leaf, "sharding", None)
    return tuple(leaf.shape) if sharding is None else tuple(sharding.shard_shape(tuple(leaf.shape)))


def held_bytes(tree: Any) -> int:
    """Bytes that one device holds of arrays or of their shapes."""
    return sum(math.prod(held_shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def held(table: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes of what one device holds of named arrays or shapes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(held_shape(leaf), leaf.dtype), dict(table))
