"""Interpreted kernels compile once what all threads run: JAX compiles it in every thread, all of which find its cache empty."""

import math
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax._src.pallas.mosaic.interpret import thread_map


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, programs = threading.Lock(), dict[Any, tuple[Any, Any]]()

    def run(jaxpr: Any, consts: Any, *args: Any) -> None:
        key = id(jaxpr), *((x.shape, x.dtype) for x in jax.tree.leaves((consts, args)))
        with lock:
            if key not in programs:
                traced = jax.jit(thread_map._run, static_argnums=(0,)).trace(jaxpr, consts, *args)
                programs[key] = jaxpr, traced.lower().compile()  # with the jaxpr, whose id is then nobody else's
        programs[key][1](consts, *args)

    monkeypatch.setattr(thread_map, "_run_jaxpr", run)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Hardly any program is met twice here, and XLA has crashed while it wrote one of an interpreted kernel to this run's cache."""
    before = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)
