"""The gated delta rule in XLA's operations and its definition, against float64: verification and fold, steps, prompts in pieces."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import DeltaShape, DeltaState, delta_fold, delta_prefill, delta_step, delta_verify
from dflash_kernels.recurrent.delta_rule.xla import unit_lower_inverse

from .delta_oracle import EPS, close, random_rows, random_state, random_weights, truth

# Value heads 1, 2 and 3 times the key heads; widths that are no power of two.
SHAPES = [DeltaShape(2, 2, 16, 24), DeltaShape(1, 2, 12, 8), DeltaShape(2, 6, 16, 24)]
SMALL = DeltaShape(1, 3, 8, 12)
NAMES = ("xla", "reference")


@functools.partial(jax.jit, static_argnames=("shape", "name"))
def verified(projected: Any, weights: Any, state: Any, counts: Any, shape: DeltaShape, name: str) -> Any:
    out, factors = delta_verify(projected, weights, state, shape, eps=EPS, implementation=name)
    return out, factors, delta_fold(state, factors, counts, implementation=name)


stepped = jax.jit(functools.partial(delta_step, eps=EPS), static_argnames=("shape", "implementation"))
prefilled = jax.jit(functools.partial(delta_prefill, eps=EPS), static_argnames=("shape", "implementation"))


@pytest.mark.few("shape1-7-xla", "shape0-16-reference")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shape", "tokens"), [(SHAPES[0], 16), (SHAPES[1], 7), (SHAPES[2], 16), (SMALL, 1), (SMALL, 3)]
)
def test_every_count_of_a_block(shape: DeltaShape, tokens: int, name: str) -> None:
    """A slot for each count from 0 to all; what is past the count leaves no trace."""
    counts = np.arange(tokens + 1)
    weights, state = random_weights(1, shape), random_state(2, len(counts), shape)
    projected = random_rows(3, len(counts), tokens, shape.columns)
    out, factors, after = verified(projected, weights, state, jnp.asarray(counts), shape, name)
    for slot, count in enumerate(counts):
        expected = truth(projected[slot], weights, shape, state.s[slot], state.conv[slot])
        close(out[slot], expected.out, 1e-5)
        close(after.s[slot], expected.s[count], 1e-6)
        np.testing.assert_array_equal(after.conv[slot], expected.conv[count].astype(np.float32))
    np.testing.assert_array_equal(after.s[0], state.s[0])
    assert factors.k.shape == (len(counts), tokens, shape.key_heads, shape.key_dim)
    assert factors.u.shape == (len(counts), tokens, shape.value_heads, shape.value_dim)
    close(jnp.linalg.norm(factors.k, axis=-1), np.ones(factors.k.shape[:-1]), 1e-4)


@pytest.mark.few
def test_blocks_of_every_length() -> None:
    weights, state = random_weights(1, SMALL), random_state(2, 1, SMALL)
    projected = random_rows(3, 1, 16, SMALL.columns)
    expected = truth(projected[0], weights, SMALL, state.s[0], state.conv[0])
    for tokens in (2, 4, 5, 8, 9, 15):
        out, _, after = verified(projected[:, :tokens], weights, state, jnp.array([tokens]), SMALL, "xla")
        close(out[0], expected.out[:tokens], 1e-5)
        close(after.s[0], expected.s[tokens], 1e-6)


def test_a_slot_alone_has_the_same_bits() -> None:
    shape = SHAPES[2]
    weights, state, projected = (
        random_weights(1, shape),
        random_state(2, 3, shape),
        random_rows(3, 3, 16, shape.columns),
    )
    together = verified(projected, weights, state, jnp.array([16, 5, 9]), shape, "xla")
    alone = verified(projected[1:2], weights, jax.tree.map(lambda x: x[1:2], state), jnp.array([5]), shape, "xla")
    jax.tree.map(lambda many, one: np.testing.assert_array_equal(many[1:2], one), together, alone)


def test_slots_that_nobody_uses_may_hold_nan() -> None:
    shape = SHAPES[0]
    weights, state, projected = (
        random_weights(1, shape),
        random_state(2, 3, shape),
        random_rows(3, 3, 16, shape.columns),
    )
    clean = verified(projected, weights, state, jnp.array([16, 0, 4]), shape, "xla")
    rubbish = jax.tree.map(lambda x: x.at[1].set(jnp.nan), state)
    found = verified(projected, weights, rubbish, jnp.array([16, 0, 4]), shape, "xla")
    for slot in (0, 2):
        jax.tree.map(lambda a, b, slot=slot: np.testing.assert_array_equal(a[slot], b[slot]), found, clean)
    # Factors past the count as well.
    spoiled = clean[1]._replace(u=clean[1].u.at[2, 4:].set(jnp.nan), k=clean[1].k.at[2, 4:].set(jnp.inf))
    after = delta_fold(state, spoiled, jnp.array([16, 0, 4]))
    jax.tree.map(np.testing.assert_array_equal, after, clean[2])


@pytest.mark.few("shape0-*")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps(shape: DeltaShape, name: str) -> None:
    """Slots that are not live keep their states, bit for bit."""
    weights, state, projected = (
        random_weights(1, shape),
        random_state(2, 3, shape),
        random_rows(3, 4, 3, 1, shape.columns),
    )
    live, first = jnp.array([True, False, True]), state
    outs = []
    for token in projected:
        out, state = stepped(token, weights, state, live, shape, implementation=name)
        outs.append(out)
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[1], old[1]), state, first)
    for slot in (0, 2):
        expected = truth(projected[:, slot, 0], weights, shape, first.s[slot], first.conv[slot])
        close(jnp.concatenate(outs, axis=1)[slot], expected.out, 1e-5)
        close(state.s[slot], expected.s[-1], 1e-6)
        np.testing.assert_array_equal(state.conv[slot], expected.conv[-1].astype(np.float32))


class Prompts:
    """Rows of a call: `add` cuts a prompt of a slot into pieces; padding holds rubbish."""

    def __init__(self, size: int, shape: DeltaShape) -> None:
        self.size, self.shape, self.rows = size, shape, list[tuple[np.ndarray, int, bool, bool, int]]()

    def add(self, prompt: np.ndarray, slot: int, fresh: bool = True) -> list[tuple[int, int]]:
        """Where the prompt's tokens are: row and length of each piece."""
        first = len(self.rows)
        for start in range(0, len(prompt), self.size):
            piece = np.full((self.size, self.shape.columns), np.nan, np.float32)
            length = len(prompt[start : start + self.size])
            piece[:length] = prompt[start : start + self.size]
            self.rows.append((piece, slot, start > 0, fresh, length))
        return [(row, self.rows[row][4]) for row in range(first, len(self.rows))]

    def run(self, weights: Any, state: DeltaState, name: str) -> Any:
        projected, slots, follows, fresh, lengths = (np.stack(column) for column in zip(*self.rows, strict=True))
        told = {
            "slots": slots.astype(np.int32),
            "follows": follows,
            "fresh": fresh,
            "lengths": lengths.astype(np.int32),
        }
        told = {key: jnp.asarray(value) for key, value in told.items()}
        return prefilled(jnp.asarray(projected), weights, state, self.shape, **told, implementation=name)


