"""What the warpgroups of the Hopper kernel must know about a block of query rows: which keys its rows see."""

import jax.numpy as jnp
from jax import lax

from dflash_kernels.attention.ragged.launch import ROWS, Launch


class Block:
    """Scalars of one block of query rows of one head, by its place in a section.

    Keys are counted from the first row of the first tile: a sequence's own first key is number `shift`.

    Attributes:
      there: whether there is such a block at all.
      index: its place in the table; head, kv_head: of the queries, of the keys.
      first_row: of its 128 rows; own_begin, own_end: those of them that are its sequence's.
      position: in its sequence, of the first of the 128 rows.
      keys_end: number of the key after the sequence's last; shift: keys of the first tile that are not the sequence's.
      origin: row of the first tile, or the sequence's index where keys are in pages.
      begin, end: tiles of keys that some row sees something of.
    """

    def __init__(self, launch: Launch, table_ref, section, place):
        self.launch = launch
        at_once = jnp.int32(launch.heads_at_once)
        self.index = jnp.minimum(lax.div(place, at_once), launch.blocks - 1)
        self.head = section * at_once + lax.rem(place, at_once)
        self.kv_head = lax.div(self.head, jnp.int32(launch.group))
        columns = [table_ref[self.index, i] for i in range(7)]
        self.first_row, self.own_begin, self.own_end, self.position = columns[0] * 8, *columns[1:4]
        self.shift = 0 if launch.page_size else columns[6]
        self.keys_end = columns[4] + self.shift
        self.origin = columns[5] if launch.page_size else columns[5] * 8
        keys = jnp.int32(launch.keys)
        low, _ = self.limits(self.position + self.own_begin)
        _, high = self.limits(self.position + self.own_end - 1)
        self.begin = lax.div(low, keys)
        end = lax.div(jnp.maximum(high, 0) + (keys - 1), keys)
        self.there = (self.own_end > 0) & (place < launch.section)
        self.end = jnp.where(self.there, jnp.maximum(end, self.begin), self.begin)

    @property
    def tiles(self):
        return self.end - self.begin

    def limits(self, position):
        """First key that the query at a position sees, and the key after the last one."""
        left, right = self.launch.window
        low = jnp.int32(0) if left is None else jnp.maximum(position - left, 0)
        high = self.keys_end
        if self.launch.causal:
            high = jnp.minimum(high, position + (self.shift + 1))
        if right is not None:
            high = jnp.minimum(high, position + (self.shift + right + 1))
        return low + self.shift, high

    def whole(self, wg):
        """Tiles that all own rows of a warpgroup see the whole of: from, to."""
        keys, first = jnp.int32(self.launch.keys), wg * ROWS
        (low, _), (_, high) = (
            self.limits(self.position + row)
            for row in (jnp.minimum(first + (ROWS - 1), self.own_end - 1), jnp.maximum(first, self.own_begin))
        )
        begin = jnp.clip(lax.div(low + (keys - 1), keys), self.begin, self.end)
        return begin, jnp.clip(lax.div(jnp.maximum(high, 0), keys), begin, self.end)
