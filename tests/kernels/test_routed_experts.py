"""Experts for few rows: the definition, and the Hopper kernel interpreted, lowered for an H200, and for real (`-m gpu`)."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import (
    NoImplementationError,
    mixture,
    routed_experts,
    routed_experts_exchange,
    routed_experts_refusal,
)
from dflash_kernels.fused.experts.mosaic_gpu import launch, launch_choices
from dflash_kernels.fused.experts.plan import Choice, most_groups, plan
from dflash_kernels.fused.experts.reference import chosen
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def make(choices: Any, count: int, hidden: int, inner: int, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    """A call in which tokens take the experts in the rows of `choices`."""
    experts = jnp.asarray(choices, jnp.int32)
    keys = jax.random.split(jax.random.key(hidden + len(experts)), 4)
    return {
        "x": normal(keys[0], (len(experts), hidden), 1, dtype), "experts": experts,
        "weights": jax.random.uniform(keys[1], experts.shape),
        "gate_up": normal(keys[2], (count, 2 * inner, hidden), hidden**-0.5, dtype),
        "down": normal(keys[3], (count, hidden, inner), inner**-0.5, dtype),
    }  # fmt: skip


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def normal(key: jax.Array, shape: tuple[int, ...], deviation: float, dtype: Any) -> jax.Array:
    """As one program: in float32 513 experts take four gigabytes, and scaled as much again."""
    return (jax.random.normal(key, shape) * deviation).astype(dtype)


def drawn(tokens: int, taken: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(tokens)
    return np.stack([rng.permutation(count)[:taken] for _ in range(tokens)])


def true_values(call: dict[str, Any]) -> np.ndarray:
    """In float64, with no rounding between the products."""
    x, experts, weights = (np.asarray(call[name], np.float64) for name in ("x", "experts", "weights"))
    out = np.zeros((experts.shape[1], *x.shape))
    for expert in np.unique(experts).astype(int):
        gate_up, down = (np.asarray(call[name][expert], np.float64) for name in ("gate_up", "down"))
        for token, choice in np.argwhere(experts == expert):
            gate, up = np.split(gate_up @ x[token], 2)
            out[choice, token] = weights[token, choice] * (down @ (gate / (1 + np.exp(-gate)) * up))
    return out


def check(call: dict[str, Any], found: jax.Array) -> None:
    """At most twice as far from float64 as the definition in the same dtype, and 2 ulp; of many tokens some."""
    tokens, hidden = call["x"].shape
    assert found.shape == (call["experts"].shape[1], tokens, hidden)
    assert found.dtype == jnp.float32
    some = np.unique(np.linspace(0, tokens - 1, 8).astype(int))
    call = call | {name: call[name][some] for name in ("x", "experts", "weights")}
    true, given = true_values(call), np.asarray(routed_experts(**call, implementation="xla"), np.float64)
    ulp = 2 * float(jnp.finfo(call["x"].dtype).eps) * np.abs(true)
    assert (np.abs(np.asarray(found[:, some], np.float64) - true) <= 2 * np.abs(given - true).max() + ulp).all()


@pytest.mark.few("odd")
@pytest.mark.parametrize(
    ("choices", "count", "hidden", "inner", "dtype"),
    [
        ([[3]], 5, 128, 384, jnp.bfloat16),
        ([[1, 0], [1, 2], [0, 1]], 4, 256, 128, jnp.float16),
        ([[2, 0]] * 19, 3, 128, 128, jnp.bfloat16),
        ([[4, 4], [0, 4]], 5, 128, 384, jnp.bfloat16),
        (drawn(7, 3, 6), 6, 128, 128, jnp.bfloat16),
    ],
    ids=["one token", "odd", "all take the same", "an expert twice", "ragged"],
)
def test_kernel(choices: Any, count: int, hidden: int, inner: int, dtype: Any) -> None:
    """More items than CTAs, rings that turn, experts that nobody takes, groups that are not full and experts with several."""
    call = make(choices, count, hidden, inner, dtype)
    check(call, launch(**call, ctas=5, interpret=INTERPRET))


def test_one_token_has_an_item_for_nearly_every_multiprocessor() -> None:
    for tokens, items in ((1, 128), (16, 12 * 8 * 16)):
        made = plan(tokens, 8, 128, 2048, 768, 132)
        assert 8 * tokens * made.gated_tiles == items
        assert made.gated_tiles * made.gated_rows == 768


def test_tiles_of_the_first_product_may_overlap() -> None:
    """As few rows as give nearly every CTA a tile, though the inner width is no multiple of them."""
    made = plan(1, 9, 257, 2048, 512, 132)
    assert (made.gated_rows, made.gated_tiles) == (40, 13)
    call, ctas = make([[2, 0]], 3, 128, 128), 8
    assert plan(1, 2, 3, 128, 128, ctas).gated_rows == 40
    check(call, launch(**call, ctas=ctas, interpret=INTERPRET))


@pytest.mark.few("5-True-True")
@pytest.mark.parametrize(("normed", "shared"), [(True, True), (False, False)])
@pytest.mark.parametrize("tokens", [5, 1])
def test_the_kernel_chooses(normed: bool, shared: bool, tokens: int) -> None:
    """By the logits, with equal ones among them: weights and order as the definition has them; a shared expert comes last."""
    call = make(drawn(tokens, 3, 6), 6 + shared, 128, 128)
    logits = jnp.round(jax.random.normal(jax.random.key(1), (tokens, 6 + shared)) * 2)
    matrices = [call[name] for name in ("x", "gate_up", "down")]
    x, *rest = matrices
    given = mixture(logits, *matrices, taken=3, normed=normed, scale=1.5, shared=shared, implementation="xla")
    how: Any = {"taken": 3, "choice": Choice(normed, 1.5, shared), "ctas": 4, "interpret": INTERPRET}
    np.testing.assert_allclose(
        launch(x, logits, None, *rest, **how), given, rtol=0, atol=1e-2 * float(jnp.abs(given).max())
    )
    scores = np.exp(np.asarray(logits[:, :6], np.float64))
    scores /= scores.sum(axis=-1, keepdims=True)
    experts = np.argsort(-scores, axis=-1, kind="stable")[:, :3]
    weights = np.take_along_axis(scores, experts, axis=-1)
    weights = 1.5 * weights / (weights.sum(axis=-1, keepdims=True) if normed else 1)
    if shared:
        experts = np.pad(experts, ((0, 0), (0, 1)), constant_values=6)
        weights = np.append(weights, 1 / (1 + np.exp(-np.asarray(logits[:, 6:], np.float64))), axis=1)
    named = call | {"experts": jnp.asarray(experts, jnp.int32), "weights": jnp.asarray(weights, jnp.float32)}
    check(named, given)


def share(call: dict[str, Any], first: int, count: int, shared: bool) -> list[jax.Array]:
    """x and the matrices of `count` experts from `first` on, and of the shared one."""
    kept = [*range(first, first + count), *([-1] if shared else [])]
    return [call["x"], *(call[name][jnp.asarray(kept)] for name in ("gate_up", "down"))]


@pytest.mark.parametrize("shared", [False, True])
def test_shares_of_the_experts_add_up(shared: bool) -> None:
    """To what one call with all of them gives, though a share has none of some token's."""
    call = make(drawn(9, 2, 6), 6 + shared, 24, 10, jnp.float32)
    logits = jax.random.normal(jax.random.key(3), (9, 6 + shared))
    how: Any = {"taken": 2, "normed": True, "scale": 1.5, "shared": shared}
    whole = mixture(logits, call["x"], call["gate_up"], call["down"], **how).sum(axis=0)
    parts = [mixture(logits, *share(call, at, 2, shared), **how, first=jnp.int32(at)).sum(axis=0) for at in (0, 2, 4)]
    np.testing.assert_allclose(sum(parts), whole, rtol=0, atol=1e-5 * float(jnp.abs(whole).max()))


