"""Stages of a persistent launch, between which CTAs wait for one another.

On a GPU one launch has all stages, and results go from one to the next through a mailbox. Pallas' interpreter runs CTAs one after
the other, and none can wait for a later one: there every stage is a launch of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflash_kernels.mosaic_gpu.thread_op import kernel


def launch(
    body: Callable[..., None], name: str, stages: Sequence[Any], given: Mapping[str, Any],
    results: Mapping[str, jax.ShapeDtypeStruct], *, interpret: Any, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Runs `body(stages, refs, buffers)` on every CTA and returns results by name.

    Args:
      name: what profilers show.
      given: arrays and Refs, by the names that `refs` has them under, before the results.
      options: `kernel`'s.
    """

    def of(stages: Sequence[Any]) -> Callable[..., None]:
        def run(*refs: Any, **buffers: Any) -> None:
            body(stages, dict(zip([*given, *results], refs, strict=True)), buffers)

        run.__name__ = name
        return run

    if interpret is None:
        found = kernel(of(stages), out_type=tuple(results.values()), **options)(*given.values())
        return dict(zip(results, found, strict=True))
    shared = [jax.new_ref(jnp.full(one.shape, jnp.nan, one.dtype)) for one in results.values()]
    for stage in stages:
        kernel(of([stage]), out_type=(), interpret=interpret, **options)(*given.values(), *shared)
    return {name: ref[...] for name, ref in zip(results, shared, strict=True)}
