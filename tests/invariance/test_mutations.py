"""What would break the property is caught by it: operations whose sums follow what is computed beside a token."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import delta_fold, delta_verify

from .over_pages import PAGE, lengths, pages, pool
from .people import Call, Form, differing, matrix, numbers
from .rowwise import rowwise
from .whole_layers import EPS, delta_net

HEADS, DIM, MIDDLE, SPLITS = 2, 16, 254, 2


def attention(*, by_count: bool) -> Form:
    """Two splits of the keys, each added up for itself: halves of those that there are, or tiles that take turns."""
    table = pages(MIDDLE)
    k, v = (pool(table.size, 1, DIM, jnp.float32, salt=salt) for salt in range(2))

    def draw(call: Call) -> dict[str, jax.Array]:
        q = numbers(call, HEADS * DIM, jnp.float32).reshape(*call.shape, HEADS, DIM)
        return {"q": q, "page_table": jnp.asarray(table[call.who])} | lengths(call)

    def run(args: dict[str, jax.Array]) -> jax.Array:
        q, lens = args["q"], args["seq_lens"]
        keys, values = (each[args["page_table"], 0].reshape(len(q), -1, DIM) for each in (k, v))
        place = jnp.arange(keys.shape[1])
        tiles = -(-lens // PAGE)[:, None]
        own = place // PAGE >= -(-tiles // SPLITS) if by_count else place // PAGE % SPLITS == jnp.ones_like(tiles)
        last = (lens - args["q_lens"])[:, None] + jnp.arange(q.shape[1])
        weights = jnp.exp(jnp.einsum("btnh,bsh->btns", q, keys))
        weights = jnp.where((place <= last[..., None])[:, :, None], weights, 0)

        def split(which: jax.Array) -> tuple[jax.Array, jax.Array]:
            of_split = jnp.where(which[:, None, None], weights, 0)
            total, out = jnp.zeros(weights.shape[:3]), jnp.zeros((*weights.shape[:3], DIM))
            # Tile after tile, as kernels add them.
            for first in range(0, keys.shape[1], PAGE):
                part = of_split[..., first : first + PAGE]
                total += part.sum(-1)
                out += jnp.einsum("btns,bsh->btnh", part, values[:, first : first + PAGE])
            return out, total

        (one, weight), (other, more) = split(~own), split(own)
        return (one + other) / jnp.maximum(weight + more, 1e-30)[..., None]

    return Form(draw, run, middle=MIDDLE)


def experts(*, by_arrival: bool) -> Form:
    """Each token's experts are added in order of its own choices, or as they become ready: those that few tokens take first."""
    hidden, count, taken = 32, 4, 3
    weights = matrix(count, hidden, hidden, dtype=jnp.float32)

    def draw(call: Call) -> dict[str, jax.Array]:
        return {"x": numbers(call, hidden, jnp.float32), "logits": numbers(call, count, jnp.float32, salt=1)}

    def run(x: jax.Array, logits: jax.Array) -> jax.Array:
        shares, chosen = jax.lax.top_k(logits, taken)
        every = jnp.einsum("md,efd->mef", x, weights)
        if by_arrival:
            load = jnp.zeros(count, jnp.int32).at[chosen].add(1)
            order = jnp.argsort(load[chosen] * count + chosen, axis=1)
            shares, chosen = (jnp.take_along_axis(each, order, axis=1) for each in (shares, chosen))
        total = jnp.zeros_like(x)
        for choice in range(taken):
            total += shares[:, choice, None] * jnp.take_along_axis(every, chosen[:, choice, None, None], axis=1)[:, 0]
        return total

    return rowwise(draw, run)


def product(*, by_rows: bool) -> Form:
    """Sums over parts of the depth, as many as there are rows, or four."""
    depth = 64
    weight = matrix(depth, depth, dtype=jnp.float32)

    def run(x: jax.Array) -> jax.Array:
        parts = 2 if by_rows and len(x) > 8 else 4
        total = jnp.zeros_like(x)
        for columns in np.split(np.arange(depth), parts):
            # One product after the other: XLA's own order is another one for each number of rows.
            total += sum(x[:, i, None] * weight[:, i] for i in columns)
        return total

    return rowwise(lambda call: {"x": numbers(call, depth, jnp.float32)}, run)


@pytest.mark.few("product-by_rows-TB", "experts-by_arrival-")
@pytest.mark.parametrize(
    ("make", "told", "free"), [(attention, "by_count", ""), (experts, "by_arrival", ""), (product, "by_rows", "TB")]
)
def test_a_mutation_is_caught(make: Any, told: str, free: str) -> None:
    found = {
        wrong: bool(differing(make(**{told: wrong}), [(3, 4), (2, 3)], free=free, turns=4)) for wrong in (False, True)
    }
    assert found == {False: False, True: True}


def test_gated_delta_nets_know_where_a_block_began() -> None:
    """Why the mode refuses them: a token after one that was folded alone is another sum than the second one of a block."""
    shape, weights, states = delta_net(False)
    call = Call(np.arange(2), np.full(2, 3), 2)
    rows, state = numbers(call, shape.columns), states(call)
    verify = jax.jit(lambda rows, state: delta_verify(rows, weights, state, shape, eps=EPS))
    _, together = verify(rows, state)
    _, alone = verify(jnp.roll(rows, -1, axis=1), delta_fold(state, together, jnp.ones(2, jnp.int32)))
    second, first = together.u[:, 1], alone.u[:, 0]
    assert (second != first).any()
    np.testing.assert_allclose(second, first, rtol=1e-4, atol=1e-4)
