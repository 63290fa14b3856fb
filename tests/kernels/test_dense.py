"""Products and what follows them: the definitions, and the Hopper kernels in Pallas's interpreter, lowered for an H200, and for
real (`-m gpu`)."""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import (
    NoImplementationError,
    add_norm,
    add_norm_dense,
    add_norm_dense_refusal,
    add_norm_scores,
    dense,
    dense_best,
    dense_gated,
    dense_parts,
    dense_refusal,
)
from dflash_kernels.matmul.dense.mosaic_gpu import (
    launch,
    launch_add_norm,
    launch_add_norm_dense,
    launch_add_norm_scores,
    launch_best,
)
from dflash_kernels.matmul.gemm_sm90 import gemm
from dflash_kernels.matmul.row_product import TILE, row_plan
from dflash_kernels.matmul.tiling import SHARED_MEMORY, plan, tiled
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import custom_calls, h200

EPS = 1e-6
INTERPRET = plgpu.InterpretGPUParams()
FORMS = {"store": dense, "swiglu": dense_gated, "split_k": dense_parts}
# Features and depth of a layer's products, and of the head.
QWEN3_4B = {"store": (6144, 2560), "swiglu": (9728, 2560), "split_k": (2560, 9728), "argmax": (151936, 2560)}
QWEN3_8B = {"store": (6144, 4096), "swiglu": (12288, 4096), "split_k": (4096, 4096), "argmax": (151936, 4096)}


