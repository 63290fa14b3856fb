"""Experts in MXFP4: tiles, the definition, and the Hopper kernel interpreted, lowered for an H200, and for real (`-m gpu`)."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import (
    MXFP4_MOST_SCALE,
    Mxfp4Tiles,
    NoImplementationError,
    mxfp4_mixture,
    mxfp4_mixture_refusal,
    mxfp4_tiles,
    routed_experts_exchange,
)
from dflash_kernels.core.mxfp4 import SHIFT
from dflash_kernels.fused.experts.mosaic_gpu_mxfp4 import launch
from dflash_kernels.fused.experts.mosaic_gpu_mxfp4_few_sm90 import DOWN, GATED
from dflash_kernels.fused.experts.mosaic_gpu_mxfp4_one_sm90 import OneToken
from dflash_kernels.fused.experts.plan_mxfp4 import Gate, plan
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
GATE = Gate(1.702, 7.0)
SIZES = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NUMBERS = np.concatenate([SIZES, -SIZES])


def released(key: int, count: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks and scales of a matrix, its numbers around `columns ** -0.5`."""
    rng = np.random.default_rng(key)
    middle = 126 - round(np.log2(columns) / 2)
    blocks = rng.integers(0, 256, (count, rows, columns // 32, 16), np.uint8)
    return blocks, rng.integers(middle - 3, middle + 1, blocks.shape[:-1]).astype(np.uint8)


def numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`[E, F, D]` float64, by the specification."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    wide = NUMBERS[codes] * 2.0 ** (scales[..., None].astype(np.float64) - 127)
    return wide.reshape(*scales.shape[:-1], -1)


def make(tokens: int, count: int, hidden: int, inner: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A call, and its matrices in float64."""
    given = {"gate_up": released(1, count, 2 * inner, hidden), "down": released(2, count, hidden, inner)}
    keys = jax.random.split(jax.random.key(tokens), 4)
    call: dict[str, Any] = {
        "logits": jax.random.normal(keys[0], (tokens, count)) * 2,
        "x": (jax.random.normal(keys[1], (tokens, hidden)) * 3).astype(jnp.bfloat16),
    }
    for key, (name, (blocks, scales)) in zip(keys[2:], given.items(), strict=True):
        call[name] = mxfp4_tiles(*map(jnp.asarray, (blocks, scales)), gated=name == "gate_up", dtype=jnp.bfloat16)
        call[f"{name}_bias"] = jax.random.normal(key, (count, blocks.shape[1])).astype(jnp.bfloat16)
    return call, {name: numbers(*both) for name, both in given.items()}


def true_values(call: dict[str, Any], matrices: dict[str, np.ndarray], taken: int) -> np.ndarray:
    """`[T, D]` in float64, with no rounding between the products."""
    logits, x = (np.asarray(call[name], np.float64) for name in ("logits", "x"))
    first, last = (np.asarray(call[name], np.float64) for name in ("gate_up_bias", "down_bias"))
    out = np.zeros_like(x)
    for token, experts in enumerate(np.argsort(-logits, axis=-1, kind="stable")[:, :taken]):
        shares = np.exp(logits[token, experts] - logits[token].max())
        for expert, share in zip(experts, shares / shares.sum(), strict=True):
            both = matrices["gate_up"][expert] @ x[token] + first[expert]
            gate, up = np.minimum(both[0::2], GATE.limit), np.clip(both[1::2], -GATE.limit, GATE.limit)
            inner = (up + 1) * gate / (1 + np.exp(-GATE.alpha * gate))
            out[token] += share * (matrices["down"][expert] @ inner + last[expert])
    return out


def check(call: dict[str, Any], matrices: dict[str, np.ndarray], taken: int, found: jax.Array) -> None:
    """The sum of the parts is as near to float64 as rounding what lies between the products to bfloat16 allows."""
    assert found.dtype == jnp.float32
    true = true_values(call, matrices, taken)
    far = np.abs(np.asarray(found, np.float64).sum(axis=0) - true).max()
    assert far <= 2**-8 * np.abs(true).max()


@pytest.mark.few("one")
@pytest.mark.parametrize(
    ("tokens", "taken", "count", "hidden", "inner"),
    [
        (2, 2, 3, 192, 384),
        (1, 1, 2, 64, 64),
        (5, 2, 4, 128, 64),
        (17, 1, 2, 64, 128),
        (2, 2, 3, 128, 128),
        (2, 1, 2, 320, 320),
    ],
    ids=["three consumers", "one", "ragged", "chosen before", "two consumers", "five consumers"],
)
def test_kernel(tokens: int, taken: int, count: int, hidden: int, inner: int) -> None:
    """More items than CTAs, rings that turn, widths of odd tiles, experts that nobody takes and groups that are not full."""
    call, matrices = make(tokens, count, hidden, inner)
    check(call, matrices, taken, launch(**call, taken=taken, gate=GATE, ctas=3, interpret=INTERPRET))


@pytest.mark.few("several")
@pytest.mark.parametrize(
    ("taken", "count", "hidden", "inner", "ctas"),
    [(1, 2, 64, 64, 3), (3, 4, 192, 384, 5), (5, 6, 128, 64, 4), (4, 4, 320, 320, 7), (8, 9, 128, 192, 6)],
    ids=["one", "several", "more than warps", "five consumers", "eight"],
)
def test_one_token(taken: int, count: int, hidden: int, inner: int, ctas: int) -> None:
    """Its choices are groups: fewer items than CTAs and more, the same number of each CTA and not."""
    call, matrices = make(1, count, hidden, inner)
    assert plan(1, taken, count, hidden, inner, ctas, GATE).alone
    check(call, matrices, taken, launch(**call, taken=taken, gate=GATE, ctas=ctas, interpret=INTERPRET))


@pytest.mark.parametrize(
    ("taken", "hidden", "inner", "ctas"),
    [
        (4, 2880, 2880, 132),
        (4, 2880, 2880, 114),
        (1, 64, 64, 3),
        (3, 192, 384, 5),
        (8, 960, 320, 132),
        (2, 1920, 64, 16),
    ],
)
def test_one_token_leaves_out_no_item(taken: int, hidden: int, inner: int, ctas: int) -> None:
    """Of both products every item is one CTA's; of gpt-oss's, CTAs have as many tiles of weights as others, or one item's more."""
    made = plan(1, taken, 32, hidden, inner, ctas, GATE)
    steps: Any = 0
    for stage, tiles in ((GATED, made.gated_tiles), (DOWN, made.down_tiles * made.parts)):

        def items(index: jax.Array, stage: str = stage, tiles: int = tiles) -> jax.Array:
            count, item_of = OneToken(made, (), {}, {}, {}, index).dealt(stage)
            turns = jnp.arange(taken * tiles)
            return jnp.where(turns < count, item_of(turns), -1)

        found = np.asarray(jax.vmap(items)(jnp.arange(ctas, dtype=jnp.int32)))
        assert np.array_equal(np.sort(found[found >= 0]), np.arange(taken * tiles))
        assert all(np.all(np.diff(row[row >= 0]) > 0) for row in found)
        steps = steps + (found >= 0).sum(axis=1) * OneToken(made, (), {}, {}, {}, 0).steps(stage)
    if (hidden, ctas) == (2880, 132):
        assert set(steps) == {12, 15}


def share(call: dict[str, Any], first: int, count: int) -> dict[str, Any]:
    """The call with the matrices and biases of `count` experts from `first` on."""
    kept, own = slice(first, first + count), {name: call[name] for name in ("gate_up", "down")}
    tiles = {name: Mxfp4Tiles(one.words[kept], one.gated, one.dtype) for name, one in own.items()}
    biases = {f"{name}_bias": call[f"{name}_bias"][kept] for name in own}
    return call | tiles | biases | {"first": jnp.int32(first)}


def test_shares_of_the_experts_add_up() -> None:
    """To what the definition gives of all of them, though a share has none of some token's."""
    call, matrices = make(6, 6, 64, 64)
    call |= {name: call[name].astype(jnp.float32) for name in ("x", "gate_up_bias", "down_bias")}
    of_share = jax.jit(lambda call: mxfp4_mixture(**call, taken=2, alpha=GATE.alpha, limit=GATE.limit))
    parts = [of_share(share(call, first, 2)) for first in (0, 2, 4)]
    true = true_values(call, matrices, 2)
    np.testing.assert_allclose(jnp.stack(parts).sum(axis=(0, 1)), true, rtol=0, atol=1e-5 * np.abs(true).max())


@pytest.mark.few("few")
@pytest.mark.parametrize(
    ("tokens", "taken", "hidden", "inner", "ctas"),
    [(5, 2, 128, 64, 3), (17, 2, 64, 128, 3), (2, 2, 64, 384, 7), (1, 3, 192, 192, 4), (1, 1, 64, 64, 2)],
    ids=["few", "chosen before", "in parts", "one", "nothing"],
)
def test_kernel_of_a_share(tokens: int, taken: int, hidden: int, inner: int, ctas: int) -> None:
    """Rows of the others' choices are zeros in all parts; the first token takes none of the three experts here."""
    call, matrices = make(tokens, 6, hidden, inner)
    call["logits"] = call["logits"].at[0, :taken].set(9.0)
    parts = plan(tokens, taken, 3, hidden, inner, ctas, GATE, chooses=tokens < 17, among=6).parts
    assert parts == (3 if (tokens, inner) == (2, 384) else 1)
    here = share(call, 3, 3)
    found = launch(**here, taken=taken, gate=GATE, ctas=ctas, interpret=INTERPRET)
    assert found.shape == (parts * taken, tokens, hidden)
    assert not np.asarray(found)[:, 0].any()
    if taken > 1 and tokens > 1:
        others = launch(**share(call, 0, 3), taken=taken, gate=GATE, ctas=ctas, interpret=INTERPRET)
        check(call, matrices, taken, jnp.concatenate([found, others]))


def shapes(tokens: int, count: int, hidden: int, inner: int, among: int | None = None) -> dict[str, Any]:
    """Of a call, with all experts or with `count` of `among`."""
    shaped = jax.ShapeDtypeStruct

    def matrix(rows: int, columns: int, gated: bool) -> Mxfp4Tiles:
        return Mxfp4Tiles(shaped((count, rows // 64, columns // 64, 4, 136), jnp.int32), gated, jnp.dtype("bfloat16"))

    return {
        "logits": shaped((tokens, among or count), jnp.float32), "x": shaped((tokens, hidden), jnp.bfloat16),
        "gate_up": matrix(2 * inner, hidden, True), "gate_up_bias": shaped((count, 2 * inner), jnp.bfloat16),
        "down": matrix(hidden, inner, False), "down_bias": shaped((count, hidden), jnp.bfloat16),
    } | ({} if among is None else {"first": shaped((), jnp.int32)})  # fmt: skip


@pytest.mark.few("1-32")
@pytest.mark.parametrize("count", [32, 128])
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
def test_lowers_for_an_h200(tokens: int, count: int) -> None:
    """gpt-oss-20b and 120b."""
    with h200():
        assert mxfp4_mixture_refusal(tokens, 4, jnp.bfloat16, experts=count, hidden=2880, inner=2880) is None
        program = jax.jit(
            lambda call: mxfp4_mixture(**call, taken=4, alpha=1.702, limit=7.0, implementation="mosaic_gpu")
        )
        text = program.trace(shapes(tokens, count, 2880, 2880)).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu_v2") == 1 + (tokens > 16)
    made = plan(tokens, 4, count, 2880, 2880, 132, GATE)
    assert made.stages * made.consumers * made.unit >= 18
    assert made.resident == (made.columns == 8)


@pytest.mark.few("1-128-2")
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("among", [32, 128])
@pytest.mark.parametrize("tokens", [1, 8, 64, 512])
def test_a_share_lowers_for_an_h200(tokens: int, among: int, ranks: int) -> None:
    with h200():
        program = jax.jit(
            lambda call: mxfp4_mixture(**call, taken=4, alpha=1.702, limit=7.0, implementation="mosaic_gpu")
        )
        call = shapes(tokens, among // ranks, 2880, 2880, among)
        text = program.trace(call).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("@mosaic_gpu_v2") == 1 + (tokens > 16)
    made = plan(tokens, 4, among // ranks, 2880, 2880, 132, GATE, among=among)
    assert (made.alone, made.columns) == (False, plan(tokens, 4, among, 2880, 2880, 132, GATE).columns)


@pytest.mark.parametrize("gated", [False, True])
def test_tiles_keep_every_bit(gated: bool) -> None:
    """Random bytes and all scales that there is room for; a matrix of several tiles each way, and one expert alone."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 128, 6, 16), np.uint8)
    scales = rng.integers(0, MXFP4_MOST_SCALE + 1, (3, 128, 6)).astype(np.uint8)
    tiles = mxfp4_tiles(jnp.asarray(blocks), jnp.asarray(scales), gated=gated, dtype=jnp.bfloat16)
    assert tiles.shape == (3, 128, 192)
    assert tiles.words.nbytes == blocks.nbytes + scales.nbytes
    for found, given in zip(tiles.blocks_and_scales(), (blocks, scales), strict=True):
        assert np.array_equal(found, given)
    one = Mxfp4Tiles(tiles.words[1], gated, tiles.dtype).blocks_and_scales()
    assert np.array_equal(one[0], blocks[1])
    assert np.array_equal(one[1], scales[1])


def test_a_thread_finds_its_numbers() -> None:
    """What the kernel does with a word, in Python: shifts, masks and a factor give the numbers of the specification."""
    blocks, scales = released(3, 1, 64, 64)
    words = np.asarray(mxfp4_tiles(jnp.asarray(blocks), jnp.asarray(scales), gated=True, dtype=jnp.bfloat16).words)
    true, flat, mask = numbers(blocks, scales)[0], words.view(np.uint32).ravel(), 0x81C081C0
    for lane, step in [(0, 0), (5, 1), (31, 2), (18, 3)]:
        warp, row, column = lane % 4, lane // 4, 16 * step + 2 * (lane % 4)
        word, factors = int(flat[(warp * 32 + lane) * 4 + step]), int(flat[512 + warp * 8 + row])
        turned = {turn: word << turn | word >> (32 - turn) for turn in (10, 14)}
        fourth = word << 6 & 0x00400040 | turned[14] & 0x81808180
        for slot, bits in enumerate((word & mask, word << 4 & mask, turned[10] & mask, fourth)):
            half, group = slot % 2, slot // 2
            factor = 2.0 ** ((factors >> 8 * (2 * half + step // 2) & 255) - 127 + SHIFT)
            for which in range(2):
                value = np.uint32((bits >> 16 * which & 0xFFFF) << 16).view(np.float32)
                assert value * factor == true[2 * (8 * warp + row) + half, column + 8 * group + which]


def test_the_definition() -> None:
    call, matrices = make(6, 5, 64, 64)
    call |= {name: call[name].astype(jnp.float32) for name in ("x", "gate_up_bias", "down_bias")}
    found = mxfp4_mixture(**call, taken=3, alpha=GATE.alpha, limit=GATE.limit)
    true = true_values(call, matrices, 3)
    np.testing.assert_allclose(np.asarray(found).sum(axis=0), true, rtol=0, atol=1e-5 * np.abs(true).max())


def test_few_tokens_leave_few_multiprocessors_idle() -> None:
    """The second product of four tokens is cut into parts, those of many are not, nor is one token's, dealt out another way."""
    plans = {tokens: plan(tokens, 4, 32, 2880, 2880, 132, GATE) for tokens in (1, 4, 8, 64)}
    found = {tokens: (one.consumers, one.parts) for tokens, one in plans.items()}
    assert found == {1: (5, 1), 4: (5, 3), 8: (5, 1), 64: (3, 1)}
    assert all((2880 // 64 // one.consumers) % one.parts == 0 for one in plans.values())


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((1, 4, 700, 128, 128), "1 to 640 experts, not 700"), ((2000, 4, 32, 128, 128), "1 to 4608 choices of tokens"),
        ((1, 4, 32, 2896, 128), "widths in 64s, not 2896 and 128"),
    ],
)  # fmt: skip
def test_refusals_name_their_reason(sizes: tuple[int, int, int, int, int], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        plan(*sizes, 132, GATE)


def test_other_dtypes_and_shapes_are_refused() -> None:
    call, _ = make(1, 2, 64, 64)
    how: dict[str, Any] = {"taken": 1, "alpha": 1.0, "limit": 7.0}
    with pytest.raises(NotImplementedError, match="takes bfloat16 throughout, not float32"):
        launch(**call | {"x": call["x"].astype(jnp.float32)}, taken=1, gate=GATE, ctas=1)
    with pytest.raises(ValueError, match="whole tiles of 64, not 32 and 64"):
        mxfp4_tiles(
            jnp.zeros((1, 32, 2, 16), jnp.uint8), jnp.zeros((1, 32, 2), jnp.uint8), gated=False, dtype=jnp.float32
        )
    plain = inspect.unwrap(mxfp4_mixture)  # annotations are checked before, in tests only
    with pytest.raises(ValueError, match="gate_up must be gated and down not"):
        plain(**call | {"gate_up": call["down"]}, **how)
    with pytest.raises(ValueError, match="of which 3 are taken"):
        plain(**call, **how | {"taken": 3})
    with pytest.raises(ValueError, match=r"gate_up_bias \(2, 64\)"):
        plain(**call | {"gate_up_bias": call["gate_up_bias"][:, :64]}, **how)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    reason = mxfp4_mixture_refusal(1, 4, jnp.bfloat16, experts=32, hidden=2880, inner=2880)
    assert "needs a Hopper GPU" in str(reason)
    with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
        mxfp4_mixture(**make(1, 2, 64, 64)[0], taken=1, alpha=1.0, limit=7.0, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 17, 64, 200])
def test_full_size_agrees_with_float64(tokens: int) -> None:
    """Of six experts in gpt-oss's sizes; twice with one exchange, which every launch leaves as it was."""
    call, matrices = make(tokens, 6, 2880, 2880)

    @jax.jit
    def twice(call: dict[str, Any]) -> list[jax.Array]:
        exchange = routed_experts_exchange(6)
        how: Any = {"taken": 4, "alpha": GATE.alpha, "limit": GATE.limit, "implementation": "mosaic_gpu"}
        return [mxfp4_mixture(**call, **how, exchange=exchange) for _ in range(2)]

    first, second = twice(call)
    check(call, matrices, 4, first)
    assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 8, 16, 17, 64, 200])
@pytest.mark.parametrize("shares", [1, 2, 4])
def test_shares_in_full_size_add_up_to_float64(tokens: int, shares: int) -> None:
    """Of eight experts in gpt-oss's sizes, of which the first token takes the last ones; in any share the same bits twice."""
    call, matrices = make(tokens, 8, 2880, 2880)
    call["logits"], count = call["logits"].at[0, 4:].set(9.0), 8 // shares

    @jax.jit
    def twice(call: dict[str, Any]) -> list[jax.Array]:
        exchange = routed_experts_exchange(count)
        how: Any = {"taken": 4, "alpha": GATE.alpha, "limit": GATE.limit, "implementation": "mosaic_gpu"}
        return [mxfp4_mixture(**call, **how, exchange=exchange) for _ in range(2)]

    found = []
    for first in range(0, 8, count):
        one, again = twice(share(call, first, count))
        assert np.asarray(one).tobytes() == np.asarray(again).tobytes()
        assert first >= 4 or count == 8 or not np.asarray(one)[:, 0].any()
        found.append(one)
    check(call, matrices, 4, jnp.concatenate(found))
