"""`mask_embedding.pt`: files that torch wrote, a drafter that has one, and what is refused without being called."""

import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_convert.cli import main as dflash_convert
from safetensors.numpy import load_file, save_file

from dflash_jax.checkpoints.huggingface import assemble, inspect, open_checkpoint
from dflash_jax.checkpoints.mask_file import FILE, read_mask
from dflash_jax.checkpoints.safetensors import chunks

from ..torch_files import REBUILD, archive, mask_file, number, tensor, text

WRITTEN = Path(__file__).parent / "torch_files"
# A tuple of the tuple before it, twice, forty times: small, but whoever hashes or prints it goes through 2^40 places.
NESTED = b")" + b"q\x00h\x00\x86" * 40
VECTOR = np.arange(8, dtype=np.float32) * 0.25 - 1


@pytest.mark.parametrize(
    ("name", "added", "id"), [("named", 0, 96), ("bare", 0, None), ("parameter", 0, None), ("row", 1, None)]
)
def test_files_that_torch_wrote(name: str, added: int, id: int | None) -> None:
    """bfloat16 beside the token's id, float32 by itself, a float16 parameter `[1, 8]`, and a row of a larger tensor."""
    found, token = read_mask(WRITTEN / f"{name}.pt")
    (values,) = chunks(found)
    assert (found.name, found.shape, token) == ("mask_embedding", (8,), id)
    assert np.array_equal(values.astype(np.float32), VECTOR + added)


def test_a_state_dict(tmp_path: Path) -> None:
    """`torch.save(embedding.state_dict(), ...)`: an OrderedDict that has the versions of its modules as an attribute."""
    versions = b"}" + text("_metadata") + b"}" + text("") + b"}" + text("version") + number(1) + b"sssb"
    pickled = b"ccollections\nOrderedDict\n)R" + text("weight") + tensor(VECTOR) + b"s" + versions
    found, token = read_mask(archive(tmp_path / FILE, pickled, VECTOR))
    (values,) = chunks(found)
    assert np.array_equal(values, VECTOR)
    assert token is None


class Trap:
    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


