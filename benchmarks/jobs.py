"""What `suite.py` runs: the commands that rows of `results` name, and the tests that need a GPU, with the seconds that each takes.

A command that only measured some cases of another once more is left out: the other renews its rows too. A test compares the table
with the results.
"""

import importlib.util
import os
import shlex
import sys
from pathlib import Path

from schedule import Job

# About how many seconds each takes on an H200, its start included, rounded up; compiling is most of it. Those of decode_* (but 32k
# and 8k), bench*, cold_start and pair* are shares of what they took together; of decode_30b, chunks*, mla_prefill*, moe* and peers,
# guesses from what they do.
BENCHMARKS = {
    "decode_4b": ("decode.py --models qwen3-4b --batch 1 8 32 --calls 5", 130),
    "decode_8b": ("decode.py --models qwen3-8b --batch 1 8 32 --calls 5", 140),
    "decode_ctx32k": ("decode.py --models qwen3-8b qwen3-4b --context 32768 --batch 1 --calls 5", 100),
    "decode_ctx32k_window": (
        "decode.py --models qwen3-8b qwen3-4b --context 32768 --batch 1 --calls 5 --kinds cycle --draft-window 2048",
        90,
    ),
    "decode_between": ("decode.py --models qwen3-8b qwen3-4b --batch 1 2 4 16 --calls 5", 230),
    "decode_hybrid": ("decode.py --models qwen3.5-4b qwen3.5-9b --batch 1 8 32 --calls 3", 200),
    "decode_hybrid_32k": ("decode.py --models qwen3.5-4b --context 32768 --batch 1 --calls 3", 70),
    "decode_hybrid_8k": (
        "decode.py --models qwen3-4b qwen3.5-4b qwen3-8b qwen3.5-9b --context 8192 --batch 1 --kinds step --calls 2",
        200,
    ),
    "decode_27b": ("decode.py --models qwen3.5-27b --batch 1 8 --calls 2", 150),
    "decode_27b_32k": ("decode.py --models qwen3.5-27b --context 32768 --batch 1 --calls 2", 120),
    "decode_35b": ("decode.py --models qwen3.5-35b-a3b --batch 1 8 --calls 3", 130),
    "decode_35b_32k": ("decode.py --models qwen3.5-35b-a3b --context 32768 --batch 1 --calls 3", 100),
    "decode_llama": ("decode.py --models llama-3.1-8b --batch 1 8 32 --calls 5", 100),
    "decode_heads": ("decode.py --models qwen3-8b qwen3-8b-dflash2 --batch 1 8 --calls 3 --kinds cycle", 110),
    "decode_30b": ("decode.py --models qwen3-coder-30b-a3b --batch 1 8 --calls 3", 140),
    "decode_gpt_oss": ("decode.py --models gpt-oss-20b --batch 1 8 --calls 3", 110),
    "decode_32k": ("decode.py --models qwen3-4b --context 1024 32768 --attention best xla --calls 3", 110),
    "decode_8k": ("decode.py --models qwen3-4b --context 8192 --batch 8 --calls 3 --cache-dtype none fp8 int8", 90),
    "decode_fp8": ("decode.py --batch 1 --calls 4 --weight-dtype fp8", 60),
    "decode_int8": ("decode.py --batch 1 --calls 4 --weight-dtype int8", 60),
    "decode_sampled": ("decode.py --models qwen3-4b --batch 1 8 32 --kinds cycle --sampling sampled --calls 5", 70),
    "decode_full": ("decode.py --models qwen3-4b --batch 1 8 32 --kinds cycle --sampling full --calls 5", 80),
    "decode_exact": ("decode.py --models qwen3-4b --batch 1 8 32 --calls 3 --kinds cycle --exact", 60),
    "decode_exact_8b": ("decode.py --models qwen3-8b --batch 1 8 32 --calls 3 --kinds cycle --exact", 90),
    "decode_fp8_dynamic": (
        "decode.py --models qwen3-4b qwen3-8b --batch 1 8 32 --calls 5 --weight-dtype fp8_dynamic",
        240,
    ),
    "decode_fp8_dynamic_drafter": (
        "decode.py --models qwen3-4b qwen3-8b --batch 1 8 32 --calls 5 --kinds cycle --draft-weight-dtype fp8_dynamic",
        190,
    ),
    "verify_1_8": ("verify.py --batch 1 8 --verified 1 4 8 16 --calls 3", 150),
    "verify_32_64": ("verify.py --batch 32 64 --verified 1 4 8 16 --calls 3", 150),
    "bench": ("bench.py --concurrency 1 8 64", 150),
    "bench_fp8_dynamic": ("bench.py --concurrency 8 64 --kinds alone block auto --weight-dtype fp8_dynamic", 120),
    "bench_mix": (
        "bench.py --concurrency 8 64 --kinds block auto per_request --imposed-acceptance 2 10 --short-length 0",
        150,
    ),
    "exact_1": ("exact.py --batch 1", 200),
    "exact_8": ("exact.py --batch 8", 200),
    "exact_32": ("exact.py --batch 32", 200),
    "exact_default": ("exact.py --batch 8 --default", 130),
    "exact_shapes_4b": ("exact_shapes.py --models qwen3-4b", 120),
    "exact_shapes_30b": ("exact_shapes.py --models qwen3-coder-30b-a3b", 150),
    "exact_shapes_lite": ("exact_shapes.py --models deepseek-v2-lite", 220),
    "cold_start": ("cold_start.py", 120),
    "pair": ("pair.py", 80),
    "pair_int8": ("pair.py --weight-dtype int8", 80),
    "pair_fp8": ("pair.py --weight-dtype fp8", 80),
    "pair_draft_fp8_dynamic": ("pair.py --draft-weight-dtype fp8_dynamic", 80),
    "pair_dflash": ("pair.py --draft tests/data/dflash", 80),
    "train_v1": ("train_drafters.py --kinds v1 --start shipped --rate 1e-3 --seed 1", 560),
    "train_dflash2": ("train_drafters.py --kinds dflash2 --start shipped --rate 1e-3 --seed 1", 900),
    "train_dspark": ("train_drafters.py --kinds dspark --start shipped --rate 1e-3 --seed 1", 600),
    "pair_window": ("pair.py --draft-window 64", 80),
    "peers": ("peers.py --models qwen3-4b --context 1024 --batch 1 8 32", 120),
    "attention": ("attention.py --without-xla", 180),
    "prefill": ("prefill.py", 80),
    "chunks": ("chunks.py", 90),
    "cascade": ("cascade.py", 120),
    "energy": ("energy.py --models qwen3-4b qwen3-8b --batch 1 8 32", 270),
    "energy_512": (
        "energy.py --models qwen3-4b qwen3-8b --batch 32 --context 512 --kinds cycle --no-products",
        100,
    ),
    "mla": ("mla.py --without-xla", 180),
    "mla_prefill": ("mla_prefill.py", 200),
    "mla_prefill_crossover": ("mla_prefill.py --parts crossover --heads 16 --tokens 128 256 512 1024", 100),
    "sparse": ("sparse.py --models DeepSeek-V3.2 --batch 1 --contexts 131072", 150),
    "sparse_lengths": (
        "sparse.py --models DeepSeek-V3.2 --batch 1 --contexts 4096 16384 32768 --steps sparse dense",
        200,
    ),
    "cache_write": ("cache_write.py", 40),
    "moe_30b": ("moe.py --shape Qwen3-30B-A3B --without-ragged --tokens 1 8 16 128 512", 120),
    "structured": ("structured.py --shapes qwen3-4b", 200),
    "serving": ("serving.py --shapes qwen3-4b", 160),
    "moe_lite": ("moe.py --without-ragged --tokens 1 16 128 512 2048", 120),
}
# Jobs whose rows nobody has brought home yet; their seconds are guesses.
WITHOUT_ROWS = (
    "pair_fp8",
    "pair_draft_fp8_dynamic",
    "pair_dflash",
    "pair_window",
)
# Commands of rows that need several GPUs at once, which a job here does not get.
SEVERAL_GPUS = (
    "several_gpus.py --models qwen3-8b --tp 2 --batch 1 8 --calls 4 --exchange",
    "several_gpus.py --models qwen3-8b --tp 2 1 --batch 1 8 --calls 4 --collectives",
    "several_gpus.py --models qwen3-8b --tp 2 --batch 8 --calls 4 --collectives",
    "several_gpus.py --models qwen3-8b --tp 4 --batch 1 8 --calls 4 --exchange",
    "several_gpus.py --models qwen3-32b --tp 4 2 --batch 1 8 --calls 4 --exchange",
    "several_gpus.py --models qwen3-coder-30b-a3b --tp 4 --batch 1 8 --calls 4 --exchange",
    "several_gpus.py --calls 4 --models qwen3.5-9b --tp 2 --batch 1 8 --exchange",
    "several_gpus.py --calls 4 --models qwen3.5-9b --tp 2 --batch 1 8 --collectives",
    "several_gpus.py --calls 4 --models qwen3-235b-a22b --tp 4 --batch 1",
    "several_gpus.py --calls 4 --models qwen3-8b --tp 4 --batch 32",
    "several_gpus.py --models qwen3-8b --context 1024 --calls 3 --tp 2 --batch 1 8",
    "several_gpus.py --models qwen3-coder-30b-a3b --context 1024 --calls 3 --tp 2 --batch 1 8",
    "several_gpus.py --models deepseek-v2-lite --context 1024 --calls 3 --tp 2 --batch 1 8",
    "several_gpus.py --models deepseek-v2-lite --context 1024 --calls 3 --tp 2 --batch 1 8 --collectives",
    "several_gpus.py --models gpt-oss-20b --context 1024 --calls 3 --tp 2 --batch 1 8",
)
PARTS, PROCESSES = 4, 15
PART_SECONDS, SEVERAL_SECONDS, LARGE_SECONDS = 200, 200, 120  # the first two with that many processes
TESTS = ["tests_several", *(f"tests{part}" for part in range(1, PARTS + 1)), "tests_large"]
SHARE = 0.9  # of a GPU's memory: each process takes half a gigabyte beside JAX's pool
OUTCOMES = "outcomes.jsonl"
# Compiling is nearly all of a test's time on a GPU; trying XLA's ways of a product half of that.
QUICK = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()}


