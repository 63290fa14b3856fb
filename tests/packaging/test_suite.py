"""The command that measures everything: what it runs, and what it says of it."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from .children import children, gone, said

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
# A benchmark: a row, and then what it is told to do.
SCRIPT = """
import json, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
(out / "fake.json").write_text(json.dumps([{"case": sys.argv[1]}]))
print("measured", flush=True)
time.sleep(float(sys.argv[2]))
sys.exit(sys.argv[3] if sys.argv[3] != "0" else 0)
"""


@pytest.fixture(scope="module")
def suite(script):
    return script("suite")


@pytest.fixture(scope="module")
def jobs(script):
    return script("jobs")


def test_jobs_are_the_commands_of_the_results(jobs, script):
    """Every job renews rows, but those that are said to have none; and every row has a job of its script, file and settings: its
    own command's or one that does more."""
    merging = script("merge")
    rows = {path: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS}
    named = {row["command"] for several in rows.values() for row in several}
    commands = {name: f"python benchmarks/{command}" for name, (command, _) in jobs.BENCHMARKS.items()}
    commands |= {command: f"python benchmarks/{command}" for command in jobs.SEVERAL_GPUS}
    assert tuple(name for name, command in commands.items() if command not in named) == jobs.WITHOUT_ROWS
    assert len(set(commands.values())) == len(commands)
    for path, several in rows.items():
        ours = [row for row in several if row["command"] in commands.values()]
        known = {(merging.settings(row), row["command"].split()[1]) for row in ours}
        for row in several:
            found = (merging.settings(row), row["command"].split()[1])
            assert found in known, f"{path.name}: no job measures {row['case']}: {row['command']}"


def test_the_longest_begin_first_and_named_ones_as_named(suite, jobs):
    abouts = [jobs.BENCHMARKS[name][1] for name in suite.chosen(None, False)]
    assert abouts == sorted(abouts, reverse=True)
    assert set(suite.chosen(None, False)) == set(jobs.BENCHMARKS)
    tests = ["tests_several", "tests1", "tests2", "tests3", "tests4", "tests_large"]
    assert suite.chosen(None, True)[-6:] == tests
    assert suite.chosen(["pair", "verify*", "pair*"], False)[:4] == ["pair", "verify_1_8", "verify_32_64", "pair_int8"]
    assert suite.chosen(["tests*"], False) == jobs.TESTS
    with pytest.raises(SystemExit, match="no job is named pears; there are decode_4b, "):
        suite.chosen(["pair", "pears"], False)


def test_jobs_say_where_rows_go_and_what_was_measured(jobs):
    job = jobs.job("pair_int8", Path("/run"), "abc1234", 12)
    words = "benchmarks/pair.py --weight-dtype int8 --out /run/pair_int8 --commit abc1234"
    assert shlex.join(job.words[1:]) == words
    assert job.limit > job.about


def test_tests_share_the_memory_of_their_gpu(jobs, monkeypatch):
    several, *parts, large = [jobs.job(name, Path("/run"), None, 8) for name in jobs.TESTS]
    for i, part in enumerate(parts, 1):
        assert {"gpu and not large and not several", f"--part={i}/{len(parts)}", "--numprocesses=8"} <= set(part.words)
        assert part.gpus == 1
    for job in (several, *parts):
        assert 0.5 < 8 * float(job.environment["XLA_PYTHON_CLIENT_MEM_FRACTION"]) < 0.95
    assert "gpu and several" in several.words
    assert several.gpus == 2
    assert "gpu and large" in large.words
    assert not large.environment
    assert not any(word.startswith("--numprocesses") for word in large.words)
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda name: None)
    alone = jobs.job("tests1", Path("/run"), None, 8)
    assert not alone.environment
    assert alone.about > parts[0].about
    assert not any(word.startswith("--numprocesses") for word in alone.words)


