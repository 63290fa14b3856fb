"""The Triton kernel of latent attention: in Triton's interpreter, compiled for GPUs that are not here, and for real (`-m gpu`)."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import mla_attention
from dflash_kernels.attention.mla.triton import LARGE_SHARED_MEMORY, Tuning, mla_attention_triton
from dflash_kernels.core.triton_call import SHARED_MEMORY

from .attention_oracle import Case, make_case, oracle
from .triton_tools import compiled, interpret, run_as_ampere

# T, heads, page size, latents, rotated part, sequence lengths, query lengths, causal, tuning.
CASES = {
    "q1": (1, 16, 64, 512, 64, [70, 64, 0, 1], None, True, Tuning(splits=1)),
    "q1-split": (1, 16, 64, 512, 64, [170, 64, 0, 1], None, True, Tuning(splits=3)),
    "q4": (4, 16, 64, 64, 16, [170, 64, 3, 0], [4, 2, 4, 4], True, Tuning(splits=2)),
    "full": (4, 16, 64, 64, 16, [170, 64, 3, 0], [4, 0, 4, 4], False, Tuning(splits=2)),
    "odd": (7, 5, 5, 24, 8, [33, 4, 70], [7, 5, 1], True, Tuning(splits=2)),
    "row-blocks": (9, 7, 16, 128, 32, [40, 9], None, True, Tuning(splits=1, rows=16)),
    "chosen": (2, 3, 32, 48, 16, [90, 2], None, True, Tuning()),
}
FILLS = ("zeros", "nan", "inf", "-inf")


def case_of(name: str, dtype: Any) -> Case:
    t, heads, page_size, rank, rotated, seq_lens, q_lens, causal, _ = CASES[name]
    shape = {"t": t, "group": heads, "page_size": page_size, "head_dim": rank + rotated, "dtype": dtype}
    return make_case(seq_lens, q_lens, kv_heads=1, causal=causal, scale=0.2, **shape)


def unused(fill: str, dtype: Any) -> Case:
    """A call with `fill` in every row that must not matter; with zeros the table holds no garbage either."""
    number = 0.0 if fill == "zeros" else float(fill)
    shape = {"t": 6, "group": 4, "head_dim": 80, "dtype": dtype, "garbage": number}
    case = make_case([33, 0, 7, 64], [6, 6, 2, 0], kv_heads=1, causal=False, scale=0.2, seed=3, **shape)
    if fill == "zeros":
        case.page_table = np.where(case.page_table % len(case.k_pages) == case.page_table, case.page_table, 0)
    return case


def arrays_of(case: Case) -> tuple[np.ndarray, ...]:
    q, pages, _, *rest = (np.asarray(array) for array in case.arrays())
    return q, pages, *rest


def calls(dtype: Any) -> dict[Any, tuple[Any, ...]]:
    """Everything that is run: arrays and options."""
    made = {}
    for name, (*_, rank, _, _, _, causal, tuning) in CASES.items():
        options = {"kv_lora_rank": rank, "scale": 0.2, "causal": causal, "tuning": tuning}
        made[name] = arrays_of(case_of(name, dtype)), options
    for fill in FILLS:
        options = {"kv_lora_rank": 64, "scale": 0.2, "causal": False, "tuning": Tuning(splits=2)}
        made[fill] = arrays_of(unused(fill, dtype)), options
    arrays, options = made["q4"]
    pages = arrays[1].astype(np.float32).astype(jnp.float8_e4m3fn)
    made["fp8"] = (arrays[0], pages, *arrays[2:]), options | {"latent_scale": np.float32(0.75).reshape(())}
    return made


@pytest.fixture(
    scope="module", params=["interpreted", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("gpu", "a100"))]
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Results of all calls, and the dtype that they were made in: the interpreter knows no bfloat16 products."""
    if request.param == "interpreted":
        given = calls(jnp.float16)
        named = {name: ("attention.mla", "mla_attention_triton", *call) for name, call in given.items()}
        return interpret(named, tmp_path_factory.mktemp("interpreter")) | {"dtype": jnp.float16}
    found: dict[Any, Any] = {"dtype": jnp.bfloat16}
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "a100":
            run_as_ampere("attention.mla", patch)
        for name, (arrays, options) in calls(jnp.bfloat16).items():
            options = {key: jnp.asarray(value) if key == "latent_scale" else value for key, value in options.items()}
            found[name] = tuple(map(np.asarray, mla_attention_triton(*map(jnp.asarray, arrays), **options)))
    return found