@pytest.mark.few("5-True-3", "1-False-3")
@pytest.mark.parametrize(("shared", "first"), [(True, 3), (True, 0), (False, 3)])
@pytest.mark.parametrize("tokens", [5, 1])
def test_the_kernel_chooses_of_a_share(shared: bool, first: int, tokens: int) -> None:
    """The first token takes what others have."""
    call = make(drawn(tokens, 3, 6), 6 + shared, 128, 128)
    logits = jnp.round(jax.random.normal(jax.random.key(1), (tokens, 6 + shared)) * 2).at[0, :3].set(9.0)
    choice, number = Choice(True, 1.5, shared), jnp.int32(first)
    x, *matrices = share(call, first, 3, shared)
    given = mixture(
        logits, x, *matrices, taken=3, normed=True, scale=1.5, shared=shared, first=number, implementation="xla"
    )
    how: Any = {"taken": 3, "choice": choice, "first": number, "ctas": 4, "interpret": INTERPRET}
    np.testing.assert_allclose(
        launch(x, logits, None, *matrices, **how), given, rtol=0, atol=1e-2 * float(jnp.abs(given).max())
    )
    experts, weights = launch_choices(logits, 3, choice, matrices[1].shape, 4, number, INTERPRET)
    of_all, expected = chosen(logits, 3, choice)
    own = (of_all >= first) & (of_all < first + 3) | (of_all == 6) & (first == 0)
    np.testing.assert_array_equal(experts, np.where(own, np.where(of_all == 6, 3, of_all - first), -1))
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.few
def test_sums_are_the_same_in_any_batch() -> None:
    call = make(drawn(6, 2, 5), 5, 128, 128)
    whole = launch(**call, ctas=3, interpret=INTERPRET)
    alone = launch(
        **call | {name: call[name][4:5] for name in ("x", "experts", "weights")}, ctas=3, interpret=INTERPRET
    )
    np.testing.assert_allclose(whole[:, 4:5], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_definition(dtype: Any) -> None:
    call = make(drawn(5, 3, 7), 7, 24, 10, dtype)
    found = routed_experts(**call)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(found, true_values(call), rtol=0, atol=tolerance * float(jnp.abs(found).max()))


@pytest.mark.few("16-8-256-7168-2048")
@pytest.mark.parametrize(
    ("taken", "count", "hidden", "inner"), [(8, 128, 2048, 768), (6, 64, 2048, 1408), (8, 256, 7168, 2048)]
)
@pytest.mark.parametrize("tokens", [1, 7, 16, 128, 512])
def test_lowers_for_an_h200(tokens: int, taken: int, count: int, hidden: int, inner: int) -> None:
    made = jax.eval_shape(lambda: make(jnp.zeros((tokens, taken)), count, hidden, inner))
    with h200():
        assert routed_experts_refusal(tokens, taken, jnp.bfloat16, experts=count, hidden=hidden, inner=inner) is None
        program = jax.jit(lambda call: routed_experts(**call, implementation="mosaic_gpu")).trace(made)
        assert program.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2") == 1
    assert plan(tokens, taken, count, hidden, inner, 132).stages >= 6


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((1, 8, 700, 128, 128), "1 to 640 experts, not 700"), ((600, 8, 64, 128, 128), "1 to 4608 choices of tokens, not 4800"),
        ((1, 8, 64, 192, 128), "widths in 128s, not 192 and 128"),
    ],
)  # fmt: skip
def test_refusals_name_their_reason(sizes: tuple[int, int, int, int, int], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        plan(*sizes, ctas=132)


@pytest.mark.parametrize(("tokens", "count", "among"), [(512, 320, 640), (300, 400, 1600), (230, 640, 1280), (1, 4, 8)])
def test_an_exchange_has_room_for_the_groups_of_a_share(tokens: int, count: int, among: int) -> None:
    for choice in (Choice(True, 1.0), None):
        assert plan(tokens, 8, count, 128, 128, 132, choice, among).groups <= most_groups(count)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="takes bfloat16 or float16 throughout, not float32"):
        launch(**make([[0]], 1, 128, 128, jnp.float32), ctas=1)


