"""Everything a training run depends on, in one frozen dataclass, with the presets `full` and `tiny`."""

import dataclasses
from dataclasses import dataclass, field

from dflash_jax.config import Qwen3Config, RopeConfig
from dflash_jax.models import DFlashConfig
from dflash_jax.training.kinds import HeadSizes, with_kind

EOS = "<|endoftext|>"
EOS_ID = 0

# Distributions whose Python sources are the corpus, beside the standard library: those this package needs anyway, those of its
# `train` extra, and what comes along with them. Each is read only if its licence is recognised as permissive (`licences`).
PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "scipy", "sympy", "mpmath", "pandas", "scikit-learn",
    "matplotlib", "networkx", "statsmodels", "xarray", "scikit-image", "transformers", "numba", "seaborn", "equinox", "diffrax",
    "optimistix", "lineax", "numpyro", "chex", "pyarrow", "fonttools", "pygments", "joblib", "patsy", "imageio", "tifffile",
    "huggingface-hub", "jinja2", "pillow",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Continuations of one prompt length: how many, and how many rows of each drafter batch they give.

    Attributes:
      greedy, sampled: continuations at temperature 0 and 1.
      greedy_rows, sampled_rows: rows of one training batch.
      batch: continuations decoded at once.
    """

    prompt: int
    new: int
    greedy: int
    sampled: int
    greedy_rows: int
    sampled_rows: int
    batch: int

    @property
    def length(self) -> int:
        return self.prompt + self.new


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run. Learning rates fall from their peak to zero along a cosine after a linear warm-up.

    Attributes:
      taps: target layers whose residual stream the drafter reads.
      chunk: optimiser steps in one compiled call; also the granularity of checkpoints. Step counts are multiples of it.
      draft_kind: `v1`, `dflash2` or `dspark`; `head` are the sizes of what the later ones add.
      optimizer: of the drafter, `adamw` or `muon`.
      loss: `dpace` (arXiv 2605.18810) or `decay` (arXiv 2602.06036: exp(-(k-1)/7)).
      blocks: weights of a step's blocks, `even` or as often as `cycles` begin where they are.
      sampled_loss: of DSpark on sampled continuations, `places` judged one by one or each `block` as a whole.
      heldout_percent: share of files, by content hash, that no stage trains on.
      prompt_percent: share of files the target does not train on, whose passages are the prompts of the drafter's data.
    """

    packages: tuple[str, ...] = PACKAGES
    folder: str | None = None
    heldout_percent: float = 1.0
    prompt_percent: float = 15.0
    vocab_size: int = 4096
    hidden_size: int = 320
    intermediate_size: int = 896
    num_heads: int = 5
    head_dim: int = 64
    target_layers: int = 4
    draft_layers: int = 5
    taps: tuple[int, ...] = (0, 1, 2, 3)
    draft_kind: str = "v1"
    head: HeadSizes = field(default=HeadSizes())
    optimizer: str = "adamw"
    block_size: int = 16
    max_position: int = 2048
    seed: int = 0
    target_steps: int = 12_000
    target_rows: int = 64
    target_length: int = 1024
    target_rate: float = 3e-3
    rollouts: tuple[Rollouts, ...] = field(
        default=(
            Rollouts(prompt=64, new=192, greedy=262_144, sampled=131_072, greedy_rows=112, sampled_rows=56, batch=4096),
            Rollouts(prompt=832, new=192, greedy=16_384, sampled=8_192, greedy_rows=8, sampled_rows=4, batch=1024),
        )
    )
    draft_steps: int = 20_000
    draft_rate: float = 2e-3
    anchors: int = 24
    loss: str = "decay"
    blocks: str = "even"
    sampled_loss: str = "places"
    chunk: int = 100
    warmup: float = 0.02
    weight_decay: float = 0.05
    evaluation_prompts: int = 1024
    shipped_prompts: int = 100
    evaluation_new: int = 128

    @property
    def mask_id(self) -> int:
        """The last row of the embedding table, which the tokenizer never produces."""
        return self.vocab_size - 1

    @property
    def target_config(self) -> Qwen3Config:
        return Qwen3Config(**self._decoder(self.target_layers), tie_embeddings=True)

    @property
    def draft_config(self) -> DFlashConfig:
        plain = DFlashConfig(
            **self._decoder(self.draft_layers),
            block_size=self.block_size,
            mask_token_id=self.mask_id,
            target_layer_ids=self.taps,
            num_target_layers=self.target_layers,
            target_hidden_size=self.hidden_size,
            causal=(False,) * self.draft_layers,
        )
        return with_kind(plain, self.draft_kind, self.head)

    def _decoder(self, layers: int) -> dict:
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_layers": layers,
            "num_heads": self.num_heads,
            "num_kv_heads": 1,
            "head_dim": self.head_dim,
            "rope": RopeConfig(theta=10_000.0, original_max_position=self.max_position),
            "max_position": self.max_position,
            "windows": (None,) * layers,
        }


FULL = Settings()

TINY = Settings(
    packages=(),
    heldout_percent=20.0,
    prompt_percent=20.0,
    vocab_size=320,
    hidden_size=32,
    intermediate_size=64,
    num_heads=2,
    head_dim=16,
    target_layers=3,
    draft_layers=1,
    taps=(0, 1),
    head=HeadSizes(rank=8, top_k=4),
    block_size=8,
    max_position=256,
    target_steps=40,
    target_rows=4,
    target_length=48,
    rollouts=(
        Rollouts(prompt=8, new=24, greedy=16, sampled=8, greedy_rows=4, sampled_rows=2, batch=8),
        Rollouts(prompt=24, new=24, greedy=8, sampled=8, greedy_rows=2, sampled_rows=1, batch=8),
    ),
    draft_steps=40,
    anchors=3,
    chunk=10,
    evaluation_prompts=8,
    shipped_prompts=4,
    evaluation_new=16,
)

PRESETS = {"full": FULL, "tiny": TINY}


def with_changes(settings: Settings, **changes) -> Settings:
    """A copy with the given fields set; a value of None leaves a field as it is."""
    return dataclasses.replace(settings, **{key: value for key, value in changes.items() if value is not None})
