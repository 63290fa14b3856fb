"""From `load`'s options and a pair of checkpoints to an engine without weights and a plan of the device's memory."""

from dataclasses import replace
from functools import partial
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dflash_jax.cache import check_cache_dtype, layer_specs
from dflash_jax.checkpoints.converted import Checkpoint
from dflash_jax.checkpoints.pair import check_pair
from dflash_jax.checkpoints.weights import (
    check_released,
    reading_bytes,
    released,
    rounded_on_arrival,
    spread,
    stored_shapes,
    weight_bytes,
    weight_shapes,
)
from dflash_jax.compile.device import local_device
from dflash_jax.compile.led import programs_over
from dflash_jax.config import DecoderConfig, reaching
from dflash_jax.engine.engine import Engine
from dflash_jax.engine.memory import MemoryPlan, free_memory, free_on_each, plan_memory, workspace_bytes
from dflash_jax.engine.sharing import check_sharing
from dflash_jax.engine.verify_policy import VerifyLength
from dflash_jax.errors import CapacityError, ParameterError
from dflash_jax.execution.plan import exact_refusals
from dflash_jax.execution.weight_layout import cycle_rows
from dflash_jax.models import DFlashConfig
from dflash_jax.models.registry import family_for, layer_traits
from dflash_jax.options import AUTO, DEFAULT_MODEL_LEN, FLOAT_DTYPES, RELEASED, LoadOptions, as_integer
from dflash_jax.parallel.ranks import local_ranks, share_config
from dflash_jax.quantization.attention_output import check_attention_output, with_outputs
from dflash_jax.quantization.kv_formats import check_query_dtype, without_layers
from dflash_jax.text.pictures.encoder import workspace_bytes as seeing_bytes


def as_checkpoint_says(options: LoadOptions, target: Checkpoint) -> LoadOptions:
    """The options with a format of pages in place of "auto".

    Raises:
      ParameterError: another option needs a format, and the checkpoint names none.
    """
    if options.cache_dtype != AUTO:
        return options
    try:
        return replace(options, cache_dtype=target.cache_dtype)
    except ParameterError as error:
        raise ParameterError(
            f'cache_dtype="{AUTO}" leaves pages as they are, since the checkpoint names no format of them: {error}'
        ) from None