@pytest.mark.parametrize(
    ("pickled", "said"),
    [
        (b"cos\nsystem\n" + b"(" + text("true") + b"tR", "it names 'os.system'"),
        (b"cbuiltins\neval\n", "it names 'builtins.eval'"), (b"ctorch\nload\n", "it names 'torch.load'"),
        (text("os") + text("system") + b"\x93", "it names 'os.system'"), (b"cx\x1b[2J\ny\n", r"it names 'x\\x1b\[2J.y'"),
        (b"(ios\nsystem\n", "its pickle has INST"), (b"\x82\x01", "its pickle has EXT1"),
        (b"Nr" + struct.pack("<I", 1 << 31) + b"p4000000000\n", "its pickle has PUT"),
        (b"\x8e" + struct.pack("<Q", 1 << 45), "cannot be read"), (b"\x8b" + struct.pack("<i", 1 << 30), "cannot be read"),
        (b"}" + NESTED + b"Ns", "keys that are no names"), (NESTED * 2 + b"\x93", "cannot be read"),
        (tensor(VECTOR).replace(b"ctorch\nFloatStorage\n", NESTED), "not a plain one"),
        (tensor(VECTOR).replace(b"ctorch\nFloatStorage\n", text("F64")), "not a plain one"),
        (tensor(VECTOR).replace(number(0), number(1)), "one after the other"),
        (b"}(" + text("mask_token_id") + b"\x8a\x06" + b"\x7f" * 6 + text("embedding") + tensor(VECTOR) + b"u", "it has"),
        (tensor(VECTOR, b"ctorch._utils\n_rebuild_qtensor\n"), "_rebuild_qtensor"), (b"N", "it holds no vector"),
        (b"}(" + text("weights") + tensor(VECTOR) + b"u", r"it has \['weights'\], expected embedding"),
        (b"}(" + text("mask_token_id") + text("96") + text("embedding") + tensor(VECTOR) + b"u", "it has"),
        (tensor(VECTOR) + b"}(" + text("offset") + number(9) + b"ub", "cannot be read"),
        (tensor(VECTOR).replace(number(8) + b"tQ", number(7) + b"tQ"), "one after the other"),
        (tensor(VECTOR).replace(number(1) + b"\x85", number(2) + b"\x85"), "one after the other"),
        (tensor(VECTOR).replace(text("storage"), text("module")), "not a plain one"),
        (tensor(VECTOR).replace(number(0), number(-1)), "not a plain one"), (REBUILD + b"(tR", "cannot be read"),
        (b"((((", "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, pickled: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        read_mask(archive(tmp_path / FILE, pickled, VECTOR))
    assert "save that tensor as `mask_embedding` in the safetensors file" in str(caught.value)


def test_archives_that_are_refused(tmp_path: Path) -> None:
    """torch's older files, bare pickles, compressed numbers, archives with a large pickle, and pieces of good ones."""
    path, opened = tmp_path / FILE, tmp_path / "opened"
    with pytest.raises(ValueError, match="not a zip file"):
        read_mask(WRITTEN / "old.pt")
    path.write_bytes(pickle.dumps(Trap(opened)))
    with pytest.raises(ValueError, match="not a zip file"):
        read_mask(path)
    with pytest.raises(ValueError, match="it names "):
        read_mask(archive(path, pickle.dumps(Trap(opened), 2)[2:-1], VECTOR))
    with pytest.raises(ValueError, match="'archive/byteorder' is compressed"):
        read_mask(archive(path, tensor(VECTOR), VECTOR, zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match="one after the other"):
        read_mask(archive(path, tensor(VECTOR), VECTOR, numbers=zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match="not little endian"):
        read_mask(archive(path, tensor(VECTOR), VECTOR, order="big"))
    archive(path, tensor(VECTOR), VECTOR)
    with zipfile.ZipFile(path, "a") as file:
        for each in range(1 << 11):
            file.writestr(f"archive/{each}", "")
    with pytest.raises(ValueError, match="no small file"):
        read_mask(path)
    with pytest.raises(ValueError, match="larger than 64 KiB"):
        read_mask(archive(path, tensor(VECTOR) + b"0" * (1 << 17), VECTOR))
    whole = mask_file(path, 96, VECTOR).read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="cannot be read"):
            read_mask(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is no file"):
        read_mask(path)
    assert not opened.exists()


def test_a_drafter_with_its_mask_in_such_a_file(hf: Any, tmp_path: Path) -> None:
    """It is the one that has the vector in its safetensors, and is written there on the way back."""
    folder = hf.dflash()
    token = open_checkpoint(folder).config.mask_token_id
    hidden = open_checkpoint(folder).config.hidden_size
    vector = np.linspace(-1, 1, hidden, dtype=np.float32).astype(jnp.bfloat16)
    mask_file(folder / FILE, token, vector)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.mask_embedding
    (step,) = (step for step in checkpoint.plan.steps if step.parameter.name == "mask_embedding")
    assert np.array_equal(assemble(step, "bfloat16"), vector)
    assert dflash_convert([str(folder), "--output", str(tmp_path / "out"), "--verify", "hash", "--quiet"]) == 0
    assert dflash_convert([str(tmp_path / "out"), "--reverse", "--output", str(tmp_path / "back"), "--quiet"]) == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.pop("mask_embedding").tobytes() == vector.tobytes()
    assert back.keys() == load_file(folder / "model.safetensors").keys()
    # Of another token, of another width, and beside the same tensor in the safetensors.
    mask_file(folder / FILE, token - 1, vector)
    assert any(f"is of token {token - 1}, config.json says mask_token_id={token}" in one for one in inspect(folder)[1])
    mask_file(folder / FILE, token, vector[1:])
    assert any("mask_embedding has shape" in one for one in inspect(folder)[1])
    tensors = load_file(folder / "model.safetensors") | {"mask_embedding": vector}
    save_file(tensors, folder / "model.safetensors")
    assert any("mask_embedding.pt is left alone" in one for one in open_checkpoint(folder).notices)
