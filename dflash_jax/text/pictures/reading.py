"""Pictures as users have them, made into patches as the model's processor makes them: resized, normed, in squares of neighbours.

Nothing is fetched: a picture comes as a path, bytes, a data URL, an array or an image of Pillow, which opens it (extra `vision`).
"""

import base64
import binascii
import io
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.checkpoints.json_files import read_object
from dflash_jax.config import KeyReader
from dflash_jax.errors import ConfigError, PromptError
from dflash_jax.models import VisionConfig
from dflash_jax.text.pictures.placed import Picture

PROCESSOR, WITH_TEXT = "preprocessor_config.json", "processor_config.json"
# What is opened at most: a small file may say that it holds billions.
MOST_PIXELS = 2**26
MOST_URL_BYTES = 64 << 20
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# A picture is no strip: as transformers has it.
MOST_RATIO = 200
_WAYS = "give a path, bytes, a data URL (data:image/png;base64,...), an array [height, width, 3] of uint8, or an image of Pillow"


@dataclass(frozen=True)
class Processor:
    """How a release makes patches of a picture.

    Attributes:
      factor: pixels of which an edge is a multiple.
      fewest, most: pixels of a picture once it is resized.
      mean, std: of each channel, of values from 0 to 1.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    fewest: int = 65_536
    most: int = 16_777_216
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @property
    def factor(self) -> int:
        return self.patch_size * self.merge_size

    @classmethod
    def from_folder(cls, folder: Path, config: VisionConfig) -> "Processor":
        """As a model's folder says, or as Qwen3.5's releases do where it says nothing.

        Raises:
          ConfigError: what it says is malformed, or is for another tower.
        """
        keys = KeyReader(PROCESSOR, _said(folder))
        common = common_settings(keys, folder / PROCESSOR, config)
        bounds = KeyReader(f"{PROCESSOR}, size", keys.get("size", {}))
        fewest = keys.integer("min_pixels", bounds.integer("shortest_edge", cls.fewest))
        most = keys.integer("max_pixels", bounds.integer("longest_edge", cls.most))
        if fewest > most:
            raise ConfigError(f"{folder / PROCESSOR}: pictures of at least {fewest} and at most {most} pixels are none")
        return cls(**common, fewest=fewest, most=most)

    def size_of(self, height: int, width: int, most: int | None = None) -> tuple[int, int]:
        """Height and width that a picture is resized to: multiples of `factor`, so many pixels, and nearly of its shape.

        Args:
          most: pixels, where they are to be fewer than the release's.

        Raises:
          PromptError: it is too long and thin.
        """
        if max(height, width) > MOST_RATIO * min(height, width):
            raise PromptError(
                f"a picture of {width} x {height} pixels is more than {MOST_RATIO} times as long as wide: cut it"
            )
        factor, most = self.factor, self.most if most is None else min(most, self.most)
        rounded = [round(edge / factor) * factor for edge in (height, width)]
        if math.prod(rounded) > most:
            by = math.sqrt(height * width / most)
            rounded = [max(factor, math.floor(edge / by / factor) * factor) for edge in (height, width)]
        elif math.prod(rounded) < min(self.fewest, most):
            by = math.sqrt(self.fewest / (height * width))
            rounded = [math.ceil(edge * by / factor) * factor for edge in (height, width)]
        return rounded[0], rounded[1]

    def picture(self, source: Any, most: int | None = None) -> Picture:
        """Patches of a picture, of at most so many pixels. Raises PromptError for what is none, or cannot be opened."""
        image = opened(source)
        height, width = self.size_of(image.height, image.width, most)
        from PIL import Image

        seen = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC)).astype(np.float32) * np.float32(
            1 / 255
        )
        seen = (seen - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        frames = np.repeat(seen[None], self.temporal_patch_size, axis=0)
        grid = height // self.patch_size, width // self.patch_size
        return Picture(patches_of(frames, self.patch_size, self.merge_size), grid)


def patches_of(frames: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """float32 `[t, H, W, 3]` as patches `[patches, 3 * t * patch * patch]`, squares of `merge` x `merge` one after the other."""
    t, height, width, channels = frames.shape
    squares = frames.reshape(
        t, height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, channels
    )
    return squares.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(-1, channels * t * patch**2)


def common_settings(keys: KeyReader, path: Path, config: VisionConfig) -> dict[str, Any]:
    """What a file says of pictures and films alike: sizes of patches, and each channel's mean and deviation.

    Raises:
      ConfigError: it says what is not implemented, or is for another tower.
    """
    sizes = {
        "patch_size": config.patch_size,
        "temporal_patch_size": config.temporal_patch_size,
        "merge_size": config.merge_size,
    }
    for name, size in sizes.items():
        if (found := keys.integer(name, size)) != size:
            raise ConfigError(f"{path}: {name} is {found}, the vision tower's is {size}; fetch both files again")
    for name, only in {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}.items():
        if (found := keys.get(name, only)) != only:
            raise ConfigError(f"{path}: {name} must be {only}, got {found!r:.40}")
    if abs(keys.number("rescale_factor", 1 / 255) - 1 / 255) > 1e-9:
        raise ConfigError(f"{path}: rescale_factor must be 1/255, got {keys.get('rescale_factor')}")
    defaults = {"mean": Processor.mean, "std": Processor.std}
    return sizes | {name: _channels(keys, f"image_{name}", default) for name, default in defaults.items()}


def opened(source: Any, *, white: bool = False) -> Any:
    """An RGB image of Pillow's, upright, and not yet resized. Raises PromptError for what is none.

    Args:
      white: what is seen through is white. Without, its colours are as they are behind what hides them.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise PromptError(
            "pictures are opened by Pillow, which is not installed: pip install 'dflash-jax[vision]'"
        ) from None
    if isinstance(source, str) and source.startswith("data:"):
        source = data_of(source)
    if isinstance(source, str) and "://" in source:
        raise PromptError(f"nothing is fetched, so a picture cannot be the URL {source!r:.60}: {_WAYS}")
    try:
        if isinstance(source, bytes | bytearray):
            image = Image.open(io.BytesIO(source), formats=_FORMATS)
        elif isinstance(source, str | Path):
            image = Image.open(Path(source).expanduser(), formats=_FORMATS)
        elif isinstance(source, np.ndarray):
            if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
                raise PromptError(f"an array of {source.dtype} {list(source.shape)} is no picture: {_WAYS}")
            image = Image.fromarray(source)
        elif isinstance(source, Image.Image):
            image = source
        else:
            raise PromptError(f"{type(source).__name__} {source!r:.40} is no picture: {_WAYS}")
        if image.width * image.height > MOST_PIXELS:
            raise PromptError(
                f"a picture of {image.width} x {image.height} pixels is too large: at most {MOST_PIXELS:,} are taken"
            )
        if 0 in (image.width, image.height):
            raise PromptError("a picture without a pixel shows nothing: leave it out")
        image = ImageOps.exif_transpose(image)
        return on_white(image) if white else image.convert("RGB")
    except PromptError:
        raise
    except Exception as error:  # what a damaged file raises depends on its format
        shown = f"the file {str(source)!r:.80}" if isinstance(source, str | Path) else "a picture"
        raise PromptError(
            f"{shown} cannot be opened as a picture ({' '.join(str(error).split()):.200}): {_WAYS}"
        ) from error


