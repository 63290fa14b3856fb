"""Grammar masks from tables on the device, for grammars that are automata over tokens: what a verified block may hold.

Tokens that lead from every state to the same one are a class, so an automaton is a table of states and classes. Those of all
requests stand in one table of a fixed size, one below the other: programs do not depend on which grammars there are, and what a row
of a block allows is one look-up a token. In state 0 everything is allowed, and it is never left: texts without a grammar are in it,
those that have ended, and rows behind a proposal that was refused, which emit nothing.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from dflash_jax.decoding.token_automata import BITS, FREE, MOST_CLASSES, TokenAutomaton

# Of all grammars that requests in slots have at a time.
SHELF_STATES, SHELF_GRAMMARS = 8192, 32


@no_type_check  # JAX rebuilds pytrees with shapes and placeholders in place of arrays
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GrammarTables:
    """Token automata of several grammars, one below the other.

    Attributes:
      next: as of `TokenAutomaton`, of all states.
      classes: of the tokens, for each grammar a row; as many columns as masks have bits.
      rows: of each state its grammar's.
    """

    next: Int[Array, "S C"]
    classes: Int[Array, "n columns"]
    rows: Int[Array, "S"]


def block_states(tables: GrammarTables, states: Int[Array, "B"], ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The state of every row of a block.

    Args:
      states: behind the pending tokens.
      ids: those, and the proposals.
    """
    classes = _classes(tables, states, ids)
    each = [states]
    for place in range(1, ids.shape[1]):
        each.append(_behind(tables, each[-1], classes[:, place]))
    return jnp.stack(each, axis=1)


def table_masks(tables: GrammarTables, states: Int[Array, "B T"]) -> UInt32[Array, "B T W"]:
    """Masks of the tokens allowed in these states, for `grammar_masks.masked`. All of a slot are of one grammar, or `FREE`."""
    allowed = tables.next.at[states].get(mode="promise_in_bounds") >= 0
    # A row that is free allows every class, whatever the grammar that its columns are of.
    rows = tables.rows.at[states[:, 0]].get(mode="promise_in_bounds")
    classes = tables.classes.at[rows].get(mode="promise_in_bounds").astype(jnp.int32)
    bits = jnp.take_along_axis(allowed, classes[:, None], axis=-1, mode="promise_in_bounds").reshape(
        *states.shape, -1, BITS
    )
    return jnp.sum(bits.astype(jnp.uint32) << jnp.arange(BITS, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def states_after(
    tables: GrammarTables, states: Int[Array, "B T"], tokens: Int[Array, "B T"], counts: Int[Array, "B"]
) -> Int[Array, "B"]:
    """The states behind the first `counts` of `tokens`, which but for their last one are a block's first proposals.

    Args:
      states: of the rows that the tokens are of.
    """
    last = jnp.maximum(counts - 1, 0)[:, None]
    state, token = (jnp.take_along_axis(each, last, axis=1) for each in (states, tokens))
    after = _behind(tables, state[:, 0], _classes(tables, states[:, 0], token)[:, 0])
    return jnp.where(counts > 0, after, states[:, 0])


def _classes(tables: GrammarTables, states: Int[Array, "B"], ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    rows = tables.rows.at[states].get(mode="promise_in_bounds")
    return tables.classes.at[rows[:, None], ids].get(mode="promise_in_bounds").astype(jnp.int32)


def _behind(tables: GrammarTables, states: Int[Array, "B"], classes: Int[Array, "B"]) -> Int[Array, "B"]:
    behind = tables.next.at[states, classes].get(mode="promise_in_bounds")
    return jnp.maximum(behind.astype(jnp.int32), FREE)


class Shelf:
    """Room for the tables of the requests in slots, of which the device has a copy.

    Args:
      vocab: tokens of the target's logits.
      put: makes arrays of the device's, on all devices that share the models.
    """

    def __init__(self, vocab: int, put: Callable[[Any], Any] = jax.device_put):
        self._put, columns = put, -(-vocab // BITS) * BITS
        host: dict[str, Any] = {
            "next": np.full((SHELF_STATES, MOST_CLASSES), FREE, np.int16),
            "classes": np.zeros((SHELF_GRAMMARS, columns), np.int16),
            "rows": np.zeros(SHELF_STATES, np.int32),
        }
        self._host: Any = GrammarTables(**host)
        self._places: dict[TokenAutomaton, tuple[int, int]] = {}  # offsets and rows
        self._device: GrammarTables | None = None

    def shapes(self) -> GrammarTables:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._host)

    @property
    def tables(self) -> GrammarTables:
        """On the device, as they are now; what was given out before stays as it was."""
        found = self._device
        if found is None:
            found = self._device = self._put(jax.tree.map(np.copy, self._host))
        return found

    def place(self, automaton: TokenAutomaton, used: Collection[TokenAutomaton]) -> bool:
        """Finds room for a grammar; False where those that are `used` leave none."""
        if automaton in self._places:
            return True
        for other in (None, *(one for one in list(self._places) if one not in used)):  # the oldest first
            if other is not None:
                del self._places[other]
            if (found := self._gap(automaton.states - 1)) is not None:
                self._write(automaton, *found)
                return True
        return False

    def state(self, automaton: TokenAutomaton, own: int) -> int:
        """The number that a state of a grammar has here."""
        return own if own == FREE else own + self._places[automaton][0]

    def own(self, automaton: TokenAutomaton, state: int) -> int:
        """The grammar's number for a state."""
        return state if state == FREE else state - self._places[automaton][0]

    def _gap(self, states: int) -> tuple[int, int] | None:
        """An offset and a row that nobody has."""
        taken = sorted((offset + 1, offset + one.states) for one, (offset, _) in self._places.items())
        rows = {row for _, row in self._places.values()}
        begin = FREE + 1
        for low, high in (*taken, (SHELF_STATES, SHELF_STATES)):
            if low - begin >= states and len(rows) < SHELF_GRAMMARS:
                return begin - 1, next(row for row in range(SHELF_GRAMMARS) if row not in rows)
            begin = max(begin, high)
        return None

    def _write(self, automaton: TokenAutomaton, offset: int, row: int) -> None:
        own, (states, classes), host = automaton.next[1:], automaton.next.shape, self._host
        place = slice(offset + 1, offset + states)
        host.next[place] = -1
        host.next[place, :classes] = np.where(own > FREE, own + offset, own)
        host.classes[row] = 0
        host.classes[row, : len(automaton.classes)] = automaton.classes
        host.rows[place] = row
        self._places[automaton], self._device = (offset, row), None