def make(form: str, rows: int, features: int, depth: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    """x and a weight."""
    keys = jax.random.split(jax.random.key(rows + features), 2)
    weight = jax.random.normal(keys[1], (features * (2 if form == "swiglu" else 1), depth)) * depth**-0.5
    return jax.random.normal(keys[0], (rows, depth)).astype(dtype), weight.astype(dtype)


def truth(form: str, x: jax.Array, weight: jax.Array) -> np.ndarray:
    product = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    if form != "swiglu":
        return product
    gate, up = np.split(product, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def whole(form: str, out: Any) -> np.ndarray:
    """A result as one matrix in float64."""
    return np.asarray(out, np.float64).sum(axis=0) if form == "split_k" else np.asarray(out, np.float64)


def check(form: str, x: jax.Array, weight: jax.Array, out: Any) -> None:
    """An error of at most twice that of the definition, and two units in the last place."""
    rows = np.unique(np.linspace(0, len(x) - 1, 24).astype(int))  # float64 is slow
    true, theirs = truth(form, x[rows], weight), whole(form, FORMS[form](x, weight, implementation="xla"))[rows]
    bound = 2 * np.abs(theirs - true).max() + 2 * float(jnp.finfo(x.dtype).eps) * np.abs(true).max()
    assert np.abs(whole(form, out)[rows] - true).max() <= bound


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_the_definitions(form: str, dtype: Any) -> None:
    x, weight = make(form, 5, 24, 64, dtype)
    out = FORMS[form](x, weight, implementation="xla")
    np.testing.assert_allclose(whole(form, out), truth(form, x, weight), atol=1e-5 if dtype == jnp.float32 else 0.06)


@pytest.mark.few("swiglu-128-88-640-tiles1", "split_k-256-96-256-tiles2")
@pytest.mark.parametrize(
    ("form", "rows", "features", "depth", "tiles"),
    [
        # Several turns of a cluster, a last tile that overlaps, a ring that is used again.
        ("store", 256, 136, 704, {"tile_m": 128, "tile_n": 24}),
        ("swiglu", 128, 88, 640, {"tile_m": 128, "tile_n": 24}),  # two blocks at a time, more than find room
        ("split_k", 256, 96, 256, {"tile_m": 256, "tile_n": 48, "split_k": 2}),
        ("swiglu", 64, 88, 128, {"tile_m": 64, "tile_n": 32}), ("store", 192, 72, 128, {"tile_m": 64, "tile_n": 48}),
        # Results through shared memory in tiles of 64 and of 16 columns, several turns of a CTA.
        ("split_k", 256, 192, 128, {"tile_m": 128, "tile_n": 64, "split_k": 2}),
        ("split_k", 128, 176, 256, {"tile_m": 64, "tile_n": 32, "split_k": 4}),
    ],
)  # fmt: skip
def test_agrees_with_float64(form: Any, rows: int, features: int, depth: int, tiles: dict[str, Any]) -> None:
    x, weight = make(form, rows, features, depth)
    schedule = tiled(rows, features, depth, form, multiprocessors=4, **tiles)
    check(form, x, weight, gemm(schedule, x, weight, interpret=INTERPRET)[0])


@pytest.mark.few("3")
@pytest.mark.parametrize("stages", [2, 3])
def test_short_rings_run(stages: int) -> None:
    """Of two slots the second never becomes free before a third block has come: blocks must be asked for one at a time."""
    x, weight = make("swiglu", 128, 48, 384)
    schedule = tiled(128, 48, 384, "swiglu", multiprocessors=4, tile_m=128, tile_n=24)
    schedule = dataclasses.replace(schedule, stages=stages)
    check("swiglu", x, weight, gemm(schedule, x, weight, interpret=INTERPRET)[0])


@pytest.mark.few("store-32")
@pytest.mark.parametrize(("form", "rows"), [("split_k", 128), ("store", 32), ("swiglu", 56), ("split_k", 40)])
def test_the_plan_that_is_chosen_runs(form: Any, rows: int) -> None:
    """Fewer rows than a tile has are no copies of more."""
    x, weight = make(form, rows, 48, 256)
    check(form, x, weight, launch(form, x, weight, multiprocessors=4, interpret=INTERPRET)[0])


@pytest.mark.few("split_k-384", "store-130")
@pytest.mark.parametrize(("form", "live"), [("store", 0), ("store", 130), ("split_k", 5), ("split_k", 384)])
def test_first_rows_are_those_of_all(form: Any, live: int) -> None:
    """Tiles of other rows are left out: the interpreter fills what nobody writes with NaN."""
    x, weight = make(form, 384, 64, 256)
    how: Any = {"multiprocessors": 3, "interpret": INTERPRET}
    out, every = (launch(form, x, weight, live=jnp.int32(rows), **how)[0] for rows in (live, 384))
    check(form, x, weight, every)
    np.testing.assert_array_equal(whole(form, out)[:live], whole(form, every)[:live])
    assert np.isnan(whole(form, out)[-(-live // 128) * 128 :]).all()


@pytest.mark.few("40")
@pytest.mark.parametrize("rows", [9, 40, 72])
def test_best_is_the_first_of_the_largest(rows: int) -> None:
    """Rows that do not fill a tile, equal products in one tile and in several."""
    x, weight = make("argmax", rows, 608, 64)
    weight = weight.at[jnp.array([17, 300, 599])].set(weight[17] * 8)
    out = launch_best(x, weight, multiprocessors=2, interpret=INTERPRET)
    assert out.shape == (rows,)
    products = jnp.einsum("md,fd->mf", x.astype(jnp.float32), weight.astype(jnp.float32)).astype(jnp.bfloat16)
    expected = np.asarray(jnp.argmax(products, axis=-1))
    assert 17 in expected
    np.testing.assert_array_equal(np.asarray(out), expected)
    np.testing.assert_array_equal(np.asarray(dense_best(x, weight, implementation="xla")), expected)


def norm_call(parts: int, rows: int, width: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(width), 3)
    kind = jnp.float32 if parts > 1 else dtype
    return (
        jax.random.normal(keys[0], (parts, rows, width)).astype(kind),
        jax.random.normal(keys[1], (rows, width)).astype(dtype),
        (1 + 0.1 * jax.random.normal(keys[2], (width,))).astype(dtype),
    )


ROUNDED_LAST = {"eps": EPS, "rounds_last": True}


def check_norm(call: tuple[jax.Array, ...], out: tuple[jax.Array, jax.Array]) -> None:
    parts, stream, weight = (np.asarray(x, np.float64) for x in call)
    true = stream + parts.sum(axis=0)
    normed = true / np.sqrt((true**2).mean(-1, keepdims=True) + EPS) * weight
    for found, expected in zip(out, (true, normed), strict=True):
        wide = np.asarray(found, np.float64)
        assert np.abs(wide - expected).max() <= 3 * float(jnp.finfo(found.dtype).eps) * np.abs(expected).max()


@pytest.mark.parametrize("width", [512, 960])
@pytest.mark.parametrize("parts", [1, 4])
def test_add_norm(parts: int, width: int) -> None:
    """Rows of whole vectors of all threads, and rows that are padded to such."""
    call = norm_call(parts, 3, width)
    check_norm(call, launch_add_norm(*call, eps=EPS, interpret=INTERPRET))
    check_norm(call, add_norm(*call, eps=EPS, implementation="xla"))


def test_norms_that_are_rounded_last() -> None:
    """As a model does whose norms have weights in float32: the same bits, where both norm the same stream."""
    call = norm_call(1, 3, 960)
    stream, found = launch_add_norm(*call, **ROUNDED_LAST, interpret=INTERPRET)
    wide = stream.astype(jnp.float32)
    true = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + EPS) * call[2].astype(jnp.float32)
    for one in (found, add_norm(*call, **ROUNDED_LAST, implementation="xla")[1]):
        np.testing.assert_allclose(np.asarray(one, np.float32), true, rtol=2**-8)


def test_add_norm_of_float32() -> None:
    wide = norm_call(4, 3, 512, jnp.float32)
    check_norm(wide, add_norm(*wide, eps=EPS, implementation="xla"))


def check_scores(
    call: tuple[jax.Array, ...], scorer: jax.Array, out: tuple[jax.Array, ...], bias: jax.Array | None = None
) -> None:
    """Scores are products of the norm that is given beside them."""
    check_norm(call, (out[0], out[1]))
    true = np.asarray(out[1], np.float64) @ np.asarray(scorer, np.float64).T
    true = true if bias is None else true + np.asarray(bias, np.float64)
    assert out[2].dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out[2]), true, rtol=0, atol=1e-5 * np.abs(true).max())


@pytest.mark.parametrize(("rows", "experts"), [(3, 9), (17, 8)])
def test_add_norm_scores(rows: int, experts: int) -> None:
    """Few rows in one launch, whose last CTA has fewer scores here, more with a product after the norm."""
    call, scorer = norm_call(2, rows, 512), make("store", 1, experts, 512)[1]
    check_scores(call, scorer, launch_add_norm_scores(*call, scorer, eps=EPS, interpret=INTERPRET))
    check_scores(call, scorer, add_norm_scores(*call, scorer, eps=EPS, implementation="xla"))


@pytest.mark.parametrize("rows", [3, 17])
def test_add_norm_scores_with_a_bias(rows: int) -> None:
    """Rows that are padded, rounded last."""
    call, scorer = norm_call(2, rows, 960), make("store", 1, 8, 960)[1]
    bias = jax.random.normal(jax.random.key(0), (8,)).astype(jnp.bfloat16)
    check_scores(call, scorer, launch_add_norm_scores(*call, scorer, bias, **ROUNDED_LAST, interpret=INTERPRET), bias)
    check_scores(call, scorer, add_norm_scores(*call, scorer, bias, **ROUNDED_LAST, implementation="xla"), bias)


def check_product(
    call: tuple[jax.Array, ...], matrix: jax.Array, out: tuple[jax.Array, ...], *, zero_centered: bool
) -> None:
    """Products with the norm, to the number it is rounded to before."""
    parts, stream, weight = (np.asarray(x, np.float64) for x in call)
    true = stream + parts.sum(axis=0)
    normed = true / np.sqrt((true**2).mean(-1, keepdims=True) + EPS) * (weight + zero_centered)
    for found, expected in zip(out, (true, normed @ np.asarray(matrix, np.float64).T), strict=True):
        assert found.dtype == call[1].dtype
        wide = np.asarray(found, np.float64)
        assert np.abs(wide - expected).max() <= 3 * float(jnp.finfo(found.dtype).eps) * np.abs(expected).max()


@pytest.mark.few("200-512-3-*")
@pytest.mark.parametrize("zero_centered", [False, True], ids=["plain", "zero_centered"])
@pytest.mark.parametrize(
    ("features", "depth", "ctas"), [(200, 512, 3), (200, 512, 2), (512, 1024, 4), (1000, 512, 3), (64, 512, 1)]
)
def test_add_norm_dense(features: int, depth: int, ctas: int, zero_centered: bool) -> None:
    """Tiles of one matrix instruction's rows and of more, last ones that begin inside the one before, several of a CTA."""
    call, matrix = norm_call(9, 1, depth), make("store", 1, features, depth)[1]
    options: dict[str, Any] = {"eps": EPS, "zero_centered": zero_centered, "rounds_last": zero_centered}
    found = launch_add_norm_dense(*call, matrix, **options, multiprocessors=ctas, interpret=INTERPRET)
    check_product(call, matrix, found, zero_centered=zero_centered)
    check_product(
        call, matrix, add_norm_dense(*call, matrix, **options, implementation="xla"), zero_centered=zero_centered
    )


def test_add_norm_dense_deals_all_rows_out() -> None:
    """Of every width that it takes, and says why of the others."""
    for features in range(8, 40_000, 8):
        with contextlib.suppress(NotImplementedError):
            plan = row_plan(features, 2048, 132)
            assert plan.rows % 8 == 0
            assert TILE <= plan.rows <= 2 * TILE
            assert (plan.tiles - 1) * plan.rows < features <= plan.tiles * plan.rows
            assert plan.offsets == (0, plan.rows - TILE)
            assert plan.stages >= 8
    assert row_plan(12_352, 2048, 132).rows == 96
    assert "one row" in str(add_norm_dense_refusal_on_h200(rows=2))
    assert "too few" in str(add_norm_dense_refusal_on_h200(features=5120))
    assert add_norm_dense_refusal_on_h200() is None


def add_norm_dense_refusal_on_h200(rows: int = 1, features: int = 9216) -> str | None:
    with h200():
        return add_norm_dense_refusal(rows, jnp.bfloat16, features=features, depth=2048)


def test_add_norm_dense_lowers_for_an_h200() -> None:
    for features in (9216, 12_352):
        shapes = jax.eval_shape(lambda: norm_call(9, 1, 2048))
        matrix = jax.ShapeDtypeStruct((features, 2048), jnp.bfloat16)
        call = functools.partial(add_norm_dense, eps=EPS, zero_centered=True, implementation="mosaic_gpu")
        assert custom_calls(call, *shapes, matrix) == ["mosaic_gpu_v2"]


@pytest.mark.few("512-sizes1")
@pytest.mark.parametrize(("rows", "sizes"), [(128, QWEN3_4B), (512, QWEN3_8B)])
def test_lowers_for_an_h200(rows: int, sizes: dict[str, tuple[int, int]]) -> None:
    """Every form at full size, through the public functions."""
    calls = {form: jax.eval_shape(lambda form=form: make(form, rows, *sizes[form])) for form in sizes}

    def run(calls: dict[str, Any]) -> Any:
        (x, qkv), (_, gates), (wide, down), (_, head) = (calls[form] for form in sizes)
        parts = dense_parts(wide, down)
        stream, normed = add_norm(parts, x, qkv[0], eps=EPS)
        return dense(normed, qkv), dense_gated(normed, gates), dense_best(stream, head)

    with h200():
        text = jax.jit(run).trace(calls).lower(lowering_platforms=("cuda",)).as_text()
    # A product of 512 rows with nothing after it is left to XLA.
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == (5 if rows <= 256 else 4)


@pytest.mark.parametrize("rows", [64, 128, 256, 512])
@pytest.mark.parametrize("sizes", [QWEN3_4B, QWEN3_8B])
def test_schedule(rows: int, sizes: dict[str, tuple[int, int]]) -> None:
    """Every plan covers its product and keeps the multiprocessors busy."""
    for form, (features, depth) in sizes.items():
        made = plan(rows, features, depth, form, multiprocessors=132)
        assert made.tile_n * made.n_tiles >= features
        assert made.split_k * made.k_tiles * 64 == depth
        assert made.m_tiles * made.tile_m == rows
        results = 2 * made.tile_m * made.tile_n * (made.staged > 0)
        assert 128 * made.stages * (made.tile_m + made.tile_w) + results <= SHARED_MEMORY
        turns = -(-made.tiles // made.ctas)
        assert made.tiles / (turns * 132) > 0.8


@pytest.mark.parametrize("sizes", [QWEN3_4B, QWEN3_8B])
def test_results_leave_through_shared_memory(sizes: dict[str, tuple[int, int]]) -> None:
    """Those of 128 rows; not where too few blocks would be on their way, and none of what is compared in registers."""
    for form, size in sizes.items():
        made = plan(128, *size, form, multiprocessors=132)
        assert (made.staged > 0) == (form != "argmax")
        assert made.wg_n % (made.staged or 1) == 0
    assert plan(256, *QWEN3_4B["swiglu"], "swiglu", multiprocessors=132).staged == 0


def test_refusals_name_their_reason() -> None:
    x, weight = make("store", 128, 64, 64)
    for arguments, reason in (
        ((x[:24], weight), "takes 32 to 512 rows, from 64 on in steps of 64 and before of 8, not 24"),
        ((x, weight[:56]), "a multiple of 16 features, not 56"),
        ((x.astype(jnp.float32), weight), "in x's dtype, not bfloat16"), ((x[:, :48], weight[:, :48]), "blocks of 64, not 48"),
        ((x.astype(jnp.float16), weight.astype(jnp.float16)), "takes bfloat16, not float16"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=reason):
            launch("store", *arguments, multiprocessors=132)
    with pytest.raises(NotImplementedError, match="7 rows are padded to 8"):
        launch_best(x[:7], weight, multiprocessors=132)
    with pytest.raises(
        NotImplementedError, match="rows of a multiple of 512, or of 64 a tenth below one, not bfloat16 of 896"
    ):
        launch_add_norm(*norm_call(1, 2, 896), eps=EPS)
    # XLA's result would be float32, and a result's dtype must not hang on who computes it.
    parts, stream, norm = norm_call(1, 2, 512)
    with pytest.raises(NotImplementedError, match="a norm's weight in the stream's dtype, bfloat16, not float32"):
        launch_add_norm(parts, stream, norm.astype(jnp.float32), eps=EPS)


def test_shapes_that_do_not_fit_are_named() -> None:
    x, weight = make("store", 4, 64, 64)
    with pytest.raises(ValueError, match="as many rows each, not 63 together"):
        dense_gated(x, weight[:63])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    assert "needs a Hopper GPU" in str(dense_refusal(128, jnp.bfloat16, 2560))
    with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
        dense(*make("store", 128, 64, 64), implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [32, 40, 64, 128, 192, 256])
@pytest.mark.parametrize("form", FORMS)
def test_full_size_agrees_with_float64(form: str, rows: int) -> None:
    x, weight = make(form, rows, *QWEN3_4B[form])
    call = jax.jit(lambda x, weight: FORMS[form](x, weight, implementation="mosaic_gpu"))
    out = call(x, weight)
    check(form, x, weight, out)
    assert np.asarray(out).tobytes() == np.asarray(call(x, weight)).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["swiglu", "split_k"])
def test_full_size_of_many_rows_agrees_with_float64(form: str) -> None:
    x, weight = make(form, 512, *QWEN3_4B[form])
    check(form, x, weight, jax.jit(lambda x, weight: FORMS[form](x, weight, implementation="mosaic_gpu"))(x, weight))


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "features", "depth"), [("split_k", 4096, 20480), ("store", 10240, 4096)])
def test_full_size_of_the_first_rows(form: str, features: int, depth: int) -> None:
    x, weight = make(form, 512, features, depth)
    call = jax.jit(lambda x, weight, live: FORMS[form](x, weight, live=live, implementation="mosaic_gpu"))
    every = call(x, weight, jnp.int32(512))
    check(form, x, weight, every)
    for live in (32, 129, 400):
        found = call(x, weight, jnp.int32(live))[..., :live, :]  # the others are not written
        np.testing.assert_array_equal(whole(form, found), whole(form, every)[:live])


@pytest.mark.gpu
def test_a_row_has_the_bits_it_has_among_others() -> None:
    """What a sequence gets does not depend on its neighbours' values."""
    x, weight = make("store", 256, *QWEN3_4B["store"])
    call = jax.jit(lambda x, weight: dense(x, weight, implementation="mosaic_gpu"))
    other = x.at[64:].set(0)
    np.testing.assert_array_equal(
        np.asarray(call(x, weight)[:64], np.float32), np.asarray(call(other, weight)[:64], np.float32)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [15, 32, 120, 512])
def test_full_size_best(rows: int) -> None:
    x, weight = make("argmax", rows, *QWEN3_4B["argmax"])
    out, theirs = (np.asarray(dense_best(x, weight, implementation=name)) for name in ("mosaic_gpu", "xla"))
    products = np.asarray(jnp.einsum("md,fd->mf", x, weight, preferred_element_type=jnp.float32))
    chosen, largest = products[np.arange(rows), out], products.max(axis=1)
    assert (chosen >= largest - 2**-7 * np.abs(largest)).all()  # sums of another order may round to another number
    assert (out == theirs).mean() > 0.97


@pytest.mark.gpu
@pytest.mark.parametrize("features", [9216, 12_352, 16_480])
def test_full_size_add_norm_dense(features: int) -> None:
    call, matrix = norm_call(9, 1, 2048), make("store", 1, features, 2048)[1]
    product = jax.jit(functools.partial(add_norm_dense, eps=EPS, zero_centered=True, implementation="mosaic_gpu"))
    found = product(*call, matrix)
    check_product(call, matrix, found, zero_centered=True)
    jax.tree.map(np.testing.assert_array_equal, found, product(*call, matrix))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2560, 2880, 4096])
def test_full_size_add_norm(width: int) -> None:
    for parts in (1, 2, 4):
        call = norm_call(parts, 512, width)
        check_norm(call, add_norm(*call, eps=EPS, implementation="mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "experts", "width"),
    [(1, 128, 2048), (16, 128, 2048), (33, 128, 2048), (1, 257, 2048), (16, 513, 2048), (8, 32, 2880)],
)
def test_full_size_scores(rows: int, experts: int, width: int) -> None:
    call, scorer = norm_call(8, rows, width), make("store", 1, experts, width)[1]
    found = add_norm_scores(*call, scorer, eps=EPS, implementation="mosaic_gpu")
    check_scores(call, scorer, found)
    again = add_norm_scores(*call, scorer, eps=EPS, implementation="mosaic_gpu")
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(found, again, strict=True))
