"""The whole command on a handful of files, what it writes, and what happens when it is interrupted."""

import json
import os
from dataclasses import replace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax.errors import ParameterError
from dflash_jax.models import family_of
from dflash_jax.training.__main__ import UNFINISHED, main
from dflash_jax.training.corpus import build_corpus, read_sources
from dflash_jax.training.drafter import train_drafter
from dflash_jax.training.optimizer import half
from dflash_jax.training.rollouts import roll_out
from dflash_jax.training.settings import TINY, with_changes
from dflash_jax.training.stages import Clock, Interrupted, latest, run_steps
from dflash_jax.training.target import initial_target, train_target
from dflash_jax.training.tokenizer import encode_files


class StopAfter(Clock):
    """Runs out at the n-th question."""

    def __init__(self, work, questions):
        super().__init__(work, lambda line: None)
        self.questions = questions

    def expired(self) -> bool:
        self.questions -= 1
        return self.questions < 0


def quiet(work) -> Clock:
    return Clock(work, lambda line: None)


def words(tiny, folder):
    """The command line of a whole pipeline below `folder`."""
    return ["--preset", "tiny", "--folder", tiny.folder, "--out", str(folder / "out"), "--work", str(folder / "work")]


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """One run of the command to its end: the work folder and the exported folder."""
    root = tmp_path_factory.mktemp("run")
    assert main(words(tiny, root)) == 0
    return root / "work", root / "out"


@pytest.mark.parametrize("stage", ["target", "drafter"])
def test_loss_falls(run, stage):
    history = json.loads((run[0] / "log.json").read_text())[stage]["history"]
    assert history[-1]["step"] == 40
    assert history[-1]["loss"] < history[0]["loss"] - 0.05


def test_heldout_text_is_in_no_stream(run, tiny):
    corpus = build_corpus(tiny, run[0] / "corpus", pytest.fail)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    assert corpus.heldout
    for file in corpus.heldout:
        body = encode_files(tokenizer, [file["text"]])[:-1].tobytes()
        assert corpus.tokens.tobytes().find(body) < 0, file["path"]
        assert corpus.prompt_tokens.tobytes().find(body) < 0, file["path"]


def test_training_files_are_in_their_stream(run, tiny):
    corpus = build_corpus(tiny, run[0] / "corpus", pytest.fail)
    files, _ = read_sources(tiny)
    heldout = {file["sha256"] for file in corpus.heldout}
    assert heldout < {file.sha256 for file in files}
    assert len(files) - len(heldout) == np.sum(corpus.tokens == 0) + np.sum(corpus.prompt_tokens == 0)


def test_prompts_come_from_heldout_files(run, tiny):
    corpus = build_corpus(tiny, run[0] / "corpus", pytest.fail)
    prompts = json.loads((run[0] / "heldout_prompts.json").read_text())
    assert len(prompts) == tiny.shipped_prompts
    for prompt in prompts:
        assert set(prompt) == {"text", "source", "licence"}
        assert any(prompt["text"] in file["text"] for file in corpus.heldout)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_exported_folder_reloads_to_the_same_bits(run, tiny, name):
    work, out = run
    config_json = json.loads((out / name / "config.json").read_text())
    tensors = load_file(out / name / "model.safetensors")
    family = family_of(config_json)
    config = family.config(config_json, list(tensors))
    assert config == (tiny.target_config if name == "target" else tiny.draft_config)
    table = family.parameters(config)
    assert {source.name for parameter in table for source in parameter.sources} == set(tensors)
    clock = quiet(work)
    corpus = build_corpus(tiny, work / "corpus", pytest.fail)
    params = train_target(tiny, corpus.tokens, work / "target", clock)
    if name == "draft":
        data = roll_out(tiny, params, corpus.prompt_tokens, work / "rollouts", clock)
        params = train_drafter(tiny, params, data, work / "drafter", clock)
    for parameter in table:
        stored = np.concatenate([tensors[source.name] for source in parameter.sources])
        expected = np.asarray(half(params)[parameter.name])
        assert stored.dtype == expected.dtype
        assert np.array_equal(stored.view(np.uint16), expected.view(np.uint16)), parameter.name


def test_record_and_cards_name_what_was_used(run):
    work, out = run
    record = json.loads((work / "record.json").read_text())
    assert record["manifest"]["packages"][0]["licence"]
    assert {row["temperature"] for row in record["evaluation"]["rows"]} == {0.0, 1.0}
    card = (out / "target" / "README.md").read_text()
    assert record["command"] in card
    assert f"{record['heldout_loss']:.4f}" in card
    draft = (out / "draft" / "README.md").read_text()
    gained = [row["histogram"] for row in record["evaluation"]["rows"] if row["set"] == row["loops"] == "all"]
    assert gained
    assert all(f": {', '.join(map(str, counts))}\n" in draft for counts in gained)
    lines = [line for text in (card, draft) for line in text.splitlines()]
    # A command is as long as the paths in it.
    assert [
        line for line in lines if len(line) > 132 and not line.startswith("|") and record["command"] not in line
    ] == []


