"""Tables of measured choices: what is in them, how a call finds its own, and the script that writes them."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dflash_kernels
import jax
import jax.numpy as jnp
import pytest
from dflash_kernels.attention.mla import mosaic_gpu as latent
from dflash_kernels.attention.mla.launch import Tuning as LatentTuning
from dflash_kernels.attention.paged import mosaic_gpu as paged
from dflash_kernels.attention.paged.launch import Tuning as PagedTuning
from dflash_kernels.attention.paged.schedule import paged_schedule
from dflash_kernels.attention.ragged import mosaic_gpu as ragged
from dflash_kernels.attention.ragged.launch import Tuning
from dflash_kernels.core import tuning

from ..devices import on

KERNELS = Path(dflash_kernels.__file__).parent
TABLES = sorted(KERNELS.rglob("tuning.json"))
ENTRIES = [
    pytest.param(str(path.parent.relative_to(KERNELS)), device, entry, id=f"{device}: {entry['case']}")
    for path in TABLES
    for device, entries in json.loads(path.read_text()).items()
    for entry in entries
]
MASK: dict[str, Any] = {
    "window": (None, None), "soft_cap": None, "sinks": None, "alibi_slopes": None, "alibi_sqrt": False, "scale": 0.1,
}  # fmt: skip
EXACT = {"dtype": "bfloat16", "causal": True}


@pytest.fixture(scope="module")
def tune() -> Iterator[Any]:
    """The script, imported from the folder of benchmarks."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    yield importlib.import_module("tune")
    sys.path.remove(folder)


