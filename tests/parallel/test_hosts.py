"""Two processes share a target: process 0 decides, both call the same programs, and neither outlives the other."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax.compile.led import follow
from dflash_jax.compile.programs import Programs
from dflash_jax.engine.sharing import check_sharing
from dflash_jax.errors import ParameterError
from dflash_jax.models.presets import TARGETS
from dflash_jax.options import LoadOptions
from dflash_jax.parallel import hosts, link
from dflash_jax.parallel.ranks import local_ranks

from ..conftest import QUICK_COMPILING
from ..convert.conftest import QWEN3, Folders
from .conftest import SIZES
from .test_texts_on_gpus import CASES, folder_of

PROMPT = [7, 3, 60, 5]
OPTIONS = {"dtype": "float32", "draft": False, "max_batch": 1, "max_model_len": 32, "page_size": 16}
# Scales of pages are found on both processes together.
ON_GPUS = {"dtype": "float32", "tp": 4, "max_batch": 1, "max_model_len": 256, "num_pages": 10}
OPTIONS |= {"cache_dtype": "fp8", "calibration": [[7, 3, 60, 5, 11, 12]]}
SCRIPT = """
import json, sys, time
from dflash_jax.parallel import hosts
coordinator, process, folder, prompt, options, gpus = sys.argv[1:]
if coordinator:
    hosts.start(coordinator, 2, int(process), gpus=int(gpus))
import dflash_jax as dj
model = dj.load(folder, **json.loads(options))
done = dj.generate(model, [json.loads(prompt)], dj.SamplingParams(max_tokens=12, ignore_eos=True))
print("tokens", json.dumps(done[0].token_ids), flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A target of one layer."""
    made = Folders(tmp_path_factory.mktemp("small"))
    config = QWEN3 | SIZES | {"num_hidden_layers": 1}
    return made.write("target", config, made.tensors(config, "float32"))


def tokens_of(process: subprocess.Popen) -> list[int]:
    """What a process says that its text is."""
    assert process.stdout is not None
    said = next((line for line in iter(process.stdout.readline, "") if line.startswith("tokens ")), None)
    if said is None:
        pytest.fail(f"it ended without a text: {process.communicate()[1][-2000:]}")
    return json.loads(said.removeprefix("tokens "))


def both(
    folder: Path, options: dict[str, Any], environments: list[dict[str, str]], gpus: int
) -> list[subprocess.Popen]:
    """Two processes that share a target, each with `gpus` of them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    return [
        started(folder, options, environment, coordinator, process, gpus)
        for process, environment in enumerate(environments)
    ]


def started(
    folder: Path,
    options: dict[str, Any],
    environment: dict[str, str],
    coordinator: str = "",
    process: int = 0,
    gpus: int = 0,
) -> subprocess.Popen:
    words = [coordinator, str(process), str(folder), json.dumps(PROMPT), json.dumps(options), str(gpus)]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *words], env=os.environ | environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def check_that_the_other_ends(processes: list[subprocess.Popen]) -> None:
    """Process 0 has done what it was asked, and sleeps; the other waits for its word, and is killed."""
    processes[1].kill()
    _, said = processes[0].communicate(timeout=30)
    assert processes[0].returncode == 1
    assert "process 1 is gone (its connection ended), and with it its part of the model: process 0 ends, too" in said


def end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def test_two_processes(small):
    expected = dj.generate(dj.load(small, **OPTIONS), [PROMPT], dj.SamplingParams(max_tokens=12, ignore_eos=True))
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_COMPILING, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    processes = both(small, OPTIONS | {"tp": 2}, [environment] * 2, 0)
    try:
        assert tokens_of(processes[0]) == expected[0].token_ids
        check_that_the_other_ends(processes)
    finally:
        end(processes)


@pytest.mark.gpu
@pytest.mark.several
def test_two_processes_with_two_gpus_each(tmp_path):
    """As on two hosts, each with two GPUs: the text of one process that has all four."""
    if hosts._gpus_here() < 4:
        pytest.skip("4 GPUs are not here")
    folder = folder_of(CASES["dense"](), tmp_path)
    everybody = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    alone = started(folder, ON_GPUS, everybody)
    try:
        expected = tokens_of(alone)
    finally:
        end([alone])
    processes = both(folder, ON_GPUS, [everybody | {"CUDA_VISIBLE_DEVICES": own} for own in ("0,1", "2,3")], 2)
    try:
        assert tokens_of(processes[0]) == expected
        check_that_the_other_ends(processes)
    finally:
        end(processes)


def test_records():
    """What was packed comes out again, and an end in the middle is an error."""
    ours, theirs = socket.socketpair()
    header, arrays = (
        {"call": 3, "gone": [1]},
        [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros(0, bool), np.array(2.0)],
    )
    ours.sendall(link.packed(header, arrays))
    told, found = link.received(theirs)
    assert told["call"] == 3
    for one, other in zip(found, arrays, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    ours.sendall(link.packed(header, arrays)[:-1])
    ours.close()
    with theirs, pytest.raises(ConnectionError, match="its connection ended"):
        link.received(theirs)


@pytest.mark.parametrize(
    ("said", "number"),
    [
        (link.packed({"token": "abc", "process": 1}, ()), 1),
        (link.packed({"token": "abd", "process": 1}, ()), None),
        (b"GET / HTTP/1.1\r\n\r\n", None),
        (b"\x02\0\0\0[]", None),
        (b"\x03\0\0\0\xff\xfe\xfd", None),
        (b"\xff\xff\xff\xff", None),
        (b"", None),
    ],
    ids=["a process", "a wrong token", "a browser", "a list", "no text", "a long one", "nothing"],
)
def test_strangers_are_sent_away(said, number):
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(said)
        assert link._greeted(theirs, "abc") == number


def test_only_functions_of_this_package_are_called():
    """Whoever could write to the connection could otherwise call anything."""
    told = {"function": "os:abort", "static": {"tuple": []}, "donate": [], "args": {"tuple": []}}
    with pytest.raises(ValueError, match="os:abort is not of dflash_jax"):
        follow(Programs(), (), {}, [({"program": told, "call": 0, "gone": []}, [np.zeros(0, np.int32)])])


def test_refusals(monkeypatch):
    with pytest.raises(
        ParameterError, match="processes, process must be given, too, where one of coordinator, processes"
    ):
        hosts.start("host:1")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ParameterError, match='cache_scales="traffic" finds scales in one process of several'):
        check_sharing(TARGETS["Qwen3-8B"], None, LoadOptions(tp=2, cache_dtype="fp8", cache_scales="traffic"))
    with pytest.raises(
        ParameterError, match="tp=2 must be the number of all devices of the 2 processes that have come together, 8"
    ):
        local_ranks(2)
