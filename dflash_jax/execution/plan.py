"""Execution plans: the one place that chooses how a stack of layers runs.

`choose` goes through the runners from the most fused one to the plain one and takes the first that accepts the layers' traits, the
call's shape, the stored weights and the device that is traced for. The plan keeps why each earlier one was refused.

    persistent     one persistent kernel for what lies between two layers' attention, or for a whole layer with its attention
    fused_dense    GEMMs with their epilogue (residual add, norm, SwiGLU) as one launch each
    fused_float8   the same in W8A8: float8 weights times rows that are rounded to float8
    fused_moe      routed experts in one launch, added to the residual stream by the launch that norms it
    plain          the layers as they are defined, called one after the other
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from dflash_kernels import (
    ColumnBlocks,
    Mxfp4Tiles,
    NoImplementationError,
    attention_chain_refusal,
    dense_refusal,
    float8_refusal,
    layer_chain_refusal,
    linear_chain_refusal,
    mxfp4_mixture_refusal,
    paged_attention,
    rank_exchange_refusal,
    reduce_add_norm_refusal,
    routed_experts_refusal,
)
from dflash_kernels.attention.mla.launch import NARROW_ROWS
from dflash_kernels.core.device import HOPPER, target

from dflash_jax.execution import switches
from dflash_jax.models.traits import Activation, LayerTraits
from dflash_jax.quantization.mxfp4 import Mxfp4
from dflash_jax.quantization.weights import MANY_ROWS, Quantized, Weight

Runner = Literal["plain", "persistent", "fused_dense", "fused_float8", "fused_moe"]
Layout = Literal["rows", "column_blocks"]

# Of fused GEMMs: with more rows, XLA's products with nothing after them are faster.
MOST_DENSE_ROWS = 256
# Fewer rows than a tile has: in layers of this width XLA's products take less. A step of 32 sequences of Qwen3-4B takes 3.99 ms by
# the kernels and 4.17 without, of Qwen3-8B 6.05 and 5.98 (medians of six and of nine calls, by turns on one H200).
TILE_ROWS, WIDE = 64, 4096
# Of a packed context projection: rows multiplied at once, of which some may be left out.
PACKED_ROWS = 128
# Tokens of the largest cycle from which on products wait for the matrix units: those of Qwen3-8B's o and down take less with
# cuBLAS, which reads rows.
MOST_BLOCKED_ROWS = 512

# Bytes that a GPU sends for a sum where each sends all others what it has. A sum in shares takes 14 to 20 us more, and sends twice
# its own bytes in place of one less than there are GPUs: two GPUs send the same either way, and at 300 GB/s eight would part at
# 9.9 MB to all others, four at 15.
MOST_SENT = 10 << 20

# For a decode loop on a GPU: all of it is one CUDA graph, with the loop in it. No host stands between two cycles, and a call
# returns while the device works. Its launches wait for what they read, not for whatever stands before them: the drafter's context
# is made beside its block, small operations beside large ones. A graph's launches of kernels do not begin before those ahead of
# them end. Without graphs they can (programmatic dependent launch), with their first weights asked for early: a layer of eight
# sequences of Qwen3-4B then takes 89.6 us for 88.6 here (o and qkv 2.3 less each, attention and norms 1.5 to 2.6 more, as their
# CTAs crowd where others end first), and a cycle 4.24 ms, 4.41 without, 4.05 as one graph; one sequence's 3.09 for 2.89.
ONE_GRAPH = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,WHILE",
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    # A kernel that reads a part of an array, as proposals of one sequence do, would be one launch with that: no graph takes it, and
    # the loop would not be one.
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
# Beside that, for as many rows of a dense model in bfloat16 as let XLA multiply onto the residual stream (`dense_onto`): one call
# of cuBLAS each. Where XLA weighs Triton's products as well, the addition may end up apart.
CUBLAS_ROWS = 512
CUBLAS_PRODUCTS = {"xla_gpu_enable_triton_gemm": False}
# Where a row's bits may depend on no other row: cuBLAS's own choice for each shape, the same in every program and every process,
# and each sum rounded where the model says so, however operations are fused. Of 1 to 512 rows of Qwen3-4B's products each then had
# the bits of any other place; of products that XLA had timed some had not.
EXACT_PRODUCTS = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_allow_excess_precision": False,
}

# In the layers: from the stream to what mixes tokens, from there to the stream, and of the feed-forward.
MATRICES = (
    "attn.qkv_proj.weight", "attn.o_proj.weight", "delta.in_proj.weight", "delta.out_proj.weight", "mlp.gate_up_proj.weight",
    "mlp.down_proj.weight",
)  # fmt: skip


@dataclass(frozen=True)
class WeightFormat:
    """Storage format of the matrices of a stack's layers.

    Attributes:
      dtype: of the stored numbers; "mixed" where matrices of one layer differ.
      quantized: whether some matrix is in eight bits, with a scale for each row.
      dynamic: whether all of them round many rows to float8 before they multiply them (W8A8).
      paired: whether columns are interleaved in pairs; None where some matrices are and others not.
      layout: of matrices that are not quantized.
      plain: whether every array of the model is bfloat16, but for those of `dynamic` matrices.
      experts: how experts are stored, where there are such.
    """

    dtype: str
    quantized: bool = False
    dynamic: bool = False
    paired: bool | None = False
    layout: Layout = "rows"
    plain: bool = False
    experts: Literal["numbers", "mxfp4", "mxfp4_tiles"] = "numbers"

    @property
    def itemsize(self) -> int:
        """Bytes of a stored number; of the model's dtype where formats are mixed."""
        return 2 if self.dtype == "mixed" else jnp.dtype(self.dtype).itemsize


