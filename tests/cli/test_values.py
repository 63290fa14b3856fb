"""What options mean, what is said of those that mean nothing, and that wrong names cost no import of JAX."""

import json
import subprocess
import sys

import pytest

import dflash_jax as dj
from dflash_jax.cli import commands
from dflash_jax.cli.commands import main
from dflash_jax.cli.values import chat_option, token_ids

GENERATE = ["generate", "ab", "--max-tokens", "24", "--json", "--model"]


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("true", True), ("True", True), ("false", False), ("False", False), ("null", None), ("None", None),
        ("3", 3), ("-3", -3), ("+3", 3), ("1_000", 1000), ("0.5", 0.5), (".5", 0.5), ("1e3", 1000.0), ("0x10", 16),
        ('"False"', "False"), ("'False'", "False"), ('"two words"', "two words"), ("'it\\'s'", "it's"), ('""', ""),
        ("low", "low"), ("gpt-4.1", "gpt-4.1"), ("_x", "_x"), ("größe", "größe"), ("yes", "yes"),
        ('[true, "a", null]', [True, "a", None]), ("[True, 'a', None]", [True, "a", None]), ("{'a': False}", {"a": False}),
        ('{"a": [1]}', {"a": [1]}),
    ],
)  # fmt: skip
def test_values_of_chat_options_are_what_json_and_python_write(said: str, value: object) -> None:
    """A text needs quotes, or is a word."""
    found = chat_option(f"name={said}")
    assert found == ("name", value)
    assert type(found[1]) is type(value)


