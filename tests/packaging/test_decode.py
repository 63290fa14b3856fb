"""What times steps and cycles, on a pair of a few thousand parameters: its figures mean nothing, its rows and engines do."""

import json
import sys

import jax
import pytest
from dflash_kernels import ColumnBlocks

from dflash_jax.bench.workload import published_shape
from dflash_jax.checkpoints import weights
from dflash_jax.engine import Engine
from dflash_jax.models import family_named

from ..small_pair import small_pair


@pytest.fixture
def decode(script, monkeypatch):
    module, card = script("decode"), script("card")
    # The rates of a card whose figures may have floors.
    monkeypatch.setitem(card.CARDS, jax.devices()[0].device_kind, card.Card(1e9, 1e9))
    target, draft = small_pair(hidden=128, inner=128, vocab=1024)
    monkeypatch.setattr(module, "published_shape", lambda name: ("qwen3", target, draft))
    for one in (module, weights):
        monkeypatch.setattr(one, "blocks_pay", lambda config, dtype, rows: rows < 32)
    return module


def test_batches_have_engines_as_their_users_do(decode):
    """Weights in blocks for one sequence and not for two or three, which share theirs; pages for all of them."""
    of_batch = decode.engines("small", 64, [1, 3, 2])
    assert list(of_batch) == [1, 3, 2]
    assert of_batch[3] is of_batch[2] is not of_batch[1]
    assert {batch: engine.max_batch for batch, engine in of_batch.items()} == {1: 1, 2: 3, 3: 3}
    name = "layers.1.mlp.down_proj.weight"
    blocked = {batch: isinstance(engine.weights["target"][name], ColumnBlocks) for batch, engine in of_batch.items()}
    assert blocked == {1: True, 2: False, 3: False}
    longer = decode.resized(of_batch, 128)
    assert longer[3] is longer[2] is not longer[1]
    assert all(engine.max_model_len == 128 + 640 for engine in longer.values())


def test_exact_engines_have_as_many_slots_as_they_run(decode):
    of_batch = decode.resized(decode.engines("small", 64, [2, 3], exact=True), 128)
    assert {batch: (engine.max_batch, engine.exact) for batch, engine in of_batch.items()} == {
        2: (2, True),
        3: (3, True),
    }
    assert of_batch[2].weights is of_batch[3].weights


def test_floors_know_what_a_drafter_sees(decode):
    (engine,) = decode.engines("small", 64, [2]).values()
    (short,) = decode.resized({2: engine}, 65536, window=1024).values()
    (whole,) = decode.resized({2: engine}, 65536).values()
    assert short.draft_window == 1024
    floors = {
        draft: [decode.floor_ms(one, draft=draft, context=65536, batch=2) for one in (short, whole)]
        for draft in (True, False)
    }
    assert floors[True][0] < floors[True][1]
    assert floors[False][0] == floors[False][1]


def test_the_floor_of_one_token_counts_its_own_experts(script):
    """Nine of the 257 that a layer of Qwen3.5-35B-A3B has, every token's included; of several tokens nobody knows how many."""
    module = script("floors")
    family, target, draft = published_shape("qwen3.5-35b-a3b")
    pair, kind = [(target, family_named(family)), (draft, family_named("dflash"))], jax.numpy.dtype("bfloat16")
    shapes = weights.weight_shapes(pair, kind, rows=16)
    engine = Engine(target=target, draft=draft, weights=shapes, dtype=kind, max_model_len=2048, max_batch=8)
    size = {"context": 1024, "batch": 1}
    assert 5.8e9 < module.floor_ms(engine, draft=False, **size) * 1e-3 * module.card().bandwidth < 6.1e9
    assert module.floor_ms(engine, draft=True, **size) is None
    assert module.floor_ms(engine, draft=False, context=1024, batch=2) is None


def test_rows(decode, monkeypatch, tmp_path, capsys):
    """A step and a cycle with their floors, first tokens, and the time of compiling once for all."""
    words = ["--models", "qwen3-4b", "--batch", "1", "--context", "32", "--calls", "1"]
    monkeypatch.setattr(sys, "argv", ["decode.py", *words, "--out", str(tmp_path), "--commit", "abc"])
    decode.main()
    rows = {row["case"]: row for row in json.loads((tmp_path / "decode_ctx0k.json").read_text())}
    timed = [f"{kind} ctx0k B1" for kind in ("step qwen3-4b", "cycle qwen3-4b-b16")]
    others = ["first token qwen3-4b ctx0k", "first token qwen3-4b-b16 ctx0k", "compile qwen3-4b ctx0k"]
    assert sorted(rows) == sorted(timed + others)
    assert all(row["value"] > 0 and row["commit"] == "abc" for row in rows.values())
    assert all(rows[case]["floor"] is not None and len(rows[case]["spread"]) == 2 for case in timed)
    assert "compiled in" in capsys.readouterr().out
