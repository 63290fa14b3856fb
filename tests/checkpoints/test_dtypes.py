"""Types of safetensors files: all that the format has are known, those that no array here has are named where they are needed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.checkpoints.huggingface import inspect, open_checkpoint
from dflash_jax.checkpoints.safetensors import DTYPES, UNREAD_BITS, chunks, read_header
from dflash_jax.errors import CheckpointError
from dflash_jax.models import family_of

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
NORM = "model.norm.weight"


def folder(root: Path, **changes: Any) -> Path:
    table = family_of(CONFIG).parameters(family_of(CONFIG).config(CONFIG))
    save_file(
        {source.name: np.ones(source.shape, np.float32) for row in table for source in row.sources},
        root / "model.safetensors",
    )
    (root / "config.json").write_text(json.dumps(CONFIG | changes))
    return root


def edit(root: Path, name: str, dtype: str, shape: list[int], data: bytes) -> None:
    """Puts a tensor at the end of the file, or another type onto the tensor of this name that lies there."""
    path = root / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    if name in header:
        header[name] |= {"dtype": dtype, "shape": shape}
    else:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@pytest.mark.parametrize("dtype", UNREAD_BITS)
def test_every_other_type_of_the_format_is_placed(tmp_path: Path, dtype: str) -> None:
    """The sizes are those of the safetensors library, which takes these files too."""
    import safetensors

    root, nbytes = folder(tmp_path), UNREAD_BITS[dtype]
    edit(root, "scale", dtype, [8], b"\x7f" * nbytes)
    with safetensors.safe_open(str(root / "model.safetensors"), "numpy") as file:
        assert "scale" in file.keys()  # noqa: SIM118, it is no mapping
    tensor = read_header(root / "model.safetensors")["scale"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes, tensor.dtype_name) == (dtype, (8,), nbytes, dtype)
    with pytest.raises(
        CheckpointError, match=f"tensor scale has dtype {dtype}, which is not read: take the release in"
    ):
        next(chunks(tensor))


def test_a_needed_tensor_of_such_a_type_is_named_and_not_called_damaged(tmp_path: Path) -> None:
    root = folder(tmp_path)
    edit(root, NORM, "F8_E8M0", [64], b"")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(root)
    [problem] = [each for each in caught.value.problems if "dtype" in each]
    assert (
        problem
        == f"tensor {NORM} has dtype F8_E8M0, which is not read: take the release in bfloat16, float16 or float32"
    )
    assert "damaged" not in str(caught.value)


def test_what_the_weights_are_quantized_with_is_said_beside_the_configuration(tmp_path: Path) -> None:
    root = folder(tmp_path, quantization_config={"quant_method": "mxfp8"})
    edit(root, "model.layers.0.mlp.up_proj.weight_scale", "F8_E8M0", [8], b"\x7f" * 8)
    edit(root, "model.layers.0.mlp.down_proj.weight_scale", "F8_E8M0", [8], b"\x7f" * 8)
    checkpoint, problems = inspect(root)
    assert checkpoint is None
    assert problems[0] == (
        "tensor model.layers.0.mlp.up_proj.weight_scale and 1 more have dtype F8_E8M0, which is not read: take the release in "
        "bfloat16, float16 or float32"
    )
    assert "weights are quantized ('mxfp8')" in problems[1]


def test_a_type_of_the_future_may_be_damage_or_not(tmp_path: Path) -> None:
    root = folder(tmp_path)
    edit(root, "scale", "F3_E1M1", [8], b"\x7f" * 3)
    with pytest.raises(CheckpointError, match=r"has dtype 'F3_E1M1', known are BOOL, .*of a newer format or damaged"):
        read_header(root / "model.safetensors")


@pytest.mark.parametrize(("dtype", "count"), [("F4", 3), ("F6_E2M3", 5), ("F4", 1)])
def test_types_below_a_byte_fill_whole_bytes(tmp_path: Path, dtype: str, count: int) -> None:
    root = folder(tmp_path)
    edit(root, "scale", dtype, [count], b"\x7f" * 4)
    with pytest.raises(CheckpointError, match="bits and no whole bytes; the file is damaged"):
        read_header(root / "model.safetensors")


def test_no_type_is_both() -> None:
    assert not DTYPES.keys() & UNREAD_BITS.keys()


@pytest.mark.parametrize("metadata", ["pt", ["pt"], {"format": 1}, {"format": None}, 0, False])
def test_metadata_are_texts_by_name(tmp_path: Path, metadata: Any) -> None:
    """As in the safetensors library, which reads no file with others."""
    import safetensors

    text = json.dumps({"__metadata__": metadata}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=r"has __metadata__ .*expected an object of texts"):
        read_header(path)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(str(path), "numpy")
    path.write_bytes((22).to_bytes(8, "little") + b'{"__metadata__": null}')
    assert read_header(path) == {}
