"""Settings of `dflash-jax train`, and the drafter's configuration that follows from them."""

from dataclasses import dataclass, field

from dflash_jax.config import DecoderConfig, RopeConfig
from dflash_jax.errors import ParameterError
from dflash_jax.models import DFlashConfig, default_target_layer_ids
from dflash_jax.training.kinds import KINDS, HeadSizes, with_kind

_MOST_TAPS, MOST_LAYERS = 5, 1024


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """One run. The learning rate falls from its peak to zero along a cosine after a linear warm-up.

    Attributes:
      kind: one of `KINDS`; `head` are the sizes of what the later ones add.
      layers: of the drafter.
      taps: target layers that it reads; empty for evenly spaced ones.
      mask_id: the token whose embedding fills a block; None for the vocabulary's last.
      length: tokens of a row; longer ones are cut.
      rows, anchors: rows of a step, and blocks of each.
      chunk: steps in one compiled call; also the granularity of checkpoints.
      loss: weights of a block's places, `dpace` or `decay`.
      teacher: `distribution` learns from the target's law at each place, `tokens` from the tokens of the file.
    """

    kind: str = "dflash2"
    head: HeadSizes = field(default=HeadSizes(rank=256))
    block_size: int = 16
    layers: int = 5
    taps: tuple[int, ...] = ()
    mask_id: int | None = None
    length: int = 1024
    rows: int = 8
    anchors: int = 64
    steps: int = 10_000
    rate: float = 6e-4
    optimizer: str = "adamw"
    loss: str = "dpace"
    teacher: str = "distribution"
    warmup: float = 0.04
    weight_decay: float = 0.01
    chunk: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ParameterError for a value that cannot be."""
        for name, known in (
            ("kind", KINDS), ("optimizer", ("adamw", "muon")), ("loss", ("dpace", "decay")),
            ("teacher", ("distribution", "tokens")),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ParameterError(f"{name} must be {', '.join(known)}, got {getattr(self, name)!r}")
        for name, least in (
            ("block_size", 2),
            ("layers", 1),
            ("length", 4),
            ("rows", 1),
            ("anchors", 1),
            ("steps", 1),
            ("chunk", 1),
        ):
            if getattr(self, name) < least:
                raise ParameterError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.layers > MOST_LAYERS:
            raise ParameterError(f"layers must be at most {MOST_LAYERS}, got {self.layers}")
        if not self.rate > 0:
            raise ParameterError(f"rate must be above 0, got {self.rate}")


def default_taps(layers: int) -> tuple[int, ...]:
    """Five evenly spaced layers, or the last ones of a target that has few."""
    if layers - 4 >= _MOST_TAPS - 1:
        return default_target_layer_ids(layers, _MOST_TAPS)
    return tuple(range(layers))[-_MOST_TAPS:]


def drafter_config(target: DecoderConfig, settings: FitSettings) -> DFlashConfig:
    """The drafter: layers of the target's widths with plain rotary embedding, embeddings and head the target's own.

    Raises:
      ParameterError: a tap is no layer of the target, the mask no token of it, or a size does not fit it.
    """
    taps = settings.taps or default_taps(target.num_layers)
    if wrong := [tap for tap in taps if not -1 <= tap < target.num_layers]:
        raise ParameterError(f"taps must be layers of the target, -1 to {target.num_layers - 1}, got {wrong}")
    mask = target.vocab_size - 1 if settings.mask_id is None else settings.mask_id
    if not 0 <= mask < target.vocab_size:
        raise ParameterError(f"mask_id must be a token of the target, 0 to {target.vocab_size - 1}, got {mask}")
    width = target.hidden_size
    if settings.kind == "dflash2" and width % settings.head.conv_group:
        raise ParameterError(f"conv_group must divide the target's hidden size {width}, got {settings.head.conv_group}")
    # A latent target's heads are no drafter's.
    latent = getattr(target, "kv_lora_rank", 0) > 0 or hasattr(target, "kept_rows")
    head_dim = 128 if latent else target.head_dim
    heads = max(1, width // head_dim) if latent else target.num_heads
    plain = DFlashConfig(
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=target.intermediate_size or 3 * width,
        num_layers=settings.layers,
        num_heads=heads,
        num_kv_heads=heads if latent else target.num_kv_heads,
        head_dim=head_dim,
        norm_eps=target.norm_eps,
        rope=RopeConfig(theta=target.rope.theta, original_max_position=target.max_position),
        max_position=target.max_position,
        windows=(None,) * settings.layers,
        block_size=settings.block_size,
        mask_token_id=mask,
        target_layer_ids=taps,
        num_target_layers=target.num_layers,
        target_hidden_size=target.feature_width,
        causal=(False,) * settings.layers,
    )
    return with_kind(plain, settings.kind, settings.head).fitted(target)
