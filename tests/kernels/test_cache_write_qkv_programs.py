"""Norm, rotation and write in one operation: programs for an H200, writes in place, what is refused."""

import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, kv_write, paged_attention, qkv_write
from dflash_kernels.kv_cache.write.mosaic_gpu import launch_kv, launch_qkv

from ..devices import h200
from .qkv_cases import CANDIDATES, CASES, F16, F32, FP8, INT8, Case, bits, inputs, run


def shapes_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)


LOWERED = {
    **{f"q{t}": Case(n=32, k=8, slots=tuple(range(t)), page_size=64, page_count=9) for t in (1, 16, 512)},
    "n64": Case(n=64, k=4, dtype=F16), "head192": Case(head_dim=192, half=96, dtype=F16), "half4": Case(half=4),
    "head512": Case(n=32, k=4, head_dim=512, half=256, norm=False, slots=tuple(range(16)), page_size=64, page_count=9),
    "int8": CASES["int8"], "fp8": CASES["fp8"],
}  # fmt: skip


@pytest.mark.few("half4", "int8", "head192")
@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_an_h200(name: str) -> None:
    """One launch, and every pool is its own output."""
    case = LOWERED[name]
    traced = jax.jit(functools.partial(launch_qkv, eps=1e-6)).trace(**shapes_of(inputs(case)))
    with h200():
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert text.count("output_operand_alias<") == (3 if case.pages == INT8 else 2)


def test_several_layers_lower_to_one_launch() -> None:
    case = Case(k=8, layers=5, slots=tuple(range(16)))
    traced = jax.jit(functools.partial(launch_kv, eps=1e-6)).trace(**shapes_of(inputs(case)))
    with h200():
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert text.count("output_operand_alias<") == 10


@functools.partial(jax.jit, static_argnames="candidate", donate_argnums=0)
def write_often(pools, rest, steps, *, candidate):
    def body(i, carry):
        pools, total = carry
        given = rest | pools | {"slots": rest["slots"] + i}
        for _ in range(2):
            q, *written = run(given, candidate=candidate)
            given |= dict(zip(("k_pages", "v_pages"), written, strict=False))
            given["qkv"] = given["qkv"].at[:, : q[0].size].add(q.reshape(q.shape[0], -1))
        return {name: given[name] for name in pools}, total + given["qkv"].astype(jnp.float32).sum()

    return jax.lax.fori_loop(0, steps, body, (pools, 0.0))


@pytest.mark.parametrize("candidate", ["reference", *CANDIDATES[2:]])
def test_a_donated_pool_is_written_in_place(candidate: str) -> None:
    """Inside a loop, too. The interpreter copies."""
    case = Case(n=8, page_count=64)
    given = jax.tree.map(lambda value: jax.device_put(jnp.asarray(value)), inputs(case))
    pools = {name: given.pop(name) for name in ("k_pages", "v_pages")}
    given["slots"] = jnp.array([5, -99, 100, 300, 400, -99, 50], jnp.int32)
    text = str(write_often.lower(pools, given, 5, candidate=candidate).compile().as_text())
    whole = ",".join(map(str, case.pool))
    assert not re.findall(rf"= \w+\[{whole}\]\S* (?:copy|copy-start|convert|transpose)\(.*", text)
    addresses = {name: pool.unsafe_buffer_pointer() for name, pool in pools.items()}
    written, _ = write_often(pools, given, 5, candidate=candidate)
    assert {name: pool.unsafe_buffer_pointer() for name, pool in written.items()} == addresses


@pytest.mark.gpu
def test_nothing_lies_between_the_write_and_attention() -> None:
    """The queries reach the attention kernel without another launch."""
    case = Case(n=32, k=8, slots=tuple(range(32)), page_size=64)
    table, lens = jnp.zeros((2, 4), jnp.int32), jnp.full((2,), 16, jnp.int32)

    def both(given, table, lens):
        q, k_pages, v_pages, _ = qkv_write(**given)
        q = q.reshape(2, 16, 32, 128)
        return paged_attention(q, k_pages, v_pages, table, lens, q_lens=lens), k_pages, v_pages

    given = jax.tree.map(jnp.asarray, inputs(case))
    pools = {name: given.pop(name) for name in ("k_pages", "v_pages")}
    program = jax.jit(lambda pools, given, *rest: both(pools | given, *rest), donate_argnums=0)
    text = str(program.lower(pools, given, table, lens).compile().as_text())
    write, attend = [match.start() for match in re.finditer("custom_call_target=.mosaic_gpu", text)][:2]
    # The program is scheduled: its text is in the order of the launches. What merges parts comes after.
    assert not re.findall(r"= bf16\[\S* (?:fusion|copy|transpose|pad)\(.*", text[write:attend])


