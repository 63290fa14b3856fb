"""How fast weights come to the GPUs that share them: GB/s of a Hugging Face folder of random bf16 weights, by `load(tp=N)`.

    python benchmarks/loading.py --tp 1 4

Writes the folder to local disk (16 GB for Qwen3-8B). Each count of GPUs has a process of its own, which loads twice from the page
cache; with `--disk` once more after the files were dropped from it. Rows say how many bytes were read for each byte of the files.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cold_start import drop_from_page_cache, write_folder

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
OPTIONS = {"draft": False, "max_batch": 1, "max_model_len": 1024, "num_pages": 20}


def read_so_far() -> int:
    """Bytes that this process has asked the system for."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def child(folder: Path, tp: int, times: int) -> None:
    """Loads so many times; prints seconds and bytes read of each."""
    import jax

    import dflash_jax as dj

    jax.block_until_ready([jax.device_put(0, device) for device in jax.devices()])
    found = []
    for _ in range(times):
        started, before = time.perf_counter(), read_so_far()
        model = dj.load(folder, tp=tp, **OPTIONS)
        jax.block_until_ready(model.engine.weights)
        found.append((time.perf_counter() - started, read_so_far() - before))
        del model
    print(json.dumps(found))


def loaded(folder: Path, tp: int, times: int) -> list[tuple[float, int]]:
    """What a fresh process says."""
    command = [sys.executable, __file__, "--child", str(folder), str(tp), str(times)]
    environment = {name: value for name, value in os.environ.items() if name != PREALLOCATE}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def main() -> None:
    os.environ[PREALLOCATE] = "false"  # JAX names the card here, and the memory is its children's
    from record import Record, arguments

    parser = arguments(__doc__)
    parser.add_argument("--shape", default="Qwen3-8B")
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--folder", type=Path, help="with such a folder in it as `target`, or where it is written")
    parser.add_argument("--disk", action="store_true", help="also from the disk")
    options = parser.parse_args()
    record = Record("loading", options)
    with tempfile.TemporaryDirectory() as name:
        folder = (options.folder or Path(name)) / "target"
        if not folder.exists():
            write_folder(folder, options.shape)
        size = (folder / "model.safetensors").stat().st_size
        for tp in options.tp:
            sources = {"page cache": loaded(folder, tp, 2)}
            if options.disk:
                drop_from_page_cache(folder)
                sources["disk"] = loaded(folder, tp, 1)
            for source, found in sources.items():
                rates = [round(size / seconds / 1e9, 2) for seconds, _ in found]
                record.add(
                    f"load {options.shape} tp{tp} from {source}", "rate", max(rates), "GB/s", first=rates[0],
                    read=round(found[0][1] / size, 3), bytes=size,
                )  # fmt: skip
    print(record.write(), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