def weight_format(params: Mapping[str, Weight | jax.ShapeDtypeStruct]) -> WeightFormat:
    """The format of a model's flat parameters, which may be shapes, read off its first layer."""
    found: list[Any] = [params[name] for name in (f"layers.0.{one}" for one in MATRICES) if name in params]
    others = [one for one in params.values() if not (isinstance(one, Quantized) and one.dynamic)]
    plain = {leaf.dtype for leaf in jax.tree.leaves(others)} <= {jnp.dtype("bfloat16")}
    experts = _experts_format([one for name, one in params.items() if name.startswith("layers.0.")])
    if not found:
        return WeightFormat("mixed", plain=plain, experts=experts)
    dtypes = {str(one.values.dtype if isinstance(one, Quantized) else one.dtype) for one in found}
    pairs = {isinstance(one, Quantized) and one.paired for one in found}
    return WeightFormat(
        dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
        quantized=any(isinstance(one, Quantized) for one in found),
        dynamic=all(isinstance(one, Quantized) and one.dynamic for one in found),
        paired=pairs.pop() if len(pairs) == 1 else None,
        layout="column_blocks" if isinstance(found[-1], ColumnBlocks) else "rows",
        plain=plain,
        experts=experts,
    )


def _experts_format(weights: Sequence[Any]) -> Literal["numbers", "mxfp4", "mxfp4_tiles"]:
    if any(isinstance(one, Mxfp4Tiles) for one in weights):
        return "mxfp4_tiles"
    return "mxfp4" if any(isinstance(one, Mxfp4) for one in weights) else "numbers"


@dataclass(frozen=True)
class PageShape:
    """Pools of keys and values of heads, and the page table that names their pages.

    Attributes:
      page_size: tokens of a page (p).
      table_width: pages of a row of the table.
      dtype: of the pools.
    """

    page_size: int
    table_width: int
    dtype: jnp.dtype


@dataclass(frozen=True)
class CallShape:
    """One call of a stack.

    Attributes:
      sequences, tokens: B and T.
      dtype: of activations.
      pages: what attention reads and writes; None where that are no pages of heads, or where several rows may be of one sequence,
        so that none may attend before all are written.
      exchanges: whether devices that share the layers would add up in the package's own kernels, if these run them.
    """

    sequences: int
    tokens: int
    dtype: jnp.dtype
    pages: PageShape | None = None
    exchanges: bool = False

    @property
    def rows(self) -> int:
        return self.sequences * self.tokens


@dataclass(frozen=True)
class Refusal:
    """Why a way to run a call was not taken."""

    what: str
    reason: str


