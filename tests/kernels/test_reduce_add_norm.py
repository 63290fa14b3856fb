"""A sum over emulated devices with the stream and a norm: the definition against float64, and devices against the definition."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import add_norm, reduce_add_norm, row_exchange
from dflash_kernels.norm.mosaic_gpu import launch_reduce_add_norm
from dflash_kernels.norm.reference import reduce_add_norm_reference
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dflash_jax.execution.plan import ONE_GRAPH

EPS, RANKS = 1e-6, 4


def drawn(rows: int, dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parts of all devices, the stream, and the norm's weight."""
    rng = np.random.default_rng(rows)
    parts, stream = rng.normal(size=(RANKS, 2, rows, 16)), rng.normal(size=(rows, 16))
    return parts.astype(np.float32), stream.astype(dtype), (1 + 0.1 * rng.normal(size=16)).astype(dtype)


@functools.cache
def over_devices() -> Any:
    """What each device finds, devices first."""

    def own(parts: jax.Array, stream: jax.Array, weight: jax.Array) -> Any:
        found = reduce_add_norm(parts[0], stream, weight, eps=EPS, axis="ranks")
        return jax.tree.map(lambda each: each[None], found)

    mesh, specs = Mesh(np.array(jax.devices()[:RANKS]), ("ranks",)), (P("ranks"), P(), P())
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P("ranks"), check_vma=False))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_devices_agree_with_the_definition(dtype: Any) -> None:
    parts, stream, weight = drawn(3, dtype)
    found = over_devices()(parts, stream, weight)
    defined = jax.jit(functools.partial(reduce_add_norm_reference, eps=EPS))(parts, stream, weight)
    true = stream.astype(np.float64) + parts.astype(np.float64).sum(axis=(0, 1))
    normed = true / np.sqrt((true**2).mean(-1, keepdims=True) + EPS) * weight.astype(np.float64)
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    for of_devices, ours, expected in zip(found, defined, (true, normed), strict=True):
        assert len({device.tobytes() for device in np.asarray(of_devices)}) == 1
        np.testing.assert_array_equal(of_devices[0], ours)
        error = np.abs(np.asarray(ours, np.float64) - expected).max()
        assert error <= tolerance * np.abs(expected).max()


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    parts, stream, weight = drawn(9, np.float32)
    alone = over_devices()(parts[:, :, :3], stream[:3], weight)
    for whole, few in zip(over_devices()(parts, stream, weight), alone, strict=True):
        np.testing.assert_array_equal(whole[:, :3], few)


def test_one_device_has_nobody_to_ask() -> None:
    parts, stream, weight = map(jnp.asarray, drawn(3, np.float32))
    ours, theirs = (call(parts[0], stream, weight, eps=EPS) for call in (reduce_add_norm, add_norm))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.few("bf16")
@pytest.mark.parametrize(("dtype", "zero_centered"), [(jnp.bfloat16, False), (jnp.float32, True)], ids=["bf16", "f32"])
def test_the_kernel_adds_as_the_definition_does(dtype: Any, zero_centered: bool) -> None:
    """Interpreted, which has one device: each rank's share of a launch, one after the other."""
    rng = np.random.default_rng(1)
    parts = jnp.asarray(rng.normal(size=(3, 2, 3, 1024)), jnp.float32)
    stream = jnp.asarray(rng.normal(size=(3, 1024)), dtype)
    weight = jnp.asarray(1 + 0.1 * rng.normal(size=1024), jnp.bfloat16)
    options: dict[str, Any] = {"eps": EPS, "zero_centered": zero_centered}
    found = launch_reduce_add_norm(parts, stream, weight, interpret=plgpu.InterpretGPUParams(), **options)
    defined = reduce_add_norm_reference(parts, stream, weight, **options)
    np.testing.assert_array_equal(np.asarray(found[0], np.float32), np.asarray(defined[0], np.float32))
    tolerance = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(found[1], np.float32), np.asarray(defined[1], np.float32), rtol=tolerance, atol=tolerance
    )


GPUS = pytest.mark.gpu, pytest.mark.several
ON_GPUS = [pytest.param("mosaic_gpu", count, rows, marks=GPUS) for count in (2, 4) for rows in (1, 16, 512)]