def test_resumed_training_equals_uninterrupted_training(run, tiny, tmp_path):
    work, _ = run
    corpus = build_corpus(tiny, work / "corpus", pytest.fail)
    whole = train_target(tiny, corpus.tokens, work / "target", quiet(work))
    with pytest.raises(Interrupted, match="step 20 of 40"):
        train_target(tiny, corpus.tokens, tmp_path / "target", StopAfter(tmp_path, 1))
    assert latest(tmp_path / "target") == 20
    resumed = train_target(tiny, corpus.tokens, tmp_path / "target", quiet(tmp_path))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), whole, resumed))

    data = roll_out(tiny, whole, corpus.prompt_tokens, work / "rollouts", quiet(work))
    whole_draft = train_drafter(tiny, whole, data, work / "drafter", quiet(work))
    with pytest.raises(Interrupted, match="step 10 of 40"):
        train_drafter(tiny, whole, data, tmp_path / "drafter", StopAfter(tmp_path, 0))
    resumed_draft = train_drafter(tiny, whole, data, tmp_path / "drafter", quiet(tmp_path))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), whole_draft, resumed_draft))


class Counting(Clock):
    """Another second at each look."""

    def elapsed(self) -> float:
        self.looks = getattr(self, "looks", 0) + 1
        return float(self.looks)


def test_a_run_until_a_time_has_rates_that_fall_by_then(tmp_path):
    rates = []

    def chunk(state, first, given):
        rates.extend(given)
        return {"x": state["x"] + len(given)}, {"loss": 0.0}

    clock = Counting(tmp_path, lambda line: None)
    state = run_steps(
        "drafter", {"x": jax.numpy.zeros(())}, chunk, tmp_path / "drafter", clock, total=1000, peak=1.0, settings=TINY,
        until=60.0,
    )  # fmt: skip
    assert clock.log["drafter"]["steps"] == len(rates) == state["x"] == latest(tmp_path / "drafter") < 1000
    assert rates[-1] < 0.01 < 0.9 < max(rates)


def test_parts_of_continuations_are_those_of_one_process(run, tiny, tmp_path):
    work, _ = run
    corpus = build_corpus(tiny, work / "corpus", pytest.fail)
    target = initial_target(tiny)

    settings = with_changes(tiny, rollouts=tuple(replace(plan, batch=4) for plan in tiny.rollouts))

    def made(folder, **how):
        return roll_out(settings, target, corpus.prompt_tokens, folder, quiet(tmp_path), **how)

    with pytest.raises(ParameterError, match="at most 2"):
        made(tmp_path / "none", part=(0, 3))
    whole = made(tmp_path / "whole")
    first = made(tmp_path / "parts", part=(0, 2), patience=0.0)
    second = made(tmp_path / "parts", part=(1, 2))
    for alone, half_of, both in zip(whole, first, second, strict=True):
        for kind, rows in alone.items():
            assert len(half_of[kind]) == -(-len(rows) // 2)
            assert {row.tobytes() for row in half_of[kind]} < {row.tobytes() for row in rows}
            assert {row.tobytes() for row in both[kind]} == {row.tobytes() for row in rows}


def test_time_limit_ends_with_its_own_status(tiny, tmp_path):
    assert main([*words(tiny, tmp_path), "--stop-after", "0"]) == UNFINISHED
    assert not (tmp_path / "out").exists()


def test_a_work_folder_of_other_settings_is_not_gone_on_with(tiny, tmp_path, capsys):
    """What lies there was trained with other taps; a card would name the new ones."""
    for _ in range(2):
        assert main([*words(tiny, tmp_path), "--stop-after", "0"]) == UNFINISHED
    assert main([*words(tiny, tmp_path), "--stop-after", "0", "--taps", "0,2", "--seed", "3"]) == 1
    assert "other settings (seed 0, now 3, taps [0, 1], now [0, 2]): name another --work" in capsys.readouterr().err


def test_what_a_run_has_left_is_whole(tmp_path, monkeypatch):
    clock = quiet(tmp_path)
    clock.note("target", steps=1)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="full"):
        clock.note("target", steps=2)
    assert quiet(tmp_path).log["target"]["steps"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["log.json"]


def full(*_):
    raise OSError("the disk is full")


def test_a_corpus_without_files_is_an_error(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    folders = ["--folder", str(tmp_path / "empty"), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert main(["--preset", "tiny", *folders]) == 1
    assert "install the `train` extra" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["--out", "--work"])
def test_folders_that_cannot_be_written_are_said_before_anything_is_trained(tmp_path, capsys, which):
    (tmp_path / "file").write_text("")
    folders = {"--out": tmp_path / "out", "--work": tmp_path / "work"} | {which: tmp_path / "file" / "folder"}
    assert main(["--preset", "tiny", *(str(part) for pair in folders.items() for part in pair)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: --out and --work must be folders that can be written to: [Errno ")
