"""Attention and cache operations for the GPU: arrays in, arrays out. Knows no model.

Letters: B sequences, T query tokens per sequence, S keys, N query heads, K key/value heads, H head dim, P pages, p page size,
R latent width, r rotated key part, C = R + r; of an indexer I heads of E numbers.
"""

from dflash_kernels.attention.index.api import index_scores, index_select
from dflash_kernels.attention.merge_states.api import merge_states
from dflash_kernels.attention.mla.api import mla_attention
from dflash_kernels.attention.mla.selected import mla_selected_attention
from dflash_kernels.attention.paged.api import paged_attention
from dflash_kernels.attention.paged.schedule import PagedSchedule, paged_schedule, schedule_helps
from dflash_kernels.attention.ragged.api import ragged_attention, ragged_paged_attention
from dflash_kernels.core.dispatch import NoImplementationError
from dflash_kernels.core.layouts import (
    INTERLEAVE_BLOCK,
    ColumnBlocks,
    deinterleave_columns,
    in_column_blocks,
    interleave_columns,
    row_by_row,
)
from dflash_kernels.core.mxfp4 import MXFP4_MOST_SCALE, Mxfp4Tiles, mxfp4_tiles
from dflash_kernels.core.rank_exchange import RankExchange
from dflash_kernels.fused.experts.api import (
    mixture,
    routed_experts,
    routed_experts_exchange,
    routed_experts_refusal,
)
from dflash_kernels.fused.experts.mxfp4 import mxfp4_mixture, mxfp4_mixture_refusal
from dflash_kernels.fused.experts.reference import share_of_choices
from dflash_kernels.fused.few_qkv.api import AddNorm, FewQkvWritten, few_qkv_write, few_qkv_write_refusal
from dflash_kernels.fused.layer.api import (
    Chained,
    attention_chain,
    attention_chain_exchange,
    attention_chain_refusal,
    chain_exchange,
    chain_ranks,
    chain_stream,
    layer_chain,
    layer_chain_refusal,
)
from dflash_kernels.fused.linear_pair.api import linear_chain, linear_chain_exchange, linear_chain_refusal
from dflash_kernels.fused.qkv_attention.api import QkvAttended, qkv_attention, qkv_attention_refusal
from dflash_kernels.fused.token_attention.api import (
    TokenAttended,
    token_attention,
    token_attention_exchange,
    token_attention_refusal,
)
from dflash_kernels.kv_cache.index.api import index_encode
from dflash_kernels.kv_cache.latent.api import latent_decode, latent_encode, latent_pack, latent_unpack
from dflash_kernels.kv_cache.latent.gather import latent_gather
from dflash_kernels.kv_cache.latent.reference import LATENT_TILE, packed_latent_width
from dflash_kernels.kv_cache.latent_expand.api import latent_expand
from dflash_kernels.kv_cache.write.api import cache_write, latent_write
from dflash_kernels.kv_cache.write.mla import MlaWritten, mla_write
from dflash_kernels.kv_cache.write.qkv import KvWritten, QkvWritten, kv_write, qkv_write
from dflash_kernels.matmul.dense.api import (
    add_norm,
    add_norm_dense,
    add_norm_dense_refusal,
    add_norm_scores,
    dense,
    dense_best,
    dense_gated,
    dense_onto,
    dense_parts,
    dense_refusal,
)
from dflash_kernels.matmul.dense.reference import dense_scores
from dflash_kernels.matmul.few.api import few_linear, few_linear_refusal
from dflash_kernels.matmul.float8.api import (
    float8_best,
    float8_candidates,
    float8_dense,
    float8_gated,
    float8_onto,
    float8_refusal,
    float8_rows,
)
from dflash_kernels.matmul.float8.reference import Float8Rows
from dflash_kernels.matmul.grouped.api import grouped_linear, grouped_linear_refusal
from dflash_kernels.matmul.quantized_output.api import (
    QuantizedOutput,
    dequantize_output,
    output_linear,
    quantize_output,
)
from dflash_kernels.matmul.weight_only.api import quantized_linear
from dflash_kernels.norm.api import embed_norm, reduce_add_norm, reduce_add_norm_refusal, stream_norm
from dflash_kernels.quantize.api import (
    column_scales,
    dequantize_tensor,
    quantize_groups,
    quantize_nvfp4,
    quantize_tensor,
    swizzle_scales,
)
from dflash_kernels.ranks.api import (
    GATHERED,
    gather_ranks,
    rank_exchange,
    rank_exchange_refusal,
    reduce_ranks,
    row_exchange,
    sum_exchange,
)
from dflash_kernels.recurrent.delta_rule.api import delta_fold, delta_prefill, delta_step, delta_verify
from dflash_kernels.recurrent.delta_rule.inputs import DeltaFactors, DeltaShape, DeltaState, DeltaWeights
from dflash_kernels.sampling.api import drawn_candidates, drawn_choice, drawn_refusal, filtered_choice
from dflash_kernels.sampling.noise import noise_of, noise_of_all
from dflash_kernels.sampling.reference import filter_logits, scaled_logits