@pytest.mark.few("100-*")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [64, 100, 2])
def test_prompts_in_pieces(size: int, name: str) -> None:
    """Prompts around the borders of chunks and pieces, from nothing and from what their slots held."""
    shape = SHAPES[2] if size == 64 else SMALL
    lengths = (
        (1, 2, 3, 63, 64, 65, 77, 128, 300)
        if size == 64
        else (1, 2, 3, 4, 5)
        if size == 2
        else (99, 100, 101, 164, 165)
    )
    slots = 2 * len(lengths) + 1
    weights, state = random_weights(1, shape), random_state(2, slots, shape)
    # What nobody goes on from holds rubbish.
    state = jax.tree.map(lambda x: x.at[: len(lengths)].set(jnp.nan), state)
    prompts, calls = Prompts(size, shape), []
    for i, length in enumerate(lengths):
        for slot, fresh in ((i, True), (i + len(lengths), False)):
            prompt = random_rows(slot, length, shape.columns)
            calls.append((prompt, slot, fresh, prompts.add(prompt, slot, fresh)))
    prompts.add(random_rows(9, 1, shape.columns), slots)  # no such slot
    prompts.rows.append((prompts.rows[0][0], slots - 1, False, True, 0))  # no tokens
    out, after = prompts.run(weights, state, name)
    for prompt, slot, fresh, pieces in calls:
        expected = truth(prompt, weights, shape, *(() if fresh else (state.s[slot], state.conv[slot])))
        close(np.concatenate([out[row, :length] for row, length in pieces]), expected.out, 1e-5)
        close(after.s[slot], expected.s[-1], 1e-6)
        np.testing.assert_array_equal(after.conv[slot], expected.conv[-1].astype(np.float32))
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[-1], old[-1]), after, state)


