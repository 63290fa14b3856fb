"""What every test shares: the platform, exact float32, shape checks, quick compiling, and a compilation cache for this run alone.

Set in the environment, so that processes started by a test inherit it, and on import of this file: pytest imports the conftest
files of folders named on its command line, and with them the package, before it calls any hook.
"""

import atexit
import functools
import gc
import importlib.util
import inspect
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAliasType, get_args

import jaxtyping
import pytest
from jaxtyping import AbstractArray, TypeCheckError, install_import_hook

CHECKED = ("dflash_jax", "dflash_kernels")
# Calls of a function whose arguments are held against its annotations, in each turn: a file of tests, or one test.
CHECKED_CALLS = 3
_checked_in: object = None  # the file or the test of this turn
_turn = 0
# Files of few tests that take half a minute or more: begun last, they would keep one process busy while the others have nothing
# left.
LONG = (
    "test_notebooks.py", "test_server.py", "test_schedules.py", "test_cross_lowering.py", "test_cli.py", "test_shipped_pair.py",
    "test_pipeline.py", "test_memory.py", "test_lossless.py", "test_load.py", "test_together.py", "test_readme.py",
    "test_hybrid_lossless.py", "test_runners.py", "test_engine.py", "test_sampling_law.py", "test_scheduler.py", "test_bench.py",
    "test_operations.py", "test_structure.py", "test_sparse_lossless.py", "test_attention_chain.py",
)  # fmt: skip
# What an op says, whose only candidate was Triton's kernel, or `jax_triton()` itself. Other refusals, and those that came before an
# op asked for Triton's, are failures.
WITHOUT_TRITON = re.compile(
    r"(\w+: no implementation takes this call\n  triton: )?needs jax-triton .*No module named '(triton|jax_triton)'"
)
# Small programs compile in half the time with the emitter of fused loops that does without MLIR, and as one module of LLVM's. The
# level is that of `optimised`: what is unrolled and vectorised beyond it saves less than it costs.
QUICK_COMPILING = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_optimization_level=1"
)
# Devices that a CPU is taken for, by tests of several.
RANKS = 8
# Folders of tests that share programs.
SHARING = ("attention", "cli", "decoding", "engine", "execution", "interactive", "models", "serving", "vision")
# Objects that are made before garbage is looked for, and such looks before the older ones are looked through, and the oldest: a
# process of tests holds millions, and looking through them took a tenth of its time.
GARBAGE = (50_000, 20, 50)
# A whole look through them takes a second or more: what asks for one between two models, or before it serves, gets the young.
WHOLE_LOOK = gc.collect
# Files whose processors' seconds are told at the end, and the name of that property of a report.
SHOWN = 15
SPENT = "processors' seconds"
_spent = sum(os.times()[:4])
# Mappings of memory that a process of tests may keep from file to file: past 65,530 (vm.max_map_count of Linux), XLA crashes.
MAPPINGS = 40_000


def check_annotations(function: Any = None, *, typechecker: Any) -> Any:
    """What jaxtyping's import hook decorates with: jaxtyping itself where axes of arrays are named, beartype alone where none are.

    jaxtyping binds every call's arguments anew, which took a sixth of the engine's tests, and beartype does not. Both check the
    first `CHECKED_CALLS` of a function in each file of tests, of ops and where all cases run in each test: all calls took a fifth
    of an engine's tests, and the first ones of each test an eighth.
    """
    if function is None:
        return functools.partial(check_annotations, typechecker=typechecker)
    if not inspect.isfunction(function):
        return _JAXTYPED(function, typechecker=typechecker)
    if any(map(_names_axes, function.__annotations__.values())):
        return _first_calls(function, functools.partial(_JAXTYPED, typechecker=typechecker))
    return _first_calls(function, _beartype()) if function.__annotations__ else function


def _first_calls(function: Any, check: Callable[[Any], Any]) -> Any:
    """`function`, checked in the first calls of a turn. The check is made once there is one: most functions are not called."""
    turn, left, checked = -1, 0, None

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        nonlocal turn, left, checked
        if turn != _turn:
            turn, left = _turn, CHECKED_CALLS
        if not left:
            return function(*args, **named)
        left -= 1
        if checked is None:
            checked = check(function)
        return checked(*args, **named)

    return call


