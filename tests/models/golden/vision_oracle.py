"""Golden of Qwen3.5 with pictures: the vision tower, positions on three axes, logits of a prompt with pictures, and pixels.

Everything is transformers': its processor's pixels of a picture, its tower's rows, its positions, and what its model says of every
token of a text with two pictures in it and of a continuation.
"""

import json

import numpy as np
import torch
from golden.store import FOLDER
from PIL import Image
from transformers import Qwen2VLImageProcessorPil, Qwen3_5Config, Qwen3_5ForConditionalGeneration

TEXT = {
    "vocab_size": 110, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    },
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 24, "intermediate_size": 36, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "in_channels": 3, "out_hidden_size": 32, "num_position_embeddings": 25,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
IDS = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.4],
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 1024},
}  # fmt: skip
# Height and width in pixels: as they are, made larger, made smaller, and a third of which neither edge fits.
PICTURES = ((24, 16), (9, 11), (70, 40), (23, 31))
FOLDER_NAME = "qwen3_5_vision"


def picture(number: int) -> Image.Image:
    """A smooth random picture: what neighbouring pixels share tells a wrong order of patches from a right one."""
    height, width = PICTURES[number]
    random = np.random.default_rng(number)
    coarse = Image.fromarray(random.integers(0, 256, (5, 4, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def write_all() -> dict[str, int]:
    """Writes `qwen3_5_vision` and returns the size of its weights in bytes by name."""
    torch.manual_seed(0)
    folder = FOLDER / FOLDER_NAME
    folder.mkdir(exist_ok=True)
    config = Qwen3_5Config(text_config=TEXT, vision_config=VISION, **IDS, tie_word_embeddings=True)
    config._attn_implementation = "eager"
    model = Qwen3_5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim > 1:
                tensor.normal_(std=(tensor[0].numel()) ** -0.5 * (1.0 if "pos_embed" not in name else 3.0))
            elif "norm" in name and name.endswith("weight") and "visual" not in name and "linear_attn" not in name:
                tensor.uniform_(-0.3, 0.3)
            elif "norm" in name and name.endswith("weight"):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                tensor.normal_(std=0.3)
            tensor.copy_(tensor.half().float())
    model = model.double()  # what is expected is to be nearer the truth than either float32 of its rounding
    process = Qwen2VLImageProcessorPil(
        **{key: value for key, value in PROCESSOR.items() if key != "image_processor_type"}
    )
    seen = process([picture(number) for number in range(len(PICTURES))], return_tensors="pt")
    pixels, grids = seen["pixel_values"], seen["image_grid_thw"]
    counts = (grids.prod(-1) // 4).tolist()
    starts = np.concatenate([[0], np.cumsum(grids.prod(-1).numpy())])
    with torch.no_grad():
        rows = model.model.get_image_features(pixels, grids).pooler_output
    random = np.random.default_rng(1)

    def text(count: int) -> list[int]:
        return random.integers(0, 100, count).tolist()

    def shown(number: int) -> list[int]:
        return [102, *[100] * counts[number], 103]

    ids = [*text(5), *shown(0), *text(9), *shown(2), *text(4)]
    further = text(7)
    two = torch.cat([pixels[starts[number] : starts[number + 1]] for number in (0, 2)])
    whole = torch.tensor([ids + further])
    kinds = (whole == 100).int()
    with torch.no_grad():
        found, delta = model.model.get_rope_index(whole, kinds, grids[[0, 2]])
        logits = model(whole, pixel_values=two, image_grid_thw=grids[[0, 2]], mm_token_type_ids=kinds).logits[0]
        best = list(ids)
        for _ in range(48):
            now = torch.tensor([best])
            given = {"pixel_values": two, "image_grid_thw": grids[[0, 2]], "mm_token_type_ids": (now == 100).int()}
            best.append(int(model(now, **given, use_cache=False).logits[0, -1].argmax()))
    model.half().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    pictures = {f"picture_{number}": np.asarray(picture(number)) for number in range(len(PICTURES))}
    np.savez_compressed(
        folder / "expected.npz", ids=np.array(ids, np.int32), further=np.array(further, np.int32), grids=grids.numpy(),
        pixels=pixels.numpy(), rows=torch.cat(tuple(rows)).float().numpy(), positions=found[:, 0].numpy().astype(np.int32),
        delta=np.int32(delta[0, 0]), logits=logits.float().numpy(), greedy=np.array(best[len(ids) :], np.int32), **pictures,
    )  # fmt: skip
    return {FOLDER_NAME: (folder / "model.safetensors").stat().st_size}