def job(name: str, out: Path, commit: str | None, processes: int) -> Job:
    """A job by its name.

    Args:
      out: where its folder will be.
      commit: for its rows, where the tree has no .git.
      processes: that share a GPU for tests.
    """
    if name in TESTS:
        return _tests(name, out / name, processes)
    command, about = BENCHMARKS[name]
    script, *words = shlex.split(command)
    more = ["--out", str(out / name), *(["--commit", commit] if commit else [])]
    return _job(name, [str(Path("benchmarks") / script), *words, *more], about)


def _tests(name: str, folder: Path, processes: int) -> Job:
    """A part of the tests that need a GPU, many at a time where pytest-xdist is there; those that use several; or those that need
    a GPU's memory."""
    words = ["-m", "pytest", "-q", f"--outcomes={folder / OUTCOMES}"]
    if name == "tests_large":
        return _job(name, [*words, "-m", "gpu and large"], LARGE_SECONDS)
    several = name == "tests_several"
    about, gpus = (SEVERAL_SECONDS, 2) if several else (PART_SECONDS, 1)
    some = (
        ["gpu and several"]
        if several
        else ["gpu and not large and not several", f"--part={name.removeprefix('tests')}/{PARTS}"]
    )
    words += ["-m", *some]
    if importlib.util.find_spec("xdist") is None or processes == 1:
        return _job(name, words, about * PROCESSES, gpus)
    words += [f"--numprocesses={processes}", "--dist=worksteal"]
    shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{SHARE / processes:.4f}", **QUICK}
    return _job(name, words, about * max(1, PROCESSES / processes), gpus, **shared)


def _job(name: str, words: list[str], about: float, gpus: int = 1, **environment: str) -> Job:
    """One that hangs is given up: twice the time is more than a slow disk or a cold cache costs."""
    return Job(name, [sys.executable, *words], about, 2 * about + 30, environment, gpus)