@dataclass(frozen=True)
class ExecutionPlan:
    """Execution plan of a stack of layers for calls of one shape.

    Attributes:
      runner: what runs the layers; see the module.
      attention: "in_layer" where a persistent kernel attends as well, else "apart".
      weight_layout: how matrices lie in memory.
      xla_options: what XLA is told about a decode loop whose target runs by this plan, on a GPU.
      workspace: device memory that the runner's kernels hand results over through; it may outlive a call.
      exchange: whether devices that share the layers add up in kernels, through such memory, and not by collectives of JAX's.
      sums: arrays like the stream that layers add up over devices at once by a launch of its own (`reduce_ranks`); 0 where the
        runner's kernels do that, or collectives.
      refusals: why earlier runners, attention in the layer, blocks of columns, a kernel for the attention of some layers, or an
        exchange in kernels were not taken.
      device: the kind of device that it was chosen for.
    """

    runner: Runner
    attention: Literal["apart", "in_layer"] = "apart"
    weight_layout: Layout = "rows"
    xla_options: tuple[tuple[str, str | bool | int], ...] = ()
    workspace: Literal["layer", "layer_with_attention", "rows", "sums"] | None = None
    exchange: bool = False
    sums: int = 0
    refusals: tuple[Refusal, ...] = ()
    device: str = ""

    def refused(self, what: str) -> str | None:
        """Why `what` was not taken; None where it was, or where it was not asked."""
        return next((one.reason for one in self.refusals if one.what == what), None)


PLAIN = ExecutionPlan("plain")


def choose(
    traits: LayerTraits,
    call: CallShape,
    weights: WeightFormat | None = None,
    *,
    beside: WeightFormat | None = None,
    ranks: int = 1,
    loops: bool = False,
    exact: bool = False,
) -> ExecutionPlan:
    """The plan for a call, on the device that is traced for.

    Args:
      traits: of the stack.
      call: its shape. Nobody takes gradients of it: kernels have none.
      weights: as they are stored; None before they are read. Then `call` is the largest cycle, the plan says how to lay them out,
        and its runner is that for the layout.
      beside: weights of another model in the same program, which XLA's options hold for as well.
      ranks: devices that share the weights; traits and call are those of a rank then.
      loops: whether the call stands in a decode loop, before which ranks tell one another where their memory is.
      exact: whether a row's bits may depend on no other row; see `exact_refusals` for what cannot be so.
    """
    refusals: list[Refusal] = []
    apart = None if ranks == 1 else _exchange_refusal(traits, ranks, loops=loops)
    refusals += [] if apart is None else [Refusal("exchange", apart)]
    if ranks > 1 and traits.experts is not None:
        traits = replace(traits, experts=traits.experts.of_rank(ranks))
    if weights is None:
        reason = _blocks_refusal(traits, call, ranks)
        refusals += [] if reason is None else [Refusal("column_blocks", reason)]
        dtype = call.dtype.name
        layout: Layout = "rows" if reason is not None else "column_blocks"
        weights = WeightFormat(dtype, layout=layout, plain=dtype == "bfloat16")
    call = replace(call, exchanges=ranks > 1 and apart is None)
    runner: Runner = "plain"
    for name, refuse in _RUNNERS.items():
        reason = _ranks_refusal(name, exchange=apart is None) if ranks > 1 else None
        reason = reason or refuse(traits, call, weights)
        if reason is None:
            runner = name
            break
        refusals.append(Refusal(name, reason))
    if (reason := _pages_refusal(traits, call)) is not None:
        refusals.append(Refusal("paged_attention", reason))
    attention, workspace = "apart", None
    if runner == "persistent":
        reason = _attention_refusal(traits, call, weights)
        refusals += [] if reason is None else [Refusal("in_layer", reason)]
        attention = "apart" if reason is not None else "in_layer"
        workspace = "layer" if reason is not None else "layer_with_attention"
    # What is done to a product between its sum and the stream, a bias or a convolution, has no place in a launch that does both.
    between = traits.convolved or (runner == "fused_moe" and traits.bias == "all")
    exchange, sums = ranks > 1 and apart is None, 0
    by_itself = runner == "plain" or between or reduce_add_norm_refusal(traits.hidden, call.dtype) is not None
    if exchange and workspace is None and by_itself:
        reason = _sums_refusal(traits, call, ranks)
        refusals += [] if reason is None else [Refusal("exchange", reason)]
        exchange, sums = reason is None, 0 if reason is not None else traits.summed_together
    if exchange and workspace is None:
        workspace = "sums" if sums else "rows"
    cublas = call.rows == CUBLAS_ROWS and traits.attention == "heads" and traits.feed_forward == "dense"
    cublas = cublas and weights.plain and (beside is None or beside.plain)
    # A graph holds no collective: XLA chooses what becomes one where there are such.
    options = ({} if ranks > 1 and not exchange else ONE_GRAPH) | (CUBLAS_PRODUCTS if cublas else {})
    options |= EXACT_PRODUCTS if exact else {}
    return ExecutionPlan(
        runner,
        attention,
        weights.layout,
        tuple(options.items()),
        workspace,
        exchange,
        sums,
        tuple(refusals),
        target().kind,
    )


