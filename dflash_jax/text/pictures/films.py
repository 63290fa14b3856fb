"""Films made into patches as the model's video processor makes them: frames sampled, resized, normed, two of them in a patch.

The pairs of frames of a film are pictures that see themselves alone, each behind the time that is shown before it.
Source: transformers' Qwen3VLVideoProcessor and Qwen3VLProcessor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dflash_jax.checkpoints.json_files import read_object
from dflash_jax.config import KeyReader
from dflash_jax.errors import ConfigError, PromptError
from dflash_jax.models import VisionConfig
from dflash_jax.text.pictures.clips import Clip, Ended, clip_of
from dflash_jax.text.pictures.placed import Picture
from dflash_jax.text.pictures.reading import MOST_RATIO, PROCESSOR, WITH_TEXT, common_settings, patches_of
from dflash_jax.text.pictures.resampling import resampled

OF_FILMS = "video_preprocessor_config.json"


class Film(NamedTuple):
    """A film as a tower takes it.

    Attributes:
      pairs: of frames, each a picture.
      times: of each the seconds that stand before it.
    """

    pairs: tuple[Picture, ...]
    times: tuple[float, ...]


@dataclass(frozen=True)
class FilmProcessor:
    """How a release makes patches of a film.

    Attributes:
      temporal_patch_size: frames that become one picture, 2 of every release.
      fps: frames of a second that are looked at.
      fewest_frames, most_frames: that are looked at, where a film has so many.
      fewest, most: pixels of all frames once they are resized.
      most_tokens: rows of a frame where its pixels are bounded by themselves too, and its fewest are a film's; None: they are not.
      mean, std: of each channel, of values from 0 to 1.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    fps: float = 2.0
    fewest_frames: int = 4
    most_frames: int = 768
    fewest: int = 131_072
    most: int = 786_432
    most_tokens: int | None = None
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def from_folder(cls, folder: Path, config: VisionConfig) -> "FilmProcessor":
        """As a model's folder says: of films, or of pictures where it says nothing of films.

        Raises:
          ConfigError: what it says is malformed, or is for another tower.
        """
        path, said = _said(folder)
        keys = KeyReader(path.name, said)
        common = common_settings(keys, path, config)
        bounds = KeyReader(f"{path.name}, size", keys.get("size", {}))
        fewest, most = bounds.integer("shortest_edge", cls.fewest), bounds.integer("longest_edge", cls.most)
        least = config.temporal_patch_size
        frames = (
            keys.integer("min_frames", cls.fewest_frames),
            keys.integer("max_frames", cls.most_frames, minimum=least),
        )
        if fewest > most or frames[0] > frames[1]:
            raise ConfigError(
                f"{path}: films of at least {fewest} and at most {most} pixels, {frames[0]} and {frames[1]} frames are none"
            )
        if not keys.flag("do_sample_frames", default=True) or keys.get("num_frames") is not None:
            raise ConfigError(f"{path}: frames must be sampled by fps: remove do_sample_frames and num_frames")
        tokens = keys.integer("max_video_tokens", 768)
        return cls(
            **common, fps=keys.number("fps", cls.fps, positive=True), fewest_frames=frames[0], most_frames=frames[1], fewest=fewest,
            most=most, most_tokens=tokens if keys.flag("cap_pixels_per_frame") else None,
        )  # fmt: skip

    @property
    def factor(self) -> int:
        """Pixels of which an edge is a multiple."""
        return self.patch_size * self.merge_size

    def places(self, frames: int, fps: float, count: int | None = None) -> list[int]:
        """Which of a film's frames are looked at, spread evenly from the first to the last.

        Args:
          frames, fps: of the film, and how many of them are shown in a second.
          count: how many are looked at; None for as many as the release says.
        """
        if count is None:
            count = min(max(int(frames / fps * self.fps), self.fewest_frames), self.most_frames, frames)
        return np.linspace(0, frames - 1, count).round().astype(int).tolist()

    def size_of(self, frames: int, height: int, width: int, most: int | None = None) -> tuple[int, int]:
        """Height and width that so many frames are resized to: multiples of `factor`, so many pixels, and nearly of their shape.

        Args:
          most: pixels of all frames, where they are to be fewer than the release's.

        Raises:
          PromptError: they are too long and thin.
        """
        factor, step = self.factor, self.temporal_patch_size
        total = self.most if most is None else min(most, self.most)
        if self.most_tokens is not None:
            each = max(min(self.most_tokens * factor**2, total // frames), int(min(self.fewest, total) * 1.05))
            total = each * frames
        if height < factor or width < factor:
            by = max(factor / height, factor / width)
            height, width = int(height * by), int(width * by)
        if max(height, width) / min(height, width) > MOST_RATIO:
            raise PromptError(
                f"a film of {width} x {height} pixels is more than {MOST_RATIO} times as long as wide: cut it"
            )
        rounded = [round(edge / factor) * factor for edge in (height, width)]
        pixels = round(frames / step) * step * math.prod(rounded)
        if pixels > total:
            by = math.sqrt(frames * height * width / total)
            rounded = [max(factor, math.floor(edge / by / factor) * factor) for edge in (height, width)]
        elif pixels < min(self.fewest, total):
            by = math.sqrt(self.fewest / (frames * height * width))
            rounded = [math.ceil(edge * by / factor) * factor for edge in (height, width)]
        return rounded[0], rounded[1]

    def film(self, source: Any, fps: Any = None, count: int | None = None, most: int | None = None) -> Film:
        """Pairs of frames of a film.

        Args:
          source, fps: see `clip_of`.
          count: frames that are looked at; None for as many as the release says.
          most: pixels of all of them at most.

        Raises:
          PromptError: it is none, or cannot be decoded, or has fewer frames than are wanted or than a pair.
        """
        clip = clip_of(source, fps)
        while True:
            try:
                return self._pairs(clip, count, most)
            except Ended as found:  # a file that was cut off: what is there is all of it
                clip = clip._replace(frames=found.frames)

    def _pairs(self, clip: Clip, count: int | None, most: int | None) -> Film:
        step = self.temporal_patch_size
        if clip.frames < step:
            raise PromptError(
                f"a film has at least {step} frames, this one has {clip.frames}: show one frame as a picture"
            )
        if count is not None and not step <= count <= (most_frames := min(clip.frames, self.most_frames)):
            raise PromptError(
                f"num_frames={count} must be from {step} to {most_frames} for a film of {clip.frames} frames"
            )
        places = self.places(clip.frames, clip.fps, count)
        height, width = self.size_of(len(places), clip.height, clip.width, most)
        frames = [resampled(frame, height, width) for frame in clip.seen(places)]
        missing = -len(frames) % step
        frames += frames[-1:] * missing
        places += places[-1:] * missing
        mean, std = (np.array(one, np.float32) * np.float32(255) for one in (self.mean, self.std))
        grid = height // self.patch_size, width // self.patch_size
        pairs, times = list[Picture](), list[float]()
        for first in range(0, len(frames), step):
            seen = (np.stack(frames[first : first + step]).astype(np.float32) - mean) / std
            pairs.append(Picture(patches_of(seen, self.patch_size, self.merge_size), grid))
            times.append((places[first] / clip.fps + places[first + step - 1] / clip.fps) / 2)
        return Film(tuple(pairs), tuple(times))


def _said(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """What a folder says of films, and where: newer ones say it in the file of the whole processor, some only of pictures."""
    for name in (WITH_TEXT, OF_FILMS, PROCESSOR):
        if not (folder / name).is_file():
            continue
        try:
            found = read_object(folder / name)
        except ValueError as error:
            raise ConfigError(f"{folder}: {error}") from error
        if name != WITH_TEXT:
            return folder / name, found
        if isinstance(found.get("video_processor"), Mapping):
            return folder / name, found["video_processor"]
    return folder / OF_FILMS, {}
