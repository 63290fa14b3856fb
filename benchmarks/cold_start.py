"""From the start of a process to its first tokens, in the exact shapes of a 4B model and its drafter.

    python benchmarks/cold_start.py

Writes Hugging Face folders with random bf16 weights to local disk (about 9 GB), drops them from the page cache, and starts a fresh
process that loads them and streams: once where no program has been compiled, once with those that the first process has kept, and
both again with the files still in the page cache. Programs are kept as the command line keeps them, and Python's bytecode is there
as pip leaves it. Seconds count from the parent's decision to start it.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

PAIR = ("Qwen3-4B", "Qwen3-4B-DFlash-b16")
PROMPT, TOKENS = 512, 64
BLOCK_BYTES = 64 << 20
# All that a child could import: whole packages, and what of Python's own library they have imported.
COMPILE_ALL = """
import compileall, sys
import dflash_jax.generation, dflash_jax.checkpoints.huggingface
own = sys.stdlib_module_names
tops = {name.partition(".")[0] for name in sys.modules} - own
folders = {path for top in tops for path in getattr(sys.modules.get(top), "__path__", ())}
files = {getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if name.partition(".")[0] in own}
for folder in sorted(folders):
    compileall.compile_dir(folder, quiet=2, workers=0)
for file in sorted(file for file in files if file and file.endswith(".py")):
    compileall.compile_file(file, quiet=2)
"""


def write_folder(folder: Path, name: str) -> None:
    """A folder as it would come from the hub: config.json and one safetensors file, small random values."""
    import numpy as np

    from dflash_jax.models import family_for
    from dflash_jax.models.presets import DRAFTERS, TARGETS

    config = (TARGETS | DRAFTERS)[name]
    family = family_for(config)
    drafts = family.role == "draft"
    described = {
        "architectures": ["DFlashDraftModel" if drafts else "Qwen3ForCausalLM"], "model_type": "qwen3",
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim, "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta, "max_position_embeddings": config.max_position, "hidden_act": "silu",
        "attention_bias": False, "tie_word_embeddings": not drafts and config.tie_embeddings,
    }  # fmt: skip
    if drafts:
        taps = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
        described |= {
            "block_size": config.block_size,
            "num_target_layers": config.num_target_layers,
            "dflash_config": taps,
        }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(described))
    header, end = {}, 0
    for parameter in family.parameters(config):
        for source in parameter.sources:
            start, end = end, end + 2 * int(np.prod(source.shape))
            header[source.name] = {"dtype": "BF16", "shape": list(source.shape), "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    rng = np.random.default_rng(0)
    # bfloat16 of either sign between 2^-6 and 2^-5.
    block = (rng.integers(0x3C80, 0x3D00, BLOCK_BYTES // 2) | rng.integers(0, 2, BLOCK_BYTES // 2) << 15).astype("<u2")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for start in range(0, end, BLOCK_BYTES):
            file.write(memoryview(block).cast("B")[: end - start])


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)  # what is not on disk yet cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def child(folder: Path, started: float) -> None:
    """Loads and streams; prints seconds since `started` at each stage."""
    stages = {}

    def done(stage: str) -> None:
        stages[stage] = round(time.time() - started, 2)

    # As the command line does.
    from dflash_jax.cli.startup import read_models, start_device

    read_models(folder)
    from dflash_jax.compile.cache_folders import enable_compilation_cache

    enable_compilation_cache()
    start_device()
    import dflash_jax as dj
    from dflash_jax.generation import STREAM_CYCLES, make_requests

    done("imported")
    prompt, params = list(range(PROMPT)), dj.SamplingParams(max_tokens=TOKENS, ignore_eos=True)

    def first_run(model: dj.Model):
        return model.engine.run(make_requests(model, [prompt], params), cycles=STREAM_CYCLES)

    model = dj.load(folder, draft=folder / "draft", max_batch=1, ahead=first_run)
    done("loaded")
    pieces = dj.stream(model, prompt, params)
    tokens = [*next(pieces).token_ids]
    done("first token")
    tokens += next(pieces).token_ids
    done("first cycles")
    tokens += [token for piece in pieces for token in piece.token_ids]
    done("all tokens")
    print(json.dumps([stages | {"compiling": round(model.engine.programs.compile_s, 2)}, tokens]))


def environment_of_children(bytecode: Path) -> dict[str, str]:
    """Where packages were installed without bytecode, it is compiled below `bytecode`: a second of every start otherwise."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    spec = importlib.util.find_spec("jax")
    if (
        spec is not None
        and spec.origin is not None
        and not Path(importlib.util.cache_from_source(spec.origin)).exists()
    ):
        found.pop("PYTHONDONTWRITEBYTECODE", None)
        found["PYTHONPYCACHEPREFIX"] = str(bytecode)
        subprocess.run([sys.executable, "-c", COMPILE_ALL], env=found, check=True)
    return found


def start(folder: Path, environment: dict[str, str], cache: Path) -> tuple[dict[str, float], list[int]]:
    """Stages of a fresh process with its compiled programs below `cache`, and its tokens."""
    environment = environment | {"XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, __file__, "--child", str(folder), repr(time.time())]
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    stages, tokens = json.loads(answer.stdout.splitlines()[-1])
    return stages, tokens


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), float(sys.argv[3]))
        return
    from record import Record, arguments

    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="a local disk with 10 GB free")
    parser.add_argument(
        "--files", nargs="+", choices=("memory", "disk"), default=["memory", "disk"], help="where they are read from"
    )
    options = parser.parse_args()
    results, texts = {}, []
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch) / "target"
        began = time.time()
        write_folder(folder, PAIR[0])
        write_folder(folder / "draft", PAIR[1])
        environment = environment_of_children(Path(scratch) / "bytecode")
        print(f"files written in {time.time() - began:.1f} s", flush=True)
        # What was just written is in memory, so that comes first.
        for files in sorted(options.files, reverse=True):
            for case in ("cold cache", "warm cache"):
                case += ", files in memory" if files == "memory" else ""
                if files == "disk":
                    drop_from_page_cache(folder)
                results[case], tokens = start(folder, environment, Path(scratch) / f"{files} cache")
                texts.append(tokens)
                print(case, results[case], flush=True)
    if any(tokens != texts[0] for tokens in texts):
        raise SystemExit(f"programs from disk do not write what compiled ones write: {texts}")
    # This process has not touched the GPU until here: its children had all of it.
    record = Record("cold_start", options)
    for case, stages in results.items():
        record.add(f"start qwen3-4b-b16 {case}", "first token", stages["first token"], "s", stages=stages)
        record.add(f"start qwen3-4b-b16 {case}", "first cycles", stages["first cycles"], "s")
    print(record.write())


if __name__ == "__main__":
    main()