def test_parts_of_the_tests_are_all_of_them(request):
    """`--part`, an option of this very run; tests of long files come first, the others in their order."""
    assert "/" in request.config.getoption("part")
    conftest = request.config.pluginmanager.getplugin(str(ROOT / "tests" / "conftest.py"))

    def split(part, long=()):
        items = [
            SimpleNamespace(number=i, path=Path(conftest.LONG[0] if i in long else "test_it.py")) for i in range(10)
        ]
        left_out = []
        hooks = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
        options = {"getoption": {"part": part, "all_cases": True}.get, "hook": hooks}
        conftest.pytest_collection_modifyitems(SimpleNamespace(**options), items)
        return tuple([item.number for item in some] for some in (items, left_out))

    assert split("1/1") == (list(range(10)), [])
    assert split("1/1", long=(3, 8)) == ([3, 8, 0, 1, 2, 4, 5, 6, 7, 9], [])
    assert split("2/3") == ([1, 4, 7], [0, 2, 3, 5, 6, 8, 9])
    assert sorted(split("1/3")[0] + split("2/3")[0] + split("3/3")[0]) == list(range(10))
    for wrong in ("0/3", "4/3", "1", "a/b", "-1/3"):
        with pytest.raises(pytest.UsageError, match=f"I from 1 to N was expected, {wrong} came"):
            split(wrong)


def test_few_cases_of_marked_tests(request):
    """Those that patterns name; all of a test named on the command line, of one without the mark, on a GPU and on demand."""
    conftest = request.config.pluginmanager.getplugin(str(ROOT / "tests" / "conftest.py"))
    patterns = {"whole": None, "some": ("q1", "*-split"), "none": ()}

    def chosen(args=("tests",), markexpr="not gpu", all_cases=False, keyword="", **changed):
        items = []
        for test, some in (patterns | changed).items():
            mark = None if some is None else SimpleNamespace(args=some)
            for case in ("q1", "q1-split", "q16"):
                found = {"nodeid": f"{test}[{case}]", "callspec": SimpleNamespace(id=case)}
                items.append(SimpleNamespace(**found, get_closest_marker=lambda name, mark=mark: mark))
        option = SimpleNamespace(markexpr=markexpr, keyword=keyword)
        config = SimpleNamespace(getoption={"all_cases": all_cases}.get, option=option, args=list(args))
        return [item.nodeid for item in conftest.few(config, items)]

    some = ["whole[q1]", "whole[q1-split]", "whole[q16]", "some[q1]", "some[q1-split]"]
    assert chosen() == some
    assert len(chosen(all_cases=True)) == len(chosen(args=["tests/x.py::some"])) == len(chosen(markexpr="gpu")) == 9
    with pytest.raises(pytest.UsageError, match=r"these name none: \[\('some', 'q2'\)\]"):
        chosen(some=("q1", "q2"))
    assert chosen(some=("q1", "q2"), keyword="q1")[3:] == ["some[q1]"]


def test_gpus_are_those_that_are_visible(suite, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-1f")
    assert suite.visible_gpus() == ["3", "GPU-1f"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert suite.visible_gpus() == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert suite.visible_gpus() == []
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: x)'\necho 'GPU 1: NVIDIA H200 (UUID: y)'\n")
    smi.chmod(0o755)
    assert suite.visible_gpus() == ["0", "1"]


def test_what_tests_said_is_told_as_they_end(suite, jobs, tmp_path):
    """What is told by one that ends the run, too."""
    text = (
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip()\ndef test_d(x): pass\n"
        "def test_e(): import os; os._exit(9)\n"
    )
    (tmp_path / "test_it.py").write_text(text)
    told = "-p", "conftest", f"--outcomes={tmp_path / jobs.OUTCOMES}"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *told, "test_it.py"], cwd=tmp_path, capture_output=True, check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
    )  # fmt: skip
    assert suite.found(tmp_path) == "1 passed, 1 failed, 1 error, 1 skipped"
    assert ["assert 0" in test.get("said", "") for test in suite.tests_of(tmp_path)] == [False, True, False, False]