def test_shapes_that_do_not_fit_are_named() -> None:
    call = make([[0, 1]], 2, 16, 8)
    plain = inspect.unwrap(routed_experts)  # annotations are checked before, in tests only
    with pytest.raises(ValueError, match=r"down \(2, 16, 7\) must be"):
        plain(**call | {"down": call["down"][..., :7]})
    with pytest.raises(ValueError, match=r"weights \(1, 1\) must be \[1, k\]"):
        plain(**call | {"weights": call["weights"][:, :1]})


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    reason = routed_experts_refusal(1, 8, jnp.bfloat16, experts=128, hidden=2048, inner=768)
    assert "needs a Hopper GPU" in str(reason)
    with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
        routed_experts(**make([[0]], 1, 128, 128), implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("taken", "count", "hidden", "inner"),
    [(8, 128, 2048, 768), (6, 64, 2048, 1408), (9, 257, 2048, 512), (11, 513, 2048, 512)],
)
@pytest.mark.parametrize("kind", ["one token", "all take the same", "ragged", "many"])
def test_full_size_agrees_with_float64(kind: str, taken: int, count: int, hidden: int, inner: int) -> None:
    """Twice with one exchange, which every launch leaves as it was."""
    tokens = {"one token": 1, "all take the same": 40, "ragged": 33, "many": 300}[kind]
    choices = drawn(tokens, taken, count)
    call = make(np.tile(choices[:1], (tokens, 1)) if kind == "all take the same" else choices, count, hidden, inner)

    @jax.jit
    def twice(call: dict[str, Any]) -> list[jax.Array]:
        exchange = routed_experts_exchange(count)
        return [routed_experts(**call, exchange=exchange, implementation="mosaic_gpu") for _ in range(2)]

    first, second = twice(call)
    check(call, first)
    assert np.asarray(first).tobytes() == np.asarray(second).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 131])
