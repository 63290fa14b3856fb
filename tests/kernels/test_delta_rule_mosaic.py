"""The Hopper kernels of the gated delta rule: in Pallas's interpreter, lowered for an H200, and for real (`-m gpu`)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import DeltaShape, NoImplementationError, delta_fold, delta_prefill, delta_step, delta_verify
from dflash_kernels.recurrent.delta_rule.mosaic_gpu import launch_fold, launch_prefill, launch_step, launch_verify
from dflash_kernels.recurrent.delta_rule.mosaic_gpu_sm90_step import parts_of
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import custom_calls
from .delta_oracle import EPS, close, random_rows, random_state, random_weights, truth

INTERPRET = plgpu.InterpretGPUParams()


def call(shape: DeltaShape, slots: int, tokens: int, dtype: Any) -> tuple[Any, Any, Any]:
    weights, state = random_weights(1, shape, dtype), random_state(2, slots, shape)
    projected = jnp.asarray(random_rows(3, slots, tokens, shape.columns), dtype)
    return projected, weights, state._replace(conv=state.conv.astype(dtype))


def check_verify(arguments: tuple[Any, Any, Any], shape: DeltaShape, found: Any) -> None:
    """Outputs against float64, factors against the definition."""
    (projected, weights, state), (out, factors) = arguments, found
    _, expected = delta_verify(*arguments, shape, eps=EPS, implementation="reference")
    for name in ("k", "u", "cum"):
        close(getattr(factors, name), np.asarray(getattr(expected, name), np.float64), 1e-6)
    np.testing.assert_array_equal(factors.rows, expected.rows)
    assert out.dtype == projected.dtype
    for slot in range(len(projected)):
        of_slot = truth(projected[slot], weights, shape, state.s[slot], state.conv[slot])
        close(out[slot], of_slot.out, 0.01 if out.dtype == jnp.bfloat16 else 1e-5)


@pytest.mark.few("shape0*")
@pytest.mark.parametrize(
    ("shape", "slots", "tokens", "dtype"),
    [(DeltaShape(1, 2, 128, 128), 2, 3, jnp.float32), (DeltaShape(2, 2, 128, 128), 1, 16, jnp.bfloat16)],
)
def test_verify(shape: DeltaShape, slots: int, tokens: int, dtype: Any) -> None:
    arguments = call(shape, slots, tokens, dtype)
    check_verify(arguments, shape, launch_verify(*arguments, shape, eps=EPS, interpret=INTERPRET))


def fold_call(shape: DeltaShape, slots: int, tokens: int, dtype: Any) -> tuple[Any, Any]:
    """A state and factors; what is past a count of `tokens - 1` is rubbish in the last slot."""
    projected, weights, state = call(shape, slots, tokens, dtype)
    _, factors = delta_verify(projected, weights, state, shape, eps=EPS, implementation="xla")
    return state, factors._replace(u=factors.u.at[-1, tokens - 1].set(jnp.nan))


def check_fold(arguments: tuple[Any, Any], counts: Any, found: Any) -> None:
    state, factors = arguments
    expected = delta_fold(state, factors, counts, implementation="xla")
    close(found.s, np.asarray(expected.s, np.float64), 5e-7)
    np.testing.assert_array_equal(found.conv, expected.conv)
    for slot, count in enumerate(counts):
        if count == 0:
            np.testing.assert_array_equal(found.s[slot], state.s[slot])


@pytest.mark.few("bfloat16")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_fold(dtype: Any) -> None:
    """Counts of none, fewer tokens than the convolution keeps, and more."""
    arguments, counts = fold_call(DeltaShape(1, 2, 128, 128), 3, 5, dtype), jnp.array([0, 2, 4])
    check_fold(arguments, counts, launch_fold(*arguments, counts, interpret=INTERPRET))


def same(found: Any, expected: Any) -> None:
    """Bit for bit; NaN, of which NumPy knows no equal ones in bfloat16, where NaN is."""
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


def check_step(arguments: tuple[Any, Any, Any], live: Any, shape: DeltaShape, found: Any) -> None:
    """Slots that are not live keep their states, bit for bit."""
    (_, _, state), (out, after) = arguments, found
    expected_out, expected = delta_step(*arguments, live, shape, eps=EPS, implementation="xla")
    close(out[live], np.asarray(expected_out[live], np.float64), 0.01 if out.dtype == jnp.bfloat16 else 1e-5)
    close(after.s[live], np.asarray(expected.s[live], np.float64), 1e-6)
    same(after.conv, expected.conv)
    jax.tree.map(lambda new, old: same(new[~live], old[~live]), after, state)


def step_call(shape: DeltaShape, live: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """Slots that are not live hold NaN, and so does what came for them."""
    projected, weights, state = call(shape, len(live), 1, dtype)
    projected, *held = (
        jnp.where(live[(slice(None), *[None] * (x.ndim - 1))], x, jnp.nan) for x in (projected, state.s, state.conv)
    )
    return projected, weights, type(state)(*held)


@pytest.mark.few("bfloat16-1", "bfloat16-4")
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_step(dtype: Any, parts: int) -> None:
    """By one CTA for a head, and by clusters of two and four."""
    shape, live = DeltaShape(1, 2, 128, 128), jnp.array([True, False])
    arguments = step_call(shape, live, dtype)
    found = launch_step(*arguments, live, shape, eps=EPS, interpret=INTERPRET, parts=parts)
    check_step(arguments, live, shape, found)


def test_heads_are_shared_where_they_are_few() -> None:
    assert [parts_of(heads) for heads in (8, 32, 128, 256)] == [4, 4, 4, 1]


def prefill_call(shape: DeltaShape, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A prompt in two pieces that goes on from its slot's state, one of three tokens that begins, one whose slot is not there, and
    a row of none. What no row counts is NaN, and so is the state of the slot that begins.
    """
    _, weights, state = call(shape, 3, 1, jnp.bfloat16)
    rows = jnp.asarray(random_rows(5, 5, length, shape.columns), jnp.bfloat16)
    lengths = jnp.array([length, length - 10, 3, 5, 0])
    rows = jnp.where((jnp.arange(length) < lengths[:, None])[..., None], rows, jnp.nan)
    state = state._replace(s=state.s.at[0].set(jnp.nan))
    pieces = {
        "slots": jnp.array([1, 1, 0, 3, 2]), "follows": jnp.array([False, True, False, False, False]),
        "fresh": jnp.array([False, False, True, False, False]), "lengths": lengths,
    }  # fmt: skip
    return (rows, weights, state), pieces


