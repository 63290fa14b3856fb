"""Memory: a checkpoint of 0.5 GB is converted, loaded and converted back by a process that never holds much of it.

The bound is the contract's: twice the largest tensor plus 300 MB, over what the process holds once everything is imported.
Peaks are VmHWM of the process itself; `ru_maxrss` would start at the size of the process that forked it.
"""

import json
import shutil
import subprocess
import sys

import pytest

from dflash_jax.models import family_of

MIB = 1 << 20
ALLOWED = 300 * MIB
BIG = {
    "hidden_size": 2048, "vocab_size": 8192, "intermediate_size": 8192, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip

# One process imports everything and then becomes each of those that are measured, which would else import it anew. Each reports
# bytes held before it begins, bytes of the arrays it is meant to end with, and the peak.
MEASURE = """
import json, os, sys
import jax
import dflash_convert.conversion
from dflash_convert.cli import main
from dflash_jax.checkpoints.opening import open_checkpoint

def held(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

def measured(arguments):
    jax.devices()
    before, code, kept = held("VmRSS"), 0, 0
    if arguments[0] == "load":
        params = open_checkpoint(arguments[1]).load()
        kept = sum(array.nbytes for array in params.values())
    else:
        code = main(arguments)
    print(json.dumps([before, kept, held("VmHWM")]), flush=True)
    return code

for arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        code = 1
        try:
            code = measured(arguments)
        finally:
            os._exit(code)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(1)
"""


def taken(*commands: list[str]) -> list[int]:
    """Bytes a process takes at its peak for each command, beyond its imports and its result."""
    done = subprocess.run([sys.executable, "-c", MEASURE, json.dumps(commands)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [peak - before - kept for before, kept, peak in map(json.loads, done.stdout.splitlines())]


def write_sparse(folder, config) -> tuple[int, int]:
    """A checkpoint of zeros that takes no room on disk; its bytes and those of its largest tensor."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    family = family_of(config)
    header, position, largest = {}, 0, 0
    for parameter in family.parameters(family.config(config)):
        for source in parameter.sources:
            end = position + 2 * source.shape[0] * (source.shape[1] if len(source.shape) == 2 else 1)
            header[source.name] = {"dtype": "BF16", "shape": list(source.shape), "data_offsets": [position, end]}
            position, largest = end, max(largest, end - position)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    return position, largest


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_of_a_large_checkpoint(hf):
    source, output, back = hf.root / "source", hf.root / "out", hf.root / "back"
    total, largest = write_sparse(source, hf.qwen3_config | BIG)
    assert total > 500 * MIB
    assert largest == 32 * MIB
    bound = 2 * largest + ALLOWED
    try:
        commands = {
            "convert": [str(source), "--output", str(output), "--quiet"],
            "load converted": ["load", str(output)],
            "load Hugging Face": ["load", str(source)],
            "reverse": [str(output), "--reverse", "--output", str(back), "--quiet"],
        }
        peaks = dict(zip(commands, taken(*commands.values()), strict=True))
    finally:
        shutil.rmtree(output, ignore_errors=True)
        shutil.rmtree(back, ignore_errors=True)
    print({name: f"{peak / MIB:.0f} MiB" for name, peak in peaks.items()}, f"bound {bound / MIB:.0f} MiB")
    assert max(peaks.values()) <= bound, peaks