def check(case: Case, rank: int, out: np.ndarray, lse: np.ndarray) -> None:
    """The latent row is the key, its first entries the value."""
    true_out, true_lse = oracle(dataclasses.replace(case, v_pages=case.k_pages))
    true_out = true_out[..., :rank]
    eps = float(jnp.finfo(case.q.dtype).eps)
    assert out.dtype == case.q.dtype
    np.testing.assert_allclose(out.astype(np.float64), true_out, rtol=0, atol=eps * max(np.abs(true_out).max(), 1))
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)
    assert (out[~np.isfinite(true_lse)] == 0).all()


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, results: dict[Any, Any]) -> None:
    check(case_of(name, results["dtype"]), CASES[name][3], *results[name])


def test_float8_pages(results: dict[Any, Any]) -> None:
    case = case_of("q4", results["dtype"])
    case.k_pages = case.k_pages.astype(np.float32).astype(jnp.float8_e4m3fn).astype(np.float64) * 0.75
    check(case, CASES["q4"][3], *results["fp8"])


def test_nothing_unused_is_read(results: dict[Any, Any]) -> None:
    for fill in FILLS:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(results[fill], results["zeros"], strict=True))


@pytest.mark.few("16-16-bfloat16-86")
@pytest.mark.parametrize("capability", [80, 86, 90])
@pytest.mark.parametrize(
    ("t", "heads", "stored"), [(1, 16, "bfloat16"), (16, 16, "bfloat16"), (2, 128, "float8_e4m3fn")]
)
def test_compiles_to_machine_code(
    t: int, heads: int, stored: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Within the shared memory of the GPU, with copies that go on while a tile is worked on."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    q, pages = jax.ShapeDtypeStruct((2, t, heads, 576), jnp.bfloat16), jax.ShapeDtypeStruct((9, 1, 64, 576), stored)
    table, lens = jax.ShapeDtypeStruct((2, 40), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    (attend,) = compiled(
        "attention.mla", mla_attention_triton, q, pages, table, lens, lens, capability=capability, monkeypatch=monkeypatch,
        kv_lora_rank=512, scale=0.1, causal=True, latent_scale=jnp.ones(()) if stored != "bfloat16" else None,
    )  # fmt: skip
    assert attend.metadata.shared <= LARGE_SHARED_MEMORY.get(capability, SHARED_MEMORY)
    assert any(int(pending) > 0 for pending in re.findall(r"cp\.async\.wait_group\s+(\w+)", attend.asm["ptx"]))
    assert attend.asm["cubin"]


@pytest.mark.parametrize(
    ("dtype", "width", "reason"),
    [
        (jnp.float32, 576, "takes queries in bfloat16 or float16, not float32"),
        (jnp.bfloat16, 1088, "takes up to 512 latents and 128 rotated parts, not 1024 and 64"),
        (jnp.bfloat16, 576, "needs an NVIDIA GPU of compute capability 8.0 or newer"),
    ],
)
def test_refusals_name_their_reason(dtype: Any, width: int, reason: str) -> None:
    q, pages = jnp.zeros((1, 1, 2, width), dtype), jnp.zeros((2, 1, 16, width), dtype)
    with pytest.raises(NotImplementedError, match=reason):
        mla_attention(
            q, pages, jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32), kv_lora_rank=width - 64, scale=0.1,
            implementation="triton",
        )  # fmt: skip
