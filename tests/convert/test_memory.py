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

# Each reports bytes held after the imports, bytes of the arrays it is meant to end with, and the peak.
MEASURE = """
import sys
def held(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))
"""
COMMAND = (
    MEASURE
    + """
import jax
import dflash_convert.conversion
from dflash_convert.cli import main
jax.devices()
before = held("VmRSS")
code = main(sys.argv[1:])
print(before, 0, held("VmHWM"))
sys.exit(code)
"""
)
LOAD = (
    MEASURE
    + """
import jax
from dflash_jax.checkpoints.opening import open_checkpoint
jax.devices()
before = held("VmRSS")
params = open_checkpoint(sys.argv[1]).load()
print(before, sum(array.nbytes for array in params.values()), held("VmHWM"))
"""
)


def taken(program: str, *arguments) -> int:
    """Bytes a process takes at its peak, beyond its imports and its result."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    before, kept, peak = map(int, result.stdout.split())
    return peak - before - kept


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
        peaks = {
            "convert": taken(COMMAND, source, "--output", output, "--quiet"),
            "load converted": taken(LOAD, output),
            "load Hugging Face": taken(LOAD, source),
            "reverse": taken(COMMAND, output, "--reverse", "--output", back, "--quiet"),
        }
    finally:
        shutil.rmtree(output, ignore_errors=True)
        shutil.rmtree(back, ignore_errors=True)
    print({name: f"{peak / MIB:.0f} MiB" for name, peak in peaks.items()}, f"bound {bound / MIB:.0f} MiB")
    assert max(peaks.values()) <= bound, peaks
