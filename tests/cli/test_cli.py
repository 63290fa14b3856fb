"""The command `dflash-jax`: what it prints where, its exit codes, and how it stops."""

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from dflash_convert.cli import main as convert
from safetensors.numpy import load_file, save_file

import dflash_jax as dj
from dflash_jax.cli.commands import main
from dflash_jax.engine.memory import size
from dflash_jax.models.dflash import SHARED_HEAD

COMMAND = [sys.executable, "-m", "dflash_jax.cli.commands"]


def generated(target: Path, prompt: str, **changes) -> dj.Completion:
    return dj.generate(dj.load(target), prompt, dj.SamplingParams(max_tokens=24, **changes))


def test_generate_prints_the_text_and_nothing_else(target, capsys):
    assert main(["generate", "ab", "--model", str(target), "--max-tokens", "24"]) == 0
    out, err = capsys.readouterr()
    assert out == generated(target, "ab").text + "\n"
    assert err == ""


@pytest.mark.few
def test_several_prompts_come_in_order(target, capsys):
    prompts = ["first", "second one", "3"]
    assert main(["generate", *prompts, "--model", str(target), "--max-tokens", "24"]) == 0
    expected = [f"==> {prompt!r} <==\n{generated(target, prompt).text}\n" for prompt in prompts]
    assert capsys.readouterr().out == "".join(expected)


def test_json_holds_the_whole_completion(target, capsys):
    options = ["--temperature", "0.9", "--seed", "7", "--json", "--max-tokens", "24"]
    assert main(["generate", "ab", "c", "--model", str(target), *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["ab", "c"]
    for row in rows:
        expected = generated(target, row["prompt"], temperature=0.9, seed=7)
        assert (row["text"], row["token_ids"], row["seed"]) == (expected.text, expected.token_ids, 7)
        assert row["stats"]["tokens_per_s"] > 0


@pytest.mark.few
def test_several_completions_with_the_models_own_temperature(target, tmp_path, capsys):
    shutil.copytree(target, tmp_path / "own")
    (tmp_path / "own" / "generation_config.json").write_text('{"temperature": 0.9, "top_k": 7}')
    options = ["--seed", "7", "--json", "--max-tokens", "12", "--n", "2", "--generation-config", "auto", "--top-k", "0"]
    assert main(["generate", "ab", "c", "--model", str(tmp_path / "own"), *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["prompt"], row["seed"]) for row in rows] == [("ab", 7), ("ab", 8), ("c", 7), ("c", 8)]
    params = dj.SamplingParams(max_tokens=12, temperature=0.9, seed=7, n=2)
    expected = dj.generate(dj.load(target), ["ab", "c"], params)
    assert [row["token_ids"] for row in rows] == [row.token_ids for row in expected]


def test_prompt_from_stdin_without_its_final_line_break(target, capsys, monkeypatch):
    for given in ("ab\n", "ab\r\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(given, newline=""))
        assert main(["generate", "-", "--model", str(target), "--max-tokens", "24"]) == 0
        assert capsys.readouterr().out == generated(target, "ab").text + "\n"


def test_stats_go_to_stderr(target, capsys):
    assert main(["generate", "ab", "--model", str(target), "--max-tokens", "24", "--stats"]) == 0
    first, second, third = capsys.readouterr().err.splitlines()
    assert re.match(
        r"24 tokens \(length\), \d+ tokens/s, first after [\d.]+ s, compilation [\d.]+ s apart, seed \d+", first
    )
    assert re.match(r"[\d.]+ tokens per cycle: 1\S  2\S  3\S  4\S$", second)
    assert re.match(r"accepted drafts by position, %: \d+ \d+ \d+$", third)


def test_a_terminal_gets_no_control_characters(target, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert (
        main(["generate", "ab", "--model", str(target), "--max-tokens", "150", "--temperature", "5", "--seed", "1"])
        == 0
    )
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "x", "--max-tokens", "0"], 2, "max_tokens must be"),
        (["generate", "x", "--top-p", "2"], 2, "top_p must be"),
        (["generate", "x", "--structured", '{"xml": 1}'], 2, "structured takes json, regex, choice, grammar"),
        (["generate", "x", "--structured", "word"], 2, "structured must be a dflash_jax.Structured or a mapping"),
        (
            ["generate", "x", "--max-tokens", "900"],
            4,
            "max_model_len is 200, the model's own: shorten the prompt or lower max",
        ),
        (
            ["generate", "x", "--max-tokens", "90", "--max-model-len", "50"],
            4,
            "max_model_len is 50: shorten the prompt, lower max_tokens, or load with a larger max_model_len, 200 at most",
        ),
        (["generate", "", "--max-tokens", "9"], 4, "error: the prompt is empty"),
        (["generate", "x", "", "--max-tokens", "9"], 4, "error: prompts[1]: the prompt is empty"),
        (["generate", "x", "--max-model-len", "100000"], 2, "max_model_len must be"),
        (["generate", "x", "--chat", "--max-tokens", "9"], 4, "no chat template and takes no messages: give a text"),
        (["generate", "x", "--chat-option", "enable_thinking=false"], 2, "add --chat"),
        (["generate", "-", "-"], 2, "once"),
        (["generate", "x", "--model", "/nowhere"], 3, "/nowhere"),
        (["info", "/nowhere"], 3, "/nowhere"),
        (["info", "--max-batch", "0"], 2, "max_batch must be"),
        (["info", "--verify-length", "99"], 2, "verify_length must be"),
        (["info", "--draft-window", "0"], 2, "draft_window must be"),
        (["info", "--cache-dtype", "fp8", "--scale-range", "1,2"], 2, "scale_range must be three numbers"),
        (["info", "--cache-dtype", "fp8", "--calibration", "/nowhere"], 4, "/nowhere cannot be read"),
        (["generate", "x", "--cache-dtype", "fp8_packed"], 2, "needs latent rows"),
        (["generate", "x\udcff", "--max-tokens", "9"], 4, "character 1 of the text is '\\udcff'"),
        (["generate", "x", "--model", ""], 3, "an empty name"),
        (["generate", "x", "--revision", "main"], 3, "is a local folder, so revision 'main' has no meaning"),
        (["info", "--draft-revision", "v2"], 3, "is a local folder, so revision 'v2' has no meaning"),
    ],
)
def test_errors_are_one_line_and_a_code(target, capsys, arguments, code, message):
    if "--model" not in arguments and arguments[0] == "generate":
        arguments = [*arguments, "--model", str(target)]
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_problems_of_a_folder_are_one_line(tmp_path, target, capsys):
    """All of them, or where they are many the first ones and how many more there are."""
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    assert main(["info", str(tmp_path)]) == 3
    assert capsys.readouterr().err.count("\n") == 1
    tensors = load_file(target / "model.safetensors")
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, tmp_path / "model.safetensors")
    assert main(["info", str(tmp_path)]) == 3
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.count(" is missing") == 6
    assert f"; and {len(tensors) - 7} more, which dflash-convert --dry-run lists\n" in err


