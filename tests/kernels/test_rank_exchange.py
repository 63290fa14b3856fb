"""How ranks take turns with areas of one another's memory, step by step in any order; and the kernels for GPUs that are not here.

What a kernel does at a place is a list of steps of each rank, as `mosaic_gpu.rank_mailbox` has them: a word for every rank, words
emptied, then a wait for every rank's. Ranks run at any speed, and what is written to another rank comes as late as may be.
"""

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import dflash_kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import GATHERED, gather_ranks, rank_exchange, rank_exchange_refusal, reduce_add_norm, row_exchange
from dflash_kernels.core.rank_exchange import AREAS
from dflash_kernels.ranks import mosaic_gpu
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAUNCHES = 12


class Ranks:
    """Memory of n ranks, and words on their way to it."""

    def __init__(self, count: int, areas: int, order: random.Random):
        self.count, self.areas, self.order = count, areas, order
        self.memory = [[[None] * count for _ in range(areas)] for _ in range(count)]
        self.travelling: list[tuple[int, int, int, Any]] = []

    def deliver(self, which: int) -> None:
        rank, area, writer, word = self.travelling.pop(which)
        self.memory[rank][area][writer] = word

    def run(self, rank: int) -> Iterator[Any]:
        """One rank's launches; gives None after a step, and after each launch what it has found."""
        for launch in range(LAUNCHES):
            used, emptied = launch % self.areas, (launch + self.areas - 1) % self.areas
            others = list(range(self.count))
            self.order.shuffle(others)
            for other in others:
                self.travelling.append((other, used, rank, (launch, rank)))
                yield None
            for writer in range(self.count):
                self.memory[rank][emptied][writer] = None
                yield None
            while None in self.memory[rank][used]:
                yield None
            yield list(self.memory[rank][used])


def found_by_all(count: int, areas: int, seed: int) -> list[list[Any]] | None:
    """What each rank finds in its launches, in some order of all steps; None where they wait for ever."""
    order = random.Random(seed)
    ranks = Ranks(count, areas, order)
    running = {rank: ranks.run(rank) for rank in range(count)}
    found: list[list[Any]] = [[] for _ in range(count)]
    pace = [order.choice((1, 4, 16)) for _ in range(count)]
    for _ in range(20_000):
        if not running:
            return found
        if ranks.travelling and order.random() < 0.3:
            ranks.deliver(order.randrange(len(ranks.travelling)))
            continue
        rank = order.choices(list(running), [pace[rank] for rank in running])[0]
        try:
            found[rank] += [one for one in [next(running[rank])] if one is not None]
        except StopIteration:
            del running[rank]
    return None


def right(count: int) -> list[list[Any]]:
    return [[[(launch, rank) for rank in range(count)] for launch in range(LAUNCHES)] for _ in range(count)]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_ranks_find_the_words_of_their_launch(count: int) -> None:
    for seed in range(20):
        assert found_by_all(count, AREAS, seed) == right(count)


def test_two_areas_are_one_too_few() -> None:
    assert any(found_by_all(3, 2, seed) != right(3) for seed in range(20))


def h100s(count: int) -> AbstractMesh:
    device = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    return AbstractMesh((count,), ("ranks",), abstract_device=device)


def lowered(count: int, function: Any, *shapes: tuple[tuple[int, ...], Any, Any]) -> str:
    """A function of every rank for so many H100s; of each argument shape, dtype and how it is cut."""
    mesh, specs = h100s(count), tuple(spec for _, _, spec in shapes)
    with jax.sharding.use_abstract_mesh(mesh):
        args = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, dtype, spec in shapes]
        shared = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P("ranks"), check_vma=False)
        return jax.jit(shared).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.few("8-bfloat16")
@pytest.mark.parametrize(("count", "dtype"), [(2, jnp.bfloat16), (4, jnp.float32), (8, jnp.bfloat16)])
def test_sums_and_choices_lower_for_several_h100s(count: int, dtype: Any) -> None:
    def of_rank(parts: Any, stream: Any, weight: Any, words: Any) -> Any:
        rows, pairs = row_exchange(16, 2560, dtype, axis="ranks"), rank_exchange(2, GATHERED, axis="ranks")

        def step(carry: Any) -> Any:
            turn, stream, words = carry
            stream, _ = reduce_add_norm(
                parts, stream, weight, eps=1e-6, axis="ranks", exchange=rows, implementation="mosaic_gpu"
            )
            found = gather_ranks(words, axis="ranks", exchange=pairs, implementation="mosaic_gpu")
            return turn + 1, stream, jnp.max(found, axis=0)

        return jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, stream, words))[1:]

    text = lowered(
        count, of_rank, ((2 * count, 16, 2560), jnp.float32, P("ranks")), ((16, 2560), dtype, P()), ((2560,), jnp.bfloat16, P()),
        ((700,), jnp.int32, P()),
    )  # fmt: skip
    # Addresses are told once each, before the loop, by launches of their own.
    assert text.count("stablehlo.all_gather") == 2
    assert text.count("@mosaic_gpu_v2") == 4
    assert "uses_xla_collective_metadata = true" not in text


def test_words_of_all_devices() -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("ranks",))
    words = np.arange(4 * 5, dtype=np.int32).reshape(4, 5)
    of_rank = jax.shard_map(
        lambda own: gather_ranks(own[0], axis="ranks")[None], mesh=mesh, in_specs=P("ranks"), out_specs=P("ranks"), check_vma=False
    )  # fmt: skip
    for found in np.asarray(jax.jit(of_rank)(words)):
        np.testing.assert_array_equal(found, words)


def test_who_has_none() -> None:
    assert "needs a Hopper GPU" in str(rank_exchange_refusal(2))
    with jax.sharding.use_abstract_mesh(h100s(2)):
        assert rank_exchange_refusal(2) is None
        assert "takes 2 to 8 GPUs, not 16" in str(rank_exchange_refusal(16))


def test_the_kernels_refuse() -> None:
    with jax.sharding.use_abstract_mesh(h100s(2)):
        words = jax.ShapeDtypeStruct((5,), jnp.int32)
        with pytest.raises(dflash_kernels.NoImplementationError, match="needs memory for the exchange"):
            jax.eval_shape(lambda own: gather_ranks(own, axis="ranks", implementation="mosaic_gpu"), words)


@pytest.mark.parametrize(("apart", "reached"), [(set(), True), ({(2, 1)}, False)])
def test_gpus_that_do_not_reach_one_another_are_told(apart, reached, monkeypatch):
    class Driver:
        def cuDeviceCanAccessPeer(self, found, one, other):
            found._obj.value = (one, other) not in apart
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert mosaic_gpu.reach_one_another.__wrapped__(3) is reached
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not mosaic_gpu.reach_one_another.__wrapped__(2)


def missing(name):
    raise OSError(name)