def exact_refusals(traits: LayerTraits, tokens: int, cache_dtype: str | None = None) -> list[str]:
    """Why a token's bits would depend on what is computed beside it, whatever shape calls have, or are not known not to.

    Args:
      traits: of a rank's share of the target.
      tokens: of a slot in a cycle.
      cache_dtype: of the target's pages.
    """
    reasons = []
    if traits.delta is not None:
        reasons.append("gated delta nets sum the tokens of a block in another order than one after the other")
    if traits.convolved:
        reasons.append("sublayers are convolved along the tokens")
    if traits.short_conv:
        reasons.append("short convolutions were not tried in other company")
    if traits.mamba2:
        reasons.append("layers of Mamba 2 sum the tokens of a block in another order than one after the other")
    if traits.uneven_heads:
        reasons.append("heads that are gated or differ by layer were not tried in other company")
    if traits.relative:
        reasons.append("attention with a bias by distance was not tried in other company")
    if traits.compressed:
        reasons.append("attention to compressed keys was not tried in other company")
    hopper = target().capability == HOPPER
    if traits.attention == "latent" and cache_dtype == "fp8" and tokens > 1 and tokens * traits.heads <= NARROW_ROWS:
        reasons.append(
            f"the kernel for up to {NARROW_ROWS} queries over latent rows in float8 deals keys out by how many there are: take "
            'cache_dtype="fp8_packed", or leave it out'
        )
    if traits.attention == "latent" and target().platform == "gpu" and not hopper and _has_triton():
        reasons.append(
            f"Triton's kernel of latent attention, which {target().kind} runs, deals keys out by how many there are: uninstall "
            "jax-triton, or take a Hopper GPU"
        )
    return reasons


def _has_triton() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("triton", "jax_triton"))


def _exchange_refusal(traits: LayerTraits, ranks: int, *, loops: bool) -> str | None:
    """Why devices that share layers add up by collectives."""
    if not switches.RANK_EXCHANGE:
        return "switched off"
    if traits.delta is not None and not switches.RANK_EXCHANGE_DELTA:
        return "switched off for gated delta nets"
    return rank_exchange_refusal(ranks) if loops else "outside of a decode loop nobody tells where memory lies"


def _sums_refusal(traits: LayerTraits, call: CallShape, ranks: int) -> str | None:
    """Why devices that share layers add up by collectives what no launch of a runner adds to the stream."""
    if not switches.RANK_EXCHANGE_SUMS:
        return "switched off where a sum is a launch of its own"
    if call.dtype not in (jnp.bfloat16, jnp.float32):
        return f"a launch of its own adds up bfloat16 or float32, not {call.dtype}"
    sent = (ranks - 1) * traits.summed_together * call.rows * traits.hidden * call.dtype.itemsize
    if sent > MOST_SENT:
        return f"each of {ranks} devices would send {sent} bytes for a sum: beyond {MOST_SENT} it is added in shares"
    return None


def _ranks_refusal(runner: Runner, *, exchange: bool) -> str | None:
    """Why a runner is not for layers that several devices share; `exchange`: who could add up in kernels."""
    if runner == "persistent" and not exchange:
        return "devices add up what they multiply twice a layer, inside of what would be one kernel"
    if runner == "fused_float8":
        return "devices add up what they multiply between its launches, which lack that"
    return None


