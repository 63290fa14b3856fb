"""What the device is given in one cycle or step, launch by launch: programs compiled for an H200 that need not be there.

    python benchmarks/launches.py --batch 8
    python benchmarks/launches.py --batch 1 --sampling full --layers 1
    python benchmarks/launches.py --model qwen3.5-35b-a3b --batch 1 --layers 5 --kind step

Takes JAX's compiler for NVIDIA GPUs (`pip install jax-cuda13-plugin jax-cuda13-pjrt`, of jax's version), which compiles without a
GPU and without CUDA's libraries. Launches stand in the order in which XLA begins them; what each waits for stands behind the arrow,
where it is one of them, and in a graph it begins when those have ended. Shapes and choices are those of a GPU, times it has none;
cuBLAS is not asked which of its products are fastest, and sorts are XLA's own.
"""

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
from decode import LAWS
from jax.experimental import topologies

from dflash_jax.bench.workload import SHAPES, published_shape
from dflash_jax.checkpoints.weights import weight_shapes
from dflash_jax.decoding.loop import loop_options
from dflash_jax.engine import STOP_WIDTH, Engine
from dflash_jax.engine.warmup import Jobs
from dflash_jax.execution.weight_layout import cycle_rows
from dflash_jax.models import family_named
from dflash_jax.models.qwen3_5 import Qwen35Config

# An H200 as XLA describes it.
DEVICE = """
platform_name: "CUDA" device_description_str: "NVIDIA H200" dnn_version_info { major: 9 minor: 1 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 150000000000
}"""
NOT_LAUNCHED = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")


@dataclass(frozen=True)
class Launch:
    """One operation of an optimised program.

    Attributes:
      name, kind: XLA's.
      shape: of its results.
      after: names of operations that it waits for.
      source: what of ours it was, as far as XLA tells.
    """

    name: str
    kind: str
    shape: str
    after: tuple[str, ...]
    source: str


def compiled_loop(name: str, batch: int, *, layers: int, sampling: str, context: int, draft: bool = True) -> str:
    """The optimised program of a decode loop over `layers` layers of a published shape, with drafting or without."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # of libraries that only running takes
    topology = topologies.get_topology_desc("h200", "cuda", target_config=DEVICE, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    family, target, drafter = published_shape(name)
    few: dict[str, Any] = {"num_layers": layers, "windows": target.windows[:layers]}
    if isinstance(target, Qwen35Config):
        few["full_layers"] = tuple(index for index in target.full_layers if index < layers)
    taps = tuple(place * layers // len(drafter.target_layer_ids) for place in range(len(drafter.target_layer_ids)))
    target = replace(target, **few)
    drafter = replace(
        drafter, num_layers=1, windows=drafter.windows[:1], causal=drafter.causal[:1], target_layer_ids=taps,
        num_target_layers=layers,
    )  # fmt: skip
    pair, dtype = [(target, family_named(family)), (drafter, family_named("dflash"))], jax.numpy.dtype("bfloat16")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        engine = Engine(
            target=target, draft=drafter, weights=weight_shapes(pair, dtype, rows=cycle_rows(batch, drafter)), dtype=dtype,
            max_model_len=context + 640, max_batch=batch,
        )  # fmt: skip
        setup = engine.setup(mode=sampling, draft=draft)  # type: ignore[arg-type]
        job = Jobs(engine, setup, STOP_WIDTH).loop(batch, engine.buckets.width[-1])
        function, static, donated, *arguments = job.args
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), arguments)
        options = loop_options(*static, *arguments)
        program = jax.jit(
            partial(function, *static), donate_argnums=donated, compiler_options=options, out_shardings=everywhere
        )
        lowered = program.trace(*shapes).lower(lowering_platforms=("cuda",))
    return lowered.compile().as_text()


def launches(program: str) -> list[Launch]:
    """Those of the loop's body: of all computations, the one with the most calls of kernels."""
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in program.splitlines():
        if found := _COMPUTATION.match(line):
            lines = bodies.setdefault(found[1], [])
        else:
            lines.append(line)
    body = max(bodies.values(), key=lambda lines: sum(" custom-call(" in line for line in lines))
    return list(_launches(body))


def _launches(body: list[str]) -> Iterator[Launch]:
    # What results are taken from, through tuples and views of them.
    sources: dict[str, set[str]] = {}
    for line in body:
        if not (found := _OPERATION.match(line)):
            continue
        name, shape, kind, rest = found.groups()
        after = set().union(*(sources.get(one, set()) for one in re.findall(r"%([\w.\-]+)", rest.partition(")")[0])))
        if kind in NOT_LAUNCHED:
            sources[name] = after
            continue
        sources[name] = {name}
        source = re.search(r'op_name="(?:jit\(loop\)/while/body/)?([^"]*)"', rest)
        yield Launch(
            name, kind, re.sub(r"\{[^}]*\}|/\*.*?\*/", "", shape), tuple(sorted(after)), source[1] if source else ""
        )


def chain(steps: list[Launch]) -> int:
    """Launches one behind the other in the longest chain of those that wait for each other."""
    longest: dict[str, int] = {}
    for step in steps:
        longest[step.name] = 1 + max((longest[one] for one in step.after), default=0)
    return max(longest.values(), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4b", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2, help="of the target; the drafter has one")
    parser.add_argument("--sampling", default="greedy", choices=list(LAWS))
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--kind", default="cycle", choices=["step", "cycle"])
    options = parser.parse_args()
    most = published_shape(options.model)[1].num_layers
    if options.batch < 1 or options.context < 1 or not 1 <= options.layers <= most:
        parser.error(f"--batch and --context must be at least 1, --layers 1 to {most} for {options.model}")
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise SystemExit("JAX's compiler for NVIDIA GPUs is missing: pip install jax-cuda13-plugin jax-cuda13-pjrt")
    program = compiled_loop(
        options.model, options.batch, layers=options.layers, sampling=options.sampling, context=options.context,
        draft=options.kind == "cycle",
    )  # fmt: skip
    steps = launches(program)
    numbers = {step.name: number for number, step in enumerate(steps)}
    for number, step in enumerate(steps):
        waits = " ".join(str(one) for one in sorted(numbers[name] for name in step.after))
        print(f"{number:3d} {step.kind:12s} {step.source[-56:]:56s} {step.shape[:48]:48s} <- {waits}")
    print(f"{len(steps)} launches, {chain(steps)} of them one behind the other")


if __name__ == "__main__":
    main()