def test_a_slot_that_a_new_request_takes() -> None:
    """It starts from nothing, also where it is shorter than the convolution."""
    weights, state = random_weights(1, SMALL), random_state(2, 1, SMALL)
    for seed, length in ((5, 70), (6, 2)):
        prompts, prompt = Prompts(64, SMALL), random_rows(seed, length, SMALL.columns)
        prompts.add(prompt, 0)
        _, state = prompts.run(weights, state, "xla")
        expected = truth(prompt, weights, SMALL)
        close(state.s[0], expected.s[-1], 1e-6)
        np.testing.assert_array_equal(state.conv[0], expected.conv[-1].astype(np.float32))


@pytest.mark.few
def test_no_drift_over_5000_tokens() -> None:
    """As one prompt, and in cycles of up to 16 tokens of which some stand."""
    rng = np.random.default_rng(7)
    weights, prompt = random_weights(1, SMALL), random_rows(3, 5008, SMALL.columns)
    weights = weights._replace(a_log=jnp.log(jnp.array([0.001, 0.1, 4.0])))
    expected = truth(prompt, weights, SMALL)
    empty = jax.tree.map(jnp.zeros_like, random_state(2, 1, SMALL))
    prompts = Prompts(5008, SMALL)
    prompts.add(prompt, 0)
    out, after = prompts.run(weights, empty, "xla")
    close(out[0], expected.out, 1e-5)
    close(after.s[0], expected.s[-1], 1e-5)

    done, state = 0, empty
    while done + 16 <= len(prompt):
        count = int(rng.integers(1, 17))
        _, _, state = verified(prompt[None, done : done + 16], weights, state, jnp.array([count]), SMALL, "xla")
        done += count
    close(state.s[0], expected.s[done], 1e-5)
    np.testing.assert_array_equal(state.conv[0], expected.conv[done].astype(np.float32))


def test_keys_that_are_all_alike() -> None:
    """Where the product of powers, the shorter inverse, is off by 200 %."""
    rng = np.random.default_rng(0)
    k = np.ones(32) + rng.normal(size=(64, 32)) / 10
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    lower = np.tril(k @ k.T, -1)
    found = jax.jit(unit_lower_inverse)(jnp.asarray(lower, jnp.float32))
    close(found, np.linalg.inv(np.eye(64) + lower.astype(np.float32).astype(np.float64)), 2e-6)


@pytest.mark.few
def test_derivatives() -> None:
    """Of a prompt in two pieces, as the definition has them."""
    weights, state, projected = (
        random_weights(1, SMALL),
        random_state(2, 1, SMALL),
        random_rows(3, 2, 7, SMALL.columns),
    )
    told = {
        "slots": jnp.zeros(2, jnp.int32), "follows": jnp.array([False, True]), "fresh": jnp.array([True, True]),
        "lengths": jnp.array([7, 5]),
    }  # fmt: skip

    def loss(projected: Any, weights: Any, name: str) -> Any:
        out, _ = delta_prefill(projected, weights, state, SMALL, eps=EPS, **told, implementation=name)
        return jnp.sum(jnp.sin(out) * (jnp.arange(7) < told["lengths"][:, None])[..., None])

    of = {
        name: jax.jit(jax.grad(functools.partial(loss, name=name), argnums=(0, 1)))(projected, weights)
        for name in NAMES
    }
    jax.tree.map(lambda found, expected: close(found, np.asarray(expected), 1e-5), of["xla"], of["reference"])