def check_prefill(arguments: tuple[Any, ...], pieces: dict[str, Any], shape: DeltaShape, found: Any) -> None:
    """Against float64; slots that nobody names keep their states, bit for bit."""
    (rows, weights, state), (out, after) = arguments, found
    whole = np.concatenate([rows[0], rows[1, : pieces["lengths"][1]]])
    cases = (
        (1, whole, np.concatenate([out[0], out[1, : pieces["lengths"][1]]]), state.s[1], state.conv[1]),
        (0, rows[2, :3], out[2, :3], None, None),
    )
    for slot, given, came, s, conv in cases:
        expected = truth(given, weights, shape, s, conv)
        close(came, expected.out, 0.015)
        close(after.s[slot], expected.s[-1], 0.01)
        close(after.conv[slot], expected.conv[-1], 1e-6)
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[2], old[2]), after, state)
    assert np.isfinite(np.asarray(out, np.float32)).all()


def test_prefill() -> None:
    shape = DeltaShape(1, 2, 128, 128)
    arguments, pieces = prefill_call(shape, 80)
    found = launch_prefill(*arguments, *pieces.values(), shape, eps=EPS, interpret=INTERPRET)
    check_prefill(arguments, pieces, shape, found)


@pytest.mark.few
def test_prefill_lowers_for_an_h200() -> None:
    shape = DeltaShape(16, 48, 128, 128)
    arguments, pieces = jax.eval_shape(functools.partial(prefill_call, shape, 512))

    def prefill(pieces: dict[str, Any], *arguments: Any) -> Any:
        return delta_prefill(*arguments, shape, eps=EPS, implementation="mosaic_gpu", **pieces)

    assert custom_calls(prefill, pieces, *arguments) == ["mosaic_gpu_v2", "mosaic_gpu_v2"]


@pytest.mark.few
@pytest.mark.parametrize("tokens", [1, 16])
def test_lowers_for_an_h200(tokens: int) -> None:
    shape = DeltaShape(16, 48, 128, 128)  # Qwen3.5-27B
    shapes = jax.eval_shape(functools.partial(call, shape, 2, tokens, jnp.bfloat16))
    verify = functools.partial(delta_verify, shape=shape, eps=EPS, implementation="mosaic_gpu")
    assert custom_calls(verify, *shapes) == ["mosaic_gpu_v2"]
    if tokens == 1:
        step = functools.partial(delta_step, shape=shape, eps=EPS, implementation="mosaic_gpu")
        assert custom_calls(step, *shapes, jax.ShapeDtypeStruct((2,), jnp.bool_)) == ["mosaic_gpu_v2"]
    state, factors = jax.eval_shape(functools.partial(fold_call, shape, 2, tokens, jnp.bfloat16))
    counts = jax.ShapeDtypeStruct((2,), jnp.int32)
    fold = functools.partial(delta_fold, implementation="mosaic_gpu")
    assert custom_calls(fold, state, factors, counts) == ["mosaic_gpu_v2"]