@pytest.mark.parametrize(
    ("taken", "count", "normed", "shared"),
    [
        (8, 128, True, False), (6, 64, False, False), (8, 256, True, False), (3, 40, False, False), (8, 257, True, True),
        (10, 513, False, True), (3, 33, True, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("zeros", [False, True])
def test_the_choice_is_that_of_the_definition(
    tokens: int, taken: int, count: int, normed: bool, shared: bool, zeros: bool
) -> None:
    """With equal logits among them; zeros of both signs are equal."""
    call = make(np.zeros((tokens, taken)), count, 256, 128)
    logits = jnp.round(jax.random.normal(jax.random.key(count), (tokens, count)) * 4) / 2
    logits = jnp.copysign(0.0, logits) if zeros else logits
    how: Any = {"taken": taken, "normed": normed, "scale": 1.5, "shared": shared}
    found, given = (
        mixture(logits, call["x"], call["gate_up"], call["down"], **how, implementation=name)
        for name in ("mosaic_gpu", "xla")
    )
    np.testing.assert_allclose(found, given, rtol=0, atol=1e-2 * float(jnp.abs(given).max()))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 131])
@pytest.mark.parametrize(
    ("taken", "among", "count", "shared"),
    [(8, 128, 64, False), (8, 256, 128, True), (3, 33, 11, True), (2, 40, 10, False)],
)
def test_the_choice_of_a_share_is_that_of_the_definition(
    tokens: int, taken: int, among: int, count: int, shared: bool
) -> None:
    """With equal logits among them, for the first share and for another, which has none of the first token's."""
    call = make(np.zeros((tokens, taken)), count + shared, 256, 128)
    logits = jnp.round(jax.random.normal(jax.random.key(count), (tokens, among + shared)) * 4) / 2
    logits = logits.at[0, :taken].set(9.0)
    how: Any = {"taken": taken, "normed": True, "scale": 1.5, "shared": shared}
    for first in (0, among - count):
        found, given = (
            mixture(
                logits, call["x"], call["gate_up"], call["down"], **how, first=jnp.int32(first), implementation=name
            )
            for name in ("mosaic_gpu", "xla")
        )
        np.testing.assert_allclose(found, given, rtol=0, atol=1e-2 * float(jnp.abs(given).max()))
