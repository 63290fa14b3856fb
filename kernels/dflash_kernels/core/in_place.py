"""Arrays that a kernel writes where they lie.

XLA hands a kernel the place of a slice where it would hand it a copy of one, and the place in a larger array where its result is
to be put (dynamic slice fusion). It does so for an array that the kernel writes, too, and leaves the copy out which that one needs:
of a stack of pools the caller's own was written, and the result was not. Barriers keep slices out of such a call; they are gone
from the finished program, and nothing is copied that was not a slice.
"""

from typing import Any

import jax


def lent(array: jax.Array) -> Any:
    """A Ref to hand to a kernel."""
    return jax.new_ref(jax.lax.optimization_barrier(array))


def returned(ref: Any) -> jax.Array:
    """What a Ref holds once the kernel has run."""
    return jax.lax.optimization_barrier(jax.freeze(ref))
