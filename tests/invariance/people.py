"""The property of every operation on the path of a token: what it makes of a sequence's token has the same bits in any company.

An operation is a function of sequences and positions. A call computes tokens `first .. first + T` of B sequences, one in each slot;
whatever call a token is computed in, its result must be the same. Calls draw who stands in which slot, where blocks begin, and what
the others hold.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

PEOPLE = 34  # sequences that there are; more than slots
MOST = 16  # tokens of a block
IDLE = -1  # first token of a slot that nobody uses

Shape = tuple[int, int]
# Sequences and tokens of calls on a GPU: the ends of what the mode may have, and some between. Each is compiled.
SHAPES: tuple[Shape, ...] = ((1, 1), (1, 16), (5, 3), (17, 5), (33, 1), (33, 16))


class Call(NamedTuple):
    """Who is in each slot, `[B]`, the first token of its block, `[B]`, IDLE where nobody is, and how many tokens blocks have."""

    who: np.ndarray
    first: np.ndarray
    tokens: int

    @property
    def shape(self) -> Shape:
        return len(self.who), self.tokens

    @property
    def positions(self) -> np.ndarray:
        """`[B, T]`; below 0 where nobody is."""
        return np.where(self.first[:, None] < 0, IDLE, self.first[:, None] + np.arange(self.tokens))


class Form(NamedTuple):
    """An operation at one size.

    Attributes:
      draw: the arguments of a call, a pytree of arrays.
      run: those to results, a pytree of `[B, T, ...]`; with `kept`, those and what is kept to results and what is kept then.
      options: what XLA is told.
      middle: the position that blocks of who is compared hold: such that a block ends in one tile of keys or in the next.
      kept: pages that calls write, as calls begin with. What stands before a block is then what the same calls have written.
    """

    draw: Callable[[Call], Any]
    run: Callable[..., Any]
    options: dict[str, Any] = {}  # noqa: RUF012 - of a tuple's fields, read only
    middle: int = 126
    kept: Any = None


@dataclass(frozen=True)
class Operation:
    """One row of the table of operations.

    Attributes:
      make: its small form, in Pallas's interpreter or XLA's on a CPU, and with True the one that a GPU runs, at real sizes.
      small, real: shapes of calls; products of XLA have no small ones, whose order is a matter of the CPU, and rows that are told
        apart by a number of splits no real ones, which have their own.
      free: over what results do not change either: "T", tokens of a block, "B", sequences. What is left out the mode must pin.
      moves: whether a block may begin anywhere; else all begin at the same token.
      holds: whether results are the same in any company; those of which they are not the mode refuses.
      most, least: rows of a call on a GPU.
    """

    make: Callable[[bool], Form]
    small: Sequence[Shape] = ((3, 4),)
    free: str = ""
    moves: bool = True
    holds: bool = True
    most: int = 10**6
    least: int = 1
    real: Sequence[Shape] = SHAPES

    @property
    def shapes(self) -> list[Shape]:
        """On a GPU."""
        return [shape for shape in self.real if self.least <= shape[0] * shape[1] <= self.most]


def people_compared(sequences: int) -> int:
    """How many of them there are in a call: the first ones of all people."""
    return -(-sequences // 3)


def drawn_call(rng: np.random.Generator, shape: Shape, middle: int, *, offset: int = 0) -> Call:
    """A third of the slots hold those who are compared: their blocks begin `offset` tokens before token `middle`."""
    sequences, tokens = shape
    compared = people_compared(sequences)
    who = np.concatenate([np.arange(compared), compared + rng.permutation(PEOPLE - compared)[: sequences - compared]])
    first = rng.integers(0, 2 * middle, sequences)
    first[rng.random(sequences) < 0.2] = IDLE
    first[:compared] = middle - offset
    order = rng.permutation(sequences)
    return Call(who[order], first[order], tokens)


def differing(form: Form, shapes: Sequence[Shape], *, free: str = "", moves: bool = True, turns: int = 2) -> list[Any]:
    """Tokens whose results differ: `(who, position)`. Compared are calls of one shape, and with `free` of several."""
    rng = np.random.default_rng(len(shapes))
    seen = defaultdict[Any, list[bytes]](list)
    for shape in shapes:
        run = _compiled(form, shape)
        kept = () if form.kept is None else (_written_before(form, run, shape),)
        own = tuple(size for axis, size in zip("BT", shape, strict=True) if axis not in free)
        for turn in range(turns):
            # A block that begins with the token, one that ends with it, and others.
            offset = (0, shape[1] - 1, *rng.integers(0, shape[1], turns))[turn] if moves else 0
            call = drawn_call(rng, shape, form.middle, offset=offset)
            found = run(form.draw(call), *kept)
            rows = [np.asarray(each) for each in jax.tree.leaves(found[0] if kept else found)]
            assert rows
            assert all(each.shape[:2] == shape for each in rows), "results are [B, T, ...]"
            # What others have before their blocks follows where these begin, which is drawn.
            for place in np.flatnonzero(call.who < people_compared(shape[0])):
                for token, position in enumerate(call.positions[place]):
                    seen[own, call.who[place], position].append(_digest(each[place, token] for each in rows))
    assert max(map(len, seen.values())) >= turns, "who is compared is in every call"
    return [key for key, bits in seen.items() if len({*bits}) > 1]


def _compiled(form: Form, shape: Shape) -> Callable[..., Any]:
    """`form.run` of a shape. Its weights and pages are arguments, as in an engine: XLA would fold them, for minutes."""
    given = (
        form.draw(drawn_call(np.random.default_rng(0), shape, form.middle)),
        *(() if form.kept is None else (form.kept,)),
    )
    traced, found = jax.make_jaxpr(form.run, return_shape=True)(*given)

    @partial(jax.jit, compiler_options=form.options or None)
    def run(constants: Sequence[Any], *given: Any) -> Any:
        flat = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, constants))(*jax.tree.leaves(given))
        return jax.tree.unflatten(jax.tree.structure(found), flat)

    return partial(run, traced.consts)


def _digest(rows: Iterable[np.ndarray]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for row in rows:
        found.update(row.tobytes())
    return found.digest()


def _written_before(form: Form, run: Callable[..., Any], shape: Shape) -> Any:
    """What is kept once a call of this shape has written the tokens of the earliest block."""
    sequences, tokens = shape
    call = Call(np.arange(sequences), np.full(sequences, form.middle - tokens + 1), tokens)
    return run(form.draw(call), form.kept)[1]


def numbers(call: Call, width: int, dtype: Any = jnp.bfloat16, *, salt: int = 0) -> jax.Array:
    """`[B, T, width]` from -1 to 1: those of a token are drawn by its sequence and position, so they are the same in any call."""
    return _numbers(jnp.asarray(call.who), jnp.asarray(call.positions), width, salt).astype(dtype)


def of_people(call: Call, width: int, dtype: Any = jnp.float32, *, salt: int = 0) -> jax.Array:
    """`[B, width]`, drawn by the sequence alone."""
    return _numbers(jnp.asarray(call.who), jnp.zeros((len(call.who), 1), jnp.int32), width, salt)[:, 0].astype(dtype)


def matrix(*shape: int, dtype: Any = jnp.bfloat16, salt: int = 0) -> jax.Array:
    """A weight: products with `numbers` are about 1."""
    return (jax.random.normal(jax.random.key(salt), shape) * (shape[-1] / 3) ** -0.5).astype(dtype)


def norm_weight(width: int, *, salt: int = 0) -> jax.Array:
    return (1 + 0.1 * jax.random.normal(jax.random.key(salt), (width,))).astype(jnp.bfloat16)


@jax.jit
def _bits(who: jax.Array, positions: jax.Array, places: jax.Array, salt: jax.Array) -> jax.Array:
    def of_token(who: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), who), position)
        return jax.random.bits(jax.random.fold_in(key, salt), places.shape)

    return jax.vmap(jax.vmap(of_token, (None, 0)))(who, positions)


def _numbers(who: jax.Array, positions: jax.Array, width: int, salt: int) -> jax.Array:
    # 24 bits are whole numbers of float32: no rounding that a fusion might do otherwise.
    bits = _bits(who, positions, jnp.zeros(width), jnp.int32(salt))
    return (bits >> 8).astype(jnp.float32) / 2.0**23 - 1
