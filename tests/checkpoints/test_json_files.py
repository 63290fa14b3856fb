"""Strict JSON: what is read, and that everything else is refused in words."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_jax.checkpoints.converted import open_converted
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.checkpoints.json_files import MAX_DEPTH, parse, read_object
from dflash_jax.checkpoints.safetensors import read_header
from dflash_jax.errors import CheckpointError, ConfigError
from dflash_jax.text.tokenizer import read_json

DEEP = 200_000
WRONG: dict[str, tuple[bytes, str]] = {
    "no UTF-8": (b'{"a": "\xff"}', "utf-8"),
    "no JSON": (b'{"a": 1,}', "property name"),
    "nothing": (b"", "Expecting value"),
    "twice": (b'{"a": {"b": 1, "b": 2}}', "keys appear twice: 'b'"),
    "objects without end": (b'{"a":' * DEEP + b"1" + b"}" * DEEP, "nested too deeply, at most 100 levels"),
    "lists without end": (b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}", "nested too deeply"),
    "one level more": (b'{"a":' * MAX_DEPTH + b"{}" + b"}" * MAX_DEPTH, "nested too deeply"),
    "beyond a double": (b'{"a": 1e400}', "number 1e400 is beyond what a double holds"),
    "minus beyond": (b'{"a": [-1.5e999]}', "number -1.5e999 is beyond"),
    "digits without end": (b'{"a": ' + b"1" * 5000 + b"}", "4300 digits"),
    "NaN": (b'{"a": NaN}', "NaN is no JSON number"),
    "Infinity": (b'{"a": -Infinity}', "-Infinity is no JSON number"),
    "half a pair": (b'{"a": ["\\ud83d"]}', "half of a surrogate pair"),
    "half a pair as a key": (b'{"a": {"\\uDC00": 1}}', "half of a surrogate pair"),
    "two first halves": (b'{"a": "\\ud83d\\ud83d"}', "half of a surrogate pair"),
}  # fmt: skip


def test_values_are_what_they_say() -> None:
    text = '{"big": 1000000000000000019884624838656, "x": 1e-7, "emoji": "\\ud83d\\ude00", "n": null, "l": [true, -3]}'
    expected = {
        "big": 1000000000000000019884624838656,
        "x": 1e-7,
        "emoji": "\N{GRINNING FACE}",
        "n": None,
        "l": [True, -3],
    }
    assert parse(text.encode()) == expected
    deepest: Any = []
    for _ in range(MAX_DEPTH - 1):
        deepest = [deepest]
    assert parse(json.dumps(deepest).encode()) == deepest


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(content)


def test_files_say_their_name_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"^config\.json is missing; give the folder"):
        read_object(path)
    path.mkdir()
    with pytest.raises(ValueError, match=r"^config\.json is missing"):
        read_object(path)
    path.rmdir()
    path.write_text("[1]")
    with pytest.raises(ValueError, match=r"^config\.json must hold a JSON object, got list; fetch the file again"):
        read_object(path)
    with pytest.raises(ValueError, match="has 3 bytes, at most 2 are permitted"):
        read_object(path, most=2)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=r"config\.json is a pointer of Git LFS"):
        read_object(path)


@pytest.mark.parametrize("content", [content for content, _ in WRONG.values()], ids=WRONG)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "conversion.json", "tokenizer_config.json"]
)
def test_every_small_file_goes_through_it(tmp_path: Path, name: str, content: bytes) -> None:
    """A folder with one bad file ends in the error of its kind, and never in one of Python's."""
    (tmp_path / name).write_bytes(content)
    if name == "conversion.json":
        with pytest.raises(CheckpointError, match=r"conversion\.json is not usable"):
            open_converted(tmp_path)
    elif name == "tokenizer_config.json":
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not usable"):
            read_json(tmp_path / name)
    else:
        with pytest.raises(CheckpointError, match=rf"{name} is not usable"):
            open_checkpoint(tmp_path)


def test_headers_go_through_it(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for content, _ in WRONG.values():
        if content:
            path.write_bytes(len(content).to_bytes(8, "little") + content)
            with pytest.raises(CheckpointError, match="header is not usable"):
                read_header(path)