@pytest.mark.few("reference")
@pytest.mark.parametrize("name", NAMES)
def test_rows_in_bfloat16(name: str) -> None:
    """What the recurrence takes is what the rows say; the output is rounded before the norm and after it."""
    shape = SHAPES[2]
    weights, state = random_weights(1, shape, jnp.bfloat16), random_state(2, 2, shape)
    projected = jnp.asarray(random_rows(3, 2, 16, shape.columns), jnp.bfloat16)
    state = state._replace(conv=state.conv.astype(jnp.bfloat16))
    out, factors, after = verified(projected, weights, state, jnp.array([16, 3]), shape, name)
    assert out.dtype == factors.rows.dtype == after.conv.dtype == jnp.bfloat16
    for slot, count in enumerate((16, 3)):
        expected = truth(projected[slot], weights, shape, state.s[slot], state.conv[slot])
        close(out[slot], expected.out, 0.01)
        close(after.s[slot], expected.s[count], 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_gate_of_sigmoid_is_that_of_silu_without_its_factor(name: str) -> None:
    weights, state, projected = random_weights(1, SMALL), random_state(2, 2, SMALL), random_rows(3, 2, 3, SMALL.columns)
    other = dataclasses.replace(SMALL, gate="sigmoid")
    z = projected[..., SMALL.channels : SMALL.channels + SMALL.value_heads * SMALL.value_dim]
    plain, _, after = verified(projected, weights, state, jnp.array([3, 1]), SMALL, name)
    gated, _, same = verified(projected, weights, state, jnp.array([3, 1]), other, name)
    close(gated * z, plain, 1e-5)
    np.testing.assert_array_equal(same.s, after.s)


def test_what_does_not_fit_is_named() -> None:
    weights, state, projected = random_weights(1, SMALL), random_state(2, 2, SMALL), jnp.ones((2, 1, SMALL.columns))
    calls = [
        (lambda: DeltaShape(2, 3, 8, 8), "value_heads 3 must be a multiple of key_heads 2"),
        (lambda: DeltaShape(1, 3, 8, 8, "relu"), "gate must be silu or sigmoid, not 'relu'"),
        (lambda: DeltaShape(0, 3, 8, 8), "key_heads must be a whole number, 1 or more, not 0"),
        (lambda: delta_verify(projected[..., 1:], weights, state, SMALL, eps=EPS), "must have 94 columns"),
        (lambda: delta_verify(projected, weights._replace(conv=weights.norm), state, SMALL, eps=EPS), "weights.conv"),
        (lambda: delta_verify(projected, weights, state._replace(s=state.s[..., :-1]), SMALL, eps=EPS), "state.s"),
        (lambda: delta_verify(projected[:1], weights, state, SMALL, eps=EPS), "as many slots"),
        (lambda: delta_verify(projected.astype(jnp.bfloat16), weights, state, SMALL, eps=EPS), "state.conv of float32"),
        (
            lambda: delta_verify(projected, weights, state._replace(s=state.s.astype(jnp.bfloat16)), SMALL, eps=EPS),
            "state.s must be float32, not bfloat16",
        ),
        (
            # The function itself: in test runs a shape checker around it would speak first.
            lambda: inspect.unwrap(delta_step)(
                jnp.ones((2, 2, SMALL.columns)), weights, state, jnp.ones(2, bool), SMALL, eps=EPS
            ),
            "one token for each slot; delta_verify takes more",
        ),
    ]  # fmt: skip
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