def _names_axes(annotation: Any) -> bool:
    """Whether it may hold an array's shape: texts and aliases, whose meaning comes later, may."""
    if isinstance(annotation, str | TypeAliasType) or (
        inspect.isclass(annotation) and issubclass(annotation, AbstractArray)
    ):
        return True
    return any(map(_names_axes, get_args(annotation)))


@functools.cache
def _beartype() -> Any:
    from beartype import BeartypeConf, beartype

    return beartype(conf=BeartypeConf(violation_type=TypeCheckError))


_JAXTYPED = jaxtyping.jaxtyped
gc.set_threshold(*GARBAGE)
gc.collect = lambda generation=2: WHOLE_LOOK(min(generation, 1))
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
# Threads of XLA's pool. Each warpgroup of an interpreted kernel that waits at a barrier holds one: with a thread for each of two
# cores, a kernel of three warpgroups can wait for ever.
os.environ.setdefault("NPROC", "8")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="dflash-jax-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
if "DFLASH_JAX_TEST_PROGRAMS" not in os.environ:
    os.environ["DFLASH_JAX_TEST_PROGRAMS"] = tempfile.mkdtemp(prefix="dflash-jax-test-programs-")
    atexit.register(shutil.rmtree, os.environ["DFLASH_JAX_TEST_PROGRAMS"], ignore_errors=True)
if importlib.util.find_spec("beartype") is not None:
    install_import_hook(CHECKED, "beartype.beartype")
    jaxtyping.jaxtyped = check_annotations


class Outcomes:
    """A line for each test as it ends: a run that is ended has told what it found.

    A line is JSON: the test, its outcome ("error" where it failed before it began or after it ended), its seconds with those of its
    fixtures, and of one that failed what pytest says.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.before = path, dict[str, float]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            self.before[report.nodeid] = report.duration
            return
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        seconds = report.duration + self.before.pop(report.nodeid, 0.0)
        line = {"test": report.nodeid, "outcome": outcome, "seconds": round(seconds, 1)}
        with open(self.path, "a", encoding="utf-8") as file:
            print(json.dumps(line | ({"said": report.longreprtext} if report.failed else {})), file=file)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="gets a line of JSON for each test as it ends")
    parser.addoption("--all-cases", action="store_true", help="the cases that the marker `few` leaves out run too")
    parser.addoption("--part", default="1/1", metavar="I/N", help="every N-th of the tests chosen, from the I-th on")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long files first; leaves a part of the tests that markers have left: the parts of all I from 1 to N are all of them."""
    items.sort(key=lambda item: item.path.name not in LONG)
    chosen = few(config, items)
    kept = set(map(id, chosen))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = chosen
    part = config.getoption("part")
    first, _, parts = (int(word) if word.isdecimal() else 0 for word in part.partition("/"))
    if not 1 <= first <= parts:
        raise pytest.UsageError(f"--part: I/N with I from 1 to N was expected, {part} came")
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != first - 1])
    items[:] = items[first - 1 :: parts]


