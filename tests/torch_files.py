"""Files of `torch.save` without torch: one vector, by itself or beside the id of a token, written opcode by opcode."""

import struct
import zipfile
from pathlib import Path

import numpy as np

STORAGES = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage"}
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def tensor(vector: np.ndarray, rebuild: bytes = REBUILD) -> bytes:
    """Opcodes of a vector whose numbers are entry 0 of the archive."""
    storage = f"ctorch\n{STORAGES[vector.dtype.name]}\n".encode()
    held = b"(" + text("storage") + storage + text("0") + text("cpu") + number(vector.size) + b"tQ"
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    return rebuild + b"(" + held + number(0) + number(vector.size) + b"\x85" + number(1) + b"\x85" + hooks + b"tR"


def archive(
    path: Path,
    pickled: bytes,
    vector: np.ndarray,
    compression: int = zipfile.ZIP_STORED,
    *,
    numbers: int | None = None,
    order: str = "little",
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        file.writestr("archive/byteorder", order)
        file.writestr("archive/data/0", vector.tobytes(), numbers)
    return path


def mask_file(path: Path, token: int, vector: np.ndarray) -> Path:
    """`{"mask_token_id": token, "embedding": vector}`, as published drafters have it."""
    return archive(
        path, b"}(" + text("mask_token_id") + number(token) + text("embedding") + tensor(vector) + b"u", vector
    )