def plan_engine(target: Checkpoint, drafter: Checkpoint | None, options: LoadOptions) -> tuple[Engine, MemoryPlan]:
    """The engine for two checkpoints, with shapes in place of weights and as many pages as there is room for.

    Raises:
      PairError, ParameterError, CapacityError, DeviceError: see `load`.
    """
    local_device()  # first, so that its own error is the one that is seen
    draft = None if drafter is None else drafter.config
    if draft is not None:
        check_pair(target.config, draft)
    check_sharing(target.config, draft, options)
    dealt = options.decode_context_parallel_size
    ranks = local_ranks(options.tp, dealt=dealt)
    check_cache_dtype(target.config, options.cache_dtype)
    check_query_dtype(target.config, options.query_dtype)
    if options.weight_dtype is not None and getattr(target.config, "kda", None) is not None:
        raise ParameterError(
            f"weight_dtype={options.weight_dtype!r} was not tried with Kimi delta attention: leave it out"
        )
    if options.weight_dtype is not None and getattr(target.config, "ngram_shapes", ()):
        raise ParameterError(
            f"weight_dtype={options.weight_dtype!r} was not tried with hashed n-grams and gated residuals: leave it out"
        )
    if options.weight_dtype is not None and getattr(target.config, "conv_shapes", ()):
        raise ParameterError(
            f"weight_dtype={options.weight_dtype!r} was not tried with attention that has a bias by distance: leave it out"
        )
    if options.weight_dtype is not None and getattr(target.config, "kept_rows", ()):
        raise ParameterError(
            f"weight_dtype={options.weight_dtype!r} was not tried with attention to compressed keys: leave it out"
        )
    kept = without_layers(target.config, options.cache_dtype, options.cache_dtype_skip_layers)
    if draft is None and options.draft_cache_dtype is not None:
        raise ParameterError(f"draft_cache_dtype must be left out without a drafter, got {options.draft_cache_dtype!r}")
    if draft is None and options.proposals != "shared_noise":
        raise ParameterError(f"proposals must be left out without a drafter, got {options.proposals!r}")
    if draft is None and options.draft_weight_dtype is not None:
        raise ParameterError(
            f"draft_weight_dtype must be left out without a drafter, got {options.draft_weight_dtype!r}"
        )
    kind = jnp.dtype(choose_dtype(options.dtype) or target.dtype)
    pair = [(one.config, one.family) for one in (target, drafter) if one is not None]
    rows, stored = cycle_rows(options.max_batch, draft), stored_shapes(pair, kind, ranks=ranks)
    check_released(options.weight_dtype, stored)
    weights = weight_shapes(pair, kind, options.weight_dtype, options.draft_weight_dtype, rows=rows, ranks=ranks)
    check_attention_output(target.config, options.attention_output, options.tp)
    with_their = partial(with_outputs, target.config, kind=options.attention_output)
    weights["target"] = jax.eval_shape(with_their, weights["target"])
    longest = choose_model_len(target.config, options.max_model_len)
    if options.exact:
        check_exact(target.config, draft, options)
    tower, config = vision_of(target, options), target.config
    if tower is not None:
        config = replace(config, mrope_section=tower.config.mrope_section)
    engine = Engine(
        target=reaching(config, longest), draft=None if draft is None else reaching(draft, longest),
        weights=spread(pair, weights, ranks), dtype=kind, cache_dtype=kept,
        query_dtype=options.query_dtype, scale_range=options.scale_range,  # pyright: ignore[reportArgumentType]
        draft_cache_dtype=options.draft_cache_dtype,
        max_model_len=longest, max_batch=options.max_batch,
        page_size=dealt * options.page_size, interleave=options.cp_kv_cache_interleave_size, proposals=options.proposals,
        verify_length=choose_verify_length(draft, options.verify_length),
        draft_window=choose_draft_window(draft, options.draft_window), programs=programs_over(ranks),
        exact=options.exact,
        pictures=tower is not None,
    )  # fmt: skip
    if options.exact and engine.page_size % engine.buckets.piece:
        raise ParameterError(
            f"exact prefills prompts in pieces of {engine.buckets.piece} tokens, of which a page must hold whole ones: raise "
            f"page_size={engine.page_size} to a multiple"
        )
    if ranks is not None and ranks.led and engine.state_bytes:
        raise ParameterError(
            f"several processes do not share {target.family.name} yet, whose states begin on the host: take the GPUs of one host"
        )
    arriving = rounded_on_arrival(
        pair, options.weight_dtype, options.draft_weight_dtype, observed=bool(len(options.calibration))
    )
    try:
        memory = plan_for(
            engine, reading_bytes(stored, weights, arriving), options.num_pages, options.state_snapshots,
            tower=None if tower is None else (weight_bytes({"": tower_shapes(tower, kind)}), seeing_bytes(tower.config, kind)),
        )  # fmt: skip
    except CapacityError as error:
        four_bits = weight_bytes(weights) <= weight_bytes(stored)  # they are kept so without being told
        if options.weight_dtype in RELEASED or four_bits or not released(stored):
            raise
        raise CapacityError(
            f'{error}. With weight_dtype="mxfp4" experts stay in the four bits they were released in'
        ) from error
    return planned(engine, memory), memory


def vision_of(target: Checkpoint, options: LoadOptions) -> Checkpoint | None:
    """The vision tower that these options load.

    Raises:
      ParameterError: one is asked for, and there is none.
    """
    if options.vision and target.vision is None:
        raise ParameterError("vision=True asks for a vision tower, which is not in this checkpoint: leave vision out")
    tower = None if options.vision is False else target.vision
    if tower is None and options.vision_attention_dtype is not None:
        raise ParameterError("vision_attention_dtype is for a vision tower, and none is loaded: leave it out")
    return tower


