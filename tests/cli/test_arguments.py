"""Arguments of every command: what was probably meant, under the usage line of the command that was called, and paths."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from dflash_convert.parser import build_parser as build_convert_parser

from dflash_jax.cli.parser import build_parser


def refused(parse, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "usage", "said"),
    [
        (["generate", "hi", "--max-tokns", "5"], "usage: dflash-jax generate ", "--max-tokns: did you mean --max-tokens?"),
        (["generate", "--mdel=x"], "usage: dflash-jax generate ", "--mdel=x: did you mean --model?"),
        (["bench", "--promts", "x"], "usage: dflash-jax bench ", "--promts: did you mean --prompts?"),
        (["--versoin"], "usage: dflash-jax [", "--versoin: did you mean --version?"),
        (["train", "--hlep"], "usage: dflash-jax train ", "--hlep: did you mean --help?"),
    ],
)  # fmt: skip
def test_the_option_that_was_meant(arguments, usage, said, capsys):
    error = refused(build_parser().parse_args, arguments, capsys)
    assert error.startswith(usage)
    assert error.endswith(f"; {said}\n")


def test_nothing_is_meant_by_dashes_alone(capsys):
    """`--model` has more in common with `--help` than with what `train` calls it."""
    error = refused(build_parser().parse_args, ["train", "--data", "x", "--output", "y", "--model", "z"], capsys)
    assert error.endswith("unrecognized arguments: --model z\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["x", "--outptu", "y"], "unrecognized arguments: --outptu y; --outptu: did you mean --output?"),
        (["--dry-rnu"], "the following arguments are required: SOURCE; --dry-rnu: did you mean --dry-run?"),
        (["x", "--dtype", "int8"], "'int8'"),
    ],
)
def test_the_option_of_a_conversion_that_was_meant(arguments, said, capsys):
    error = refused(build_convert_parser().parse_args, arguments, capsys)
    assert error.startswith("usage: dflash-convert ")
    assert said in error


def test_usage_that_fills_a_screen_is_not_in_the_way_of_an_error(capsys):
    error = refused(build_parser().parse_args, ["generate", "hi", "--max-tokens", "few"], capsys)
    first, second, last = error.splitlines()
    assert first == "usage: dflash-jax generate [OPTION ...] PROMPT [PROMPT ...]"
    assert second.strip() == "dflash-jax generate --help tells the options"
    assert last == "dflash-jax generate: error: argument --max-tokens: invalid int value: 'few'"


def test_info_takes_its_model_by_place_or_by_name(capsys):
    parse = build_parser().parse_args
    assert parse(["info"]).model is None
    assert parse(["info", "folder"]).model == parse(["info", "--model", "folder"]).model == "folder"
    assert "not allowed with" in refused(parse, ["info", "folder", "--model", "other"], capsys)


@pytest.mark.parametrize("package", ["dflash_jax", "dflash_convert"])
def test_packages_are_commands_too(package):
    """As `python -m` calls them, with the version that both print."""
    done = subprocess.run([sys.executable, "-m", package, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{version('dflash-jax')}\n"


def test_words_that_are_like_nothing_get_no_hint(capsys):
    error = refused(build_parser().parse_args, ["generate", "hi", "--zzzz"], capsys)
    assert error.endswith("unrecognized arguments: --zzzz\n")
    # What follows a command is not the parser's that looks for one.
    error = refused(build_parser().parse_args, ["generat", "--verison"], capsys)
    assert "version" not in error.partition("error: ")[2]


def test_beginnings_of_options_still_do():
    assert build_parser().parse_args(["generate", "hi", "--max-tok", "5"]).max_tokens == 5


PATHS = [
    (build_parser, ["bench"], "--json", "json"),
    (build_parser, ["bench"], "--prompts", "prompts"),
    (build_parser, ["generate", "hi"], "--calibration", "calibration"),
    (build_convert_parser, ["x"], "--output", "output"),
]


@pytest.mark.parametrize(("build", "before", "option", "name"), PATHS, ids=[row[2] for row in PATHS])
@pytest.mark.parametrize("one_word", [True, False])
def test_a_path_is_what_a_shell_would_take_it_for(build, before, option, name, one_word, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))

    def parsed(text):
        return getattr(build().parse_args([*before, *([f"{option}={text}"] if one_word else [option, text])]), name)

    assert Path(parsed("~/x")) == tmp_path / "x"
    assert Path(parsed("a/x")) == Path("a/x")
    assert Path(parsed("/a/x")) == Path("/a/x")
    assert Path(parsed("a~x")) == Path("a~x")
    for wrong, said in (("", "an empty path"), ("~nobody-of-this-name/x", "begins with the home of a user")):
        error = refused(lambda _, wrong=wrong: parsed(wrong), (), capsys)
        assert f"argument {option}: " in error
        assert said in error


@pytest.mark.parametrize("option", ["--json", "--prompts", "--calibration"])
def test_a_folder_s_name_is_no_file(option, capsys):
    assert "x/ is a folder's name; name a file" in refused(build_parser().parse_args, ["bench", option, "x/"], capsys)


def test_a_folder_s_name_may_end_with_a_slash():
    assert build_convert_parser().parse_args(["x", "--output", "out/"]).output == Path("out")


def test_json_may_go_to_stdout():
    assert build_parser().parse_args(["bench", "--json", "-"]).json == "-"
