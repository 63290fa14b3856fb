"""Sums over emulated devices: the definition against float64, devices against the definition, and the kernel's two forms."""

import functools
from typing import Any

import dflash_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import reduce_ranks, sum_exchange
from dflash_kernels.ranks.mosaic_gpu import SUMMED, launch_reduce_ranks
from dflash_kernels.ranks.reference import reduce_ranks_reference
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DTYPES = pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def drawn(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Parts of all devices."""
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


@functools.cache
def over_devices(count: int, *, collective: bool = False) -> Any:
    """What each device finds, devices first; by JAX's own sum if `collective`."""

    def own(parts: jax.Array) -> jax.Array:
        return jax.lax.psum(parts, "ranks") if collective else reduce_ranks(parts[0], axis="ranks")[None]

    mesh = Mesh(np.array(jax.devices()[:count]), ("ranks",))
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"), check_vma=False))


@DTYPES
def test_devices_agree_with_the_definition(dtype: Any) -> None:
    parts = drawn((4, 5, 24), dtype)
    found, defined = np.asarray(over_devices(4)(parts)), np.asarray(reduce_ranks_reference(jnp.asarray(parts)))
    assert len({device.tobytes() for device in found}) == 1
    np.testing.assert_array_equal(found[0], defined)
    true = parts.astype(np.float64).sum(axis=0)
    assert np.abs(defined.astype(np.float64) - true).max() <= float(jnp.finfo(dtype).eps) * np.abs(true).max()
    np.testing.assert_array_equal(np.asarray(over_devices(4)(parts[:, 1:3]))[0], defined[1:3])


@pytest.mark.few("5760-*", "1-bfloat16")
@DTYPES
@pytest.mark.parametrize("numbers", [1, 5760, 4096])
def test_two_devices_have_the_bits_of_a_collective(dtype: Any, numbers: int) -> None:
    """Interpreted, the gathered sum, and JAX's own: prompts take one of these, and decode loops another."""
    parts = drawn((2, 1, numbers), dtype)
    ours = launch_reduce_ranks(jnp.asarray(parts), interpret=plgpu.InterpretGPUParams())
    for collective in (False, True):
        theirs = np.asarray(over_devices(2, collective=collective)(parts))
        np.testing.assert_array_equal(np.asarray(ours), theirs[0])


@pytest.mark.few("3-2880-bfloat16")
@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(3, 2880), (1, 512), (2, 3), (4, 1024)])
def test_the_kernel_adds_as_the_definition_does(rows: int, width: int, dtype: Any) -> None:
    """Interpreted, which has one device: places that are full, and a last one that is not; NaN stays where it is."""
    parts = drawn((3, rows, width), dtype)
    parts[0, 0, 0], parts[1, -1, -1] = np.nan, np.inf
    found = launch_reduce_ranks(jnp.asarray(parts), interpret=plgpu.InterpretGPUParams())
    assert (found.shape, found.dtype) == ((rows, width), dtype)
    defined = reduce_ranks_reference(jnp.asarray(parts))
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(defined, np.float32))


def test_one_device_has_nobody_to_ask() -> None:
    x = jnp.ones((3, 5))
    np.testing.assert_array_equal(reduce_ranks(x), x)


def h100s(count: int) -> AbstractMesh:
    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    return AbstractMesh((count,), ("ranks",), abstract_device=device)


def traced(count: int, function: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A function of each rank's array, for so many H100s."""
    mesh = h100s(count)
    with jax.sharding.use_abstract_mesh(mesh):
        own = jax.ShapeDtypeStruct((count * shape[0], *shape[1:]), dtype, sharding=NamedSharding(mesh, P("ranks")))
        shared = jax.shard_map(function, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"), check_vma=False)
        return jax.jit(shared).trace(own)


@pytest.mark.few("8-bfloat16")
@pytest.mark.parametrize(("count", "dtype"), [(2, jnp.bfloat16), (4, jnp.float32), (8, jnp.bfloat16)])
def test_sums_lower_for_several_h100s(count: int, dtype: Any) -> None:
    def of_rank(x: jax.Array) -> jax.Array:
        exchange = sum_exchange(x.size, dtype, axis="ranks")

        def step(carry: Any) -> Any:
            turn, x = carry
            return turn + 1, reduce_ranks(x, axis="ranks", exchange=exchange, implementation="mosaic_gpu")

        return jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]

    text = traced(count, of_rank, (16, 2880), dtype).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.all_gather") == 1
    assert text.count("@mosaic_gpu_v2") == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "told"),
    [((16, 2880), jnp.float32, "places of 1024 words"), ((3, 8), jnp.float16, "adds up bfloat16 or float32")],
)
def test_what_the_kernel_refuses(shape: tuple[int, int], dtype: Any, told: str) -> None:
    def of_rank(x: jax.Array) -> jax.Array:
        exchange = sum_exchange(16 * 2880, jnp.bfloat16, axis="ranks")
        return reduce_ranks(x, axis="ranks", exchange=exchange, implementation="mosaic_gpu")

    with pytest.raises(dflash_kernels.NoImplementationError, match=told):
        traced(2, of_rank, shape, dtype)