def test_refusals_name_their_reason() -> None:
    shape = DeltaShape(1, 2, 64, 128)
    with pytest.raises(NotImplementedError, match="takes heads of 128 and up to 16 tokens, not 3 of 64 and 128"):
        launch_verify(*call(shape, 1, 3, jnp.float32), shape, eps=EPS)
    with pytest.raises(NotImplementedError, match="takes bfloat16 and float32, not float16"):
        launch_verify(*call(DeltaShape(1, 1, 128, 128), 1, 3, jnp.float16), DeltaShape(1, 1, 128, 128), eps=EPS)
    shape = DeltaShape(1, 1, 128, 128, "sigmoid")
    with pytest.raises(NotImplementedError, match="takes gates of silu, not of sigmoid"):
        launch_verify(*call(shape, 1, 3, jnp.float32), shape, eps=EPS)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    shape = DeltaShape(1, 1, 128, 128)
    with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
        delta_verify(*call(shape, 1, 2, jnp.float32), shape, eps=EPS, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
@pytest.mark.parametrize("heads", [(16, 32), (16, 48), (2, 2)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_verify_for_real(tokens: int, heads: tuple[int, int], dtype: Any) -> None:
    shape = DeltaShape(*heads, 128, 128)
    for slots in (1, 5):
        arguments = call(shape, slots, tokens, dtype)
        check_verify(arguments, shape, delta_verify(*arguments, shape, eps=EPS, implementation="mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 16])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_fold_for_real(tokens: int, dtype: Any) -> None:
    for heads in ((16, 32), (16, 48)):
        arguments = fold_call(DeltaShape(*heads, 128, 128), tokens + 1, tokens, dtype)
        counts = jnp.arange(tokens + 1)[::-1]
        check_fold(arguments, counts, delta_fold(*arguments, counts, implementation="mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 32), (16, 48), (2, 2)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_step_for_real(heads: tuple[int, int], dtype: Any) -> None:
    """However many CTAs share a head, and whichever comes first, the bits are the same."""
    shape, live = DeltaShape(*heads, 128, 128), jnp.array([True, False, True])
    arguments = step_call(shape, live, dtype)
    alone, *others = (launch_step(*arguments, live, shape, eps=EPS, parts=parts) for parts in (1, 2, 4, 4))
    check_step(arguments, live, shape, alone)
    for out, after in others:
        same(out[live], alone[0][live])
        jax.tree.map(same, after, alone[1])


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 4, 5])
def test_steps_of_more_slots_for_real(slots: int) -> None:
    shape, live = DeltaShape(16, 32, 128, 128), jnp.arange(slots) % 4 != 3
    arguments = step_call(shape, live, jnp.bfloat16)
    check_step(arguments, live, shape, delta_step(*arguments, live, shape, eps=EPS, implementation="mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 80, 512])
@pytest.mark.parametrize("heads", [(16, 32), (16, 48), (2, 2)])
def test_prefill_for_real(length: int, heads: tuple[int, int]) -> None:
    shape = DeltaShape(*heads, 128, 128)
    arguments, pieces = prefill_call(shape, length)
    found = delta_prefill(*arguments, shape, eps=EPS, implementation="mosaic_gpu", **pieces)
    check_prefill(arguments, pieces, shape, found)


@pytest.mark.gpu
def test_prefill_of_keys_that_are_alike() -> None:
    """The inverse's entries would grow without bound if anything in between cancelled: all keys the same, hardly any decay."""
    shape = DeltaShape(1, 1, 128, 128)
    (rows, weights, state), pieces = prefill_call(shape, 512)
    rows = rows.at[0, :, :384].set(rows[0, 0, :384]).at[0, :, -1].set(-20.0).at[0, :, -2].set(4.0)
    found = delta_prefill(rows, weights, state, shape, eps=EPS, implementation="mosaic_gpu", **pieces)
    check_prefill((rows, weights, state), pieces, shape, found)