@pytest.fixture
def command(tmp_path):
    """The command line over four jobs of another table: one is quick, one fails, one overruns, one waits for the others."""
    script = tmp_path / "fake.py"
    script.write_text(SCRIPT)
    table = {
        "quick": (f"{script} quick 0 0", 3), "failing": (f"{script} failing 0 'out of luck'", 2),
        "slow": (f"{script} slow 60 0", 1.5), "last": (f"{script} last 0 0", 1),
    }  # fmt: skip
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nimport dataclasses, jobs, suite\n"
        f"jobs.BENCHMARKS = {table!r}\nmake = jobs.job\n"
        "jobs.job = lambda *words: dataclasses.replace(make(*words), limit=float(sys.argv[1]))\n"
        "sys.exit(suite.main(sys.argv[2:]))\n"
    )

    def call(limit, *words):
        return subprocess.Popen(
            [sys.executable, str(driver), str(limit), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return call


def table_of(text):
    """Rows of the table at the end, by job."""
    lines = [line.split() for line in text.partition("\njob ")[2].splitlines()]
    return {words[0]: words[1:] for words in lines if words}


def test_the_command_runs_its_jobs_and_says_what_came_of_them(command, tmp_path):
    out = tmp_path / "run"
    with command(4, "--gpus", "7", "9", "--out", str(out), "--commit", "abc") as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    table = table_of(text)
    assert table["quick"][2:] == ["3", "0", "1", "rows"]
    assert table["failing"][2:] == ["2", "1", "1", "rows"]
    assert " ".join(table["slow"][2:]) == "2 -15: over its limit of 4 s 1 rows"
    assert table["last"][2:] == ["1", "0", "1", "rows"]
    assert {table[name][0] for name in ("quick", "failing", "slow", "last")} == {"7", "9"}
    # The end of its log stands below the table.
    assert text.index("out of luck") > text.index("\njob ")
    assert text.rstrip().endswith(f"--merge {out}")
    with command(2, "--gpus", "7", "--out", str(out)) as process:
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "is not empty" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_a_signal_ends_the_command_and_its_jobs(command, tmp_path, number):
    out = tmp_path / "run"
    with command(100, "--gpus", "7", "7", "--out", str(out), "--only", "slow", "last") as process:
        said(out / "slow" / "log.txt")
        (running,) = children(process.pid)
        process.send_signal(number)
        text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert gone(running)
    table = table_of(text)
    assert " ".join(table["slow"][3:]) == "-15: interrupted 1 rows"
    assert " ".join(table["last"]) == "- 0 1 not started: interrupted 0 rows"


def test_no_gpu_is_said(suite, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="no GPU is visible"):
        suite.main(["--only", "pair"])


def test_what_is_not_installed_is_said_before_a_gpu_is_taken(suite, monkeypatch):
    find = suite.importlib.util.find_spec
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None if name == "nbformat" else find(name))
    suite.refuse_without(["pair"])
    with pytest.raises(SystemExit, match="the tests import nbformat, which is not installed"):
        suite.main(["--only", "tests*", "--gpus", "0"])
    monkeypatch.setattr(suite, "installed", lambda name: False)
    with pytest.raises(SystemExit, match="dflash-jax is not installed"):
        suite.main(["--only", "pair", "--gpus", "0"])


def test_jobs_are_listed(suite, jobs, capsys):
    assert suite.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {*jobs.BENCHMARKS, *jobs.TESTS}
    assert suite.main(["--list", "--only", "pair"]) == 0
    assert capsys.readouterr().out.split() == "pair about 80 s python benchmarks/pair.py --out OUT/pair".split()


def test_rows_are_merged_by_the_command(suite, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    row = json.loads(RESULTS[0].read_text(encoding="utf-8"))[0]
    (tmp_path / "run" / RESULTS[0].name).write_text(json.dumps([row]))
    assert suite.main(["--merge", str(tmp_path / "run"), "--out", str(tmp_path / "here")]) == 0
    assert json.loads((tmp_path / "here" / RESULTS[0].name).read_text()) == [row]
    assert "0 rows renewed, 1 new" in capsys.readouterr().out
    assert os.listdir(tmp_path / "here") == [RESULTS[0].name]
