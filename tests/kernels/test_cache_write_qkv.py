"""Norm, rotation and write in one operation: against float64, in Pallas's interpreter, lowered for an H200, and for real."""

import contextlib
import dataclasses
import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, cache_write, kv_write, paged_attention, qkv_write
from dflash_kernels.cache_write.mosaic_gpu import launch_kv, launch_qkv
from dflash_kernels.cache_write.qkv_reference import kv_write_reference, qkv_write_reference
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_jax.config import RopeConfig
from dflash_jax.models.layers import rms_norm, rotary_tables, rotate

BF16, F16, F32, FP8, INT8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn, jnp.int8
SLOTS = (3, -1, 17, 79, 40, -2_147_483_648, 0)
GPU = pytest.mark.gpu
CANDIDATES = (
    "reference", "interpreted", pytest.param("mosaic_gpu", marks=GPU), pytest.param("reference", id="xla-on-gpu", marks=GPU),
)  # fmt: skip


@pytest.fixture(params=CANDIDATES)
def candidate(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclasses.dataclass(frozen=True)
class Case:
    n: int = 4
    k: int = 2
    head_dim: int = 128
    half: int = 64
    dtype: Any = BF16
    pages: Any = None
    norm: bool = True
    slots: tuple[int, ...] = SLOTS
    layers: int = 1
    scalar: bool = False
    page_count: int = 5
    page_size: int = 16

    @property
    def pool(self) -> tuple[int, int, int, int]:
        return self.page_count, self.k, self.page_size, self.head_dim


CASES = {
    "plain": Case(),
    "one-token": Case(slots=(33,), half=0, norm=False),
    "nothing-written": Case(slots=(-1, -5)),
    "float32": Case(dtype=F32),
    "float16": Case(dtype=F16),
    "eight-heads": Case(n=32, k=8, slots=(5, -1, 9)),
    "odd-heads": Case(n=15, k=3, head_dim=64, half=32),
    "one-head": Case(n=1, k=1, head_dim=80, half=40),
    "head96-partial": Case(head_dim=96, half=12),
    "partial": Case(half=16, dtype=F32),
    "head256": Case(n=8, k=4, head_dim=256, half=128, page_size=8, slots=(1, 39)),
    "no-rotation": Case(half=0),
    "wide-to-narrow": Case(dtype=F32, pages=BF16),
    "fp8": Case(pages=FP8, scalar=True),
    "fp8-by-head": Case(pages=FP8, dtype=F32, k=4),
    "int8": Case(pages=INT8),
    "int8-partial": Case(pages=INT8, dtype=F16, head_dim=64, half=8, k=1),
}  # fmt: skip


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Every bit pattern is as likely as any other, so NaNs with payloads are among them."""
    dtype = np.dtype(dtype)
    return rng.integers(0, 2 ** (8 * dtype.itemsize), shape, np.dtype(f"u{dtype.itemsize}")).view(dtype)


def bits(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.itemsize}")


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments of `qkv_write_reference`; with several layers of `kv_write_reference`."""
    rng = np.random.default_rng(seed)
    t, heads = len(case.slots), (case.n if case.layers == 1 else 0) + 2 * case.k * case.layers
    angles = rng.uniform(-100, 100, (t, case.half))
    pools = [[random_bits(rng, case.pool, case.pages or case.dtype) for _ in range(2)] for _ in range(case.layers)]

    def weight() -> np.ndarray | None:
        return rng.uniform(0.5, 1.5, case.head_dim).astype(case.dtype) if case.norm else None

    def scales() -> tuple[Any, Any]:
        if case.pages == INT8:
            rows = random_bits(rng, case.pool[:3], np.float32)
            return rows, rng.uniform(0.005, 0.03, (case.k, case.head_dim)).astype(np.float32)
        by_head = () if case.scalar else (case.k,)
        keys, values = (np.asarray(rng.uniform(0.004, 0.03, by_head), np.float32) for _ in range(2))
        return (keys, values) if case.pages == FP8 else (None, None)

    x = 3 * rng.standard_normal((t, heads * case.head_dim)).astype(np.float32)
    made = {"slots": np.array(case.slots, np.int32), "cos": None, "sin": None}
    made["qkv" if case.layers == 1 else "kv"] = x.astype(case.dtype)
    if case.half:
        made |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    per_layer = [(k, v, weight(), *scales()) for k, v in pools]
    names = ("k_pages", "v_pages", "k_norm", "k_scale", "v_scale")
    if case.layers == 1:
        return made | {"q_norm": weight()} | dict(zip(names, per_layer[0], strict=True))
    columns = (None if column[0] is None else tuple(column) for column in zip(*per_layer, strict=True))
    return made | dict(zip(names, columns, strict=True))


@functools.partial(jax.jit, static_argnames=("candidate", "several"))
def run(arguments: dict[str, Any], *, candidate: str, several: bool = False):
    if candidate == "reference":
        return (kv_write_reference if several else qkv_write_reference)(**arguments, eps=1e-6)
    interpret = plgpu.InterpretGPUParams() if candidate == "interpreted" else None
    return (launch_kv if several else launch_qkv)(**arguments, eps=1e-6, interpret=interpret)


def true_heads(case: Case, arguments: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values in float64."""
    heads = arguments["qkv"].astype(np.float64).reshape(len(case.slots), -1, case.head_dim)
    q, k, v = np.split(heads, [case.n, case.n + case.k], axis=1)

    def finished(x: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        if weight is not None:
            x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
        if not case.half:
            return x
        cos, sin = (arguments[name].astype(np.float64)[:, None] for name in ("cos", "sin"))
        first, second, rest = np.split(x, [case.half, 2 * case.half], axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    return finished(q, arguments["q_norm"]), finished(k, arguments["k_norm"]), v


def near(ours: Any, true: np.ndarray, dtype: Any, half: int, roundings: int = 6) -> None:
    """Within some roundings of the projection's dtype: of the number itself, or of the length of the pair it turned with."""
    size, step = np.abs(true), float(jnp.finfo(dtype).eps) / 2
    if half:
        length = np.hypot(true[..., :half], true[..., half : 2 * half])
        size = np.concatenate([length, length, size[..., 2 * half :]], axis=-1)
    assert (np.abs(np.asarray(ours, np.float64) - true) <= roundings * step * size).all()


def rows_of(pool: Any, slots: np.ndarray) -> np.ndarray:
    pool = np.asarray(pool)
    return pool[slots // pool.shape[2], :, slots % pool.shape[2]]


def untouched(case: Case, before: Any, after: Any) -> None:
    """All but the named rows keep their bits."""
    after, expected = bits(after).copy(), bits(before)
    for slot in case.slots:
        if slot >= 0:
            after[slot // case.page_size, :, slot % case.page_size] = expected[
                slot // case.page_size, :, slot % case.page_size
            ]
    np.testing.assert_array_equal(after, expected)


def check_pools(case: Case, given: dict[str, Any], k_pages: Any, v_pages: Any, k_scale: Any, true: Any) -> None:
    live = np.array(case.slots) >= 0
    slots = np.array(case.slots)[live]
    true_k, true_v = (x[live] for x in true)
    untouched(case, given["k_pages"], k_pages)
    untouched(case, given["v_pages"], v_pages)
    k, v = rows_of(k_pages, slots), rows_of(v_pages, slots)
    if case.pages in (None, BF16):
        near(k, true_k, case.pages or case.dtype, case.half)
        assert (v == true_v.astype(case.dtype).astype(v.dtype)).all()
        return
    if case.pages == INT8:
        untouched(case, given["k_scale"], k_scale)
        scale = rows_of(np.asarray(k_scale)[..., None], slots)
        near(scale[..., 0], np.abs(true_k).max(-1) / 127, case.dtype, 0, roundings=8)
        v_scale, k_step = given["v_scale"], 0.5
        true_v = np.clip(true_v, -127 * v_scale.astype(np.float64), 127 * v_scale.astype(np.float64))
        assert (np.abs(k).max(-1) == 127).all()
        v_error = 0.5 * v_scale
    else:
        scale, v_scale = (np.asarray(given[name]).reshape(-1, 1) for name in ("k_scale", "v_scale"))
        true_k, true_v = (
            np.clip(x, -448 * s.astype(np.float64), 448 * s) for x, s in ((true_k, scale), (true_v, v_scale))
        )
        k_step = np.maximum(np.abs(k.astype(np.float64)) / 16, 2.0**-10)
        v_error = np.maximum(np.abs(v.astype(np.float64)) / 16, 2.0**-10) * v_scale
    slack = 8 * float(jnp.finfo(case.dtype).eps) * np.abs(true_k).max()
    assert (np.abs(k.astype(np.float64) * scale - true_k) <= k_step * scale * 1.001 + slack).all()
    assert (np.abs(v.astype(np.float64) * v_scale - true_v) <= v_error * 1.001).all()


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, candidate: str) -> None:
    case = CASES[name]
    given = inputs(case)
    q, k_pages, v_pages, k_scale = run(given, candidate=candidate)
    true_q, *true = true_heads(case, given)
    assert q.dtype == case.dtype
    assert q.shape == true_q.shape
    near(q, true_q, case.dtype, case.half)
    check_pools(case, given, k_pages, v_pages, k_scale, true)


@pytest.mark.parametrize("pages", [None, INT8], ids=["bfloat16", "int8"])
def test_several_layers_are_each_one_call(pages: Any, candidate: str) -> None:
    case = Case(k=4, head_dim=64, half=32, layers=2, slots=SLOTS[:3], pages=pages)
    given = inputs(case)
    k_pages, v_pages, k_scale = run(given, candidate=candidate, several=True)
    columns = np.split(given["kv"], case.layers, axis=1)
    for i, column in enumerate(columns):
        alone = {name: value[i] if isinstance(value, tuple) else value for name, value in given.items() if name != "kv"}
        # The query heads are whatever: they have no say in the pools.
        alone |= {"qkv": np.concatenate([column[:, : case.head_dim], column], axis=1), "q_norm": None}
        expected = run(alone, candidate=candidate)
        for ours, theirs in zip((k_pages[i], v_pages[i]), expected[1:3], strict=True):
            np.testing.assert_array_equal(bits(ours), bits(theirs))
        if k_scale is not None:
            np.testing.assert_array_equal(bits(k_scale[i]), bits(expected[3]))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [128, 257, 512])
def test_many_tokens_agree_with_the_definition(tokens: int) -> None:
    """In the shapes of Qwen3-8B; every fifth writes nothing."""
    slots = np.random.default_rng(1).permutation(20 * 64)[:tokens]
    slots[::5] = -1
    case = Case(n=32, k=8, slots=tuple(slots.tolist()), page_size=64, page_count=20)
    given = inputs(case)
    q, k_pages, v_pages, _ = run(given, candidate="mosaic_gpu")
    true_q, *true = true_heads(case, given)
    near(q, true_q, BF16, case.half)
    check_pools(case, given, k_pages, v_pages, None, true)


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


@pytest.mark.parametrize("name", ["plain", "int8"])
def test_the_same_call_twice_gives_the_same_bits(name: str, candidate: str) -> None:
    given = inputs(CASES[name])
    first, second = (jax.tree.leaves(run(given, candidate=candidate)) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(bits(one), bits(other))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_the_definition_is_what_the_layers_compute(dtype: Any) -> None:
    """Bit for bit: norm, rotation and write one after the other."""
    case = Case(dtype=dtype, half=32)
    given = jax.tree.map(jnp.asarray, inputs(case))
    rope, positions = RopeConfig(theta=1e4, partial=0.5), jnp.arange(len(case.slots)) * 977
    rotary = rotary_tables(positions, rope, case.head_dim)
    given |= rotary._asdict()
    q, k, v = jnp.split(given["qkv"].reshape(len(case.slots), -1, case.head_dim), [case.n, case.n + case.k], axis=1)
    q = rotate(rms_norm(q, given["q_norm"], 1e-6), rotary)
    k = rotate(rms_norm(k, given["k_norm"], 1e-6), rotary)
    expected = (q, *cache_write(given["k_pages"], given["v_pages"], k, v, given["slots"]))
    for ours, theirs in zip(qkv_write_reference(**given, eps=1e-6), expected, strict=False):
        np.testing.assert_array_equal(bits(ours), bits(theirs))


def h200() -> contextlib.AbstractContextManager[Any]:
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


def shapes_of(arguments: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)


LOWERED = {
    **{f"q{t}": Case(n=32, k=8, slots=tuple(range(t)), page_size=64, page_count=9) for t in (1, 16, 512)},
    "n64": Case(n=64, k=4, dtype=F16), "head192": Case(head_dim=192, half=96, dtype=F16), "half4": Case(half=4),
    "int8": CASES["int8"], "fp8": CASES["fp8"],
}  # fmt: skip


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
@pytest.mark.parametrize("candidate", ["reference", "mosaic_gpu"])
def test_a_pool_of_more_than_two_to_the_31_elements(candidate: str) -> None:
    """4.3 GB a pool; first and last rows, and one on each side of 2**31 elements."""
    shape = (2**31 // (8 * 64 * 128) + 100, 8, 64, 128)
    edge = 2**31 // (8 * 128)
    slots = (0, edge - 1, edge, shape[0] * 64 - 1, -1)
    small = Case(n=32, k=8, slots=slots, page_size=64)
    given = {name: value for name, value in inputs(small).items() if not name.endswith("pages")}
    make = jax.jit(lambda: jnp.full(shape, 0.5, jnp.bfloat16))

    @functools.partial(jax.jit, donate_argnums=0)
    def write(pools, rest):
        return run(pools | rest, candidate=candidate)

    q, k_pages, v_pages, _ = write({"k_pages": make(), "v_pages": make()}, given)
    near(q, true_heads(small, given)[0], BF16, small.half)
    true = true_heads(small, given)[1:]
    for pool, expected in zip((k_pages, v_pages), true, strict=True):
        assert int(jax.jit(lambda x: jnp.sum(jnp.any(x != 0.5, axis=-1), dtype=jnp.int32))(pool)) == 4 * 8
        live = np.array(slots[:4])
        near(pool[live // 64, :, live % 64], expected[:4], BF16, small.half)


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
        ({"v_pages": np.zeros((5, 2, 8, 128), np.float32)}, "must be alike"),
        ({"qkv": np.zeros((7, 100), np.float32)}, r"qkv \(7, 100\) must be \[T, \(N \+ 2 \* 2\) \* 128\]"),
        ({"qkv": np.zeros((7, 512), np.float32)}, "with a query head or more"),
        ({"slots": np.zeros(6, np.int32)}, "one slot for each of 7 tokens"),
        ({"sin": None}, "give both or neither"),
        ({"sin": np.zeros((7, 65), np.float32), "cos": np.zeros((7, 65), np.float32)}, "at most 128 dims"),
        ({"k_norm": np.zeros(64, np.float32)}, "one weight for each of 128 dims"),
        ({"q_norm": np.zeros(64, np.float32)}, "one weight for each of 128 dims"),
        ({"k_scale": np.zeros(2, np.float32)}, "take no scales"),
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
