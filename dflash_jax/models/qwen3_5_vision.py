"""The vision tower of Qwen3.5 and Qwen3.6: what a picture's patches are to the text model.

Patches are embedded, told where they stand by a learnt grid that is resampled to the picture's and by rotation on two axes, and
see one another, those of one picture alone. Four neighbours then become one row of the text model's width.
Source: transformers' Qwen3_5VisionModel, whose positions are interpolated with corners aligned.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dflash_jax.config import NEUTRAL_KEYS, NEUTRAL_VALUES, KeyReader
from dflash_jax.errors import ConfigError
from dflash_jax.models.layers import LayerNorm, Linear, Rotary, rotate
from dflash_jax.models.parameters import Parameter, Source, single

VISION_TYPES = ("qwen3_5_vision", "qwen3_5_moe_vision")
PREFIX = "model.visual."
_EPS = 1e-6
_OF_FILMS = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
_TOKENS = {"image_token_id": 248_056} | dict(zip(_OF_FILMS, (248_057, 248_053, 248_054), strict=True))
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    **NEUTRAL_VALUES, "deepstack_visual_indexes": (None, []), "model_type": (None, *VISION_TYPES, "qwen3_5", "qwen3_5_moe")
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A vision tower.

    Attributes:
      depth, hidden_size, intermediate_size, num_heads: of its blocks.
      patch_size: pixels of a patch's edge.
      temporal_patch_size: frames of a patch; a picture is so many equal ones.
      merge_size: patches of the edge of a square that becomes one row of the text model.
      grid_side: of the square grid of learnt positions.
      out_hidden_size: the text model's width.
      image_token_id: stands in a text for each row of a picture.
      video_token_id: the same of a film; None where a model was converted before there were films.
      vision_start_token_id, vision_end_token_id: stand around a pair of frames of a film.
      mrope_section: pairs of a text head that turn by time, row and column.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    channels: int
    grid_side: int
    out_hidden_size: int
    image_token_id: int
    mrope_section: tuple[int, ...] = (11, 11, 10)
    rope_theta: float = 10_000.0
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return self.channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged(self) -> int:
        """Patches that become one row."""
        return self.merge_size**2

    @classmethod
    def from_hf(cls, values: Mapping[str, Any], notices: list[str] | None = None) -> "VisionConfig":
        """Reads the `vision_config` of a `config.json`, and what that says of pictures beside it.

        Raises:
          ConfigError: a needed key is malformed, or one is present that this package does not implement.
        """
        keys = KeyReader("config.json, vision_config", values.get("vision_config"), notices)
        if (activation := keys.get("hidden_act", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
            raise ConfigError(f"{keys.subject}: hidden_act must be gelu_pytorch_tanh, got {activation!r:.40}")
        positions = keys.integer("num_position_embeddings", 2304)
        rope = KeyReader(f"{keys.subject}, rope_parameters", keys.get("rope_parameters", {}))
        if (kind := rope.get("rope_type", "axial")) not in ("axial", "default"):
            raise ConfigError(f"{rope.subject}: rope_type must be axial, got {kind!r:.40}")
        text = KeyReader("config.json, text_config", values.get("text_config") or {})
        rope_of_text = KeyReader(f"{text.subject}, rope_parameters", text.get("rope_parameters", {}))
        sections = rope_of_text.get("mrope_section", [11, 11, 10])
        listed = isinstance(sections, list | tuple) and len(sections) == 3
        if not listed or not all(type(one) is int and one > 0 for one in sections):
            raise ConfigError(f"{text.subject}: mrope_section must list three positive integers, got {sections!r:.40}")
        whole, size = KeyReader("config.json", values), text.integer("vocab_size", 248_320)
        tokens = {name: whole.integer(name, default, minimum=0) for name, default in _TOKENS.items()}
        for name, token in tokens.items():
            if token >= size:
                raise ConfigError(f"config.json: {name}={token} is outside the vocabulary of {size}")
        config = cls(
            depth=keys.integer("depth", 27),
            hidden_size=keys.integer("hidden_size", 1152),
            intermediate_size=keys.integer("intermediate_size", 4304),
            num_heads=keys.integer("num_heads", 16),
            patch_size=keys.integer("patch_size", 16),
            temporal_patch_size=keys.integer("temporal_patch_size", 2),
            merge_size=keys.integer("spatial_merge_size", 2),
            channels=keys.integer("in_channels", 3),
            grid_side=round(positions**0.5),
            out_hidden_size=keys.integer("out_hidden_size", 3584),
            mrope_section=tuple(sections),
            rope_theta=rope.number("rope_theta", 10_000.0, positive=True),
            **tokens,
        )
        if config.grid_side**2 != positions:
            raise ConfigError(f"{keys.subject}: num_position_embeddings must be a square number, got {positions}")
        if config.hidden_size % (4 * config.num_heads):
            raise ConfigError(
                f"{keys.subject}: hidden_size={config.hidden_size} over num_heads={config.num_heads} must be a multiple of 4, half "
                "of a head for each axis"
            )
        if config.channels != 3:
            raise ConfigError(f"{keys.subject}: in_channels must be 3, got {config.channels}")
        rope.refuse_rest(NEUTRAL_KEYS, _NEUTRAL_VALUES)
        keys.refuse_rest(NEUTRAL_KEYS, _NEUTRAL_VALUES)
        return config

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "VisionConfig":
        """Inverse of `to_dict`; what was written before there were films is of pictures alone. Raises ConfigError where another
        version wrote it."""
        if {*values, *_OF_FILMS} != {field.name for field in dataclasses.fields(cls)}:
            raise ConfigError(
                f"{cls.__name__} has no such fields: {', '.join(sorted(values))}. Convert the checkpoint again."
            )
        given: dict[str, Any] = dict(values) | {"mrope_section": tuple(values["mrope_section"])}
        return cls(**given)


# Rotated queries, keys and values `[P, N, H]` and where each picture begins, to `[P, N, H]`: every patch over its own picture's.
type Mixing = Callable[[Array, Array, Array, Array], Array]


class Patches(NamedTuple):
    """What a tower sees: patches of pictures one after the other, each picture's in squares of neighbours.

    Attributes:
      pixels: of every patch, channels first, then frames, rows and columns. Rows past the last picture may hold anything.
      places: row and column of each in its picture.
      taps: rows of the learnt grid around each, `weights` how much of them it takes.
      cu_lens: where each picture begins, and the end of the last; pictures may be empty.
    """

    pixels: Float[Array, "P W"]
    places: Int[Array, "P 2"]
    taps: Int[Array, "P 4"]
    weights: Float[Array, "P 4"]
    cu_lens: Int[Array, "C"]


class VisionBlock(nnx.Module):
    """Pre-norm attention over one picture's patches and a feed-forward, each added to the stream."""

    def __init__(self, config: VisionConfig):
        d, inner = config.hidden_size, config.intermediate_size
        self.head_dim = config.head_dim
        self.norm1, self.norm2 = LayerNorm(d, _EPS), LayerNorm(d, _EPS)
        self.qkv, self.proj = Linear(3 * d, d, bias=True), Linear(d, d, bias=True)
        self.fc1, self.fc2 = Linear(inner, d, bias=True), Linear(d, inner, bias=True)

    def __call__(
        self, x: Float[Array, "P D"], rotary: Rotary, cu_lens: Int[Array, "C"], attend: Mixing
    ) -> Float[Array, "P D"]:
        q, k, v = jnp.split(self.qkv(self.norm1(x)).reshape(len(x), -1, self.head_dim), 3, axis=1)
        out = attend(rotate(q, rotary), rotate(k, rotary), v, cu_lens)
        x = x + self.proj(out.reshape(x.shape))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x)), approximate=True))


