"""Published drafters, by their targets' families and the layouts of their files: those that are said to run do, at small sizes and
with random weights, and documents count them.

What each file says is in `published_layouts`; what is known of the drafters themselves is in `data/published_drafters.json`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import dflash_jax as dj
from dflash_jax.checkpoints.pair import KNOWN_DRAFTERS
from dflash_jax.errors import DFlashError
from dflash_jax.models import family_of, to_huggingface

from ..published_layouts import BROUGHT, LAYOUTS, REDUCED, REFUSED_LAYOUTS, REFUSED_TARGETS, TARGETS, VOCAB

ROOT = Path(__file__).parents[2]
ROWS: list[dict[str, Any]] = json.loads((ROOT / "tests/data/published_drafters.json").read_text())
RUN = [row for row in ROWS if "why" not in row]
PAIRS = list(dict.fromkeys((row["family"], row["layout"]) for row in RUN))
KINDS = ("DFlash", "DFlash 2", "DSpark")
PROMPT, GREEDY = list(range(9, 30)), dj.SamplingParams(max_tokens=12, ignore_eos=True)
SMALL: Any = {"max_batch": 1, "max_model_len": 64}


def write(folder: Path, file: dict[str, Any], own: tuple[str, ...], seed: int) -> Path:
    """A Hugging Face folder with random weights; `own`: tensors that a drafter brings beside its layers."""
    folder.mkdir(parents=True)
    rng, family = np.random.default_rng(seed), family_of(file)
    reduced = file.get("draft_vocab_size", VOCAB) < VOCAB
    names = (*own, "lm_head.weight", "d2t") if reduced else own
    arguments: Any = (names,) if family.role == "draft" else ()
    table = [row for row in family.parameters(family.config(file, *arguments)) if row.name != "d2t"]
    params = {row.name: (rng.normal(size=row.shape) * 0.3).astype(np.float32) for row in table}
    tensors = {name: np.ascontiguousarray(array) for name, array in to_huggingface(table, params).items()}
    if reduced:
        tensors["d2t"] = np.sort(rng.choice(VOCAB, REDUCED, replace=False)) - np.arange(REDUCED)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(file))
    return folder


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[int]]]:
    """By family: a folder, and what the model in it says without a drafter; filled as they are asked for."""
    root = tmp_path_factory.mktemp("targets")

    class Made(dict[str, tuple[Path, list[int]]]):
        def __missing__(self, family: str) -> tuple[Path, list[int]]:
            folder = write(root / str(len(self)), TARGETS[family], (), 0)
            alone = dj.generate(dj.load(folder, draft=False, **SMALL), PROMPT, GREEDY)
            self[family] = folder, alone.token_ids
            return self[family]

    return Made()


@pytest.mark.few("LFM2.5 with experts*", "Qwen3: speculators DSpark", "Muse Glimmer: Muse*")
@pytest.mark.parametrize(("family", "layout"), PAIRS, ids=[f"{family}: {layout}" for family, layout in PAIRS])
def test_it_drafts_what_its_target_says(
    tmp_path: Path, targets: dict[str, tuple[Path, list[int]]], family: str, layout: str
) -> None:
    target, alone = targets[family]
    drafted = dj.generate(
        dj.load(target, draft=write(tmp_path / "draft", LAYOUTS[layout], BROUGHT.get(layout, ()), 1), **SMALL),
        PROMPT,
        GREEDY,
    )
    assert drafted.token_ids == alone


def test_what_does_not_run_is_refused_by_name() -> None:
    """So that a family that comes is counted: a row with a reason has a target or a layout that is refused, or no file at all."""
    for row in ROWS:
        known = row["family"] in TARGETS and row["layout"] in LAYOUTS
        assert known == ("why" not in row), row
        assert row["family"] in {*TARGETS, *REFUSED_TARGETS}
    for name in (name for names in REFUSED_TARGETS.values() for name in names):
        with pytest.raises(dj.UnsupportedModelError, match="known architectures"):
            family_of({"architectures": [name]})
    for file in REFUSED_LAYOUTS.values():
        with pytest.raises(DFlashError):
            family_of(file).config(file)


def table() -> list[str]:
    """The table of docs/models.md: of each family and kind how many drafters run of how many."""
    lines = []
    for family in dict.fromkeys(row["family"] for row in ROWS):
        rows, cells = [row for row in ROWS if row["family"] == family], []
        for kind in (*KINDS, None):
            of = [row for row in rows if (row["kind"] == kind if kind else row["kind"] not in KINDS)]
            ours = sum("why" not in row for row in of)
            cells.append("" if not of else str(ours) if ours == len(of) else f"{ours} of {len(of)}")
        whys = "; ".join(dict.fromkeys(row["why"] for row in rows if "why" in row))
        lines.append(f"| {' | '.join([family, *cells, whys])} |".replace("|  |", "| |").replace("|  |", "| |"))
    return lines


def test_documents_count_them() -> None:
    models = (ROOT / "docs/models.md").read_text()
    assert [line for line in table() if line not in models.splitlines()] == []
    count = f"{len(RUN)} of {len(ROWS)}"
    for document in ("docs/models.md", "docs/limits.md", "README.md"):
        assert count in (ROOT / document).read_text(), document


def test_each_target_that_runs_has_a_drafter_by_its_name() -> None:
    """By hub id, but for drafters that one has to ask for."""
    by_target: dict[str, set[str]] = {}
    for row in RUN:
        by_target.setdefault(row["target"], set()).update([] if row.get("gated") else [row["drafter"]])
    listed = {target: drafters for target, drafters in by_target.items() if "/" in target and drafters}
    known = {target: drafter for target, drafter in KNOWN_DRAFTERS.items() if "/Meta-" not in target}
    assert known.keys() == listed.keys()
    assert all(drafter in listed[target] for target, drafter in known.items())
