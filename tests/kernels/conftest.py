"""Interpreted kernels in less time: what all threads run is compiled once, and callbacks get NumPy's arrays.

JAX compiles a kernel in every thread, all of which find its cache empty, and makes each number that an interpreted instruction
is told an array of its own on the CPU. `test_interpreter.py` shows that races are found all the same.
"""

import threading
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import callback as callbacks
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
def callbacks_take_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(arg: Any) -> Any:
        # Copies: XLA takes its buffers back when the callback returns.
        return int(arg) if arg.shape == () and arg.dtype == np.int32 else np.array(arg)

    def call(*args: Any, callback: Any, **_: Any) -> Any:
        return jax.tree.map(np.asarray, callback(*map(plain, args)))

    monkeypatch.setattr(callbacks, "io_callback_impl", call)
