"""A pair's weights: their shapes before they are read, and the reading itself."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels import ColumnBlocks
from jax.sharding import NamedSharding
from jaxtyping import Array

from dflash_jax.checkpoints.converted import Checkpoint
from dflash_jax.checkpoints.transfer import ring_bytes
from dflash_jax.config import DecoderConfig
from dflash_jax.errors import CheckpointError, ParameterError
from dflash_jax.execution.draft_head import head_index, index_pays, lists
from dflash_jax.execution.weight_layout import (
    block_columns,
    blocking_jobs,
    blocks_pay,
    check_scales,
    tile_experts,
    tiles_pay,
)
from dflash_jax.models import DFlashConfig, Family
from dflash_jax.models.dflash import HEAD_INDEX, SHARED_HEAD
from dflash_jax.options import RELEASED, WeightDtype
from dflash_jax.parallel.ranks import Ranks, held, held_bytes, share_config
from dflash_jax.quantization.mxfp4 import Mxfp4, dequantize_weights
from dflash_jax.quantization.weights import (
    Quantized,
    Weight,
    quantize_shares,
    quantize_weights,
    rounding,
    rounding_jobs,
)

type Shapes = dict[str, dict[str, Any]]

_index = jax.jit(head_index)


def stored_shapes(
    models: Sequence[tuple[DecoderConfig, Family]], dtype: jnp.dtype, *, ranks: Ranks | None = None
) -> Shapes:
    """The weights of a target and perhaps its drafter in shapes, before any is rounded or copied.

    `ranks`: devices that share them; shapes are those of a rank's share.
    """
    shapes: Shapes = {}
    for config, family in models:
        declared = family.parameters(config)
        own = {one.name: one.shape if ranks is None else ranks.own_shape(one) for one in declared}
        table = {one.name: jax.ShapeDtypeStruct(own[one.name], jnp.dtype(one.dtype or dtype)) for one in declared}
        if family.derive is not None:
            table = jax.eval_shape(partial(family.derived, _share(config, ranks)), table)
        shapes[family.role] = table
    return shapes


def _share(config: DecoderConfig, ranks: Ranks | None) -> Any:
    return config if ranks is None else share_config(config, ranks.count)


def weight_shapes(
    models: Sequence[tuple[DecoderConfig, Family]],
    dtype: jnp.dtype,
    weight_dtype: WeightDtype | None = None,
    draft_weight_dtype: WeightDtype | None = None,
    *,
    rows: int = 1,
    ranks: Ranks | None = None,
) -> Shapes:
    """The weights of a target and perhaps its drafter in shapes, as `read_weights` gives them for the same arguments.

    `ranks`: see `stored_shapes`; `spread` makes of them what `read_weights` gives.
    """
    shapes = stored_shapes(models, dtype, ranks=ranks)
    for config, family in models:
        kind = draft_weight_dtype or weight_dtype if family.role == "draft" else weight_dtype
        if ranks is None:
            shapes[family.role] = jax.eval_shape(partial(_kept, config, dtype, rows, kind=kind), shapes[family.role])
        else:
            keep = partial(_kept_share, config, share=ranks.count, kind=kind)
            shapes[family.role] = jax.eval_shape(keep, shapes[family.role])
        if family.role == "draft":
            shapes[family.role] |= jax.eval_shape(
                partial(_copied_head, cast(DFlashConfig, config), kind=kind), shapes.get("target", {})
            )
    return shapes


def spread(models: Sequence[tuple[DecoderConfig, Family]], shapes: Shapes, ranks: Ranks | None) -> Shapes:
    """Shapes over all ranks of shapes of a rank's share, with the shardings of what is read."""
    if ranks is None:
        return shapes
    result: Shapes = {}
    for config, family in models:
        axes = _axes(config, family, shapes, ranks)
        result[family.role] = {
            name: jax.tree.map(partial(ranks.over, axis=axes[name]), one) for name, one in shapes[family.role].items()
        }
    return result