# The names of releases before these.
quantise_groups, quantise_nvfp4, quantise_tensor = quantize_groups, quantize_nvfp4, quantize_tensor
quantised_linear = quantized_linear

__all__ = [
    "GATHERED",
    "INTERLEAVE_BLOCK",
    "LATENT_TILE",
    "MXFP4_MOST_SCALE",
    "AddNorm",
    "Chained",
    "ColumnBlocks",
    "DeltaFactors",
    "DeltaShape",
    "DeltaState",
    "DeltaWeights",
    "FewQkvWritten",
    "Float8Rows",
    "KvWritten",
    "MlaWritten",
    "Mxfp4Tiles",
    "NoImplementationError",
    "PagedSchedule",
    "QkvAttended",
    "QkvWritten",
    "QuantizedOutput",
    "RankExchange",
    "TokenAttended",
    "add_norm",
    "add_norm_dense",
    "add_norm_dense_refusal",
    "add_norm_scores",
    "attention_chain",
    "attention_chain_exchange",
    "attention_chain_refusal",
    "cache_write",
    "chain_exchange",
    "chain_ranks",
    "chain_stream",
    "column_scales",
    "deinterleave_columns",
    "delta_fold",
    "delta_prefill",
    "delta_step",
    "delta_verify",
    "dense",
    "dense_best",
    "dense_gated",
    "dense_onto",
    "dense_parts",
    "dense_refusal",
    "dense_scores",
    "dequantize_output",
    "dequantize_tensor",
    "drawn_candidates",
    "drawn_choice",
    "drawn_refusal",
    "embed_norm",
    "few_linear",
    "few_linear_refusal",
    "few_qkv_write",
    "few_qkv_write_refusal",
    "filter_logits",
    "filtered_choice",
    "float8_best",
    "float8_candidates",
    "float8_dense",
    "float8_gated",
    "float8_onto",
    "float8_refusal",
    "float8_rows",
    "gather_ranks",
    "grouped_linear",
    "grouped_linear_refusal",
    "in_column_blocks",
    "index_encode",
    "index_scores",
    "index_select",
    "interleave_columns",
    "kv_write",
    "latent_decode",
    "latent_encode",
    "latent_expand",
    "latent_gather",
    "latent_pack",
    "latent_unpack",
    "latent_write",
    "layer_chain",
    "layer_chain_refusal",
    "linear_chain",
    "linear_chain_exchange",
    "linear_chain_refusal",
    "merge_states",
    "mixture",
    "mla_attention",
    "mla_selected_attention",
    "mla_write",
    "mxfp4_mixture",
    "mxfp4_mixture_refusal",
    "mxfp4_tiles",
    "noise_of",
    "noise_of_all",
    "output_linear",
    "packed_latent_width",
    "paged_attention",
    "paged_schedule",
    "qkv_attention",
    "qkv_attention_refusal",
    "qkv_write",
    "quantize_groups",
    "quantize_nvfp4",
    "quantize_output",
    "quantize_tensor",
    "quantized_linear",
    "ragged_attention",
    "ragged_paged_attention",
    "rank_exchange",
    "rank_exchange_refusal",
    "reduce_add_norm",
    "reduce_add_norm_refusal",
    "reduce_ranks",
    "routed_experts",
    "routed_experts_exchange",
    "routed_experts_refusal",
    "row_by_row",
    "row_exchange",
    "scaled_logits",
    "schedule_helps",
    "share_of_choices",
    "stream_norm",
    "sum_exchange",
    "swizzle_scales",
    "token_attention",
    "token_attention_exchange",
    "token_attention_refusal",
]  # fmt: skip