class VisionTower(nnx.Module):
    """Patches of pictures to rows of the text model's width."""

    def __init__(self, config: VisionConfig):
        d, wide = config.hidden_size, config.hidden_size * config.merged
        self.config = config
        self.patch = Linear(d, config.patch_width, bias=True)
        self.grid = nnx.Param(jnp.zeros((config.grid_side**2, d)))
        self.blocks = nnx.List([VisionBlock(config) for _ in range(config.depth)])
        self.norm = LayerNorm(d, _EPS)
        self.fc1, self.fc2 = Linear(wide, wide, bias=True), Linear(config.out_hidden_size, wide, bias=True)

    def __call__(self, patches: Patches, attend: Mixing) -> Float[Array, "R D"]:
        """One row for every square of neighbours, in the order of the patches; those past the last picture mean nothing."""
        dtype = self.grid[...].dtype
        x = self.patch(patches.pixels.astype(dtype))
        learnt = self.grid[...][patches.taps] * patches.weights[:, :, None]
        x = x + jnp.sum(learnt, axis=1).astype(dtype)
        rotary = self.rotary(patches.places)
        for block in self.blocks:
            x = block(x, rotary, patches.cu_lens, attend)
        x = self.norm(x).reshape(-1, self.fc1.weight[...].shape[1])
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))

    def rotary(self, places: Int[Array, "P 2"]) -> Rotary:
        """The first half of a head's pairs turns by the row, the other by the column."""
        quarter = self.config.head_dim // 4
        exponents = np.arange(quarter, dtype=np.float32) / np.float32(quarter)
        freqs = np.float32(1) / np.float32(self.config.rope_theta) ** exponents
        angles = (places[:, :, None].astype(jnp.float32) * freqs).reshape(len(places), 2 * quarter)
        return Rotary(jnp.cos(angles), jnp.sin(angles))


def vision_parameters(config: VisionConfig) -> tuple[Parameter, ...]:
    """Parameters of a tower by their published names."""
    d, inner, wide = config.hidden_size, config.intermediate_size, config.hidden_size * config.merged
    kernel = (d, config.channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    conv = Source(f"{PREFIX}patch_embed.proj.weight", kernel, kept=(d, config.patch_width))
    table = [
        Parameter("patch.weight", (conv,)),
        single("patch.bias", f"{PREFIX}patch_embed.proj.bias", (d,)),
        single("grid", f"{PREFIX}pos_embed.weight", (config.grid_side**2, d)),
    ]

    def layer(ours: str, theirs: str, *shape: int) -> None:
        table.append(single(f"{ours}.weight", f"{PREFIX}{theirs}.weight", shape))
        table.append(single(f"{ours}.bias", f"{PREFIX}{theirs}.bias", shape[:1]))

    for i in range(config.depth):
        ours = f"blocks.{i}"
        layer(f"{ours}.norm1", f"{ours}.norm1", d)
        layer(f"{ours}.norm2", f"{ours}.norm2", d)
        layer(f"{ours}.qkv", f"{ours}.attn.qkv", 3 * d, d)
        layer(f"{ours}.proj", f"{ours}.attn.proj", d, d)
        layer(f"{ours}.fc1", f"{ours}.mlp.linear_fc1", inner, d)
        layer(f"{ours}.fc2", f"{ours}.mlp.linear_fc2", d, inner)
    layer("norm", "merger.norm", d)
    layer("fc1", "merger.linear_fc1", wide, wide)
    layer("fc2", "merger.linear_fc2", config.out_hidden_size, wide)
    return tuple(table)


def vision_canonical(name: str) -> str | None:
    """A tower's tensor as declared above; None for what is no tower's."""
    if name.startswith("visual."):
        return f"model.{name}"
    return name if name.startswith(PREFIX) else None
