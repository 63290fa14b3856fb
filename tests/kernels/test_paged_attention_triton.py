"""The Triton kernel of paged attention: in Triton's interpreter, compiled for GPUs that are not here, and for real (`-m gpu`)."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels.attention.paged.reference import paged_attention_reference
from dflash_kernels.attention.paged.triton import Tuning, paged_attention_triton

from .attention_oracle import Case, make_case, oracle, with_wide_values
from .triton_tools import interpret, run_as_ampere

SLOPES = (2.0 ** -np.linspace(0.5, 8, 8)).astype(np.float32)
SINKS = np.linspace(-1.5, 2.5, 16, dtype=np.float32)
MASK = {"causal": True, "window": (None, None), "soft_cap": None, "sinks": None}

# T, group, page size, head dim, sequence lengths, query lengths, mask, tuning. Idle rows, short rows and rows before the sequence.
CASES = {
    "q1": (1, 4, 64, 128, [150, 64, 0, 1], None, {}, Tuning(splits=1)),
    "q1-split": (1, 4, 64, 128, [330, 64, 0, 1], None, {}, Tuning(splits=5)),
    "q16-direct": (16, 4, 64, 128, [190, 70, 5, 0], [16, 3, 16, 16], {}, Tuning(splits=1)),
    "q16-split": (16, 4, 64, 128, [330, 70, 5, 0], [16, 0, 16, 16], {}, Tuning(splits=2)),
    "q16-full": (16, 4, 64, 128, [330, 64, 5, 0], [16, 3, 16, 16], {"causal": False}, Tuning(splits=3)),
    "page16": (4, 1, 16, 64, [150, 17], [4, 2], {}, Tuning(splits=2)),
    "page32": (3, 8, 32, 64, [150, 96], [3, 2], {"causal": False}, Tuning(splits=2)),
    "page128": (3, 5, 128, 128, [150, 129], None, {}, Tuning(splits=2)),
    "page5": (3, 3, 5, 64, [33, 4], None, {"causal": False}, Tuning(splits=2)),
    "row-blocks": (40, 3, 64, 64, [150, 21], [40, 9], {}, Tuning(splits=2)),
    "window": (8, 2, 16, 128, [290, 70], [8, 3], {"window": (70, 0)}, Tuning(splits=2)),
    "window-both": (8, 2, 64, 64, [290, 3], [8, 3], {"causal": False, "window": (9, 3)}, Tuning(splits=1)),
    "window-right": (8, 2, 64, 64, [90, 3], None, {"causal": False, "window": (None, 2)}, Tuning(splits=2)),
    "window-behind": (8, 2, 64, 64, [90, 3], None, {"causal": False, "window": (9, -2)}, Tuning(splits=2)),
    "cap-sinks": (4, 4, 64, 128, [150, 2, 0], [4, 4, 2], {"soft_cap": 1.5, "sinks": SINKS[:8]}, Tuning(splits=2)),
    "sinks-one-part": (2, 4, 64, 64, [90, 1, 0], [2, 1, 2], {"sinks": SINKS[:8], "scale": 0.25}, Tuning(splits=1)),
    "sinks-three-parts": (4, 4, 64, 64, [150, 2, 0], [4, 4, 2], {"sinks": SINKS[:8]}, Tuning(splits=3)),
    "head72": (3, 3, 64, 72, [150, 2], None, {}, Tuning(splits=2)),
    "head80": (3, 1, 16, 80, [50, 2], None, {}, Tuning(splits=1)),
    "head96": (3, 3, 64, 96, [150, 2], None, {}, Tuning(splits=2)),
    "head192": (16, 4, 64, 192, [90, 2], None, {}, Tuning(splits=2)),
    "head256": (1, 16, 32, 256, [70, 2], None, {}, Tuning(splits=2)),
    "alibi": (5, 4, 64, 64, [90, 3, 0], [5, 5, 2], {"alibi_slopes": SLOPES[:8], "causal": False}, Tuning(splits=2)),
    "alibi-sqrt": (5, 4, 16, 64, [90, 3], None, {"alibi_slopes": SLOPES[:8], "alibi_sqrt": True}, Tuning(splits=1)),
    "fp8": (5, 4, 64, 128, [90, 3, 0], [5, 3, 2], {"stored": jnp.float8_e4m3fn}, Tuning(splits=2)),
    "e5m2": (5, 4, 64, 128, [90, 3, 0], [5, 3, 2], {"stored": jnp.float8_e5m2}, Tuning(splits=2)),
    "e5m2-page16": (2, 3, 16, 72, [90, 3], None, {"stored": jnp.float8_e5m2, "causal": False}, Tuning(splits=1)),
    "values32": (5, 4, 64, 128, [90, 3, 0], [5, 3, 2], {"value_dim": 32}, Tuning(splits=2)),
    "values80": (3, 3, 5, 64, [33, 4], None, {"value_dim": 80, "causal": False}, Tuning(splits=1)),
    "values40-int8": (2, 3, 16, 72, [90, 3], None, {"value_dim": 40, "stored": np.int8}, Tuning(splits=2)),
    "int8": (5, 4, 64, 128, [90, 3, 0], [5, 3, 2], {"stored": np.int8}, Tuning(splits=2)),
    "int8-page16": (2, 3, 16, 72, [90, 3], None, {"stored": np.int8, "soft_cap": 1.5}, Tuning(splits=1)),
    "int8-keys": (5, 4, 64, 128, [90, 3, 0], [5, 3, 2], {"stored": np.int8}, Tuning(splits=2)),
    "int8-keys-page5": (2, 3, 5, 64, [33, 3], None, {"stored": np.int8, "value_dim": 24}, Tuning(splits=1)),
    "chosen": (4, 4, 64, 128, [150, 70], None, {}, Tuning()),
}  # fmt: skip


def case_of(name: str, dtype: Any = jnp.float16) -> Case:
    """In float16 for the interpreter, which multiplies the bits of bfloat16."""
    t, group, page_size, head_dim, seq_lens, q_lens, mask, _ = CASES[name]
    shape = {"t": t, "group": group, "page_size": page_size, "head_dim": head_dim, "dtype": dtype}
    case = make_case(seq_lens, q_lens, kv_heads=2, **shape, **mask)
    return with_wide_values(case) if name.startswith("int8-keys") else case


def call_of(case: Case, tuning: Tuning) -> tuple[Any, ...]:
    arrays = tuple(np.asarray(array) for array in case.arrays())
    options = MASK | case.options | {"scale": case.scale, "tuning": tuning}
    options["window"] = options["window"] or (None, None)
    return "attention.paged", "paged_attention_triton", arrays, options


@pytest.fixture(scope="module")
def interpreted(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, tuple[np.ndarray, ...]]:
    """Everything that is interpreted, in one process: of the cases those that run."""
    tests = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked = {test.callspec.params.get("name") for test in tests if hasattr(test, "callspec")}
    calls = {name: call_of(case_of(name), CASES[name][-1]) for name in CASES if name in asked}
    calls |= {(fill, splits): call_of(unused(fill), Tuning(splits=splits)) for fill in FILLS for splits in (1, 2)}
    calls["long"] = call_of(longer_than_its_table(), Tuning(splits=2))
    return interpret(calls, tmp_path_factory.mktemp("interpreter"))


def check(case: Case, out: np.ndarray, lse: np.ndarray) -> None:
    true_out, true_lse = oracle(case)
    eps = float(jnp.finfo(case.q.dtype).eps)
    assert out.dtype == case.q.dtype
    np.testing.assert_allclose(out.astype(np.float64), true_out, rtol=0, atol=eps * max(np.abs(true_out).max(), 1))
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)
    assert (out[~np.isfinite(true_lse)] == 0).all()


@pytest.mark.few(
    "q1-split", "q16-direct", "page5", "window-both", "cap-sinks", "head72", "alibi-sqrt", "fp8", "e5m2-page16",
    "int8-keys-page5", "values40-int8",
)  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, interpreted: dict[Any, tuple[np.ndarray, ...]]) -> None:
    check(case_of(name), *interpreted[name])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ["q1-split", "q16-direct", "page5", "window", "cap-sinks", "head72", "head256", "fp8", "int8"]
)
def test_what_an_a100_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_as_ampere("attention.paged", monkeypatch)
    case = case_of(name, jnp.bfloat16)
    _, _, arrays, options = call_of(case, CASES[name][-1])
    options = {key: jnp.asarray(value) if isinstance(value, np.ndarray) else value for key, value in options.items()}
    check(case, *map(np.asarray, paged_attention_triton(*map(jnp.asarray, arrays), **options)))


FILLS = ("zeros", "nan", "inf", "-inf")


def unused(fill: str) -> Case:
    """A call with `fill` in every row that must not matter; with zeros the table holds no garbage either."""
    number = 0.0 if fill == "zeros" else float(fill)
    case = make_case([33, 0, 7, 64], [6, 6, 2, 0], t=6, dtype=jnp.float16, causal=False, seed=3, garbage=number)
    if fill == "zeros":
        case.page_table = np.where(case.page_table % len(case.k_pages) == case.page_table, case.page_table, 0)
    return case


@pytest.mark.parametrize("splits", [1, 2])
def test_nothing_unused_is_read(splits: int, interpreted: dict[Any, tuple[np.ndarray, ...]]) -> None:
    for fill in FILLS:
        found = zip(interpreted[fill, splits], interpreted["zeros", splits], strict=True)
        assert all(a.tobytes() == b.tobytes() for a, b in found)


def longer_than_its_table() -> Case:
    case = make_case([128, 64], t=4, page_size=64, dtype=jnp.float16, width=2)
    return dataclasses.replace(case, seq_lens=case.seq_lens + np.array([2, 0], np.int32))


def test_longer_than_the_table(interpreted: dict[Any, tuple[np.ndarray, ...]]) -> None:
    """The reference cuts such a sequence to its table, too; positions go on counting from its length."""
    case, (out, lse) = longer_than_its_table(), interpreted["long"]
    true, true_lse = paged_attention_reference(*case.arrays(), **MASK | {"scale": case.scale})
    np.testing.assert_allclose(out.astype(np.float32), np.asarray(true, np.float32), atol=2e-3)
    np.testing.assert_allclose(lse, np.asarray(true_lse), atol=1e-4)
