"""A whole layer for a few tokens as one operation: the definition, and the Hopper kernel in Pallas's interpreter, lowered for an
H200, and for real (`-m gpu`)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import (
    NoImplementationError,
    attention_chain,
    attention_chain_exchange,
    attention_chain_refusal,
)
from dflash_kernels.core.device import SHARED_MEMORY
from dflash_kernels.fused.layer.mosaic_gpu import launch_layer
from dflash_kernels.fused.layer.plan import attention_plan, plan
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200
from .attention_chain_cases import (
    EPS,
    LLAMA_8B,
    MIDDLE,
    QWEN3_4B,
    QWEN3_8B,
    TINY,
    arrays,
    check,
    in_float8,
    make,
    without_norms,
)

# One program: by itself every operation of it would be compiled.
definition = jax.jit(functools.partial(attention_chain, exchange=None, eps=EPS, implementation="xla"))


def new_exchange(call: dict[str, Any], tokens: int, sizes: dict[str, int]) -> tuple[Any, ...]:
    start = attention_chain_exchange(
        call["stream"], call["down"], len(call["seq_lens"]), tokens, heads=sizes["heads"], kv_heads=sizes["kv_heads"]
    )
    return tuple(jax.new_ref(array) for array in start)


def interpreted(call: dict[str, Any], *, causal: bool = True, ctas: int = 7, **options: Any) -> tuple[Any, ...]:
    options |= {"causal": causal, "scale": 128**-0.5, "eps": EPS, "ctas": ctas, "interpret": plgpu.InterpretGPUParams()}
    return jax.jit(lambda heads, layer: launch_layer(heads, layer, None, **options))(*arrays(call))


@pytest.mark.few("5-seq_lens2*")
@pytest.mark.parametrize(
    ("tokens", "seq_lens", "q_lens", "page_size", "causal", "options"),
    [
        (
            5,
            [258],
            [5],
            128,
            True,
            {"ctas": 3, "stages": 1},
        ),  # new keys in the tiles of two CTAs, two tiles in one stage
        (2, [0, 70], [0, 1], 16, False, {"ctas": 4}),
        (5, [418], [5], 128, True, {"ctas": 2, "stages": 2}),  # every stage more than once, new keys in one of the last
    ],
)
def test_agrees_with_separate_operations(
    tokens: int, seq_lens: list[int], q_lens: list[int], page_size: int, causal: bool, options: dict[str, int]
) -> None:
    call = make(tokens, seq_lens, q_lens, TINY, page_size=page_size)
    check(call, interpreted(call, causal=causal, **options), causal=causal)


@pytest.mark.few  # pages in float8 are read below
@pytest.mark.parametrize(
    ("tokens", "seq_lens", "q_lens", "page_size", "causal", "options"),
    [
        (5, [418], [5], 128, True, {"ctas": 2, "stages": 3}),  # stages of widened tiles and of 8-bit ones out of step
        (2, [0, 70], [0, 1], 16, False, {"ctas": 4}),
    ],
)
def test_agrees_over_float8_pages(
    tokens: int, seq_lens: list[int], q_lens: list[int], page_size: int, causal: bool, options: dict[str, int]
) -> None:
    call = in_float8(make(tokens, seq_lens, q_lens, TINY, page_size=page_size))
    check(call, interpreted(call, causal=causal, **options), causal=causal)


@pytest.mark.few
@pytest.mark.parametrize("float8", [False, True])
def test_agrees_where_heads_are_not_normed(float8: bool) -> None:
    """One of the two sequences is empty."""
    call = without_norms(make(2, [0, 70], [0, 1], TINY, page_size=16))
    call = in_float8(call) if float8 else call
    check(call, interpreted(call, causal=False, ctas=4), causal=False)


def test_the_definition() -> None:
    """A sequence that its table cuts short among them: what has no place there is neither written nor seen."""
    call = make(3, [40, 0, 35, 7], [3, 0, 2, 3], TINY, page_size=16, width=3)
    call["page_table"], call["seq_lens"] = call["page_table"].at[0, 2].set(0), call["seq_lens"].at[0].set(50)
    call["k_pages"], call["v_pages"] = (jnp.nan_to_num(call[name]) for name in ("k_pages", "v_pages"))
    out = definition(**call)
    check(call, out)


def test_last_layer_projects_nothing() -> None:
    call = make(1, [9], [1], TINY)
    del call["next_norm"], call["following"]
    out = definition(**call)
    assert out.projected is None
    check(call, out)


@pytest.mark.few
@pytest.mark.parametrize(
    ("tokens", "b", "sizes", "width", "float8", "count"),
    [
        (1, 1, QWEN3_4B, 2, False, 2), (16, 1, QWEN3_8B, 600, False, 1), (2, 8, QWEN3_4B, 2, False, 1),
        (16, 1, QWEN3_4B, 600, True, 1), (1, 1, QWEN3_8B, 2, True, 1), (16, 1, LLAMA_8B, 26, False, 1),
    ],
)  # fmt: skip
def test_lowers_for_an_h200(tokens: int, b: int, sizes: dict[str, int], width: int, float8: bool, count: int) -> None:
    """Layers one after the other; pools and exchange are changed in place."""
    change = in_float8 if float8 else without_norms if sizes is LLAMA_8B else lambda call: call
    call = jax.eval_shape(lambda: change(make(tokens, [tokens] * b, [tokens] * b, sizes, width=width)))

    def layers(call: dict[str, Any]) -> Any:
        exchange = new_exchange(call, tokens, sizes)
        for _ in range(count):
            out = attention_chain(**call, exchange=exchange, eps=EPS, implementation="mosaic_gpu")
            call = {**call, "stream": out.stream, "qkv": out.projected, "k_pages": out.k_pages, "v_pages": out.v_pages}
        return out

    with h200():
        text = jax.jit(layers).trace(call).lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu_v2" in text
    assert "output_operand_alias" in text


@pytest.mark.parametrize("sizes", [QWEN3_4B, QWEN3_8B, LLAMA_8B])
@pytest.mark.parametrize(("b", "tokens"), [(1, 1), (1, 16), (2, 8), (16, 1)])
def test_schedule(b: int, tokens: int, sizes: dict[str, int]) -> None:
    """Attention keeps most multiprocessors busy, and all that it needs at once fits into their memory."""
    whole = plan(
        live=b * tokens,
        hidden=sizes["hidden"],
        heads_width=4096,
        inner=sizes["inner"],
        next_width=6144,
        ctas=132,
        eps=EPS,
    )
    for width, itemsize in ((10, 2), (26, 2), (600, 2), (26, 1), (600, 1)):
        attention, launched = attention_plan(
            whole, sequences=b, group=4, kv_heads=8, head_dim=128, page_size=64, table_width=width, scale=1.0,
            page_itemsize=itemsize,
        )  # fmt: skip
        assert 110 <= attention.work_items <= 132
        quads = attention.rows * 128 // 4
        assert attention.combiners * 128 >= quads or attention.combiners == attention.splits
        memory = 128 * (
            launched.stages * launched.stage_rows + launched.x_stages * 2 * launched.tokens + 4 * attention.staged
        )
        assert 100 * 1024 < memory < SHARED_MEMORY
        # What attention borrows is the end of the ring, behind stages that weights fill meanwhile.
        rows, tiles = launched.stages * launched.stage_rows, attention.tiles(launched)
        assert 0 <= rows - 128 * tiles < 128
        assert 1 <= attention.kept(launched) <= (tiles - attention.borrowed) * 128 / launched.stage_rows
        # As many bytes are on their way as memory takes to answer, and no more than a short sequence has.
        most = -(-width * 64 // (64 * attention.splits))
        assert min(most, 3) <= (attention.stages if itemsize == 2 else attention.stages_8bit) <= most


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 64}, "takes head dim 128, not 64"), ({"page_size": 24}, "page sizes 8, 16, 32 and multiples of 64"),
        ({"group": 8}, "16 tokens of 64 heads a KV head, not 16 of 8"), ({"kv_heads": 160}, "132 KV heads of all sequences"),
    ],
)  # fmt: skip
def test_refusals_name_their_reason(changes: dict[str, int], reason: str) -> None:
    whole = plan(live=16, hidden=2560, heads_width=4096, inner=9728, next_width=6144, ctas=132, eps=EPS)
    shapes: dict[str, Any] = {"group": 4, "kv_heads": 8, "head_dim": 128, "page_size": 64} | changes
    with pytest.raises(NotImplementedError, match=reason):
        attention_plan(whole, sequences=1, table_width=26, scale=1.0, **shapes)


def test_what_is_not_bfloat16_or_turns_in_part_is_refused() -> None:
    call = make(2, [9], [2], TINY)
    with pytest.raises(NotImplementedError, match="takes bfloat16 throughout"):
        interpreted({**call, "k_pages": call["k_pages"].astype(jnp.float16)}, ctas=2)
    with pytest.raises(NotImplementedError, match="turns whole heads of 128, not 64 columns"):
        interpreted({**call, "cos": call["cos"][:, :32], "sin": call["sin"][:, :32]}, ctas=2)


def test_shapes_that_do_not_fit_are_named() -> None:
    call = make(2, [9], [2], TINY)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"gate_up": call["gate_up"][:250]}, r"gate_up \(250, 128\) and down \(128, 128\) do not fit 256 columns of heads"),
        ({"next_norm": None}, "come with the weight of its norm"),
        ({"stream": call["stream"][:, :1]}, "a column for each of 2 rows"),
        ({"v_pages": call["v_pages"].astype(jnp.float16)}, "must be alike"),
        ({"q_norm": None}, r"q_norm None and k_norm \(128,\) must be one weight for each of 128 dims, or None both"),
        ({"qkv": call["qkv"][:, :256]}, r"must be \[M, \(N \+ 2 \* 1\) \* 128\]"),
        ({"cos": jnp.zeros((2, 65)), "sin": jnp.zeros((2, 65))}, "at most 128 dims to turn"),
    ]  # fmt: skip
    for changes, reason in wrong:
        with pytest.raises(ValueError, match=reason):
            attention_chain(**{**call, **changes}, exchange=None)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    sizes = {"hidden": 2560, "heads_width": 4096, "inner": 9728, "next_width": 6144}
    shapes = {"group": 4, "kv_heads": 8, "head_dim": 128, "page_size": 64, "table_width": 26}
    assert "needs a Hopper GPU" in str(attention_chain_refusal(1, 16, jnp.bfloat16, **shapes, **sizes))
    with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
        attention_chain(**make(1, [9], [1], TINY), exchange=None, implementation="mosaic_gpu")
    with h200():
        assert attention_chain_refusal(1, 16, jnp.bfloat16, **shapes, **sizes) is None
        assert attention_chain_refusal(1, 16, jnp.bfloat16, **shapes | {"table_width": 2000}, **sizes) is None
        float8 = {"table_width": 128, "page_dtype": jnp.float8_e4m3fn}
        assert attention_chain_refusal(1, 16, jnp.bfloat16, **shapes | float8, **sizes) is None
        assert "up to 8192 keys in float8_e4m3fn, not 8256" in str(
            attention_chain_refusal(1, 16, jnp.bfloat16, **shapes | float8 | {"table_width": 129}, **sizes)
        )
        assert "pages of bfloat16 or float8_e4m3fn, not int8" in str(
            attention_chain_refusal(1, 16, jnp.bfloat16, **shapes, page_dtype=jnp.int8, **sizes)
        )
        assert "one sequence" in str(attention_chain_refusal(2, 1, jnp.bfloat16, **shapes, **sizes))
        assert "pages of 64 tokens, not 16" in str(
            attention_chain_refusal(1, 1, jnp.bfloat16, **shapes | {"page_size": 16}, **sizes)
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "tokens", "seq_lens", "q_lens", "page_size", "causal", "options"),
    [
        (QWEN3_4B, 16, [1091], [16], 64, True, {}),
        (MIDDLE, 1, [1100], [1], 64, True, {"stages": 1}),
        (MIDDLE, 16, [3001], [16], 64, True, {"stages": 2}),
        (MIDDLE, 16, [9001], [16], 64, True, {}),
        (MIDDLE, 16, [9001], [13], 64, False, {"float8": True}),
        (MIDDLE, 1, [5121], [1], 64, True, {"float8": True}),
        (QWEN3_8B, 16, [1091], [16], 64, True, {"float8": True}),
        (MIDDLE, 16, [1640], [16], 16, False, {"stages": 1}),
        (MIDDLE, 16, [16], [16], 128, True, {}),
        (MIDDLE, 2, [0, 1, 2, 63, 65, 513, 1000, 257], [0, 1, 2, 2, 1, 2, 0, 2], 32, True, {}),
        (MIDDLE, 11, [777], [9], 64, False, {}),
        (LLAMA_8B, 16, [1091], [16], 64, True, {"norms": False}),
        (LLAMA_8B, 1, [5121], [1], 64, True, {"norms": False}),
        (MIDDLE, 11, [777], [9], 64, False, {"norms": False, "float8": True}),
    ],
)
def test_full_size_on_a_gpu(
    sizes: dict[str, int],
    tokens: int,
    seq_lens: list[int],
    q_lens: list[int],
    page_size: int,
    causal: bool,
    options: Any,
) -> None:
    call, options = make(tokens, seq_lens, q_lens, sizes, page_size=page_size), dict(options)
    call = in_float8(call) if options.pop("float8", False) else call
    call = call if options.pop("norms", True) else without_norms(call)

    @jax.jit
    def run(call: dict[str, Any]) -> Any:
        exchange = new_exchange(call, tokens, sizes)
        return launch_layer(*arrays(call), exchange, causal=causal, scale=128**-0.5, eps=EPS, ctas=132, **options)

    out = run(call)
    check(call, out, causal=causal)
    for _ in range(3):
        again = run(call)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(out, again, strict=True))
