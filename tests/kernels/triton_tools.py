"""Triton implementations without a GPU: run in Triton's interpreter, or compiled down to machine code."""

import importlib
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.core.device import Target, target

TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int8": "i8", "uint8": "u8",
    "float8_e4m3fn": "fp8e4nv",
}  # fmt: skip


def interpret(calls: dict[Any, Any], folder: Path) -> dict[Any, tuple[np.ndarray, ...]]:
    """Results of calls `(op, function, arrays, options)` under Triton's interpreter."""
    pytest.importorskip("triton")
    given, made = folder / "calls.pkl", folder / "results.pkl"
    given.write_bytes(pickle.dumps(calls))
    script = Path(__file__).parent / "interpret_triton.py"
    done = subprocess.run([sys.executable, script, given, made], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads(made.read_bytes())


def compiled(
    op: str, function: Callable[..., Any], *shapes: Any, capability: int, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[Any]:  # fmt: skip
    """What Triton makes of each kernel that `function` launches; `op` names the package with its module `triton`.

    The function is traced as it is, with its call of jax-triton replaced. Triton assumes the same about arrays as under jax-triton:
    that they start at multiples of 16 bytes.
    """
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    programs = []

    def triton_call(*arrays, kernel, out_shape, num_warps, num_stages, compute_capability, **constants):
        constants.pop("grid")
        constants.pop("input_output_aliases", None)
        kinds = [f"*{TYPES[jnp.dtype(array.dtype).name]}" for array in (*arrays, *out_shape)]
        named = dict(zip(kernel.arg_names, kinds, strict=False))
        source = ASTSource(
            kernel, signature=named | dict.fromkeys(constants, "constexpr"), constexprs=constants,
            attrs={(i,): [["tt.divisibility", 16]] for i in range(len(named))},
        )  # fmt: skip
        target, flags = GPUTarget("cuda", compute_capability, 32), {"num_warps": num_warps, "num_stages": num_stages}
        programs.append(triton.compile(source, target=target, options=flags))
        return tuple(jnp.zeros(shape.shape, shape.dtype) for shape in out_shape)

    module = importlib.import_module(f"dflash_kernels.{op}.triton")
    # A name of its own, since what is traced here must not be found by a call that runs.
    device = Target(f"compiler {capability}", "gpu", capability, 108)
    monkeypatch.setattr(module, "jax_triton", lambda: types.SimpleNamespace(triton_call=triton_call))
    monkeypatch.setattr(module, "usable_target", lambda: device)
    jax.eval_shape(lambda *arrays: function(*arrays, **options), *shapes)
    return programs


def run_as_ampere(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has an op's kernels compiled as for an A100 and run on the GPU that is here: GPUs run what is compiled for older ones."""
    library = pytest.importorskip("jax_triton").triton_lib.triton_kernel_call_lib
    build, here = library.TritonKernel, target().capability

    def built(*arguments):
        # The last one says which GPU the assembler makes machine code for.
        return build(*arguments[:-1], here)

    monkeypatch.setattr(library, "TritonKernel", built)
    device = Target("as an A100", "gpu", 80, 108)
    monkeypatch.setattr(importlib.import_module(f"dflash_kernels.{op}.triton"), "usable_target", lambda: device)
