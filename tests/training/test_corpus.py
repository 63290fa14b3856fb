"""Licences, selection of files, tokenizer."""

import re
import tomllib
from importlib.metadata import PathDistribution
from pathlib import Path

import numpy as np
import pytest

from dflash_jax.training.corpus import (
    Corpus,
    Package,
    SourceFile,
    TrainingError,
    heldout_prompts,
    is_source,
    packages_of,
    read_sources,
)
from dflash_jax.training.licences import permissive_licence
from dflash_jax.training.settings import FULL, TINY, with_changes
from dflash_jax.training.tokenizer import encode_files, train_tokenizer


def distribution(folder: Path, fields: dict[str, str | list[str]]) -> PathDistribution:
    """A distribution with only metadata."""
    lines = [
        f"{name}: {value}\n"
        for name, values in fields.items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    (folder / "METADATA").write_text("Metadata-Version: 2.4\nName: fake\nVersion: 1\n" + "".join(lines))
    return PathDistribution(folder)


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License-Expression": "BSD-3-Clause AND 0BSD AND MIT"}, "BSD-3-Clause AND 0BSD AND MIT"),
        ({"License-Expression": "MIT OR GPL-3.0-only"}, None),
        ({"License-Expression": "MPL-2.0", "Classifier": "License :: OSI Approved :: MIT License"}, None),
        ({"Classifier": "License :: OSI Approved :: Apache Software License"}, "Apache-2.0"),
        (
            {"Classifier": ["License :: OSI Approved :: BSD License", "License :: OSI Approved :: MIT License"]},
            "BSD AND MIT",
        ),
        ({"Classifier": ["License :: OSI Approved :: BSD License", "License :: Other/Proprietary License"]}, None),
        ({"License": "Apache 2.0 License", "Classifier": "Programming Language :: Python"}, "Apache-2.0"),
        ({"License": "GNU General Public License"}, None),
        ({}, None),
    ],
)
def test_permissive_licences(tmp_path, fields, licence):
    assert permissive_licence(distribution(tmp_path, fields)) == licence


def test_missing_and_unrecognised_packages_are_named():
    found, left_out = packages_of(with_changes(TINY, packages=("no-such-package-here", "hypothesis", "numpy")))
    assert [package.name for package, _ in found] == ["Python standard library", "numpy"]
    assert left_out == {"no-such-package-here": "not installed", "hypothesis": "licence not recognised as permissive"}


def test_the_train_extra_is_read():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    names = {re.split(r"[<>=\[]", line)[0] for line in project["optional-dependencies"]["train"]}
    assert names < set(FULL.packages)


def test_content_decides_which_part_a_file_is_in():
    """A hash's place among 10,000 against two percentages; nothing is in two parts, and neither path nor package has a say."""
    settings = with_changes(TINY, heldout_percent=3.0, prompt_percent=20.0)

    def part(place: int, path: str = "a.py") -> str:
        return SourceFile(Package("one", "1", "MIT"), path, "", f"{place:012x}" + "f" * 52).part(settings)

    assert [part(place) for place in (0, 299, 300, 2299, 2300, 9999)] == ["heldout"] * 2 + ["prompts"] * 2 + [
        "train"
    ] * 2
    assert part(10_000 + 299, "b.py") == "heldout"


def test_identical_files_are_read_once(tmp_path):
    text = "import os\n" * 100
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(text)
    (tmp_path / "c.py").write_text(text + "# another\n")
    files, _ = read_sources(with_changes(TINY, folder=str(tmp_path)))
    assert [file.path for file in files] == ["a.py", "c.py"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("x = 1\n" * 50, False),
        ("name = call(other)\n" * 60, True),
        ("0.123, 4567,\n" * 60, False),
        ("a" * 1200 + "\n", False),
    ],
)
def test_tables_and_generated_lines_are_left_out(text, kept):
    assert is_source(text) == kept


def test_tokenizer_returns_every_text_and_ends_files(sources):
    texts = [path.read_text("utf-8") for path in sorted(sources.glob("*.py"))[:12]]
    tokenizer = train_tokenizer(texts, 319)
    tokens = encode_files(tokenizer, texts)
    assert tokens.dtype == np.uint16
    assert int(tokens.max()) < 319
    ends = np.flatnonzero(tokens == 0)
    assert len(ends) == len(texts)
    assert tokenizer.decode(tokens[ends[0] + 1 : ends[1]].tolist(), skip_special_tokens=False) == texts[1]
    odd = "snowman ☃, tab\t, null \x00\n"
    assert tokenizer.decode(tokenizer.encode(odd).ids) == odd


def test_too_short_heldout_files_are_an_error(tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(["import this\n" * 50], 280).save(str(path))
    heldout = [{"text": "import this\n", "path": "x.py", "package": {"name": "x", "version": "1", "licence": "MIT"}}]
    corpus = Corpus(np.zeros(4, np.uint16), np.zeros(4, np.uint16), heldout, {}, path)
    with pytest.raises(TrainingError, match="more than 64 tokens"):
        heldout_prompts(corpus, 64, 2, 0)
