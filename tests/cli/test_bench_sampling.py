"""`dflash-jax bench` of users who sample: with a temperature and the filters that model cards recommend."""

import json
from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax.bench.measure import measure
from dflash_jax.bench.workload import synthetic
from dflash_jax.cli.commands import main


@pytest.mark.few
def test_users_who_sample(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table says what was drawn from, rows hold all of it."""
    path = tmp_path / "figures.json"
    words = ["--temperature", "0.7", "--top-k", "20", "--top-p", "0.8", "--json", str(path)]
    sizes = ["--requests", "2", "--input-length", "8", "--output-length", "6", "--max-model-len", "64"]
    assert main(["bench", "--model", str(target), *sizes, *words]) == 0
    assert ": 8 random tokens, temperature 0.7, top_p 0.8, top_k 20\n" in capsys.readouterr().out
    rows = json.loads(path.read_text())
    assert [row["draft"] for row in rows] == [True, False]
    for row in rows:
        law = {name: row[name] for name in ("temperature", "top_p", "top_k", "min_p")}
        assert law == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0}
        assert row["tokens_per_s"] > 0


def test_what_requests_draw_from(target: Path) -> None:
    """Programs of the mode that the law needs, each compiled before the timed run; every request has a seed of its own."""
    model = dj.load(target, max_batch=2, max_model_len=64)
    size = model.target.vocab_size - 2
    for law, mode in (({}, "greedy"), ({"temperature": 0.5}, "sampled"), ({"temperature": 0.5, "min_p": 0.1}, "full")):
        figures = measure(model, synthetic(size, 8, 2, 6, **law), concurrency=2, requests=2, draft=True)
        assert any(f"draft {mode}" in shape for shape in model.compiled_shapes())
        assert (figures.temperature, figures.min_p) == (law.get("temperature", 0.0), law.get("min_p", 0.0))
    assert synthetic(size, 8, 1, 6, min_p=0.1).law == {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--top-k", "-2"], "top_k must be an integer of at least 0, got -2"),
        (["--top-p", "0"], "top_p must be a number"),
        (["--min-p", "1.5"], "min_p must be a number from 0.0"),
    ],
)
def test_laws_that_are_none_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--model", "/no/such/model", *options]) == 2
    assert said in capsys.readouterr().err
