"""What is done with JAX's internals: kernels are compiled on their own, their lowering is not changed by what makes it faster."""

# pyright: reportPrivateImportUsage=false

import os
import re
import threading
import time
from typing import Any

import dflash_kernels
import jax
import jax.numpy as jnp
import pytest

from dflash_jax.compile import jax_patches as side_by_side
from dflash_jax.compile.jax_patches import (
    compile_kernel,
    find_kernel_runtime,
    kernels_side_by_side,
    sorts_by_name,
)

from ..devices import on

ROWS, HEAD = (16, 64), 4096


def program(table: Any, weight: Any, head: Any, *ids: Any) -> Any:
    """Two kernels for each number of rows, one of them called twice."""
    out = [dflash_kernels.embed_norm(table, of, weight, eps=1e-6)[1] for of in ids]
    return [dflash_kernels.dense_best(rows, head) for rows in (*out, *out)]


def lowered(*, names: bool = True) -> jax.stages.Lowered:
    jax.clear_caches()
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((999, 2560), (2560,), (HEAD, 2560))]
    ids = [jax.ShapeDtypeStruct((rows,), jnp.int32) for rows in ROWS]
    with on("NVIDIA H200", names=names):
        traced = jax.jit(program).trace(*arrays, *ids)
        return traced.lower(lowering_platforms=("cuda",))


@pytest.fixture
def compiled(monkeypatch):
    """Kernels that were to be compiled, with the threads that were to do it."""
    seen = []
    monkeypatch.setattr(
        side_by_side, "compile_kernel", lambda *kernel: seen.append((kernel, threading.current_thread().name))
    )
    return seen


def known() -> dict[bytes, bytes]:
    from jax.experimental.mosaic.gpu import core

    return core.KNOWN_KERNELS


def forget() -> None:
    """Kernels of the next program are new ones: the hash of a kernel that is lowered again may be the same."""
    known().clear()


def settle(seen: list[Any], count: int) -> None:
    deadline = time.monotonic() + 10
    while len(seen) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def test_every_kernel_is_compiled_once_by_another_thread(compiled):
    lowered()  # Pallas is imported by what is traced
    forget()
    with kernels_side_by_side():
        lowered()
        assert compiled == []
    settle(compiled, 4)
    assert len({digest for (digest, _), _ in compiled}) == len(compiled) == 4
    for (digest, code), thread in compiled:
        assert known()[digest] == code
        assert code.startswith(b"ML\xefR")  # MLIR's bytecode
        assert thread.startswith("kernel")


def test_what_was_lowered_before_or_is_lowered_later_is_not_compiled(compiled):
    lowered()
    with kernels_side_by_side():
        pass
    forget()
    lowered()
    assert len(known()) == 4
    assert compiled == []


def test_a_failure_is_for_the_program_to_tell(monkeypatch):
    failed = []

    def fail(digest, code):
        failed.append(digest)
        raise RuntimeError("no compiler")

    monkeypatch.setattr(side_by_side, "compile_kernel", fail)
    lowered()
    forget()
    with kernels_side_by_side():
        assert "mosaic_gpu_v2" in lowered().as_text()
    settle(failed, 4)
    assert len(failed) == 4


def code(kernel: bytes) -> str:
    """A kernel without what it holds of lines of Python and of how many were lowered before it."""
    from jax._src.interpreters.mlir import make_ir_context
    from jax._src.lib.mlir import ir
    from jax.experimental.mosaic.gpu import dialect

    with make_ir_context() as context:
        dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        return re.sub('mosaic_gpu.dump_base[a-z]* = "[^"]*"', "", str(ir.Module.parse(kernel)))


def kernels(**options: Any) -> set[str]:
    forget()
    lowered(**options)
    return {code(kernel) for kernel in known().values()}


def test_names_from_one_numbering_lower_to_the_same_kernels(monkeypatch):
    from jax.experimental.mosaic.gpu import layout_inference as inference

    lowered()
    new, prints = kernels(), []
    assert len(new) == 4
    if not sorts_by_name():  # nothing is patched, and nothing needs to be
        monkeypatch.setattr(inference.ValueSite, "__str__", lambda _: prints.append(1) or "")
        assert kernels() == new
        assert prints == []
        return
    parts: tuple[Any, ...] = inference.infer_layout, inference.ValueSite.__str__
    infer_layout, name = (part.__wrapped__ for part in parts)
    monkeypatch.setattr(inference, "infer_layout", infer_layout)
    monkeypatch.setattr(inference.ValueSite, "__str__", lambda site: prints.append(site) or name(site))
    assert kernels(names=False) == new
    assert len(prints) > 10


def test_names_tell_all_values_of_a_kernel_apart(monkeypatch):
    from jax.experimental.mosaic.gpu import constraints
    from jax.experimental.mosaic.gpu import layout_inference as inference

    names, equal = [], constraints.compute_transitively_equal_vars

    def seen(system: Any) -> Any:
        found = equal(system)
        names.append(([str(variable) for variable in found], len(found)))
        return found

    lowered()
    monkeypatch.setattr(constraints, "compute_transitively_equal_vars", seen)
    if sorts_by_name():
        monkeypatch.setattr(inference.ValueSite.__str__, "__wrapped__", None)  # nothing is printed
    lowered()
    assert len(names) == 4
    for found, count in names:
        assert len(set(found)) == count > 0


@pytest.mark.gpu
def test_a_program_runs_with_kernels_that_were_compiled_alone():
    key = jax.random.key(0)
    table, weight = (jax.random.normal(key, shape, jnp.bfloat16) for shape in ((999, 2560), (2560,)))
    ids = jnp.arange(16, dtype=jnp.int32) * 31
    program = jax.jit(lambda *arrays: dflash_kernels.embed_norm(*arrays, eps=1e-6)[1])
    jax.clear_caches()
    text = program.lower(table, ids, weight).as_text()
    digest, code = list(known().items())[-1]
    assert "mosaic_gpu_v2" in text
    compile_kernel(digest, code)
    expected = dflash_kernels.embed_norm(table, ids, weight, eps=1e-6, implementation="xla")[1]
    expected = expected.astype(jnp.float32)
    assert (
        jnp.abs(program(table, ids, weight).astype(jnp.float32) - expected) <= 0.02 * jnp.abs(expected) + 1e-3
    ).all()


@pytest.mark.gpu
def test_kernels_find_their_runtime_as_jax_would_tell_them(monkeypatch):
    """Their code is restored without any import of what would name it. JAX has what tells it with a GPU's libraries only."""
    monkeypatch.delenv("MOSAIC_GPU_RUNTIME_LIB_PATH", raising=False)
    find_kernel_runtime()
    ours = os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"]
    from jax.experimental.mosaic.gpu import core

    assert str(core.RUNTIME_PATH) == ours


def test_nothing_is_patched_in_a_version_that_is_not_known(compiled, monkeypatch):
    from jax.experimental.mosaic.gpu import layout_inference as inference

    lowered()
    forget()
    usual = inference.infer_layout
    monkeypatch.setattr(inference, "infer_layout", getattr(usual, "__wrapped__", usual))
    monkeypatch.setattr(side_by_side, "KNOWN_VERSIONS", ())
    with kernels_side_by_side():
        lowered()
    assert not hasattr(inference.infer_layout, "__wrapped__")
    assert compiled == []