def _axes(
    config: DecoderConfig, family: Family, weights: Mapping[str, Mapping[str, Any]], ranks: Ranks
) -> dict[str, int | None]:
    """Along which axis each array is cut. What is made of others is made of cut rows, and has rows of its own."""
    cuts = {one.name: ranks.cut_of(one) for one in family.parameters(config)}
    axes: dict[str, int | None] = {name: None if cut is None else cut.axis for name, cut in cuts.items()}
    made: dict[str, int | None] = dict.fromkeys(weights[family.role].keys() - axes.keys(), 0)
    if family.role == "draft" and _head(weights["target"]).shape[0] == config.vocab_size:
        made |= dict.fromkeys(made.keys() & {HEAD_INDEX, SHARED_HEAD}, None)
    return axes | made


def completed(
    models: Sequence[tuple[DecoderConfig, Family]],
    placed: Mapping[str, dict[str, Any]],
    ranks: Ranks,
    weight_dtype: WeightDtype | None = None,
    draft_weight_dtype: WeightDtype | None = None,
) -> dict[str, dict[str, Weight]]:
    """Declared arrays, cut for ranks, with what is made of them; see `read_weights` for the dtypes."""
    result: dict[str, dict[str, Weight]] = {}
    for config, family in models:
        kind = draft_weight_dtype or weight_dtype if family.role == "draft" else weight_dtype
        params = _derived(config, family, placed[family.role], ranks)
        result[family.role] = _kept_shares(config, params, kind, ranks)
        if family.role == "draft":
            result["draft"] |= _copied_head(cast(DFlashConfig, config), result["target"], kind, ranks)
    return result


def _derived(config: DecoderConfig, family: Family, params: dict[str, Any], ranks: Ranks | None) -> dict[str, Any]:
    """See `Family.derived`; ranks make theirs of what they have."""
    if ranks is None or family.derive is None:
        return family.derived(config, params)
    derive = partial(family.derived, _share(config, ranks))
    named = jax.eval_shape(derive, held(params))
    if params.keys() - named.keys():
        # In place of others are the same rows in another shape, and ranks' shares of them side by side: no two copies at a time.
        return family.derived(config, params)
    new = [name for name in named if name not in params]
    made = ranks.each(
        lambda own: {name: array for name, array in derive(dict(own)).items() if name in new}, params, axis=0
    )
    return params | made


def released(stored: Shapes) -> bool:
    """Whether some weights of a target were released in four bits. `stored`: of `stored_shapes`."""
    return any(isinstance(one, Mxfp4) for one in stored["target"].values())


def check_released(weight_dtype: WeightDtype | None, stored: Shapes) -> None:
    """Raises ParameterError where weights are to be kept in a format that the target was not released in.

    Args:
      stored: of `stored_shapes`.
    """
    if weight_dtype in RELEASED and not released(stored):
        raise ParameterError(
            f"weight_dtype={weight_dtype!r} leaves experts as they were released, and none of this checkpoint is in MXFP4: leave "
            'it out, or name "int8" or "fp8"'
        )


def weight_bytes(weights: Mapping[str, Mapping[str, Any]]) -> int:
    """Bytes of weights or of their shapes that one device holds."""
    return held_bytes(weights)


def rounded_on_arrival(
    models: Sequence[tuple[DecoderConfig, Family]],
    weight_dtype: WeightDtype | None,
    draft_weight_dtype: WeightDtype | None = None,
    *,
    observed: bool = False,
) -> frozenset[str]:
    """Roles of the models of which `read_weights` rounds each matrix as soon as it is there.

    Others are there whole first: those of whose arrays others are made, and a target that somebody looks at as it was (`observed`).
    """
    kinds: dict[str, WeightDtype | None] = {"target": weight_dtype, "draft": draft_weight_dtype or weight_dtype}
    return frozenset(
        family.role
        for _, family in models
        if _rounds(kinds[family.role]) and family.derive is None and not (observed and family.role == "target")
    )