def few(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Of a test marked `few` the cases that its patterns match, of others all; on a GPU, by name and on demand, all of both."""
    if config.getoption("all_cases") or _for_gpu(config) or any("::" in argument for argument in config.args):
        return items
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        for pattern in getattr(item.get_closest_marker("few"), "args", ("*",)):
            found = cases.setdefault((item.nodeid.partition("[")[0], pattern), [])
            if fnmatchcase(item.callspec.id if hasattr(item, "callspec") else "", pattern):
                found.append(item)
    if (unmatched := [name for name, found in cases.items() if not found]) and not config.option.keyword:
        raise pytest.UsageError(f"few: a pattern that names a case was expected, these name none: {unmatched}")
    chosen = set(map(id, itertools.chain(*cases.values())))
    return [item for item in items if id(item) in chosen]


def _for_gpu(config: pytest.Config) -> bool:
    return "gpu" in config.option.markexpr.replace("not gpu", "")


def pytest_configure(config: pytest.Config) -> None:
    """The CPU, unless the tests asked for need a GPU. Programs are small there and run once or twice: optimising costs more."""
    import jax

    path = config.getoption("outcomes")
    if path is not None and not hasattr(config, "workerinput"):  # a process of pytest-xdist tells the first one
        config.pluginmanager.register(Outcomes(path))
    if not _for_gpu(config):
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        if QUICK_COMPILING not in (flags := os.environ.get("XLA_FLAGS", "")):  # a process of pytest-xdist inherits them
            os.environ["XLA_FLAGS"] = f"{flags} {QUICK_COMPILING}"
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_disable_most_optimizations", True)
        jax.config.update("jax_num_cpu_devices", RANKS)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What tests spend counts from here.

    On a GPU all kernels are lowered as those of an engine are, in half the time; what is patched for it has been imported by now.
    """
    global _spent
    if _for_gpu(session.config):
        from dflash_jax.compile.jax_patches import name_values_once

        name_values_once()
    _spent = sum(os.times()[:4])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Annotations are checked anew, in each file or in each test: see `check_annotations`."""
    global _checked_in, _turn
    if _checked_in != (place := item.nodeid if _checks_each_test(item) else item.path):
        _checked_in, _turn = place, _turn + 1


def _checks_each_test(item: pytest.Item) -> bool:
    return item.config.getoption("all_cases") or item.path.parent.name == "kernels"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A GPU test that named Triton's kernels counts as not run, with what is missing, where jax-triton is not installed."""
    try:
        return (yield)
    except NotImplementedError as error:
        if item.get_closest_marker("gpu") and WITHOUT_TRITON.fullmatch(str(error)):
            pytest.skip("jax-triton is not installed: pip install 'dflash-jax[triton]'")
        raise


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Keeps the processors' seconds of a test's three parts, and of the processes it waited for."""
    global _spent
    report, before, _spent = (yield), _spent, sum(os.times()[:4])
    report.user_properties.append((SPENT, _spent - before))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Where the time of many tests went: by folder, and the longest files."""
    folders, files = Counter[str](), Counter[str]()
    for report in itertools.chain(*terminalreporter.stats.values()):
        for name, seconds in getattr(report, "user_properties", ()):
            if name == SPENT:
                path = Path(report.nodeid.partition("::")[0])
                folders[path.parent.name] += seconds
                files[path.name] += seconds
    if len(files) > SHOWN:
        terminalreporter.section(f"{folders.total():.0f} seconds of processors")
        for found in (folders.most_common(), files.most_common(SHOWN)):
            terminalreporter.write_line(", ".join(f"{name} {seconds:.0f}" for name, seconds in found))


@pytest.fixture(autouse=True)
def programs_of_one_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """Programs are shared by tests of engines and what they decode, on a CPU.

    A command called in this process has programs kept in a folder of its own: the next test's are not.
    """
    module = sys.modules.get("dflash_jax.compile.programs")
    if module is not None and request.path.parent.name in SHARING and not _for_gpu(request.config):
        from .shared_programs import shared

        module.Programs.stored = shared()
    yield
    if (module := sys.modules.get("dflash_jax.compile.programs")) is not None:
        module.Programs.stored = None


@pytest.fixture
def monkeypatch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """pytest's. A test that replaces what may be traced gets programs of its own from then on: nothing else tells them apart."""
    replace = monkeypatch.setattr

    def setattr_(target: Any, *rest: Any, **options: Any) -> None:
        module = sys.modules.get("dflash_jax.compile.programs")
        if module is not None and module.Programs.stored is not None:
            from .shared_programs import traced

            if traced(target):
                module.Programs.stored = None
        replace(target, *rest, **options)

    monkeypatch.setattr = setattr_
    return monkeypatch


@pytest.fixture(autouse=True, scope="module")
def few_mappings() -> Iterator[None]:
    """A program compiled for the CPU holds several mappings for as long as it is kept: all tests' are more than Linux allows."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MAPPINGS:
        import jax

        if "dflash_jax.compile.programs" in sys.modules:
            from .shared_programs import shared

            shared().called.clear()
        jax.clear_caches()
        WHOLE_LOOK()


@pytest.fixture(scope="session")
def all_cases(pytestconfig: pytest.Config) -> bool:
    """Whether tests that draw their cases draw as many as `make test-all` does."""
    return pytestconfig.getoption("all_cases") or _for_gpu(pytestconfig)


@pytest.fixture(scope="module")
def optimised() -> Iterator[None]:
    """Programs optimised as for users: for tests that run them for long."""
    import jax

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