def ragged_call(entry: dict[str, Any]) -> Any:
    """The call that an entry was measured for, and its function."""
    exact, sizes = entry["exact"], entry["sizes"]
    tokens, page_size = sizes["tokens"], sizes["page_size"]
    dtype, lens = jnp.dtype(exact["dtype"]), jax.ShapeDtypeStruct((3,), jnp.int32)
    q = jax.ShapeDtypeStruct((tokens, sizes["heads"], exact["head_dim"]), dtype)
    leading = (tokens // page_size, sizes["kv_heads"], page_size) if page_size else (tokens, sizes["kv_heads"])
    k, v = (jax.ShapeDtypeStruct((*leading, exact[dim]), dtype) for dim in ("head_dim", "value_dim"))
    if not page_size:
        return ragged.tuned_dense, (q, k, v, lens, lens)
    table = jax.ShapeDtypeStruct((2, tokens // page_size), jnp.int32)
    return ragged.tuned_paged, (q, k, v, lens, table, jax.ShapeDtypeStruct((2,), jnp.int32))


def scheduled(function: Any, shape: dict[str, int]) -> Any:
    return lambda *arrays, **options: function(*arrays, schedule=paged_schedule(arrays[4], **shape), **options)


def paged_call(entry: dict[str, Any]) -> Any:
    exact, sizes = entry["exact"], entry["sizes"]
    kv_heads, pages = sizes["kv_heads"], (sizes["b"] * sizes["table_width"], sizes["kv_heads"], sizes["page_size"])
    q = jax.ShapeDtypeStruct((sizes["b"], 1, kv_heads * sizes["rows"], exact["head_dim"]), jnp.dtype(exact["dtype"]))
    pool = jax.ShapeDtypeStruct((*pages, exact["head_dim"]), jnp.dtype(exact["stored"]))
    table = jax.ShapeDtypeStruct((sizes["b"], sizes["table_width"]), jnp.int32)
    if exact.get("dealt"):
        shape = {"heads": q.shape[2], "kv_heads": kv_heads, "tokens": 1}
        return scheduled(paged.tuned, shape), (
            q,
            pool,
            pool,
            table,
            *[jax.ShapeDtypeStruct((sizes["b"],), jnp.int32)] * 2,
        )
    return paged.tuned, (q, pool, pool, table, *[jax.ShapeDtypeStruct((sizes["b"],), jnp.int32)] * 2)


def latent_call(entry: dict[str, Any]) -> Any:
    exact, sizes = entry["exact"], entry["sizes"]
    q = jax.ShapeDtypeStruct((sizes["b"], 1, sizes["rows"], 576), jnp.dtype(exact["dtype"]))
    pool = (sizes["b"] * sizes["table_width"], 1, sizes["page_size"], 576)
    table = jax.ShapeDtypeStruct((sizes["b"], sizes["table_width"]), jnp.int32)
    lens = [jax.ShapeDtypeStruct((sizes["b"],), jnp.int32)] * 2
    return latent.tuned, (q, jax.ShapeDtypeStruct(pool, jnp.dtype(exact["stored"])), table, *lens)


PAGED_MASK: dict[str, Any] = {"window": (None, None), "soft_cap": None, "sinks": None, "scale": 0.1}
CALLS = {
    "attention/ragged": (ragged_call, ragged, Tuning, MASK),
    "attention/paged": (paged_call, paged, PagedTuning, PAGED_MASK),
    "attention/mla": (latent_call, latent, LatentTuning, {"kv_lora_rank": 512, "scale": 0.1}),
}


@pytest.mark.few("NVIDIA H200: paged*")
@pytest.mark.parametrize(("op", "device", "entry"), ENTRIES)
def test_entries_are_valid_and_lower(
    op: str, device: str, entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call like the measured one takes the choice, and the kernel takes it too."""
    call, module, make, mask = CALLS[op]
    function, arrays = call(entry)
    taken = []
    attend = module._attend
    monkeypatch.setattr(
        module, "_attend", lambda *args, **options: taken.append(options["tuning"]) or attend(*args, **options)
    )
    with on(device):
        traced = jax.jit(lambda *args: function(*args, **mask, causal=entry["exact"]["causal"])).trace(*arrays)
        assert "@mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert taken == [make(**entry["choice"])]
    assert entry["us"] <= entry["default_us"]


def test_an_unknown_device_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"exact": EXACT, "sizes": {"tokens": 64}, "choice": {"stages": 3}}]
    monkeypatch.setattr(tuning, "table", lambda op: {"NVIDIA H200": entries})
    for device, stages in (("NVIDIA H200", 3), ("NVIDIA H100 80GB HBM3", 2)):
        with on(device):
            assert tuning.choose("some_op", Tuning, exact=EXACT, sizes={"tokens": 64}).stages == stages


def test_the_nearest_call_serves() -> None:
    entries = [
        {"exact": EXACT, "sizes": {"tokens": 1024, "heads": 8}, "choice": {"stages": 2}},
        {"exact": EXACT, "sizes": {"tokens": 8192, "heads": 8}, "choice": {"stages": 3}},
        {"exact": EXACT | {"causal": False}, "sizes": {"tokens": 2000, "heads": 8}, "choice": {"stages": 4}},
    ]

    def found(tokens: int, heads: int = 8, **exact: Any) -> Any:
        entry = tuning.nearest(entries, EXACT | exact, {"tokens": tokens, "heads": heads})
        return entry and entry["choice"]["stages"]

    assert [found(tokens) for tokens in (1, 128, 1024, 2000, 4000, 65536, 65537)] == [None, 2, 2, 2, 3, 3, None]
    assert found(2000, causal=False) == 4
    assert found(2000, dtype="float16") is None
    assert (found(1024, 64), found(512, 64), found(1024, 0)) == (2, None, 2)


def test_an_op_without_a_table() -> None:
    assert tuning.table("merge_states") == {}
    assert tuning.choose("merge_states", Tuning, exact={}, sizes={}) == Tuning()


@pytest.mark.parametrize("choice", [{"stages": 1}, {"keys": 96}, {"colour": 3}])
def test_impossible_choices_name_the_table(choice: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"exact": EXACT, "sizes": {"tokens": 64}, "choice": choice}]
    monkeypatch.setattr(tuning, "table", lambda op: {"NVIDIA H200": entries})
    with on("NVIDIA H200"), pytest.raises(ValueError, match=r"some_op/tuning.json: .* run benchmarks/tune.py some_op"):
        tuning.choose("some_op", Tuning, exact=EXACT, sizes={"tokens": 64})


def test_tiles_that_do_not_fit() -> None:
    exact = {"dtype": "bfloat16", "head_dim": 256, "value_dim": 256}
    sizes = {"tokens": 128, "heads": 1, "kv_heads": 1, "page_size": 0}
    _, arrays = ragged_call({"exact": exact, "sizes": sizes})
    with on("NVIDIA H200"), pytest.raises(ValueError, match="bytes of shared memory too many"):
        jax.eval_shape(lambda *args: ragged.tuned_dense(*args, **MASK, causal=True, tuning=Tuning(stages=4)), *arrays)


@pytest.mark.few("attention/paged")
@pytest.mark.parametrize("op", ["attention/ragged", "attention/paged", "attention/mla"])
def test_dry_run(op: str, tune: Any, tmp_path: Path) -> None:
    """The script from end to end: inputs, kernels in the interpreter, checks, the table."""
    tune.main(["--dry-run", "--out", str(tmp_path), op])
    subject = tune.tune_subjects.SUBJECTS[op]
    ((device, (entry,)),) = json.loads((tmp_path / op / "tuning.json").read_text()).items()
    assert device == jax.devices()[0].device_kind
    assert subject.make(**entry["choice"]) in [subject.make(**choice) for choice in subject.candidates(subject.tiny)]
    assert 0 < entry["us"] <= entry["default_us"]
    assert tuning.nearest([entry], entry["exact"], entry["sizes"]) == entry


def test_every_table_can_be_written_again(tune: Any) -> None:
    assert {str(path.parent.relative_to(KERNELS)) for path in TABLES} <= set(tune.tune_subjects.SUBJECTS) == set(CALLS)


@dataclasses.dataclass(frozen=True)
class Named:
    name: str = "default"
    other: int | None = None


def fake(tune: Any, results: dict[str, tuple[float, str | None]]) -> Any:
    """A subject whose choices take the given seconds and have the given faults; "raises" is one that does not compile."""

    def program(choice: Named) -> Any:
        seconds, wrong = results[choice.name]
        if wrong == "raises":
            raise ValueError(wrong)
        return lambda: seconds, wrong

    trial = tune.tune_subjects.Trial("a case", ({}, {"tokens": 1}), program)
    choices = [{} if name == "default" else {"name": name} for name in results]
    return tune.tune_subjects.Subject(Named, (), None, lambda case: choices, lambda case: trial)


def test_the_fastest_right_choice_wins(tune: Any) -> None:
    results = {"default": (10e-6, None), "wrong": (1e-6, "wrong"), "broken": (1e-6, "raises"), "slow": (9e-6, None)}
    entry = tune.tune(fake(tune, results | {"fast": (8e-6, None)}), None)
    assert (entry["choice"], entry["us"], entry["default_us"]) == ({"name": "fast"}, 8.0, 10.0)
    assert tune.tune(fake(tune, results | {"slow": (9.85e-6, None)}), None)["choice"] == {"name": "default"}
    with pytest.raises(SystemExit, match="the default choice is wrong"):
        tune.tune(fake(tune, {"default": (1e-6, "wrong"), "fast": (8e-6, None)}), None)


def test_tables_are_merged_and_written_whole(tune: Any, tmp_path: Path) -> None:
    def entry(case: str, tokens: int, stages: int) -> dict[str, Any]:
        return {"case": case, "exact": EXACT, "sizes": {"tokens": tokens}, "choice": {"stages": stages}}

    table = tune.merged({"B": [entry("other device", 1, 2)]}, "A", entry("two", 2, 2))
    table = tune.merged(tune.merged(table, "A", entry("one", 1, 2)), "A", entry("two again", 2, 3))
    assert [one["case"] for one in table["A"]] == ["one", "two again"]
    assert table["B"] == [entry("other device", 1, 2)]
    path = tmp_path / "op" / "tuning.json"
    for _ in range(2):
        tune.write(path, table)
    assert json.loads(path.read_text()) == table
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["no_op"], "no table for no_op"), (["--dry-run"], "--out must name"), ([], "measures on a GPU")],
)
def test_refusals(
    tune: Any, words: list[str], reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit):
        tune.main(words)
    assert reason in capsys.readouterr().err