def reading_bytes(stored: Shapes, kept: Shapes, arriving: frozenset[str] = frozenset()) -> int:
    """The most that `read_weights` holds at a time on the device.

    A model is there whole before its matrices are rounded or dequantized, a drafter beside the target as it is kept, and one array
    is made at a time. Of a model that is rounded as it arrives there are, beside what is kept, the arrays that are on their way.

    Args:
      stored: of `stored_shapes`; `kept` of `weight_shapes`.
      arriving: of `rounded_on_arrival`.
    """
    held, most = 0, 0
    for role, table in stored.items():
        whole, rounded = weight_bytes({role: table}), weight_bytes({role: kept[role]})
        made = 0 if kept[role] == table else max(weight_bytes({role: {"": one}}) for one in kept[role].values())
        on_the_way = ring_bytes(weight_bytes({role: {"": one}}) for one in table.values())
        most = max(most, held + made + (rounded + on_the_way if role in arriving else max(whole, rounded)))
        held += rounded
    return most


def reading_jobs(kept: Mapping[str, Mapping[str, Any]]) -> list[Callable[[], Any]]:
    """Jobs that compile the programs of `read_weights` for weights of these shapes.

    Beside larger programs, which are compiled while weights are read, each takes half a second or more: they are worth being there
    before the weights are.
    """
    rounded = {role: {name: one for name, one in table.items() if name != HEAD_INDEX} for role, table in kept.items()}
    jobs = blocking_jobs(kept) + rounding_jobs(rounded)
    if HEAD_INDEX in kept.get("draft", {}):
        head = _head(kept["target"])
        if not isinstance(head.sharding, NamedSharding):
            jobs.append(lambda: _index.lower(jax.ShapeDtypeStruct(head.shape, head.dtype)).compile())
    return jobs


def read_weights(
    target: Checkpoint,
    drafter: Checkpoint | None,
    dtype: jnp.dtype,
    weight_dtype: WeightDtype | None = None,
    draft_weight_dtype: WeightDtype | None = None,
    observe: Callable[[Mapping[str, Array]], None] | None = None,
    *,
    rows: int = 1,
    ranks: Ranks | None = None,
    arrived: Callable[[], Any] | None = None,
) -> dict[str, dict[str, Weight]]:
    """Weights on the device, one array after the other, and one model in eight bits before the other is read.

    A matrix is rounded as soon as it is there where `rounded_on_arrival` says so.

    Args:
      dtype: of all weights, but those of which a family fixes it.
      weight_dtype: of large matrices, see `quantize_weights`.
      draft_weight_dtype: of the drafter's, where they are others. One without a head of its own is given a copy of the target's in
        it, unless that is in eight bits itself; one that stays as it is an index of the target's head, where that is faster.
      observe: called with the target's weights as they were read.
      rows: tokens of the largest cycle, on which the layout of matrices in memory depends (`execution.plan`).
      ranks: devices that share the weights, each of which gets its share alone.
      arrived: called for each parameter of the checkpoints that is on its way to the device.
    """
    one = [(target.config, target.family)]
    if _rounds(weight_dtype) and rounded_on_arrival(one, weight_dtype, observed=observe is not None):
        keep = rounding(stored_shapes(one, dtype, ranks=ranks)["target"], weight_dtype, ranks)
        weights = {"target": target.load(dtype.name, ranks, arrived, keep)}
    else:
        params = _derived(target.config, target.family, target.load(dtype.name, ranks, arrived), ranks)
        if observe is not None:
            observe(params)
        if _tiled(target.config, params, weight_dtype, 1 if ranks is None else ranks.count):
            check_scales(params, ranks)
        weights = {"target": _kept(target.config, dtype, rows, params, weight_dtype, ranks)}
    if drafter is not None:
        params = drafter.load(dtype.name, ranks, arrived)
        check_draft_vocabulary(drafter.config, params)
        params = _derived(drafter.config, drafter.family, params, ranks)
        kind = draft_weight_dtype or weight_dtype
        own = _kept(drafter.config, dtype, rows, params, kind, ranks)
        weights["draft"] = own | _copied_head(drafter.config, weights["target"], kind, ranks)
    return weights


def round_weights(
    weights: dict[str, dict[str, Array]],
    target: DecoderConfig,
    draft: DFlashConfig,
    dtype: jnp.dtype,
    weight_dtype: WeightDtype | None = None,
    draft_weight_dtype: WeightDtype | None = None,
    *,
    rows: int = 1,
) -> dict[str, dict[str, Weight]]:
    """A pair's weights as `read_weights` keeps them, taken out of `weights`."""
    kept = _kept(target, dtype, rows, weights.pop("target"), weight_dtype)
    kind = draft_weight_dtype or weight_dtype
    return {
        "target": kept,
        "draft": _kept(draft, dtype, rows, weights.pop("draft"), kind) | _copied_head(draft, kept, kind),
    }


