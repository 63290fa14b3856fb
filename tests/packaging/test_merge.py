"""Rows measured elsewhere come into `benchmarks/results`: each renews its own and no other."""

import itertools
import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*.json"))
LATER = {"date": "2100-01-01", "commit": "fffffff", "value": 123.0}


@pytest.fixture(scope="module")
def merging(script):
    return script("merge")


@pytest.fixture
def here(tmp_path):
    """A copy of the results, which rows are brought into."""
    return Path(shutil.copytree(RESULTS, tmp_path / "here"))


def rows_of(path):
    return json.loads(path.read_text(encoding="utf-8"))


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows))
    return path.parent


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_results_brought_into_themselves_change_nothing(merging, here):
    before = contents(here)
    changes = merging.merge([RESULTS], here)
    assert {change.path.name for change in changes} == {path.name for path in FILES}
    assert not any(change.renewed or change.new or change.older for change in changes)
    assert contents(here) == before


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_two_rows_of_a_file_measure_one_thing(merging, path):
    rows = rows_of(path)
    assert len({merging.key(row) for row in rows}) == len(rows)


def test_everything_is_brought_into_an_empty_folder(merging, tmp_path):
    merging.merge([RESULTS], tmp_path / "new")
    for path in FILES:
        ours, rows = rows_of(tmp_path / "new" / path.name), rows_of(path)
        assert len(ours) == len(rows)
        assert all(row in ours for row in rows)


def test_a_later_row_takes_the_place_of_its_own_alone(merging, here, tmp_path):
    before = rows_of(RESULTS / "decode.json")
    newer = before[3] | LATER
    (change,) = merging.merge([write(tmp_path / "run" / "job" / "decode.json", [newer])], here)
    assert (change.renewed, change.new, change.older) == (1, 0, 0)
    after = rows_of(here / "decode.json")
    assert newer in after
    assert [row for row in after if row != newer] == before[:3] + before[4:]
    assert {name: text for name, text in contents(here).items() if name != "decode.json"} == {
        path.name: path.read_bytes() for path in FILES if path.name != "decode.json"
    }


def test_rows_stand_together_by_run(merging, here, tmp_path):
    before = rows_of(RESULTS / "decode.json")
    newer = [row | LATER for row in before[2:20:4]]
    merging.merge([write(tmp_path / "run" / "decode.json", newer)], here)
    runs = [merging.run_of(row) for row in rows_of(here / "decode.json")]
    changes = sum(one != other for one, other in itertools.pairwise(runs))
    assert changes == len(set(runs)) - 1


def test_a_run_without_rows_is_gone(merging, here, tmp_path):
    before = rows_of(RESULTS / "decode.json")
    old = merging.run_of(before[0])
    newer = [row | LATER for row in before if merging.run_of(row) == old]
    merging.merge([write(tmp_path / "run" / "decode.json", newer)], here)
    after = rows_of(here / "decode.json")
    assert after[: len(newer)] == newer
    assert old not in map(merging.run_of, after)
    assert len(after) == len(before)


def test_an_older_row_is_left_out(merging, here, tmp_path):
    before = contents(here)
    older = [row | {"date": "2001-01-01", "value": 0} for row in rows_of(RESULTS / "pair.json")]
    (change,) = merging.merge([write(tmp_path / "run" / "pair.json", older)], here)
    assert (change.renewed, change.new, change.older) == (0, 0, len(older))
    assert contents(here) == before


def test_of_one_day_the_last_folder_counts(merging, here, tmp_path):
    row = rows_of(RESULTS / "prefill.json")[0]
    folders = [
        write(tmp_path / name / "prefill.json", [row | {"value": value}]) for name, value in (("b", 1), ("a", 2))
    ]
    merging.merge(folders, here)
    assert rows_of(here / "prefill.json")[0]["value"] == 2


