"""From a projection to heads in one operation: the Hopper kernel against the definition, in Pallas's interpreter, lowered for an
H200, and for real (`-m gpu`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, paged_attention, qkv_attention, qkv_attention_refusal, qkv_write
from dflash_kernels.attention.paged.launch import Tuning
from dflash_kernels.fused.arguments import Heads
from dflash_kernels.fused.qkv_attention.mosaic_gpu import launch
from dflash_kernels.fused.qkv_attention.reference import qkv_attention_reference
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

EPS, HEAD_DIM, PAGE = 1e-6, 128, 64


def make(lens: list[int], q_lens: list[int], tokens: int, kv_heads: int, group: int, width: int) -> dict[str, Any]:
    """A call; entries of the table past a sequence's last page are garbage, and so are rows of pages past its keys."""
    rng, b = np.random.default_rng(len(lens) + tokens), len(lens)
    pages = b * width + 1
    table = 1 + rng.permutation(b * width).reshape(b, width).astype(np.int32)
    pools = []
    for _ in range(2):
        pool = rng.standard_normal((pages, kv_heads, PAGE, HEAD_DIM))
        for sequence, (length, new) in enumerate(zip(lens, q_lens, strict=True)):
            for position in range(max(length - new, 0), width * PAGE):
                pool[table[sequence, position // PAGE], :, position % PAGE] = np.nan
        pools.append(pool)
    for sequence, length in enumerate(lens):
        table[sequence, -(-length // PAGE) :] = 2147480000
    angles = rng.standard_normal((b * tokens, HEAD_DIM // 2))
    wide = {
        "k_pages": pools[0], "v_pages": pools[1], "q_norm": 1 + 0.1 * rng.standard_normal(HEAD_DIM),
        "k_norm": 1 + 0.1 * rng.standard_normal(HEAD_DIM),
        "qkv": rng.standard_normal((b * tokens, (group + 2) * kv_heads * HEAD_DIM)),
    }  # fmt: skip
    call = {name: jnp.asarray(array, jnp.bfloat16) for name, array in wide.items()}
    call |= {"page_table": jnp.asarray(table), "seq_lens": jnp.asarray(lens), "q_lens": jnp.asarray(q_lens)}
    return call | {"cos": jnp.asarray(np.cos(angles), jnp.float32), "sin": jnp.asarray(np.sin(angles), jnp.float32)}


def check(call: dict[str, Any], found: Any, causal: bool) -> None:
    """Heads to a few roundings, the pools to one of numbers before they turn."""
    wanted = qkv_attention_reference(Heads(**call), causal=causal, scale=HEAD_DIM**-0.5, eps=EPS)
    out, expected = (np.asarray(heads, np.float32) for heads in (found[0], wanted[0]))
    np.testing.assert_allclose(out, expected, atol=2e-2)
    for ours, theirs in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(np.asarray(ours, np.float32), np.asarray(theirs, np.float32), rtol=2**-7, atol=2**-6)


@pytest.mark.few("True-2")
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_agrees_with_the_definition(causal: bool, splits: int) -> None:
    """New tokens alone, at a page's start, across two pages, of nobody, fewer than there is room for; more tiles than slots; more
    tokens than the sequence has with them, and none at all."""
    call = make([5, 69, 66, 0, 40, 250, 3, 0], [5, 5, 5, 0, 3, 5, 5, 5], tokens=5, kv_heads=1, group=4, width=4)
    found = launch(
        Heads(**call), causal=causal, scale=HEAD_DIM**-0.5, eps=EPS,
        tuning=Tuning(splits=splits, stages=2, together=splits > 1), interpret=plgpu.InterpretGPUParams(),
    )  # fmt: skip
    check(call, found, causal)


@pytest.mark.few("3")
@pytest.mark.parametrize("splits", [1, 3])
def test_agrees_where_heads_are_not_normed(splits: int) -> None:
    call = make([5, 69, 250], [5, 5, 4], tokens=5, kv_heads=1, group=4, width=4) | {"q_norm": None, "k_norm": None}
    found = launch(
        Heads(**call), causal=True, scale=HEAD_DIM**-0.5, eps=EPS, tuning=Tuning(splits=splits, stages=2, together=False),
        interpret=plgpu.InterpretGPUParams(),
    )  # fmt: skip
    check(call, found, causal=True)


def test_is_the_two_operations() -> None:
    """In float32, through the public functions."""
    call = make([5, 69, 130], [5, 4, 5], tokens=5, kv_heads=2, group=2, width=4)
    call = {name: array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array for name, array in call.items()}
    given: Any = {name: call[name] for name in ("q_norm", "k_norm")}
    out, k, v = qkv_attention(**call)
    position = (call["seq_lens"] - call["q_lens"])[:, None] + jnp.arange(5)
    page = jnp.take_along_axis(call["page_table"], jnp.minimum(position // PAGE, 3), axis=1)
    slots = jnp.where(jnp.arange(5) < call["q_lens"][:, None], page * PAGE + position % PAGE, -1).reshape(-1)
    written = qkv_write(call["k_pages"], call["v_pages"], call["qkv"], slots, call["cos"], call["sin"], **given)
    pools = written.k_pages, written.v_pages
    lens = call["page_table"], call["seq_lens"]
    theirs = paged_attention(written.q.reshape(3, 5, 4, HEAD_DIM), *pools, *lens, q_lens=call["q_lens"])
    np.testing.assert_allclose(np.asarray(out), np.asarray(theirs), atol=1e-5)
    for ours, expected in zip((k, v), pools, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(expected))


def test_refusals_name_their_reason() -> None:
    sizes = {
        "group": 4,
        "kv_heads": 8,
        "head_dim": 128,
        "turned": 128,
        "page_size": 64,
        "table_width": 26,
        "causal": True,
    }
    with h200():
        for b, tokens in ((2, 16), (5, 1), (8, 1), (8, 16), (32, 1), (32, 16)):
            assert qkv_attention_refusal(b, tokens, jnp.bfloat16, **sizes) is None
        for b, tokens, changed, reason in (
            (1, 16, {}, "not known to be faster for one sequence"), (32, 17, {}, "16 tokens and 64 query rows at most, not 17"),
            (32, 16, {"group": 8}, "not 16 and 128"), (32, 16, {"turned": 64}, "not 64 columns of 128"),
            (32, 16, {"page_size": 16}, "pages of 64 tokens, not 16"),
        ):  # fmt: skip
            assert reason in str(qkv_attention_refusal(b, tokens, jnp.bfloat16, **{**sizes, **changed}))
        assert "bfloat16 throughout, not float16" in str(qkv_attention_refusal(32, 16, jnp.float16, **sizes))
    assert jax.default_backend() == "gpu" or "needs a Hopper GPU" in str(
        qkv_attention_refusal(32, 16, jnp.bfloat16, **sizes)
    )


def test_shapes_that_do_not_fit_are_named() -> None:
    call = make([5, 6], [5, 5], tokens=5, kv_heads=2, group=2, width=2)
    nine = {name: call[name][:9] for name in ("qkv", "cos", "sin")}
    broad = {name: jnp.zeros((10, 65)) for name in ("cos", "sin")}
    for wrong, message in (
        (nine, "do not fit 2 sequences"), ({"qkv": call["qkv"][:, :512]}, r"must be \[M, \(N \+ 2 \* 2\) \* 128\]"),
        (broad, "at most 128 dims to turn"),
    ):  # fmt: skip
        given = {**call, **wrong}
        with pytest.raises(ValueError, match=message):
            qkv_attention(**given)
    if jax.default_backend() != "gpu":
        with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
            qkv_attention(**call, implementation="mosaic_gpu")


@pytest.mark.few
@pytest.mark.parametrize(("splits", "parts"), [(1, 1), (2, 1), (3, 3)])
def test_clusters_of_two_put_parts_together_and_no_others(splits: int, parts: int) -> None:
    """Whatever is asked for: of three CTAs each leaves a part, in token order."""
    call = make([130] * 4, [5] * 4, tokens=5, kv_heads=8, group=4, width=4)
    tuning = Tuning(splits=splits, stages=2, together=True)
    with h200():
        run = jax.jit(lambda call: launch(Heads(**call), causal=True, scale=1.0, eps=EPS, tuning=tuning))
        text = run.trace(call).lower(lowering_platforms=("cuda",)).as_text()
    assert (f"tensor<4x8x{parts}x24x128xf32>" in text) == (parts > 1)


@pytest.mark.few("8-1-False")
@pytest.mark.parametrize(
    ("b", "launches", "normed"), [(2, 2, True), (4, 2, True), (5, 1, True), (8, 1, True), (32, 1, True), (8, 1, False)]
)
def test_lowers_for_an_h200_in_place(b: int, launches: int, normed: bool) -> None:
    """Four parts and more are put together by a kernel, three by XLA."""
    wide, pool = (
        jax.ShapeDtypeStruct((b * 16, 6144), jnp.bfloat16),
        jax.ShapeDtypeStruct((600, 8, PAGE, 128), jnp.bfloat16),
    )
    table, lens = jax.ShapeDtypeStruct((b, 17), jnp.int32), jax.ShapeDtypeStruct((b,), jnp.int32)
    angles = jax.ShapeDtypeStruct((b * 16, 64), jnp.float32)
    norm = jax.ShapeDtypeStruct((128,), jnp.bfloat16) if normed else None

    def run(k: jax.Array, v: jax.Array, *given: Any) -> Any:
        return qkv_attention(k, v, *given[:-2], q_norm=given[-2], k_norm=given[-1], implementation="mosaic_gpu")

    call = (pool, pool, wide, table, lens, lens, angles, angles, norm, norm)
    with h200():
        text = jax.jit(run, donate_argnums=(0, 1)).trace(*call).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == launches
    assert text.count("output_operand_alias") >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("b", [1, 2, 3, 4, 5, 8, 32])
@pytest.mark.parametrize(("causal", "normed"), [(True, True), (False, True), (True, False)])
def test_full_size_agrees_with_the_definition(causal: bool, normed: bool, b: int) -> None:
    """More tiles than a warp holds page ids of among them."""
    longest = 2500 if b == 32 else 5000
    lens = [longest, *(1040 - 7 * i for i in range(b - 4)), 16, 80, 0][:b]
    call = make(
        lens, [16 if length else 0 for length in lens], tokens=16, kv_heads=8, group=4, width=-(-longest // PAGE)
    )
    call |= {} if normed else {"q_norm": None, "k_norm": None}
    found = jax.jit(lambda call: qkv_attention(**call, causal=causal, implementation="mosaic_gpu"))(call)
    check(call, found, causal)