@pytest.mark.parametrize(("implementation", "count", "rows"), [("xla", 4, 5), *ON_GPUS])
def test_rounds_of_a_loop_add_what_is_new_in_each(implementation: str, count: int, rows: int) -> None:
    """Parts change in each round, so that a word of an earlier one would be seen. Sums of sixteenths are exact, in any order."""
    if len(jax.devices()) < count:
        pytest.skip(f"{count} GPUs are not here")
    rounds, width = 12, 1024
    rng = np.random.default_rng(rows)
    parts = rng.integers(-64, 64, (count, 2, rows, width)).astype(np.float32) / 16
    stream, weight = rng.integers(-4, 4, (rows, width)).astype(np.float32), np.ones(width, jnp.bfloat16)

    def own(parts: jax.Array, stream: jax.Array, weight: jax.Array) -> Any:
        rank = jax.lax.axis_index("ranks")
        exchange = None if implementation == "xla" else row_exchange(rows, width, jnp.float32, axis="ranks")

        def again(turn: jax.Array, told: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            stream, streams, norms = told
            new = parts[0] + turn * (rank + 1) / 4
            stream, normed = reduce_add_norm(
                new, stream, weight, eps=EPS, axis="ranks", exchange=exchange, implementation=implementation
            )
            return stream, streams.at[turn].set(stream), norms.at[turn].set(normed)

        empty = jnp.zeros((rounds, rows, width))
        return jax.tree.map(lambda each: each[None], jax.lax.fori_loop(0, rounds, again, (stream, empty, empty))[1:])

    mesh, specs = Mesh(np.array(jax.devices()[:count]), ("ranks",)), (P("ranks"), P(), P())
    run = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P("ranks"), check_vma=False))
    turns, true = np.arange(rounds, dtype=np.float64)[:, None, None], parts.astype(np.float64).sum(axis=(0, 1))
    true = stream + np.cumsum(true + 2 * turns * sum(range(1, count + 1)) / 4, axis=0)
    normed = true / np.sqrt((true**2).mean(-1, keepdims=True) + EPS)
    for _ in range(2):
        streams, norms = map(np.asarray, run(parts, stream, weight))
        np.testing.assert_array_equal(streams, np.broadcast_to(true, streams.shape))
        np.testing.assert_allclose(norms, np.broadcast_to(normed, norms.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("implementation", "count", "rounds"), [
    ("xla", 4, 20), *(pytest.param("mosaic_gpu", count, 100_000, marks=GPUS) for count in (2, 4)),
])  # fmt: skip
def test_a_million_rounds_end(implementation: str, count: int, rounds: int) -> None:
    """Ten calls, each of one graph. What every device adds changes in each round and can be told beforehand, so that a word of
    another round would be seen; sums of sixteenths are exact. Devices that wait for ever need a watchdog (`timeout`)."""
    if len(jax.devices()) < count:
        pytest.skip(f"{count} GPUs are not here")
    rows, width = 16, 1024
    places = np.arange(rows * width, dtype=np.int32).reshape(rows, width)

    def part(turn: jax.Array, rank: jax.Array | int) -> jax.Array:
        return ((turn * (2 * rank + 3) + places * (rank + 1)) % 257 - 128).astype(jnp.float32) / 16

    def own(first: jax.Array) -> jax.Array:
        rank = jax.lax.axis_index("ranks")
        exchange = None if implementation == "xla" else row_exchange(rows, width, jnp.float32, axis="ranks")

        def again(turn: jax.Array, wrong: jax.Array) -> jax.Array:
            turn = first + turn
            stream, weight = jnp.zeros((rows, width)), jnp.ones(width, jnp.bfloat16)
            found, _ = reduce_add_norm(
                part(turn, rank)[None],
                stream,
                weight,
                eps=EPS,
                axis="ranks",
                exchange=exchange,
                implementation=implementation,
            )
            return wrong + (found != sum(part(turn, other) for other in range(count)))

        return jax.lax.fori_loop(0, rounds, again, jnp.zeros((rows, width), jnp.int32))[None]

    mesh = Mesh(np.array(jax.devices()[:count]), ("ranks",))
    shared = jax.shard_map(own, mesh=mesh, in_specs=P(), out_specs=P("ranks"), check_vma=False)
    run = jax.jit(shared, compiler_options=None if implementation == "xla" else ONE_GRAPH)
    for call in range(10):
        np.testing.assert_array_equal(run(np.int32(call * rounds)), 0)