def on_white(image: Any) -> Any:
    """An RGB image of Pillow's, with white where another is seen through."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    from PIL import Image

    shown = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")


def data_of(url: str, kind: str = "picture", example: str = "image/png") -> bytes:
    """What a data URL holds. Raises PromptError for what is none, or too long."""
    head, comma, content = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PromptError(f"a data URL of a {kind} must begin like data:{example};base64, got {url!r:.40}")
    if len(content) > MOST_URL_BYTES:
        raise PromptError(
            f"a data URL may have {MOST_URL_BYTES:,} characters, this one has {len(content):,}: make the {kind} smaller"
        )
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError):
        raise PromptError(f"a data URL of a {kind} holds no base64: encode its bytes in base64") from None


def _said(folder: Path) -> Mapping[str, Any]:
    """What a folder says of pictures; newer ones say it in the file of the whole processor."""
    for name in (PROCESSOR, WITH_TEXT):
        if not (folder / name).is_file():
            continue
        try:
            found = read_object(folder / name)
        except ValueError as error:
            raise ConfigError(f"{folder}: {error}") from error
        if name == PROCESSOR or isinstance(found.get("image_processor"), Mapping):
            return found if name == PROCESSOR else found["image_processor"]
    return {}


def _channels(keys: KeyReader, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    found = keys.get(name, list(default))
    with suppress(TypeError, ValueError):
        numbers = tuple(float(one) for one in found)
        if len(numbers) == 3 and all(map(math.isfinite, numbers)) and (name != "image_std" or min(numbers) > 0):
            return numbers
    raise ConfigError(f"{keys.subject}: {name} must list three numbers, of image_std positive ones; got {found!r:.60}")