def test_the_kernel_needs_memory() -> None:
    with pytest.raises(dflash_kernels.NoImplementationError, match="needs memory for the exchange"):
        traced(2, lambda x: reduce_ranks(x, axis="ranks", implementation="mosaic_gpu"), (3, 8), jnp.float32)


GPUS = pytest.mark.gpu, pytest.mark.several
SIZES = [(1, 2048), (16, 2880), (128, 5376), (512, 2048), (3, 5)]
ON_GPUS = [pytest.param("mosaic_gpu", count, *size, marks=GPUS) for count in (2, 4) for size in SIZES]


@DTYPES
@pytest.mark.parametrize(("implementation", "count", "rows", "width"), [("xla", 4, 3, 5), *ON_GPUS])
def test_rounds_of_a_loop_add_what_is_new_in_each(
    implementation: str, count: int, rows: int, width: int, dtype: Any
) -> None:
    """Parts change in each round, so that a word of an earlier one would be seen; a sum of fewer rows after each leaves places
    alone. Whole numbers up to 256 are exact."""
    if len(jax.devices()) < count:
        pytest.skip(f"{count} GPUs are not here")
    rounds, few = 12, -(-rows // 3)
    parts = np.random.default_rng(rows).integers(-16, 16, (count, rows, width)).astype(np.float32)

    def own(parts: jax.Array) -> Any:
        rank = jax.lax.axis_index("ranks")
        exchange = None if implementation == "xla" else sum_exchange(rows * width, dtype, axis="ranks")
        add = functools.partial(reduce_ranks, axis="ranks", exchange=exchange, implementation=implementation)

        def again(turn: jax.Array, told: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            new = (parts[0] + turn * (rank + 1)).astype(dtype)
            return told[0].at[turn].set(add(new)), told[1].at[turn].set(add(-2 * new[:few]))

        empty = jnp.zeros((rounds, rows, width), dtype), jnp.zeros((rounds, few, width), dtype)
        return jax.tree.map(lambda each: each[None], jax.lax.fori_loop(0, rounds, again, empty))

    mesh = Mesh(np.array(jax.devices()[:count]), ("ranks",))
    run = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"), check_vma=False))
    true = parts.sum(axis=0) + np.arange(rounds)[:, None, None] * sum(range(1, count + 1))
    for _ in range(2):
        sums, fewer = (np.asarray(found).astype(np.float32) for found in run(parts))
        np.testing.assert_array_equal(sums, np.broadcast_to(true, sums.shape))
        np.testing.assert_array_equal(fewer, np.broadcast_to(-2 * true[:, :few], fewer.shape))


@DTYPES
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.gpu
@pytest.mark.several
def test_sums_are_rounded_as_the_definition_rounds(count: int, dtype: Any) -> None:
    """Numbers that are not exact: the bits of the definition, and of two GPUs those of JAX's own sum."""
    if len(jax.devices()) < count:
        pytest.skip(f"{count} GPUs are not here")
    parts = drawn((count, 7, 2880), dtype)
    parts[0, 0, 0], parts[1, -1, -1] = np.nan, np.inf

    def own(parts: jax.Array) -> tuple[jax.Array, jax.Array]:
        exchange = sum_exchange(parts.size, dtype, axis="ranks")
        ours = reduce_ranks(parts[0], axis="ranks", exchange=exchange, implementation="mosaic_gpu")
        return ours[None], jax.lax.psum(parts, "ranks")

    mesh = Mesh(np.array(jax.devices()[:count]), ("ranks",))
    shared = jax.shard_map(own, mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"), check_vma=False)
    ours, collective = map(np.asarray, jax.jit(shared)(parts))
    defined = np.asarray(jax.jit(reduce_ranks_reference)(parts))
    for found in (*ours, *(collective if count == 2 else ())):
        np.testing.assert_array_equal(found.astype(np.float32), defined.astype(np.float32))


def test_places_are_whole_vectors_of_all_threads() -> None:
    assert SUMMED % (4 * 128) == 0
