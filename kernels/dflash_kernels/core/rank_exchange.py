"""Memory through which several GPUs hand one another results: places in three areas that take turns, and where the others' are.

A rank writes what it has to the same place of every rank's memory, its own included, and reads its own until all ranks' have come:
words are EMPTY until they are written, so nobody counts and nobody signals. Launch number i of a place uses area `i % 3` and
empties area `(i + 2) % 3` of its own memory. Ranks may be one launch apart, as one ends as soon as all have written: a rank writes
for launch i + 1 while another one is still in launch i, into the area that was emptied in launch i - 1, which all have ended before
anybody wrote for launch i. With two areas launch i would empty what may have come for launch i + 1 already.

Places are independent of one another, and launches may use some of them. Whatever is written is waited for, by every rank, before
its launch ends: nothing comes late, when memory is somebody else's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dflash_kernels.core.layouts import EMPTY

AREAS = 3
# Words of a place for sums: a row of few features is a CTA or two, and hundreds of rows are no more CTAs than run at once.
SUMMED = 1024


class RankExchange(NamedTuple):
    """One rank's memory for exchanges, made by `rank_exchange` before a loop and handed to one launch after the other.

    Attributes:
      counts: Ref `[places]`, int32: launches that have used a place.
      area: Ref `[AREAS, ranks, places, words]`, int32: what each rank has written there.
      peers: `[2 ranks + 2]`, int32: the address of every rank's `area` in two words each, then the rank itself.
    """

    counts: Any
    area: Any
    peers: Any

    @property
    def ranks(self) -> int:
        return self.area.shape[1]

    @property
    def room(self) -> int:
        """Bytes that a rank hands over through all places."""
        return 4 * self.area.shape[2] * self.area.shape[3]


def first_values(ranks: int, places: int, words: int) -> tuple[jax.Array, jax.Array]:
    """`counts` and `area` of a `RankExchange` that nobody has used."""
    return jnp.zeros((places,), jnp.int32), jnp.full((AREAS, ranks, places, words), EMPTY, jnp.int32)
