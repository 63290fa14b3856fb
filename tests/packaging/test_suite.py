"""The command that measures everything: what it runs, and jobs over GPUs, here real processes and GPUs that are only names."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PYTHON = [sys.executable, "-S", "-c"]
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
# Says when it began and ended and where; all of one test write into one file.
NOTE = """
import os, sys, time
began = time.monotonic()
time.sleep(float(sys.argv[2]))
with open(sys.argv[1], "a") as file:
    file.write(f"{os.environ['CUDA_VISIBLE_DEVICES']} {began} {time.monotonic()}\\n")
"""
# Starts another process that outlives SIGTERM, says its number, and waits.
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {STUBBORN + "print(1, flush=True); import time; time.sleep(60)"!r}],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""
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
def schedule(script):
    return script("schedule")


@pytest.fixture(scope="module")
def suite(script):
    return script("suite")


@pytest.fixture
def run(schedule, tmp_path, monkeypatch):
    """Runs jobs on GPUs a and b; stubborn ones are killed after half a second."""
    monkeypatch.setattr(schedule, "GRACE", 0.5)

    def call(*jobs, gpus=("a", "b"), stop=None, **options):
        return schedule.run(jobs, gpus, tmp_path, stop=stop or threading.Event(), **options)

    return call


@pytest.fixture
def job(schedule):
    def make(name, code, *words, about=0.1, limit=30.0):
        return schedule.Job(name, [*PYTHON, code, *map(str, words)], about, limit)

    return make


def alive(pid):
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid):
    for _ in range(100):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


def said(log):
    """Lines of a log, once there are two: the command and what it printed first."""
    for _ in range(200):
        if log.exists() and len(lines := log.read_text().splitlines()) > 1:
            return lines
        time.sleep(0.05)
    raise AssertionError(f"{log} stays empty")


def test_one_job_at_a_time_on_each_gpu(run, job, tmp_path):
    note = tmp_path / "note"
    outcomes = run(*(job(f"job{i}", NOTE, note, 0.3) for i in range(6)))
    assert [one.code for one in outcomes] == [0] * 6
    spans = {}
    for gpu, *times in map(str.split, note.read_text().splitlines()):
        spans.setdefault(gpu, []).append(tuple(map(float, times)))
    assert sorted(spans) == ["a", "b"]
    for times in spans.values():
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
    # Both worked at the same time, which is what they are for.
    assert max(spans["a"][0][0], spans["b"][0][0]) < min(spans["a"][-1][1], spans["b"][-1][1])
    assert {one.job.name: one.gpu for one in outcomes}.keys() == {f"job{i}" for i in range(6)}


def test_jobs_begin_in_order(run, job, tmp_path):
    note = tmp_path / "note"
    outcomes = run(*(job(name, NOTE, note, 0.1) for name in "cab"), gpus=("a",))
    assert [one.job.name for one in outcomes] == ["c", "a", "b"]


def test_a_job_that_fails_leaves_its_log_and_the_others_run(run, job, tmp_path):
    failed, fine = run(job("failing", "print('so far'); raise SystemExit('no luck')"), job("fine", "1"), gpus=("a",))
    assert (failed.code, failed.failed, str(failed)) == (1, True, "1")
    assert (fine.code, fine.failed) == (0, False)
    command, *lines = (tmp_path / "failing" / "log.txt").read_text().splitlines()
    assert command.startswith("CUDA_VISIBLE_DEVICES=a ")
    assert lines == ["so far", "no luck"]


def test_a_job_over_its_limit_is_told_to_end(run, job):
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(60)"
    (outcome,) = run(job("slow", code, limit=2.0))
    assert str(outcome) == "0: over its limit of 2 s"
    assert outcome.failed
    assert 2 <= outcome.seconds < 10


def test_a_job_that_does_not_end_is_killed_with_all_it_started(run, job, tmp_path):
    (outcome,) = run(job("stubborn", STUBBORN + PARENT, 60, limit=2.0))
    assert (outcome.code, outcome.why) == (-signal.SIGKILL, "over its limit of 2 s")
    assert gone(int(said(tmp_path / "stubborn" / "log.txt")[-1]))


def test_what_a_job_leaves_running_is_killed(run, job, tmp_path):
    log = tmp_path / "parent" / "log.txt"
    code = f"""
