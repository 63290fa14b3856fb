"""Programs compiled side by side in processes of their own: tracing and lowering hold Python's lock, which threads share.

    programs = compiled(make, [("a", 1), ("b", 2)])     # make(*job) -> jax.stages.Compiled, a function of a module

Every process has a client of the same device and gives its memory back when it ends; nothing is timed before that.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax

from dflash_jax.compile.jax_patches import compile_here, find_kernel_runtime, restore, serialise

MOST = 16  # processes


def compiled(make: Callable[..., tuple[Callable[..., Any], tuple]], jobs: Sequence[tuple]) -> list[Any]:
    """A compiled program for each job, in order.

    Args:
      make: gives a function and the shapes of its arguments for a job; it and the jobs are pickled.
    """
    # Before JAX starts there: a client takes three quarters of the memory otherwise.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    find_kernel_runtime()
    programs = []
    with ProcessPoolExecutor(min(MOST, len(jobs)), multiprocessing.get_context("spawn")) as pool:
        done = [pool.submit(_bytes, make, job) for job in jobs]
        for job, one in zip(jobs, done, strict=True):
            payload, read, results, args = one.result()
            programs.append(restore(payload, read, results, str(job), (), args))
    return programs


def _bytes(make: Callable[..., Any], job: tuple) -> tuple[bytes, list[int], Any, tuple]:
    function, args = make(*job)
    lowered = jax.jit(function).lower(*args)
    program, _ = compile_here(lowered)
    results, args = (
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
        for tree in (lowered.out_info, args)
    )
    return *serialise(program), results, args
