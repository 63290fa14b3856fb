"""Ways in which implementations of latent attention are known to have failed, and the tests here that would notice each.

The table is checked against the files: a test that is renamed or removed takes its line along.
"""

import ast
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import quantize_groups, quantize_nvfp4, quantize_tensor

from dflash_jax.attention.mla import LatentForm

from .latent_layer import make_batch
from .test_mla import CONTEXT, QUERIES, run

TESTS = Path(__file__).parents[1]
MLA, PREFILL, PLAN = "attention/test_mla.py", "attention/test_mla_prefill.py", "attention/test_mla_metadata.py"
FORMATS, PACKED, RANKS = (
    "attention/test_cache_formats.py",
    "attention/test_packed.py",
    "attention/test_context_parallel.py",
)
OP, MERGE, ROWS = "kernels/test_mla_attention.py", "kernels/test_merge_states.py", "kernels/test_latent_cache.py"
CALIBRATION = "attention/test_calibration.py"
CONFIG, PARITY = "models/test_deepseek_config.py", "models/test_parity_deepseek.py"

KNOWN = {
    "an empty chunk of context has a finite or garbage lse": [
        (MLA, "test_agrees_with_float64"), (PLAN, "test_the_packed_prefill"), (MERGE, "test_an_empty_part_changes_nothing"),
    ],
    "plus and minus infinity both stand for nothing seen": [(MERGE, "test_an_empty_part_changes_nothing")],
    "two empty parts merge to NaN": [(MERGE, "test_two_empty_parts_are_zero_and_minus_infinity")],
    "more than one chunk, values narrower than keys": [
        (MLA, "test_the_chunk_does_not_matter"), (PREFILL, "test_packed_parts_agree_with_float64"),
    ],
    "accuracy lost to chunking": [
        (MLA, "test_the_chunk_does_not_matter"), (MLA, "test_many_chunks_keep_their_accuracy"),
        (MLA, "test_half_precision_chunks_agree_with_one_pass"),
    ],
    "logarithms to base two and natural ones mixed": [
        (MERGE, "test_lse_is_a_natural_logarithm"), (RANKS, "test_an_lse_in_base_two_would_be_noticed"),
        (OP, "test_agrees_with_float64"),
    ],
    "rows that pad a batch: length 0, garbage tables, NaN in the output or in a largest value": [
        (MLA, "test_nothing_unused_is_read"), (PACKED, "test_every_request_is_as_alone"),
        ("attention/test_known_failures.py", "test_padding_does_not_reach_quantized_outputs"),
    ],
    "NaN behind a sequence's end": [
        (MLA, "test_nothing_unused_is_read"), (OP, "test_nothing_unused_is_read"), (FORMATS, "test_nothing_unused_is_read"),
    ],
    "a finite number for masked scores": [
        (MLA, "test_very_negative_logits"), (OP, "test_logits_shifted_by_a_large_constant"),
    ],
    "rows that see nothing": [(OP, "test_rows_without_a_visible_key")],
    "context parallelism: local lengths, interleaving, empty ranks, chunks inside a turn": [
        (RANKS, "test_every_token_has_one_place"), (RANKS, "test_causal_bounds_of_several_queries"),
        (RANKS, "test_ranks_together_equal_the_undivided"), (RANKS, "test_gathered_context_equals_the_undivided"),
        (RANKS, "test_chunks_that_begin_inside_a_turn_are_refused"),
    ],
    "order of a batch, decoding and prefilling requests mixed up": [
        (MLA, "test_order_of_requests_does_not_matter"), (PACKED, "test_every_request_is_as_alone"),
        (PLAN, "test_tokens_with_context"), (FORMATS, "test_order_of_requests_does_not_matter"),
    ],
    "offsets past 2^31": [
        (OP, "test_a_pool_of_more_than_two_to_the_31_entries"), (ROWS, "test_rows_past_two_billion_bytes"),
    ],
    "YaRN's magnitude left out of the scale, or twice in it": [
        (CONFIG, "test_yarn_reaches_the_scale_squared_and_cos_and_sin_as_a_ratio"), (PARITY, "test_both_magnitudes_are_noticed"),
    ],
    "packed rows: a tile of zeros, scales that are powers of two or not": [
        (ROWS, "test_a_row_of_zeros_reads_as_zeros_and_its_scale_is_the_smallest_normal_number"),
        (ROWS, "test_reading_packed_rows"), (FORMATS, "test_an_all_zero_token"),
    ],
    "scales from zeros, padding or a dummy pass": [
        (CALIBRATION, "test_tokens_that_pad_a_text_are_not_counted"), (FORMATS, "test_padding_is_looked_past"),
        (FORMATS, "test_zeros_have_a_scale_and_infinities_have_none"), (FORMATS, "test_a_model_of_zeros_gets_scales_of_one"),
    ],
    "the epsilon of the latents' norms": [(CONFIG, "test_norms_of_latents_keep_their_epsilon")],
}  # fmt: skip


@pytest.mark.parametrize("failure", KNOWN)
def test_every_known_failure_has_its_tests(failure: str) -> None:
    assert KNOWN[failure]
    for path, name in KNOWN[failure]:
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


@pytest.mark.few("chunked")
@pytest.mark.parametrize("form", [None, LatentForm(0, 24)], ids=["absorbed", "chunked"])
def test_padding_does_not_reach_quantized_outputs(form: LatentForm | None) -> None:
    """The layer's output, quantized three ways: garbage in padding rows changes no byte of any row, and they are zeros."""

    def quantized(garbage: float) -> list[np.ndarray]:
        out, _ = run(make_batch(CONTEXT, QUERIES, garbage=garbage, value=16, seed=5), 6, form, garbage)
        rows = jnp.asarray(out.reshape(*out.shape[:2], -1))
        arrays = [quantize_tensor(rows, 0.01), *quantize_groups(rows, group=16), *quantize_nvfp4(rows, 50.0)]
        return [np.asarray(array) for array in arrays]

    clean = quantized(0.0)
    for garbage in (np.nan, np.inf):
        assert [array.tobytes() for array in quantized(garbage)] == [array.tobytes() for array in clean]
    dead = np.arange(6) >= np.array(QUERIES)[:, None]
    assert not clean[0].view(np.uint8)[dead].any()
    assert np.isfinite(clean[2][dead]).all()