def _layers_refusal(traits: LayerTraits, activation: Activation = "silu") -> str | None:
    """Why no fused runner takes these layers at all, those whose kernels of a feed-forward have this activation."""
    if traits.attention == "latent":
        return "keys and values are latent rows, whose projections no fused runner has"
    if traits.delta is not None and not switches.HYBRID:
        return "some layers are gated delta nets, whose fused runners are switched off"
    if traits.short_conv:
        return "some layers are short convolutions, which no fused runner has"
    if traits.mamba2:
        return "layers have a mixer or a feed-forward and not both, some Mamba 2, which no fused runner has"
    if traits.normed_together:
        return "queries and keys are normed over all heads at once, which no fused runner does"
    if traits.relative:
        return "scores have a bias by distance, and sublayers convolutions along the tokens, which no fused runner has"
    if traits.uneven_heads:
        return "heads are gated one by one, differ by layer or have values of another size, which no fused runner does"
    if traits.block_sparse:
        return "heads attend to blocks that an indexer chooses, which no fused runner has"
    if traits.normed_out:
        return "what comes out of a sublayer is normed before it is added, for which kernels have no epilogue"
    if traits.activation != activation:
        return f"the feed-forward's activation is {traits.activation}, kernels have {activation}"
    if traits.value_scale != 1.0:
        return f"what attention gives is multiplied with {traits.value_scale}, which is a step of its own"
    return None


def _convolved_refusal(traits: LayerTraits) -> str | None:
    """Why no kernel that goes on after a sublayer's product takes these layers."""
    return "sublayers are convolved along the block, for which it has no epilogue" if traits.convolved else None


def _dense_layers_refusal(traits: LayerTraits) -> str | None:
    if (reason := _layers_refusal(traits)) is not None:
        return reason
    if traits.feed_forward != "dense":
        return "some layers have experts"
    if traits.bias == "all":
        return "attention's output has a bias, which kernels do not add to the stream"
    if traits.bias == "qkv" and not switches.BIASES:
        return "attention's projections have biases, which are switched off"
    return None


def _persistent_refusal(traits: LayerTraits, call: CallShape, weights: WeightFormat) -> str | None:
    if not switches.PERSISTENT:
        return "switched off"
    if (reason := _convolved_refusal(traits) or _dense_layers_refusal(traits)) is not None:
        return reason
    if weights.dtype == "mixed" or (weights.quantized and not weights.paired):
        return "matrices of a layer are stored in different formats, or in eight bits without interleaved columns"
    if weights.quantized and (reason := _eight_bits_refusal(traits)) is not None:
        return reason
    return _chain_refusal(traits, call.rows, call.dtype, weights.itemsize)


def _fused_dense_refusal(traits: LayerTraits, call: CallShape, weights: WeightFormat) -> str | None:
    if not switches.FUSED_DENSE:
        return "switched off"
    if (reason := _dense_layers_refusal(traits)) is not None:
        return reason
    if weights.quantized:
        return "weights are quantized"
    if weights.layout == "column_blocks":
        return None  # which only these kernels multiply
    # What XLA multiplies faster is added up by collectives, with which a loop is no graph.
    if call.rows < TILE_ROWS and traits.hidden >= WIDE and not call.exchanges:
        return (
            f"{call.rows} rows fill no tile of {TILE_ROWS}, and XLA's products of layers of {traits.hidden} are faster"
        )
    depths = traits.hidden, *(width for _, width in traits.mixers), traits.inner
    return next(filter(None, (dense_refusal(call.rows, call.dtype, depth) for depth in depths)), None)


def _fused_float8_refusal(traits: LayerTraits, call: CallShape, weights: WeightFormat) -> str | None:
    if (reason := _convolved_refusal(traits) or _dense_layers_refusal(traits)) is not None:
        return reason
    if not weights.dynamic:
        return 'weights are not "fp8_dynamic"'
    if call.rows < MANY_ROWS:
        return f"{call.rows} rows are multiplied as they are, rounding begins at {MANY_ROWS}"
    if weights.paired is None:
        return "some matrices have interleaved columns and others not"
    return _eight_bits_refusal(traits)


def _eight_bits_refusal(traits: LayerTraits) -> str | None:
    """Why kernels that multiply weights in eight bits do not take these layers, though those of sixteen do."""
    if (traits.delta is not None or traits.zero_centered) and not switches.HYBRID_EIGHT_BITS:
        return "switched off for weights in eight bits of layers with zero-centered norms and gated delta nets"
    return None