def test_a_converted_folder_that_has_lost_its_files_is_one_line(target, tmp_path, capsys):
    """With what to do about it first, and no hint at a plan, which there is none of."""
    assert convert([str(target), "--output", str(tmp_path / "out"), "--quiet"]) == 0
    shutil.rmtree(tmp_path / "out" / "params")
    assert main(["info", str(tmp_path / "out")]) == 3
    found = r"error: \S+ is not what its conversion\.json says, convert again: \d+ files are missing, params/\S+ the first.*\n"
    assert re.fullmatch(found, capsys.readouterr().err)


def test_files_of_a_converted_folder_are_compared_where_asked(target, tmp_path, capsys):
    """A byte that changed on the way to another machine changes no size; weights with it would load."""
    out = tmp_path / "out"
    assert convert([str(target), "--draft", str(target / "draft"), "--output", str(out), "--quiet"]) == 0
    assert main(["info", str(out), "--hashes"]) == 0
    assert re.search(
        r"^hashes    \d+ files are what their conversion recorded$", capsys.readouterr().out, flags=re.MULTILINE
    )
    weights = max((out / "draft").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert main(["info", str(out)]) == 0
    assert "hashes" not in capsys.readouterr().out
    assert main(["info", str(out), "--hashes"]) == 3
    assert f"{weights.relative_to(out / 'draft')} has changed: its sha256" in capsys.readouterr().err
    assert main(["info", str(target), "--hashes"]) == 0
    assert "none is recorded" in capsys.readouterr().out


def test_text_that_cannot_be_written_is_one_line(target):
    with open("/dev/full", "w") as full:
        run = [*COMMAND, "generate", "ab", "--model", str(target), "--max-tokens", "9"]
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("arguments", [[], ["generate"], ["nothing"], ["generate", "x", "--draft", "d", "--no-draft"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert "usage:" in capsys.readouterr().err


def test_info_counts_without_loading(target, capsys):
    assert main(["info", str(target), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    model = dj.load(target)
    sizes = [sum(array.size for array in model.engine.weights["target"].values())]
    assert [row["parameters"] for row in facts["models"]][:1] == sizes
    assert facts["models"][1]["block_size"] == 4
    assert facts["pages"]["pool_bytes"] == model.engine.pool_bytes
    assert facts["versions"]["jax"] == jax.__version__
    assert main(["info", str(target), "--no-draft"]) == 0
    assert "drafter" not in capsys.readouterr().out


def test_pages_in_int8_with_texts_to_calibrate_on(target, tmp_path, capsys):
    """The file's texts go to `load`; `info` needs none, and without them nothing is generated."""
    command = ["generate", "ab", "--model", str(target), "--max-tokens", "9", "--cache-dtype", "int8"]
    (tmp_path / "texts").write_text("some text\nand more\n")
    assert main([*command, "--calibration", str(tmp_path / "texts")]) == 0
    model = dj.load(target, cache_dtype="int8", calibration=["some text", "and more"])
    assert capsys.readouterr().out == dj.generate(model, "ab", dj.SamplingParams(max_tokens=9)).text + "\n"
    assert main(["info", str(target), "--cache-dtype", "int8"]) == 0
    assert f"pages     {size(model.engine.pool_bytes)} in int8 (target)" in capsys.readouterr().out
    assert main(command) == 2
    assert "needs calibration" in capsys.readouterr().err
    assert main([*command, "--calibration", str(tmp_path / "none")]) == 4


@pytest.mark.few
def test_pages_in_eight_bits(target, capsys):
    """As asked for, the text is what `load` with that option gives; `info` counts the smaller pages."""
    assert main(["generate", "ab", "--model", str(target), "--max-tokens", "9", "--cache-dtype", "fp8"]) == 0
    params = dj.SamplingParams(max_tokens=9)
    assert capsys.readouterr().out == dj.generate(dj.load(target, cache_dtype="fp8"), "ab", params).text + "\n"
    assert main(["info", str(target), "--cache-dtype", "fp8"]) == 0
    out = capsys.readouterr().out
    assert "in float8_e4m3fn (target) and float32 (drafter)" in out
    assert f"pages     {size(dj.load(target, cache_dtype='fp8').engine.pool_bytes)} in float8" in out


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_info_counts_weights_in_eight_bits(target, capsys, kind):
    """As `load` keeps them, with what they take until then; nothing of it is said without the option."""
    memory = dj.load(target, weight_dtype=kind).memory
    assert main(["info", str(target), "--weight-dtype", kind]) == 0
    out = capsys.readouterr().out
    assert f": {size(memory.weights)} weights, " in out
    assert f"large matrices in {kind}, {size(memory.reading)} while weights are read" in out
    assert main(["info", str(target)]) == 0
    out = capsys.readouterr().out
    assert f": {size(dj.load(target).memory.weights)} weights, " in out
    assert "while weights are read" not in out


@pytest.mark.parametrize("kind", [None, "int8"])
def test_info_says_what_a_drafter_in_eight_bits_takes(capsys, kind):
    """Its copy of the target's head counts, unless the target's is in eight bits itself."""
    options = [] if kind is None else ["--weight-dtype", kind]
    assert main(["info", "--draft-weight-dtype", "fp8_dynamic", *options]) == 0
    out = capsys.readouterr().out
    copy: Any = dj.load(draft_weight_dtype="fp8_dynamic").engine.weights["draft"][SHARED_HEAD]
    head = size(copy.values.nbytes + copy.scales.nbytes)
    said = f", {head} for its copy of the target's head, " if kind is None else f", the target's in {kind}, "
    assert f"the drafter's large matrices in fp8_dynamic{said}" in out


def test_interrupt_ends_quietly_with_130(target):
    run = [*COMMAND, "generate", "ab", "--model", str(target), "--max-tokens", "190", "--temperature", "1"]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1), process.stderr.read()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.decode().strip()) in [
        (130, "interrupted"),
        (0, ""),
    ]  # it may have been done by then


def test_reader_that_leaves_is_no_traceback(target):
    run = [*COMMAND, "generate", *["ab"] * 8, "--model", str(target), "--max-tokens", "190", "--temperature", "1"]
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) in (0, 1)
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
