"""What counts equal texts, told the texts: its rows, whatever is loaded."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

from dflash_jax.decoding import cycle


def test_rows_count_the_texts_that_are_equal(script, monkeypatch, tmp_path):
    """Of two texts one is another one alone, where requests sample; each row says how it was measured."""
    exact, loaded = script("exact"), []

    def load(**options):
        loaded.append(options)
        return SimpleNamespace()

    monkeypatch.setattr(exact.dj, "load", load)
    monkeypatch.setattr(exact, "texts", lambda model, prompts, law, draft=True: [[len(prompt)] for prompt in prompts])
    monkeypatch.setattr(
        exact,
        "alone",
        lambda model, prompts, law: [
            [len(prompt) if at or law == "greedy" else 0] for at, prompt in enumerate(prompts)
        ],
    )
    words = ["--batch", "1", "8", "--texts", "2", "--out", str(tmp_path), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["exact.py", *words])
    exact.main()
    rows = {row["case"]: row for row in json.loads((tmp_path / "exact.json").read_text())}
    assert [(one["max_batch"], one["exact"], one["dtype"]) for one in loaded] == [
        (1, True, "bfloat16"),
        (8, True, "bfloat16"),
    ]
    assert len(rows) == 2 * 2 * 3
    assert {row["unit"] for row in rows.values()} == {"of 2"}
    unequal = [case for case, row in rows.items() if row["value"] < 2]
    assert unequal == [f"shipped pair, {batch} slots, sampled: alone" for batch in (1, 8)]
    assert {row["command"] for row in rows.values()} == {"python benchmarks/exact.py --batch 1 8 --texts 2"}


def test_proposals_that_are_known_stand(script, monkeypatch, tmp_path):
    """Of a small target all texts are equal, and all but every seventh proposal stands."""
    shapes = script("exact_shapes")
    family, whole = shapes.MODELS["qwen3-4b"]
    small = replace(
        whole, vocab_size=300, hidden_size=64, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=32
    )
    monkeypatch.setattr(shapes, "MODELS", {"qwen3-4b": (family, small)})
    monkeypatch.setattr(shapes, "LAWS", {"greedy": {}})
    monkeypatch.setattr(sys.modules["exact"], "TOKENS", 48)
    monkeypatch.setattr(shapes, "TOKENS", 48)
    monkeypatch.setattr(
        sys, "argv", ["exact_shapes.py", "--texts=2", "--batch=2", "--layers=2", "--out", str(tmp_path), "--commit=abc"]
    )
    for name in ("commit_context", "best_proposals", "propose"):
        monkeypatch.setattr(cycle, name, getattr(cycle, name))
    # With one law nothing is traced twice, and other tests of this process keep what they have compiled.
    monkeypatch.setattr(shapes.jax, "clear_caches", lambda: None)
    shapes.main()
    rows = {
        row["case"].rpartition("greedy")[2]: row for row in json.loads((tmp_path / "exact_shapes.json").read_text())
    }
    counts = [row["value"] for row in rows.values() if row["unit"] == "of 2"]
    assert counts == [2] * 4
    assert 5 < rows[""]["value"] <= 7