def _fused_moe_refusal(traits: LayerTraits, call: CallShape, weights: WeightFormat) -> str | None:
    if weights.experts == "mxfp4":
        return "experts are stored in MXFP4, which the kernel of routed experts does not read"
    tiles = weights.experts == "mxfp4_tiles"
    if tiles and not switches.FUSED_MXFP4:
        return "experts are in tiles of MXFP4, for which it is switched off"
    reason = _convolved_refusal(traits) or _layers_refusal(traits, "clamped_swiglu" if tiles else "silu")
    if reason is not None:
        return reason
    experts = traits.experts
    if experts is None:
        return "no layer has experts"
    refuse = mxfp4_mixture_refusal if tiles else routed_experts_refusal
    sizes = {"experts": experts.count, "hidden": traits.hidden, "inner": experts.inner}
    return refuse(call.rows, experts.per_token, call.dtype, **sizes)


type _Refuse = Callable[[LayerTraits, CallShape, WeightFormat], str | None]
# In the order in which they are tried.
_RUNNERS: Mapping[Runner, _Refuse] = {
    "persistent": _persistent_refusal,
    "fused_dense": _fused_dense_refusal,
    "fused_float8": _fused_float8_refusal,
    "fused_moe": _fused_moe_refusal,
}


def _attention_refusal(traits: LayerTraits, call: CallShape, weights: WeightFormat) -> str | None:
    """Why attention is not part of the persistent kernel."""
    pages = call.pages
    if not switches.PERSISTENT_ATTENTION:
        return "switched off"
    if pages is None:
        return "there are no pages of heads, or rows may be of one sequence and attend when all of them are written"
    if traits.window or traits.sinks:
        return "layers have sliding windows or attention sinks"
    if traits.delta is not None or traits.gated or traits.zero_centered:
        return (
            "some layers are gated delta nets, or attention is gated or norms are zero-centered, which the kernel lacks"
        )
    if traits.paired:
        return "entries of a head that lie next to each other rotate together, the kernel rotates halves"
    if traits.rotary_dim != traits.head_dim:
        return f"{traits.rotary_dim} of a head's {traits.head_dim} entries rotate, the kernel rotates all"
    return attention_chain_refusal(
        call.sequences, call.tokens, call.dtype, group=traits.heads // traits.kv_heads, kv_heads=traits.kv_heads,
        head_dim=traits.head_dim, page_size=pages.page_size, table_width=pages.table_width, **_sizes(traits)[0],
        itemsize=weights.itemsize, page_dtype=pages.dtype,
    )  # fmt: skip


def _pages_refusal(traits: LayerTraits, call: CallShape) -> str | None:
    """Why no kernel attends to the pages of layers with wider heads than other families have, so that XLA gathers them."""
    if traits.wide_heads is None or call.pages is None:
        return None
    if not switches.WIDE_HEADS:
        return "switched off"
    shaped, (heads, dim), pages = jax.ShapeDtypeStruct, traits.wide_heads, call.pages
    pool = shaped((1, heads, pages.page_size, dim), pages.dtype)
    rows = [shaped((call.sequences, *more), jnp.int32) for more in ((pages.table_width,), ())]
    scales = {}
    if pages.dtype == jnp.int8:
        scales = {"k_scale": shaped(pool.shape[:3], jnp.float32), "v_scale": shaped((heads, dim), jnp.float32)}
    kernels = functools.partial(paged_attention, implementation=("mosaic_gpu", "triton"))
    queries = shaped((call.sequences, call.tokens, traits.heads, dim), call.dtype)
    try:
        jax.eval_shape(kernels, queries, pool, pool, *rows, **scales)
    except NoImplementationError as error:
        return " ".join(str(error).split())
    return None


def _blocks_refusal(traits: LayerTraits, call: CallShape, ranks: int) -> str | None:
    """Why matrices stay in rows: blocks pay where `layer_chain` takes the layers, so that calls of few rows have a kernel as well,
    and the largest cycle, of `call.rows` tokens, waits for weights."""
    if not switches.COLUMN_BLOCKS:
        return "switched off"
    if ranks > 1:
        return f"{ranks} devices share the layers, and matrices are read to each of them as they are"
    if call.rows >= MOST_BLOCKED_ROWS:
        return f"the largest cycle has {call.rows} tokens, XLA's products are faster from {MOST_BLOCKED_ROWS} on"
    if (reason := _convolved_refusal(traits) or _dense_layers_refusal(traits)) is not None:
        return reason
    return _chain_refusal(traits, 1, call.dtype)