def test_another_command_of_one_case_keeps_its_row(merging, here, tmp_path):
    """Two files hold the case, as their names say the settings; in one file, the options of the commands do."""
    case = "step qwen3-4b ctx1k B1"
    (row,) = (row for row in rows_of(RESULTS / "decode_best_xla.json") if row["case"] == case)
    serving = rows_of(RESULTS / "bench.json")[0]
    other = serving | LATER | {"command": serving["command"] + " --imposed-acceptance 3"}
    run = write(tmp_path / "run" / "decode" / "decode_best_xla.json", [row | LATER]).parent
    write(run / "bench" / "bench.json", [other])
    merging.merge([run], here)
    assert row | LATER in rows_of(here / "decode_best_xla.json")
    assert [r["value"] for r in rows_of(here / "decode.json") if r["case"] == case] != [LATER["value"]]
    assert serving in rows_of(here / "bench.json")
    assert other in rows_of(here / "bench.json")


def test_compile_times_are_those_of_the_programs_asked_for(merging):
    rows = rows_of(RESULTS / "decode.json")
    for kind, alike in (("compile", False), ("step", True)):
        row = next(row for row in rows if row["case"].startswith(kind))
        first, more_calls, fewer = (
            merging.key(row | {"command": f"python benchmarks/decode.py {options}"})
            for options in ("--batch 1 8 32", "--calls 9 --batch 1 8 32", "--batch 1")
        )
        assert first == more_calls
        assert (first == fewer) == alike


def test_a_command_that_measures_more_renews_rows_of_one_that_measured_a_part(merging, here, tmp_path):
    before = rows_of(RESULTS / "mla.json")
    whole = next(row for row in before if "--only" not in row["command"])
    parts = [row for row in before if "--only" in row["command"]] or before[-1:]
    newer = [row | LATER | {"command": whole["command"]} for row in parts]
    (change,) = merging.merge([write(tmp_path / "run" / "mla.json", newer)], here)
    assert (change.renewed, change.new) == (len(parts), 0)
    assert not any("--only" in row["command"] for row in rows_of(here / "mla.json"))


def test_rows_of_another_device_stand_beside(merging, here, tmp_path):
    row = rows_of(RESULTS / "attention.json")[0]
    (change,) = merging.merge([write(tmp_path / "run" / "attention.json", [row | LATER | {"device": "A100"}])], here)
    assert (change.renewed, change.new) == (0, 1)
    assert row in rows_of(here / "attention.json")


@pytest.mark.parametrize("text", ["{", '{"case": 1}', '[{"case": "x"}]', "[3]"])
def test_nothing_is_written_where_a_file_holds_something_else(merging, here, tmp_path, text):
    before = contents(here)
    write(tmp_path / "run" / "a" / "pair.json", [row | LATER for row in rows_of(RESULTS / "pair.json")])
    (tmp_path / "run" / "b.json").write_text(text)
    with pytest.raises(SystemExit, match=r"b\.json: .*expected"):
        merging.merge([tmp_path / "run"], here)
    with pytest.raises(SystemExit, match=r"nowhere: .*none are there"):
        merging.merge([tmp_path / "run" / "a", tmp_path / "nowhere"], here)
    assert contents(here) == before


def test_a_file_is_written_whole_or_not_at_all(script, here, monkeypatch):
    rows, path = rows_of(RESULTS / "pair.json"), here / "pair.json"
    half = Path.write_text

    def full(self, text):
        half(self, text[: len(text) // 2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="no space left"):
        script("record").write_rows(path, [*rows, *rows])
    assert path.read_bytes() == (RESULTS / "pair.json").read_bytes()


def test_options_that_matter_are_those_of_the_scripts(merging):
    for name, options in merging.OF_SCRIPTS.items():
        text = (ROOT / "benchmarks" / name).read_text(encoding="utf-8")
        assert all(f'"{option}"' in text for option in options), name
    assert set(merging.OF_METRICS) <= {row["metric"] for path in FILES for row in rows_of(path)}
