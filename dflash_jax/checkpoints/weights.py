"""A pair's weights: their shapes before they are read, and the reading itself."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels import ColumnBlocks
from jaxtyping import Array

from dflash_jax.checkpoints.converted import Checkpoint
from dflash_jax.config import DecoderConfig
from dflash_jax.errors import CheckpointError, ParameterError
from dflash_jax.execution.draft_head import head_index, index_pays, lists
from dflash_jax.execution.weight_layout import block_columns, blocking_jobs, blocks_pay
from dflash_jax.models import DFlashConfig, Family
from dflash_jax.models.dflash import HEAD_INDEX, SHARED_HEAD
from dflash_jax.options import RELEASED, WeightDtype
from dflash_jax.quantization.mxfp4 import Mxfp4, dequantise_weights
from dflash_jax.quantization.weights import Quantised, Weight, quantise_weights

type Shapes = dict[str, dict[str, Any]]

_index = jax.jit(head_index)


def stored_shapes(models: Sequence[tuple[DecoderConfig, Family]], dtype: jnp.dtype) -> Shapes:
    """The weights of a target and perhaps its drafter in shapes, before any is rounded or copied."""
    shapes: Shapes = {}
    for config, family in models:
        declared = family.parameters(config)
        table = {one.name: jax.ShapeDtypeStruct(one.shape, jnp.dtype(one.dtype or dtype)) for one in declared}
        if family.derive is not None:
            table = jax.eval_shape(partial(family.derived, config), table)
        shapes[family.role] = table
    return shapes


def weight_shapes(
    models: Sequence[tuple[DecoderConfig, Family]],
    dtype: jnp.dtype,
    weight_dtype: WeightDtype | None = None,
    draft_weight_dtype: WeightDtype | None = None,
    *,
    rows: int = 1,
) -> Shapes:
    """The weights of a target and perhaps its drafter in shapes, as `read_weights` gives them for the same arguments."""
    shapes = stored_shapes(models, dtype)
    for config, family in models:
        kind = draft_weight_dtype or weight_dtype if family.role == "draft" else weight_dtype
        shapes[family.role] = jax.eval_shape(partial(_kept, config, dtype, rows, kind=kind), shapes[family.role])
        if family.role == "draft":
            shapes[family.role] |= jax.eval_shape(
                partial(_copied_head, cast(DFlashConfig, config), kind=kind), shapes.get("target", {})
            )
    return shapes


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
    """Bytes of weights or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))


def reading_bytes(stored: Shapes, kept: Shapes) -> int:
    """The most that `read_weights` holds at a time on the device.

    A model is there whole before its matrices are rounded or dequantised, a drafter beside the target as it is kept, and one array
    is made at a time.

    Args:
      stored: of `stored_shapes`; `kept` of `weight_shapes`.
    """
    held, most = 0, 0
    for role, table in stored.items():
        made = 0 if kept[role] == table else max(weight_bytes({role: {name: one}}) for name, one in kept[role].items())
        most = max(most, held + max(weight_bytes({role: table}), weight_bytes({role: kept[role]})) + made)
        held += weight_bytes({role: kept[role]})
    return most


def reading_jobs(kept: Mapping[str, Mapping[str, Any]]) -> list[Callable[[], Any]]:
    """What compiles the programs that `read_weights` makes weights of these shapes with, where they are not rounded.

    Beside larger programs, which are compiled while weights are read, each takes half a second or more: they are worth being there
    before the weights are.
    """
    jobs = blocking_jobs(kept)
    if HEAD_INDEX in kept.get("draft", {}):
        head = _head(kept["target"])
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
) -> dict[str, dict[str, Weight]]:
    """Weights on the device, one array after the other, and one model in eight bits before the other is read.

    Args:
      dtype: of all weights, but those of which a family fixes it.
      weight_dtype: of large matrices, see `quantise_weights`.
      draft_weight_dtype: of the drafter's, where they are others. One without a head of its own is given a copy of the target's in
        it, unless that is in eight bits itself; one that stays as it is an index of the target's head, where that is faster.
      observe: called with the target's weights as they were read.
      rows: tokens of the largest cycle, on which the layout of matrices in memory depends (`execution.plan`).
    """
    params = target.family.derived(target.config, target.load(dtype.name))
    if observe is not None:
        observe(params)
    weights = {"target": _kept(target.config, dtype, rows, params, weight_dtype)}
    if drafter is not None:
        params = drafter.load(dtype.name)
        check_draft_vocabulary(drafter.config, params)
        params = drafter.family.derived(drafter.config, params)
        kind = draft_weight_dtype or weight_dtype
        kept = _kept(drafter.config, dtype, rows, params, kind)
        weights["draft"] = kept | _copied_head(drafter.config, weights["target"], kind)
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
    config: DecoderConfig, dtype: jnp.dtype, rows: int, params: dict[str, Array], kind: WeightDtype | None
) -> dict[str, Weight]:
    if kind not in RELEASED:
        params = dequantise_weights(params)
    if _rounds(kind):
        return quantise_weights(params, kind)
    return {**(block_columns(params) if blocks_pay(config, dtype, rows) else params)}


def _rounds(kind: WeightDtype | None) -> TypeGuard[WeightDtype]:
    """Whether matrices are made eight bits of, and not left as they were released."""
    return kind is not None and kind not in RELEASED


def _copied_head(config: DFlashConfig, target: Mapping[str, Weight], kind: WeightDtype | None) -> dict[str, Weight]:
    """The target's head in eight bits for a drafter that proposes with it, or its index; nothing where it reads another one."""
    head = _head(target)
    if head is None or config.own_head or isinstance(head, Quantised | ColumnBlocks):
        return {}
    if not _rounds(kind):
        return {HEAD_INDEX: _index(head)} if lists(config.head) and index_pays(head) else {}
    return quantise_weights({SHARED_HEAD: head}, kind)


def _head(target: Mapping[str, Any]) -> Any:
    return target.get("lm_head.weight", target.get("embed.weight"))


def check_draft_vocabulary(draft: DFlashConfig, params: Mapping[str, Array]) -> None:
    """Raises CheckpointError where a draft vocabulary (`d2t`) points outside the target's or twice at one token."""
    if draft.draft_vocab_size:
        ids = np.arange(draft.draft_vocab_size) + np.asarray(params["d2t"])
        if ids.min() < 0 or ids.max() >= draft.vocab_size or len(np.unique(ids)) != len(ids):
            raise CheckpointError("drafter", f"d2t must map each row to its own token below {draft.vocab_size}")