def _chain_refusal(traits: LayerTraits, rows: int, dtype: jnp.dtype, itemsize: int = 2) -> str | None:
    """Why there is no chain of products between layers of each two kinds."""
    if itemsize == 1 and traits.delta is not None:
        # Rows of gates are two numbers of eight bits each.
        traits = replace(traits, delta=replace(traits.delta, columns=traits.delta.columns + traits.delta.gates))
    refusals = (layer_chain_refusal(rows, dtype, **sizes, itemsize=itemsize) for sizes in _sizes(traits))
    return next(filter(None, refusals), None)


def _sizes(traits: LayerTraits) -> list[dict[str, int]]:
    """Sizes of a layer and of the next one's first operation, for each kind of either."""
    both, (firsts, lasts) = {"hidden": traits.hidden, "inner": traits.inner}, zip(*traits.mixers, strict=True)
    return [
        both | {"heads_width": last, "next_width": first}
        for last in dict.fromkeys(lasts)
        for first in dict.fromkeys(firsts)
    ]


@dataclass(frozen=True)
class ContextPlan:
    """Plan of a drafter's projection from tapped features to its context's keys and values.

    Attributes:
      form: "one_launch" for both projections and the norm between them in one kernel, which needs a workspace; "packed" where rows
        that count are gathered in front and the others are not multiplied; "apart" for one product after the other.
      refusals: why earlier forms were not taken.
    """

    form: Literal["packed", "one_launch", "apart"]
    refusals: tuple[Refusal, ...] = ()


def choose_context(params: Mapping[str, Any], rows: int, dtype: jnp.dtype, *, drafts: bool = True) -> ContextPlan:
    """The plan for `rows` rows of tapped features.

    Args:
      params: the drafter's flat parameters, which may be shapes.
      drafts: whether a block is drafted between the context and the target's pass. Without one both could run side by side, and a
        kernel that takes the whole GPU would wait for the other.
    """
    reasons: list[Refusal] = []
    if "fc.weight" not in params:
        why = "features are not projected"
        return ContextPlan("apart", (Refusal("packed", why), Refusal("one_launch", why)))
    forms = {"packed": lambda: _packed_refusal(params, rows, dtype)}
    forms["one_launch"] = lambda: _one_launch_refusal(params, rows, dtype) if drafts else "no block is drafted after it"
    for form, refuse in forms.items():
        if (reason := refuse()) is None:
            return ContextPlan(form, tuple(reasons))  # pyright: ignore[reportArgumentType]  # a key of the table above
        reasons.append(Refusal(form, reason))
    return ContextPlan("apart", tuple(reasons))


def _packed_refusal(params: Mapping[str, Any], rows: int, dtype: jnp.dtype) -> str | None:
    first = params["fc.weight"]
    if rows <= MOST_DENSE_ROWS or rows % PACKED_ROWS:
        return f"{rows} rows are not a multiple of {PACKED_ROWS} above {MOST_DENSE_ROWS}"
    if isinstance(first, Quantized) and first.dynamic and rows >= MANY_ROWS:
        return float8_refusal(rows, dtype, first.shape[1])
    if isinstance(first, Quantized | ColumnBlocks):
        return "the projection's weights are quantized"
    return dense_refusal(rows, dtype, first.shape[1])


def _one_launch_refusal(params: Mapping[str, Any], rows: int, dtype: jnp.dtype) -> str | None:
    first, second = params["fc.weight"], params["context_kv_proj.weight"]
    if isinstance(first, Quantized) or isinstance(second, Quantized):
        return "the projections' weights are quantized"
    if "context_kv_proj.bias" in params:
        return "the projection to keys and values has a bias"
    if "feature_norms.weight" in params:
        return "features are normed before the projection and once more after it, which the kernel lacks"
    if "layers.0.attn_out_norm.weight" in params:
        return "the norm's weight is applied in float32, the kernel rounds before it"
    return linear_chain_refusal(rows, dtype, depth=first.shape[1], hidden=first.shape[0], features=second.shape[0])
