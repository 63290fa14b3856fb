"""The demonstration: what it says before and after, and that its own prompts are held out and lead to texts that do not loop."""

import json
import re
import shutil
from pathlib import Path

import pytest

import dflash_jax as dj
from dflash_jax.cli.commands import main
from dflash_jax.cli.demo import default_prompts

DATA = Path(__file__).parent.parent / "data" / "heldout_prompts.json"


def test_demo_shows_what_drafting_spares_before_it_shows_speed(target, capsys):
    assert main(["demo", "ab", "--model", str(target), "--max-tokens", "24"]) == 0
    out = capsys.readouterr().out
    done = dj.generate(dj.load(target), "ab", dj.SamplingParams(max_tokens=24))
    passes, mean = len(done.acceptance_lengths), 23 / len(done.acceptance_lengths)
    assert f"ab{done.text}\n" in out
    assert re.search(
        rf"tokens per cycle +{mean:.2f}   \(of 4 at most\)\n"
        r"cycles by length  1\S  2\S  3\S  4\S\n"
        rf"target passes +{passes} where decoding without a drafter takes 23   \({1 - passes / 23:.0%} saved\)\n"
        r"same text +yes: 1 of 1 equal token for token\n"
        r"with drafting +\d+ tokens/s   \([\d.]+ times as fast\)\n"
        r"without +\d+ tokens/s\n\Z",
        out,
    )
    said = out.index("On a CPU this shows what drafting does")
    assert said < out.index("compiling")
    assert "takes a CPU many times as long as one" in " ".join(out.split())


def test_demo_of_one_token_has_nothing_to_compare(target, capsys):
    assert main(["demo", "ab", "--model", str(target), "--max-tokens", "1"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"target passes +0 where decoding without a drafter takes 0\n", out)
    assert re.search(r"with drafting +0 tokens/s\nwithout +0 tokens/s\n", out)


def test_demo_without_a_drafter(target, capsys):
    assert main(["demo", "ab", "--model", str(target), "--no-draft", "--max-tokens", "9"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^without drafting +\d+ tokens/s\n\Z", out, re.MULTILINE)
    assert not any(word in out for word in ("with drafting ", "per cycle", "same text", "On a CPU"))


def test_demo_says_that_there_is_no_drafter_and_refuses_before_it_compiles(target, tmp_path, capsys):
    alone = shutil.copytree(target, tmp_path / "alone", ignore=shutil.ignore_patterns("draft"))
    assert main(["demo", "", "--model", str(alone)]) == 4
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(r"note: no drafter: .*\nerror: the prompt is empty.*\n", told.err)


def test_prompts_of_the_demo_are_held_out():
    """With their source and licence."""
    rows = json.loads((Path(dj.__file__).parent / "cli" / "demo_prompts.json").read_text())
    assert [row["text"] for row in rows] == default_prompts()
    held_out = json.loads(DATA.read_text())
    assert len(rows) == 3
    assert all(row in held_out for row in rows)


@pytest.mark.few
@pytest.mark.usefixtures("optimised")
def test_texts_of_the_demo_do_not_loop():
    """Hardly any run of eight tokens comes twice."""
    model = dj.load(max_batch=4, dtype="float32")
    for done in dj.generate(model, default_prompts(), dj.SamplingParams(max_tokens=128)):
        runs = [tuple(done.token_ids[i : i + 8]) for i in range(len(done.token_ids) - 7)]
        assert len(runs) > 100
        assert len(set(runs)) > 0.95 * len(runs)
