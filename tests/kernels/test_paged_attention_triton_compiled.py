"""The Triton kernel of paged attention compiled for GPUs that are not here, its schedule, and what it refuses."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.attention.paged.triton import Tuning, paged_attention_triton, plan
from dflash_kernels.core.triton_call import SHARED_MEMORY

from .attention_oracle import make_case
from .triton_tools import compiled

MASK = {"causal": True, "window": (None, None), "soft_cap": None, "sinks": None}


def shapes(t: int, group: int, head_dim: int, page_size: int, dtype: Any = jnp.bfloat16) -> list[jax.ShapeDtypeStruct]:
    q = jax.ShapeDtypeStruct((2, t, 2 * group, head_dim), dtype)
    pages = jax.ShapeDtypeStruct((9, 2, page_size, head_dim), dtype)
    table, lens = jax.ShapeDtypeStruct((2, 40), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    return [q, pages, pages, table, lens, lens]


@pytest.mark.few("1-4-128-64-80")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("t", "group", "head_dim", "page_size"),
    [(1, 4, 128, 64), (16, 4, 128, 16), (1, 16, 64, 32), (7, 5, 72, 64), (16, 4, 192, 128), (16, 8, 256, 5)],
)
def test_compiles_to_machine_code(
    t: int, group: int, head_dim: int, page_size: int, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Within the shared memory of every GPU since Ampere, with copies of 16 bytes that go on while a tile is worked on."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    mask = MASK | {"scale": 0.1} | ({"window": (70, 3), "soft_cap": 30.0, "causal": False} if t == 7 else {})
    (attend,) = compiled(
        "attention.paged", paged_attention_triton, *shapes(t, group, head_dim, page_size), capability=capability,
        monkeypatch=monkeypatch, **mask,
    )  # fmt: skip
    ptx = attend.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert attend.metadata.shared <= SHARED_MEMORY
    assert re.search(r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10", ptx)
    assert any(int(pending) > 0 for pending in re.findall(r"cp\.async\.wait_group\s+(\w+)", ptx))
    assert ("wgmma" in ptx) == (capability == 90 and t * group > 32)
    assert attend.asm["cubin"]


@pytest.mark.few("fp8-90")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("stored", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8], ids=["fp8", "e5m2", "int8"])
def test_quantized_pages_compile(stored: Any, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    q, pages, _, *rest = shapes(5, 4, 128, 64)
    pages = jax.ShapeDtypeStruct(pages.shape, stored)
    scales = {"k_scale": jnp.ones(2), "v_scale": jnp.ones(2)}
    if stored == jnp.int8:
        scales = {"k_scale": jnp.ones(pages.shape[:3]), "v_scale": jnp.ones((2, 128))}
    (attend,) = compiled(
        "attention.paged", paged_attention_triton, q, pages, pages, *rest, capability=capability, monkeypatch=monkeypatch,
        **MASK | {"scale": 0.1}, **scales, alibi_slopes=jnp.ones(8), alibi_sqrt=True,
    )  # fmt: skip
    assert attend.asm["cubin"]
    assert attend.metadata.shared <= SHARED_MEMORY
    assert ("e4m3x2" in attend.asm["ptx"]) == (stored == jnp.float8_e4m3fn and capability == 90)


def test_schedule() -> None:
    shape = {"group": 4, "head_dim": 128, "page_size": 64, "kv_heads": 8, "table_width": 64, "sinks": True}
    mask = {"causal": True, "window": (None, None), "soft_cap": None, "scale": 0.1, "multiprocessors": 108}
    for b in (64, 8, 1):
        programs = math.prod(plan(Tuning(), b=b, tokens=1, **shape, **mask).grid)
        assert 128 <= programs < 4 * 8 * 64 * 4
    rows = [plan(Tuning(), b=1, tokens=t, **shape, **mask).constants["ROWS"] for t in (1, 5, 16, 64)]
    assert rows == [16, 32, 64, 64]
    assert plan(Tuning(), b=1, tokens=64, **shape, **mask).grid[0] == 32
    whole, parts = (plan(Tuning(splits=splits), b=1, tokens=1, **shape, **mask) for splits in (1, 5))
    assert whole.constants["SINKS"]
    assert not parts.constants["SINKS"]  # they are the merge's: adding them to every part would count them five times


@pytest.mark.parametrize(
    ("shape", "dtype", "changes", "reason"),
    [
        ({"head_dim": 320}, jnp.bfloat16, {}, "takes head dims up to 256, not 320"),
        ({}, np.float32, {}, "takes queries in bfloat16 or float16, not float32"),
        ({}, jnp.bfloat16, {"soft_cap": -1.0}, "takes a positive soft cap"),
        ({}, jnp.bfloat16, {}, "needs an NVIDIA GPU of compute capability 8.0 or newer; the device, cpu, has none"),
    ],
)
def test_refusals_name_their_reason(shape: dict[str, int], dtype: Any, changes: dict[str, Any], reason: str) -> None:
    case = make_case([4], t=1, dtype=dtype, **shape)
    with pytest.raises(NotImplementedError, match=reason):
        paged_attention_triton(*case.arrays(), **MASK | {"scale": 0.1} | changes)