import pathlib, time
time.sleep(0.5)
state = pathlib.Path("/proc", open({str(log)!r}).read().split()[-1], "stat")
print(state.read_text().rpartition(")")[2].split()[0] if state.exists() else "gone")
"""
    parent, _ = run(job("parent", PARENT, 0), job("next", code), gpus=("a",))
    assert parent.code == 0
    assert said(tmp_path / "next" / "log.txt")[-1] in ("gone", "Z")  # or dead, and nobody has waited for it


def test_jobs_begin_only_if_they_fit_the_time_that_is_left(run, job):
    outcomes = run(job("long", "1", about=50), job("short", "1", about=1), seconds=20)
    assert [(one.job.name, str(one)) for one in outcomes] == [("short", "0"), ("long", "not started: no time left")]
    assert not any(one.failed for one in outcomes)


def test_what_runs_when_no_time_is_left_is_ended(run, job):
    (outcome,) = run(job("slow", "import time; time.sleep(60)"), seconds=1)
    assert str(outcome) == f"{-signal.SIGTERM}: no time left"
    assert outcome.failed


def test_a_stop_ends_all_and_starts_nothing_more(run, job, tmp_path):
    stop = threading.Event()
    threading.Timer(0.5, stop.set).start()
    waits = "import time; time.sleep(60)"
    outcomes = run(job("one", waits), job("two", waits), job("three", waits), stop=stop)
    assert {one.job.name: str(one) for one in outcomes} == {
        "one": "-15: interrupted", "two": "-15: interrupted", "three": "not started: interrupted",
    }  # fmt: skip
    assert not (tmp_path / "three").exists()


def test_an_error_of_the_scheduler_leaves_nothing_running(run, job, tmp_path):
    def full(line):
        if "two" in line:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run(job("one", STUBBORN + "import os, time; print(os.getpid(), flush=True); time.sleep(60)"),
            job("quick", "import time; time.sleep(1.5)"), job("two", "1"), say=full)  # fmt: skip
    assert gone(int(said(tmp_path / "one" / "log.txt")[-1]))


@pytest.fixture(scope="module")
def jobs(script):
    return script("jobs")


def test_jobs_are_the_commands_of_the_results(jobs, script):
    """Every job renews rows; and every row has a job of its script, file and settings: its own command's or one that does more."""
    merging = script("merge")
    rows = {path: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS}
    named = {row["command"] for several in rows.values() for row in several}
    commands = {name: f"python benchmarks/{command}" for name, (command, _) in jobs.BENCHMARKS.items()}
    assert {name: command for name, command in commands.items() if command not in named} == {}
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
    assert suite.chosen(None, True)[-5:] == ["tests1", "tests2", "tests3", "tests4", "tests_large"]
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
    *parts, large = [jobs.job(name, Path("/run"), None, 8) for name in jobs.TESTS]
    for i, part in enumerate(parts, 1):
        assert {"gpu and not large", f"--part={i}/{len(parts)}", "--numprocesses=8"} <= set(part.words)
        assert 0.5 < 8 * float(part.environment["XLA_PYTHON_CLIENT_MEM_FRACTION"]) < 0.95
    assert "gpu and large" in large.words
    assert not large.environment
    assert not any(word.startswith("--numprocesses") for word in large.words)
    monkeypatch.setattr(jobs.importlib.util, "find_spec", lambda name: None)
    alone = jobs.job("tests1", Path("/run"), None, 8)
    assert not alone.environment
    assert alone.about > parts[0].about
    assert not any(word.startswith("--numprocesses") for word in alone.words)


def test_parts_of_the_tests_are_all_of_them(request):
    """`--part`, an option of this very run."""
    assert "/" in request.config.getoption("part")
    hook = request.config.pluginmanager.getplugin(str(ROOT / "tests" / "conftest.py")).pytest_collection_modifyitems

    def split(part):
        items, left_out = list(range(10)), []
        hooks = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items))
        hook(SimpleNamespace(getoption={"part": part}.get, hook=hooks), items)
        return items, left_out

    assert split("1/1") == (list(range(10)), [])
    assert split("2/3") == ([1, 4, 7], [0, 2, 3, 5, 6, 8, 9])
    assert sorted(split("1/3")[0] + split("2/3")[0] + split("3/3")[0]) == list(range(10))
    for wrong in ("0/3", "4/3", "1", "a/b", "-1/3"):
        with pytest.raises(pytest.UsageError, match=f"I from 1 to N was expected, {wrong} came"):
            split(wrong)


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


def test_what_tests_said_is_read_from_their_report(suite, jobs, tmp_path):
    text = (
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip()\ndef test_d(x): pass\n"
    )
    (tmp_path / "test_it.py").write_text(text)
    report = f"--junitxml={tmp_path / jobs.JUNIT}"
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", report, "test_it.py"], cwd=tmp_path, capture_output=True, check=False
    )
    assert suite.found(tmp_path) == "1 passed, 1 failed, 1 errors, 1 skipped"


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


def children(pid):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == pid:
            found.append(int(path.parent.name))
    return found


def test_no_gpu_is_said(suite, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match="no GPU is visible"):
        suite.main(["--only", "pair"])


def test_jobs_are_listed(suite, jobs, capsys):
    assert suite.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} == {*jobs.BENCHMARKS, *jobs.TESTS}
    assert suite.main(["--list", "--only", "pair"]) == 0
    assert capsys.readouterr().out.split() == "pair about 60 s python benchmarks/pair.py --out OUT/pair".split()


def test_rows_are_merged_by_the_command(suite, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    row = json.loads(RESULTS[0].read_text(encoding="utf-8"))[0]
    (tmp_path / "run" / RESULTS[0].name).write_text(json.dumps([row]))
    assert suite.main(["--merge", str(tmp_path / "run"), "--out", str(tmp_path / "here")]) == 0
    assert json.loads((tmp_path / "here" / RESULTS[0].name).read_text()) == [row]
    assert "0 rows renewed, 1 new" in capsys.readouterr().out
    assert os.listdir(tmp_path / "here") == [RESULTS[0].name]
