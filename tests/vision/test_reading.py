"""Pictures as users have them: the processor's pixels in every form, what a folder says of them, and what is refused."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import dflash_jax as dj
from dflash_jax.attention.standalone.encoder import encoder_attention
from dflash_jax.checkpoints.huggingface import open_checkpoint
from dflash_jax.errors import ConfigError
from dflash_jax.text.pictures import encoder
from dflash_jax.text.pictures.messages import pictures_in, without_pictures
from dflash_jax.text.pictures.placed import Pictures
from dflash_jax.text.pictures.reading import MOST_PIXELS, Processor, opened

from ..picture_pair import FOLDER, expected


def processor(folder: Path = FOLDER) -> Processor:
    tower = open_checkpoint(FOLDER).vision
    assert tower is not None
    return Processor.from_folder(folder, tower.config)


def png(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return file.getvalue()


def test_patches_are_those_of_transformers_processor() -> None:
    found, at = expected(), 0
    for number, grid in enumerate(found["grids"][:, 1:].tolist()):
        picture = processor().picture(found[f"picture_{number}"])
        assert picture.grid == tuple(grid)
        np.testing.assert_allclose(picture.pixels, found["pixels"][at : at + len(picture.pixels)], atol=2e-7)
        at += len(picture.pixels)
    assert at == len(found["pixels"])


def test_every_form_of_a_picture(tmp_path: Path) -> None:
    array = expected()["picture_0"]
    content = png(array)
    (tmp_path / "a.png").write_bytes(content)
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    forms: list[Any] = [
        array,
        content,
        bytearray(content),
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        url,
        Image.fromarray(array),
    ]
    digests = {processor().picture(one).digest for one in forms}
    assert len(digests) == 1
    assert processor().picture(255 - array).digest not in digests
    seen = np.asarray(opened(Image.fromarray(np.concatenate([array, array[:, :, :1]], axis=2), "RGBA")))
    assert np.array_equal(seen, array), "what is behind a picture is not asked"
    turned = Image.fromarray(array)
    turned.getexif()[0x0112] = 6
    file = io.BytesIO()
    turned.save(file, "PNG", exif=turned.getexif())
    assert opened(file.getvalue()).size == array.shape[:2], "upright, as it was taken"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://a.test/b.png", "nothing is fetched"), ("/no/such.png", "cannot be opened"), (b"GIF8", "cannot be opened"),
        ("data:image/png,abc", "must begin like"), ("data:image/png;base64,?", "holds no base64"), (5, "int 5 is no picture"),
        (np.zeros((2, 2), np.uint8), r"uint8 \[2, 2\] is no picture"), (np.zeros((4, 900, 3), np.uint8), "more than 200 times"),
        (png(np.zeros((4, 4, 3), np.uint8))[:40], "cannot be opened"),
    ],
)  # fmt: skip
def test_what_is_no_picture(source: Any, message: str) -> None:
    with pytest.raises(dj.PromptError, match=message):
        processor().picture(source)


def test_a_picture_that_says_it_is_huge_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image.new("L", (4, 4))
    monkeypatch.setattr(Image.Image, "width", property(lambda _: MOST_PIXELS), raising=False)
    with pytest.raises(dj.PromptError, match="too large"):
        opened(image)


def test_sizes_of_published_pictures() -> None:
    """As transformers resizes them: of Qwen3.5's own settings, and the edge cases of rounding."""
    published = Processor(16, 2, 2)
    sizes = {
        (480, 640): (480, 640), (1080, 1920): (1088, 1920), (100, 100): (256, 256), (4000, 6000): (3328, 4992),
        (17, 3000): (32, 3008),
    }  # fmt: skip
    assert {size: published.size_of(*size) for size in sizes} == sizes


def test_what_a_folder_says_of_pictures(tmp_path: Path) -> None:
    said = json.loads((FOLDER / "preprocessor_config.json").read_text())
    assert (processor(tmp_path).fewest, processor(tmp_path).mean) == (65_536, (0.5, 0.5, 0.5))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": said}))
    assert processor(tmp_path) == processor()
    for change, message in (
        ({"patch_size": 14}, "patch_size is 14, the vision tower's is 4"), ({"image_std": [1, 1, 0]}, "image_std must list three"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "are none"), ({"do_resize": False}, "do_resize must be True"),
        ({"rescale_factor": 1}, "rescale_factor must be"), ({"resample": 2}, "resample must be 3"),
    ):  # fmt: skip
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(said | change))
        with pytest.raises(ConfigError, match=message):
            processor(tmp_path)


def test_pictures_of_messages_in_every_way_they_are_written() -> None:
    parts = [
        {"type": "image", "image": 1}, {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:2"}},
        {"type": "input_image", "image_url": "data:3"}, {"image": 4}, {"type": "image", "path": "5"}, "b",
    ]  # fmt: skip
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "user", "content": [parts[1]]},
    ]
    assert [one.given for one in pictures_in(messages)] == [1, "data:2", "data:3", 4, "5"]
    shown = {"type": "image"}
    told = without_pictures(messages)
    assert told[1]["content"] == [shown, parts[1], shown, shown, shown, shown, "b"]
    assert [told[0], told[2]] == [messages[0], messages[2]]
    with pytest.raises(dj.PromptError, match=r"messages\[0\], part 0 holds no picture"):
        pictures_in([{"role": "user", "content": [{"type": "image"}]}])


def test_a_picture_may_be_bounded() -> None:
    """By pixels, also below what a release has at least; and by the detail that OpenAI's clients ask for."""
    parts = [
        {"image": 1, "max_pixels": 64}, {"image_url": {"url": "data:", "detail": "low"}},
        {"image_url": {"url": "data:", "detail": "high"}},
    ]  # fmt: skip
    assert [one.most for one in pictures_in([{"role": "user", "content": parts}])] == [64, 512 * 512, None]
    assert processor().picture(expected()["picture_0"], 64).grid == (2, 2)
    assert Processor(16, 2, 2).size_of(4000, 6000, 512 * 512) == (416, 608)
    with pytest.raises(dj.PromptError, match="max_pixels must be a positive integer"):
        pictures_in([{"role": "user", "content": [{"image": 1, "max_pixels": "9"}]}])


def test_attention_of_many_patches_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that begin and end within pictures, with NaN in the padding, against all at once."""
    rng, cu_lens = np.random.default_rng(0), np.array([0, 100, 100, 180, 181, 181], np.int32)
    q, k, v = (rng.standard_normal((256, 2, 12), np.float32) for _ in range(3))
    for array in (q, k, v):
        array[181:] = np.nan
    given = [jnp.asarray(array) for array in (q, k, v, cu_lens)]
    monkeypatch.setattr(encoder, "QUERIES", 64)
    np.testing.assert_allclose(encoder.attended(*given), encoder_attention(*given), atol=1e-6)


def test_a_prompt_without_pictures_is_told_its_places_alone() -> None:
    positions, placed = Pictures((), (), np.zeros((0, 3), np.int32), 0).piece(3, 5)
    assert positions.tolist() == [[3] * 3, [4] * 3]
    assert not placed.any()
