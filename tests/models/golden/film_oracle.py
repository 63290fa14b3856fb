"""Golden of Qwen3.5 with films: frames that are looked at, their pixels, tokens of a prompt, positions on three axes, and logits.

Everything is transformers': its video processor, its processor of a text with two films and a picture in it, and what its model, of
the weights that `vision_oracle` wrote, says of every token and of a continuation.
"""

import json

import numpy as np
import torch
from golden.film_words import TEMPLATE, tokenizer
from golden.store import FOLDER
from golden.vision_oracle import FOLDER_NAME, PROCESSOR, picture
from PIL import Image
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize
from transformers.video_utils import VideoMetadata

SAID = {
    "video_processor_type": "Qwen3VLVideoProcessor", "image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.5, 0.4], "patch_size": 4,
    "temporal_patch_size": 2, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 4096}, "fps": 2, "min_frames": 4,
    "max_frames": 12, "cap_pixels_per_frame": False,
}  # fmt: skip
# Frames, height and width, and frames a second: sampled and as large as they are; odd and smaller; a pair that is larger; many.
FILMS = ((9, 24, 16, 4.0), (5, 70, 40, 2.0), (2, 9, 11, 1.0), (60, 23, 31, 30000 / 1001))
# Of a prompt: a film, a picture, a film.
FIRST, BETWEEN, SECOND = 1, 0, 0
COUNTS = ((2, 1.0), (3, 30.0), (5, 2.0), (100, 25.0), (901, 29.97), (12, 24.0), (40_000, 23.976), (60, 30000 / 1001))
SIZES = (
    (4, 480, 640), (5, 1080, 1920), (3, 100, 100), (768, 1080, 1920), (120, 720, 1280), (2, 17, 3000), (7, 20, 40),
    (60, 4000, 6000), (2, 33, 33), (12, 31, 32),
)  # fmt: skip
# What the class says where a folder says nothing, and what releases say.
BUDGETS = ((128 * 32 * 32, 32 * 32 * 768), (4096, 25_165_824))


def film(number: int) -> np.ndarray:
    """A smooth random film that goes on: `[T, H, W, 3]`."""
    frames, height, width, _ = FILMS[number]
    random = np.random.default_rng(100 + number)
    coarse = random.integers(0, 256, (frames // 8 + 2, 5, 4, 3)).astype(np.float32)
    at = np.linspace(0, len(coarse) - 1.001, frames)
    low, rest = at.astype(int), (at % 1)[:, None, None, None].astype(np.float32)
    mixed = ((1 - rest) * coarse[low] + rest * coarse[low + 1]).round().astype(np.uint8)
    return np.stack(
        [np.asarray(Image.fromarray(one).resize((width, height), Image.Resampling.BICUBIC)) for one in mixed]
    )


def metadata(number: int) -> VideoMetadata:
    frames, height, width, fps = FILMS[number]
    return VideoMetadata(total_num_frames=frames, fps=fps, width=width, height=height, duration=frames / fps)


def write_all() -> dict[str, int]:
    """Writes `films.npz` and `video_preprocessor_config.json` into `qwen3_5_vision`; returns the size of the first in bytes."""
    folder = FOLDER / FOLDER_NAME
    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, attn_implementation="eager", dtype="float32")
    model = model.eval().double()
    videos = Qwen3VLVideoProcessor(**{key: value for key, value in SAID.items() if key != "video_processor_type"})
    images = Qwen2VLImageProcessorPil(
        **{key: value for key, value in PROCESSOR.items() if key != "image_processor_type"}
    )
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), chat_template=TEMPLATE)
    process = Qwen3VLProcessor(images, words, videos, chat_template=TEMPLATE)
    each = [
        videos([film(number)], video_metadata=[metadata(number)], return_tensors="pt", return_metadata=True)
        for number in range(len(FILMS))
    ]
    random = np.random.default_rng(2)

    def text(count: int) -> str:
        return " ".join(f"w{one}" for one in random.integers(0, 100, count))

    parts = [
        {"type": "text", "text": text(3)}, {"type": "video"}, {"type": "text", "text": text(4)}, {"type": "image"},
        {"type": "text", "text": text(2)}, {"type": "video"}, {"type": "text", "text": text(5)},
    ]  # fmt: skip
    asked = process.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    given = process(
        text=[asked], images=[picture(BETWEEN)], videos=[film(FIRST), film(SECOND)],
        video_metadata=[metadata(FIRST), metadata(SECOND)], return_tensors="pt",
    )  # fmt: skip
    seen = {name: given[name] for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")}
    ids, kinds = given["input_ids"], given["mm_token_type_ids"]
    with torch.no_grad():
        rows = model.model.get_video_features(given["pixel_values_videos"], given["video_grid_thw"]).pooler_output
        grids = seen["image_grid_thw"], seen["video_grid_thw"]
        positions, delta = model.model.get_rope_index(ids, kinds, *grids)
        logits = model(ids, mm_token_type_ids=kinds, **seen).logits[0]
        best, told = ids, kinds
        for _ in range(32):
            found = model(best, mm_token_type_ids=told, **seen, use_cache=False).logits[0, -1].argmax()
            best, told = torch.cat([best, found[None, None]], 1), torch.cat([told, torch.zeros_like(told[:, :1])], 1)
    # Sizes and places where nothing is drawn: of the class's own settings.
    plain = Qwen3VLVideoProcessor()
    places = [plain.sample_frames(VideoMetadata(total_num_frames=total, fps=fps)) for total, fps in COUNTS]
    sizes = [
        smart_resize(*size, temporal_factor=2, factor=32, min_pixels=fewest, max_pixels=most)
        for fewest, most in BUDGETS
        for size in SIZES
    ]
    capped = [
        (
            frames,
            height,
            width,
            *plain.resize(frame.expand(1, frames, 3, -1, -1), plain.size, 3, 32, 2, True).shape[-2:],
        )
        for frames, height, width in SIZES
        if frames * height * width < 10_000_000
        for frame in [torch.zeros(height, width, dtype=torch.uint8)]
    ]
    (folder / "video_preprocessor_config.json").write_text(json.dumps(SAID, indent=2) + "\n")
    np.savez_compressed(
        folder / "films.npz", ids=ids[0].numpy().astype(np.int32), text=np.array([part.get("text", "") for part in parts]),
        grids=torch.cat([one["video_grid_thw"] for one in each]).numpy(),
        pixels=torch.cat([one["pixel_values_videos"] for one in each]).numpy(), rows=torch.cat(tuple(rows)).float().numpy(),
        looked_at=np.concatenate([one["video_metadata"][0].frames_indices for one in each]).astype(np.int32),
        positions=positions[:, 0].numpy().astype(np.int32), delta=np.int32(delta[0, 0]), logits=logits.float().numpy(),
        greedy=best[0, ids.shape[1] :].numpy().astype(np.int32), fps=np.array([fps for *_, fps in FILMS]), counts=np.array(COUNTS),
        places=np.concatenate(places).astype(np.int32), place_counts=np.array([len(one) for one in places]),
        sizes=np.array(SIZES), sized=np.array(sizes), capped=np.array(capped),
        **{f"film_{number}": film(number) for number in range(len(FILMS))},
    )  # fmt: skip
    return {f"{FOLDER_NAME}/films": (folder / "films.npz").stat().st_size}
