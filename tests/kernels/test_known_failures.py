"""Ways in which attention over pages is known to have failed elsewhere, and the tests here that would notice each.

The table is checked against the files: a test that is renamed or removed takes its line along. Those of latent attention are in
`tests/attention/test_known_failures.py`.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OP, HOPPER, NARROW = (f"kernels/test_paged_attention{name}.py" for name in ("", "_mosaic", "_narrow"))
OPTIONS, SCHEDULE = "kernels/test_paged_attention_options.py", "kernels/test_paged_attention_schedule.py"
RAGGED, RAGGED_HOPPER = "kernels/test_ragged_attention.py", "kernels/test_ragged_attention_mosaic.py"
MERGE, WRITE, QKV = "kernels/test_merge_states.py", "kernels/test_cache_write.py", "kernels/test_cache_write_qkv.py"
LARGE, ENGINE, SCHEDULES = "kernels/test_large_pools.py", "engine/test_engine.py", "engine/test_schedules.py"
LOSSLESS, CHUNKS = "decoding/test_lossless.py", "attention/test_chunks.py"
CASCADE, STATIC, RANKS = (f"attention/test_{name}.py" for name in ("cascade", "static_sinks", "context_parallel_heads"))
SHARERS = "engine/test_cascade.py"
DRAFTER, PARITY = "decoding/test_config_draft.py", "models/test_parity_qwen3.py"
BLOCK = "decoding/test_draft_block.py"

KNOWN = {
    "plus and minus infinity both stand for nothing seen": [(MERGE, "test_an_empty_part_changes_nothing")],
    "two empty parts merge to NaN": [(MERGE, "test_two_empty_parts_are_zero_and_minus_infinity")],
    "logarithms to base two and natural ones mixed": [
        (MERGE, "test_lse_is_a_natural_logarithm"), (OP, "test_agrees_with_float64"),
        (RAGGED, "test_reference_agrees_with_float64"),
    ],
    "rows that pad a batch: length 0, garbage tables, NaN in queries": [
        (OP, "test_nothing_unused_is_read"), (OP, "test_other_requests_leave_no_trace"),
        (RAGGED_HOPPER, "test_nothing_unused_is_read"),
    ],
    "NaN behind a sequence's end": [
        (OP, "test_nothing_unused_is_read"), (OPTIONS, "test_nothing_unused_is_read_of_quantized_pages"),
        (HOPPER, "test_nothing_unused_is_read"), (SCHEDULE, "test_nothing_unused_is_read"), (NARROW, "test_nothing_unused_is_read"),
        (RAGGED_HOPPER, "test_neighbours_may_hold_nan"), (ENGINE, "test_nan_in_unused_slots_changes_nothing"),
    ],
    "a finite number for masked scores": [(OP, "test_logits_shifted_by_a_large_constant")],
    "rows that see nothing": [(OP, "test_rows_without_a_visible_key"), (RAGGED, "test_reference_agrees_with_float64")],
    "parts: their layout, how many there are, lengths that leave some empty": [
        (HOPPER, "test_any_number_of_parts"), (SCHEDULE, "test_every_part_is_dealt_once"), (SCHEDULE, "test_agrees_with_float64"),
    ],
    "a learned sink counted in every part, or in none": [
        (HOPPER, "test_any_number_of_parts"), (OP, "test_every_mask"), (OP, "test_rows_without_a_visible_key"),
        (CASCADE, "test_agrees_with_float64"), (RANKS, "test_ranks_together_equal_the_undivided"),
        (RANKS, "test_a_sink_on_every_rank_would_be_noticed"),
    ],
    "a shared beginning read apart: windows, sinks, idle rows, pages that are not whole or not everyone's": [
        (CASCADE, "test_agrees_with_float64"), (CASCADE, "test_some_share_nothing"),
        (SHARERS, "test_the_beginnings_that_save_most"), (SHARERS, "test_texts_are_those_of_requests_alone"),
        (CASCADE, "test_groups_of_any_number_and_size"), (SHARERS, "test_texts_of_several_groups_are_those_of_requests_alone"),
    ],
    "static sinks added twice, or to rows of length 0": [
        (STATIC, "test_tables_are_made_anew_each_time"), (STATIC, "test_queries_see_the_sinks_ahead_of_their_sequence"),
    ],
    "context parallelism over keys and values of heads: empty ranks, several queries": [
        (RANKS, "test_ranks_together_equal_the_undivided"),
    ],
    "offsets past 2^31": [
        (LARGE, "test_attention"), (LARGE, "test_attention_of_prompts"), (LARGE, "test_writes"),
        (QKV, "test_a_pool_of_more_than_two_to_the_31_elements"),
    ],
    "negative slots": [(WRITE, "test_only_the_named_slots_change"), (QKV, "test_agrees_with_float64")],
    "page sizes of 1, 5 and 61, tables in any order": [(OP, "test_agrees_with_float64"), (OP, "test_page_order_does_not_matter")],
    "the length of the keys leaves the new tokens out": [
        (OP, "test_agrees_with_float64"), (CHUNKS, "test_chunks_agree_with_the_op_for_decoding"),
    ],
    "a single query is not masked as one of many is": [
        (OP, "test_one_query_is_the_same_in_a_longer_block"), (OP, "test_a_request_alone_equals_itself_in_a_batch"),
    ],
    "rejected tokens stay visible, a drafter's window, acceptance that falls in a batch": [
        (ENGINE, "test_drafter_context_is_that_of_the_committed_tokens_only"), (BLOCK, "test_blocks_equal_a_dense_pass"),
        (LOSSLESS, "test_drafter_variants"),
        (LOSSLESS, "test_alone_equals_in_a_batch"), (SCHEDULES, "test_shared_pages_leave_acceptance_as_it_is"),
    ],
    "a tapped layer off by one": [
        (PARITY, "test_a_tap_one_layer_off_is_noticed"), (PARITY, "test_last_tap_is_taken_before_the_final_norm"),
        (DRAFTER, "test_default_taps"),
    ],
    "parts chosen without a look at the batch": [
        (HOPPER, "test_schedule"), (SCHEDULE, "test_long_ones_are_divided_until_the_gpu_is_full"),
    ],
    "eight-bit pages written in one way and read in another": [
        (QKV, "test_agrees_with_float64"), (OPTIONS, "test_quantized_pages"), (NARROW, "test_every_float8_value_is_exact"),
        ("decoding/test_cache_dtype.py", "test_int8_pages_are_read_as_they_are_kept"),
        (QKV, "test_a_key_of_zeros_has_a_scale_to_divide_by"),
    ],
    "the same call twice gives other bits": [(OP, "test_twice_the_same"), (SCHEDULE, "test_real_sizes_run_to_run")],
}  # fmt: skip


@pytest.mark.parametrize("failure", KNOWN)
def test_every_known_failure_has_its_tests(failure: str) -> None:
    for path, name in KNOWN[failure]:
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"