@pytest.mark.parametrize(
    "said",
    [
        "FALSE", "tRUE", "NULL", "none", "NaN", "Infinity", "-Infinity", "1e999", "two words", "", " ", "26 Jul 2024",
        "2024-07-26", "007", "a=b", "{1, 2}", "b'a'", "1j", "{1: 2}", "[1", "'a", "f(1)", "x + 1", "[" * 200_000,
        "-" * 200_000 + "1",
    ],
)  # fmt: skip
def test_other_values_are_refused(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "x", "--chat", "--chat-option", f"name={said}"])
    assert stop.value.code == 2
    assert "expected true, false, null, a number, a word, a text in quotes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "usage", "said"),
    [
        (["generate", "x", "--max-token=5", "--stat", "--sead", "5"], "generate", "--sead: did you mean --seed?"),
        (["info", "a", "b"], "info", "unrecognized arguments: b"),
        (["generat", "x"], "", "; did you mean generate?"),
        (["info", "--dtype", "float23"], "info", "; did you mean float32?"),
        (["generate", "x", "--stop-token-ids", "1,a"], "generate", "expected token ids between commas"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_the_usage_of_their_command(
    arguments: list[str], usage: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.startswith(f"usage: dflash-jax {usage or '[-h]'}")
    assert said in err


@pytest.mark.parametrize("value", ["-1", "hot", "nan"])
def test_wrong_values_of_an_option_end_with_one_code(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever finds it: the parser, or who checks its range."""
    try:
        code = main(["generate", "x", "--temperature", value])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert "temperature" in capsys.readouterr().err


def test_sampling_options_reach_the_model(target, capsys) -> None:
    model = dj.load(target)

    def rows(*options: str) -> dict:
        assert main([*GENERATE, str(target), *options]) == 0
        return json.loads(capsys.readouterr().out)

    def expected(**params) -> dj.Completion:
        return dj.generate(model, "ab", dj.SamplingParams(max_tokens=24, **params))

    first, second = expected().token_ids[3], expected().token_ids[5]
    for options, params in (
        (["--stop-token-ids", str(first)], {"stop_token_ids": [first]}),
        (["--stop-token-ids", f"{second},{first}", "--include-stop"], {"stop_token_ids": [first, second], "include_stop": True}),
        (["--stop-token-ids", str(second), "--stop-token-ids", str(first)], {"stop_token_ids": [first, second]}),
        (["--min-tokens", "9", "--stop-token-ids", str(first)], {"min_tokens": 9, "stop_token_ids": [first]}),
        (["--ignore-eos"], {"ignore_eos": True}),
    ):  # fmt: skip
        row, one = rows(*options), expected(**params)
        assert (row["text"], row["token_ids"], row["finish_reason"]) == (one.text, one.token_ids, one.finish_reason)
    assert len(rows("--stop-token-ids", str(first))["token_ids"]) <= 4
    row, one = rows("--logprobs", "2"), expected(logprobs=2)
    assert one.logprobs is not None
    assert [entry["token_id"] for entry in row["logprobs"]] == one.token_ids
    assert [len(entry["top"]) for entry in row["logprobs"]] == [2] * len(one.token_ids)
    assert row["logprobs"][0]["logprob"] == pytest.approx(one.logprobs[0].logprob)


def test_options_that_change_logits_are_parameters(target, monkeypatch) -> None:
    """Each by itself; what the parameters do is tested where they are."""
    seen = []
    monkeypatch.setattr(commands, "_generate", lambda args, prompts, params, *rest: seen.append(params) or 0)
    monkeypatch.setattr(commands, "check_models", lambda args: None)
    for options, params in (
        ((), {}),
        (
            ("--presence-penalty", "0.5", "--frequency-penalty", "-1"),
            {"presence_penalty": 0.5, "frequency_penalty": -1},
        ),
        (("--repetition-penalty", "1.2"), {"repetition_penalty": 1.2}),
        (("--logit-bias", "7=-2.5", "--logit-bias", "9=3"), {"logit_bias": {7: -2.5, 9: 3}}),
        (("--allowed-token-ids", "7,8", "--allowed-token-ids", "9"), {"allowed_token_ids": [7, 8, 9]}),
        (("--bad-word", "a", "--bad-word", "b c"), {"bad_words": ["a", "b c"]}),
    ):
        assert main(["generate", "ab", *options]) == 0
        assert dj.SamplingParams(**seen.pop()) == dj.SamplingParams(**params)
    for wrong in ("7", "7=", "a=1"):
        with pytest.raises(SystemExit):
            main(["generate", "ab", "--logit-bias", wrong])


def test_end_tokens_are_passed_over_where_asked(target, capsys, tmp_path) -> None:
    """The folder's end token is one that it writes."""
    import shutil

    free = dj.generate(dj.load(target), "ab", dj.SamplingParams(max_tokens=24)).token_ids
    folder = shutil.copytree(target, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": free[4]}))
    lengths = []
    for options in ([], ["--ignore-eos"]):
        assert main([*GENERATE, str(folder), *options]) == 0
        lengths.append(len(json.loads(capsys.readouterr().out)["token_ids"]))
    assert lengths == [free.index(free[4]) + 1, 24]


def test_options_that_need_others_say_so(target, capsys) -> None:
    assert main(["generate", "x", "--logprobs", "2", "--model", str(target)]) == 2
    assert capsys.readouterr().err == "error: --logprobs are part of the rows of --json: add it\n"
    assert main(["generate", "x", "--stop-token-ids", "999", "--model", str(target)]) == 2
    assert "stop_token_ids must be inside the target's vocabulary of 258 tokens, got 999" in capsys.readouterr().err


def test_token_ids_between_commas() -> None:
    assert token_ids("5,7, 9") == [5, 7, 9]


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "hi", "--model", "/nope"],
        ["generate", "hi", "--draft", "/nope"],
        ["generate", "hi", "--max-tokens", "0"],
        ["info", "/nope"],
        ["demo", "--model", "/nope"],
    ],
)
def test_what_is_wrong_at_once_is_told_at_once(arguments: list[str]) -> None:
    """Without the seconds that JAX takes to import."""
    code = f"import sys; from dflash_jax.cli.commands import main; code = main({arguments}); print(code, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2" if "--max-tokens" in arguments else "3", "False"]
    assert done.stderr.startswith("error: ")