def _kept(
    config: DecoderConfig,
    dtype: jnp.dtype,
    rows: int,
    params: dict[str, Array],
    kind: WeightDtype | None,
    ranks: Ranks | None = None,
) -> dict[str, Weight]:
    if ranks is not None:
        return _kept_shares(config, params, kind, ranks)
    if _tiled(config, params, kind):
        return tile_experts(config, params)
    if kind not in RELEASED:
        params = dequantize_weights(params)
    if _rounds(kind):
        return quantize_weights(params, kind)
    return {**(block_columns(params) if blocks_pay(config, dtype, rows) else params)}


def _kept_shares(
    config: DecoderConfig, params: dict[str, Array], kind: WeightDtype | None, ranks: Ranks
) -> dict[str, Weight]:
    """`_kept` of arrays that ranks share."""
    if _tiled(config, params, kind, ranks.count):
        return tile_experts(config, params, ranks)
    if kind not in RELEASED:
        params = dequantize_weights(params)
    return quantize_shares(params, kind, ranks) if _rounds(kind) else {**params}


def _kept_share(
    config: DecoderConfig, params: dict[str, Array], *, share: int, kind: WeightDtype | None
) -> dict[str, Weight]:
    """The same of what one of `share` ranks holds."""
    if _tiled(config, params, kind, share):
        return tile_experts(config, {**params}, share=share)
    if kind not in RELEASED:
        params = dequantize_weights({**params})
    return quantize_weights(params, kind) if _rounds(kind) else {**params}


def _tiled(config: DecoderConfig, params: Mapping[str, Any], kind: WeightDtype | None, ranks: int = 1) -> bool:
    """Whether experts that were released in MXFP4 are kept in tiles, each rank's its own."""
    dtypes = {one.dtype for one in params.values() if isinstance(one, Mxfp4)}
    return not _rounds(kind) and any(tiles_pay(config, dtype, ranks) for dtype in dtypes)


def _rounds(kind: WeightDtype | None) -> TypeGuard[WeightDtype]:
    """Whether matrices are made eight bits of, and not left as they were released."""
    return kind is not None and kind not in RELEASED


def _copied_head(
    config: DFlashConfig, target: Mapping[str, Weight], kind: WeightDtype | None, ranks: Ranks | None = None
) -> dict[str, Weight]:
    """The target's head in eight bits for a drafter that proposes with it, or its index; nothing where it reads another one."""
    head = _head(target)
    if head is None or config.own_head or isinstance(head, Quantized | ColumnBlocks):
        return {}
    if not _rounds(kind):
        # Some draft heads read more than the best few rows, and over ranks all read the whole logits.
        wanted = lists(config.head) if ranks is None else config.head is None
        if not wanted or not index_pays(held({"": head})[""] if ranks is not None else head):
            return {}
        if ranks is None:
            return {HEAD_INDEX: _index(head)}
        return ranks.each(lambda own: {HEAD_INDEX: head_index(own[""])}, {"": head}, axis=ranks.axis_of(head))
    copied = {SHARED_HEAD: head}
    return quantize_weights(copied, kind) if ranks is None else quantize_shares(copied, kind, ranks)


def _head(target: Mapping[str, Any]) -> Any:
    return target.get("lm_head.weight", target.get("embed.weight"))


def check_draft_vocabulary(draft: DFlashConfig, params: Mapping[str, Array]) -> None:
    """Raises CheckpointError where a draft vocabulary (`d2t`) points outside the target's or twice at one token."""
    if draft.draft_vocab_size:
        ids = np.arange(draft.draft_vocab_size) + np.asarray(params["d2t"])
        if ids.min() < 0 or ids.max() >= draft.vocab_size or len(np.unique(ids)) != len(ids):
            raise CheckpointError("drafter", f"d2t must map each row to its own token below {draft.vocab_size}")