def tower_shapes(tower: Checkpoint, dtype: jnp.dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """The weights of a vision tower in shapes."""
    return {one.name: jax.ShapeDtypeStruct(one.shape, dtype) for one in tower.family.parameters(tower.config)}


def planned(engine: Engine, memory: MemoryPlan, **changes: Any) -> Engine:
    """The engine with as many pages and snapshots as planned, and `changes` of other attributes."""
    counts = {"num_pages": memory.num_pages, "window_pages": memory.window_pages}
    return replace(engine, **counts, state_snapshots=memory.state_snapshots, **changes)


def plan_for(
    engine: Engine,
    reading: int,
    num_pages: int | None,
    state_snapshots: int | None = None,
    *,
    tower: tuple[int, int] | None = None,
) -> MemoryPlan:
    """Memory plan of the device: the weights of `engine`, which may be shapes, its pages and its snapshots of states.

    Args:
      reading: see `MemoryPlan`.
      num_pages, state_snapshots: as asked; None for what there is room for.
      tower: bytes of a vision tower's weights, and of what it needs besides while it works.

    Raises:
      CapacityError: see `plan_memory`.
      ParameterError: snapshots are asked for, of what has no states.
    """
    if state_snapshots and not engine.state_bytes:
        raise ParameterError(
            f"state_snapshots must be left out for a target without recurrent states, got {state_snapshots}"
        )
    ranks = engine.programs.ranks
    free = free_memory() if ranks is None else free_on_each(ranks.devices)
    draft = None if engine.draft is None else share_config(engine.draft, engine.tp)
    workspace = workspace_bytes(
        share_config(engine.target, engine.tp), draft, engine.dtype,
        tokens=engine.max_model_len, batch=engine.max_batch, chunk=engine.buckets.chunk,
    )  # fmt: skip
    beside = (0, 0) if tower is None else tower
    (first, *others), (first_bytes, *other_bytes) = engine.groups, engine.group_bytes
    return plan_memory(
        weights=weight_bytes(engine.weights) + beside[0], reading=reading, workspace=workspace + beside[1], page=first_bytes,
        longest_pages=first.group.columns, max_batch=engine.max_batch, num_pages=num_pages, free=free,
        state=engine.state_bytes, snapshots=state_snapshots,
        windows=tuple((size, pool.group.columns) for size, pool in zip(other_bytes, others, strict=True)),
    )  # fmt: skip


def check_exact(target: DecoderConfig, draft: DFlashConfig | None, options: LoadOptions) -> None:
    """Raises ParameterError, with every reason, for a target whose texts cannot be exact."""
    chosen = choose_verify_length(draft, options.verify_length)
    tokens = chosen if isinstance(chosen, int) else 1 if draft is None else draft.num_drafts + 1
    reasons = exact_refusals(layer_traits(share_config(target, options.tp)), tokens, options.cache_dtype)
    if any(spec.index for spec in layer_specs(target)):
        reasons.append("an indexer chooses which keys a token sees, by programs that follow the context's length")
    if getattr(target, "logit_softcap", 0.0):
        reasons.append("logits have a soft cap, which is rounded otherwise where somebody samples")
    if reasons:
        raise ParameterError(f"exact is not there for {family_for(target).name}: {'; '.join(reasons)}")


def choose_dtype(dtype: DTypeLike | None) -> str | None:
    """The dtype to load in: as asked; otherwise the checkpoint's on a GPU (None) and float32 on a CPU."""
    if dtype is None:
        return None if jax.default_backend() != "cpu" else "float32"
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = None
    if name not in FLOAT_DTYPES:
        raise ParameterError(f"dtype must be float32, bfloat16 or float16, got {dtype!r}")
    return name


def choose_model_len(config: DecoderConfig, length: SupportsIndex | None) -> int:
    """The longest sequence to serve: as asked, or the model's own limit up to `DEFAULT_MODEL_LEN`.

    Raises:
      ParameterError: the model was not made for that length.
    """
    limit = config.max_position
    chosen = min(limit, DEFAULT_MODEL_LEN) if length is None else as_integer(length)
    if chosen is None or not 2 <= chosen <= limit:
        raise ParameterError(f"max_model_len must be an integer from 2 to the model's {limit}, got {length!r}")
    return chosen


def choose_verify_length(draft: DFlashConfig | None, length: SupportsIndex | str | None) -> VerifyLength:
    """As asked; None, the whole block, for "auto" on a CPU: its costs are a GPU's, on a CPU each token costs what the first costs.
    "per_request" is for those who ask for it by name, also there.

    Raises:
      ParameterError: the drafter does not offer so many tokens.
    """
    if length is None:
        return None
    if isinstance(length, str) and length == "auto":
        return None if jax.default_backend() == "cpu" else "auto"
    if isinstance(length, str) and length == "per_request" and draft is not None:
        return "per_request"
    offered = 0 if draft is None else draft.num_drafts + 1
    if (number := as_integer(length)) is not None and 1 <= number <= offered:
        return number
    which = f"an integer from 1 to {offered}, all that the drafter offers" if offered else "left out without a drafter"
    words = ', "per_request"' if offered else ""
    raise ParameterError(f'verify_length must be "auto"{words} or {which}; got {length!r}')


def choose_draft_window(draft: DFlashConfig | None, window: Any) -> int | None:
    """As asked; None for all of a context.

    Raises:
      ParameterError: no number of tokens, or nobody who would see them.
    """
    if window is None:
        return None
    if draft is None:
        raise ParameterError(f"draft_window must be left out without a drafter, got {window!r}")
    number = as_integer(window)
    if number is None or not 1 <= number < 2**31:
        raise ParameterError(f"draft_window must be an integer from 1 to {2**31 - 1}, or None for all, got {window!r}")
    return number
