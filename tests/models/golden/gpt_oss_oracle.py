"""Golden of gpt-oss's experts: what transformers makes of MXFP4, every scale and every byte among it."""

import numpy as np
import torch
from golden.store import FOLDER
from transformers.integrations.mxfp4 import convert_moe_packed_tensors


def write_all() -> dict[str, int]:
    """Writes `gpt_oss_folder/mxfp4.npz` and returns its size in bytes by name: 256 rows of a block each, with scales from 0 on."""
    rows = np.arange(256)
    blocks = (rows[:, None] * 31 + np.arange(16) * 16 + rows[:, None] // 16).astype(np.uint8).reshape(1, 256, 1, 16)
    scales = rows.astype(np.uint8).reshape(1, 256, 1)
    numbers = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.bfloat16)
    path = FOLDER / "gpt_oss_folder" / "mxfp4.npz"
    bits = numbers.contiguous().view(torch.int16).numpy().view(np.uint16)
    np.savez_compressed(path, blocks=blocks, scales=scales, bits=bits)
    return {"gpt_oss_mxfp4": path.stat().st_size}