def test_dispatch() -> None:
    """The public functions pick what the machine can run, and agree with the definition."""
    given = inputs(Case(layers=2, pages=FP8, k=4))
    expected = run(given, candidate="reference", several=True)
    ours = jax.jit(kv_write)(**jax.tree.map(jnp.asarray, given))
    np.testing.assert_array_equal(bits(ours.k_pages[1]), bits(expected[0][1]))
    one = jax.tree.map(jnp.asarray, inputs(CASES["plain"]))
    assert qkv_write(**one).k_scale is None
    pools = dict.fromkeys(("k_pages", "v_pages"), jnp.zeros(CASES["plain"].pool, FP8))
    assert (jax.jit(qkv_write)(**one | pools | {"v_scale": 2.0}).k_scale == 1).all()
    with pytest.raises(
        NoImplementationError, match=r"qkv_write: no implementation named \['cuda'\]; there are mosaic_gpu, xla"
    ):
        qkv_write(**one, implementation="cuda")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    with pytest.raises(NoImplementationError, match=r"mosaic_gpu: needs a Hopper GPU \(compute capability 9\.0\)"):
        qkv_write(**jax.tree.map(jnp.asarray, inputs(CASES["plain"])), implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q_norm": np.ones(128, np.float32)}, "norm weights in the projection's dtype, bfloat16"),
        (
            {"cos": np.ones((7, 10), np.float32), "sin": np.ones((7, 10), np.float32)},
            "multiple of 8 dims, not 128 and 20",
        ),
    ],
)
def test_refusals_name_their_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        run(inputs(CASES["plain"]) | changes, candidate="interpreted")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_pages": np.zeros((5, 2, 8, 128), np.float32)}, "must agree in all but the head dim"),
        ({"qkv": np.zeros((7, 100), np.float32)}, r"qkv \(7, 100\) must be \[T, \(N \+ 2 \* 2\) \* 128\]"),
        ({"qkv": np.zeros((7, 512), np.float32)}, "with a query head or more"),
        ({"slots": np.zeros(6, np.int32)}, "one slot for each of 7 tokens"),
        ({"sin": None}, "give both or neither"),
        ({"sin": np.zeros((7, 65), np.float32), "cos": np.zeros((7, 65), np.float32)}, "at most 128 rotary dims"),
        ({"k_norm": np.zeros(64, np.float32)}, "one weight for each of 128 dims"),
        ({"q_norm": np.zeros(64, np.float32)}, "one weight for each of 128 dims"),
        ({"k_scale": np.zeros(2, np.float32)}, "take no k_scale"),
        (dict.fromkeys(("k_pages", "v_pages"), np.zeros((5, 2, 16, 128), np.int8)), r"take k_scale \(5, 2, 16\)"),
        (dict.fromkeys(("k_pages", "v_pages"), np.zeros((5, 2, 16, 128), FP8)) | {"v_scale": np.ones(3)}, r"number or \(2,\)"),
    ],
)  # fmt: skip
def test_shapes_that_do_not_agree(changes: dict[str, Any], message: str) -> None:
    given = jax.tree.map(jnp.asarray, inputs(CASES["float32"]) | changes)
    with pytest.raises(ValueError, match=message):
        # The function itself: in test runs a shape checker around it would speak first.
        inspect.unwrap(qkv_write)(**given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_pages": ()}, "one for each layer"),
        ({"kv": np.zeros((7, 512), np.float32)}, r"kv \(7, 512\) must be \[T, 2 layers"),
    ],
)
def test_layers_that_do_not_agree(changes: dict[str, Any], message: str) -> None:
    given = jax.tree.map(jnp.asarray, inputs(Case(layers=2, dtype=F32)) | changes)
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(kv_write)(**given)
