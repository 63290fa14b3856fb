"""A layer's weights in eight bits: both chains against what they give for the same weights widened, in Pallas's interpreter, and
for real (`-m gpu`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import attention_chain, attention_chain_exchange, chain_exchange, layer_chain
from dflash_kernels.core.device import SHARED_MEMORY
from dflash_kernels.core.layouts import interleave_columns
from dflash_kernels.fused.layer.mosaic_gpu import launch_products
from dflash_kernels.fused.layer.plan import plan
from dflash_kernels.mosaic_gpu.convert import digits_of

from ..devices import h200
from . import attention_chain_cases as whole
from . import test_attention_chain as attention
from . import test_layer_chain as products

KINDS = [jnp.int8, jnp.float8_e4m3fn]
WEIGHTS = ("o", "gate_up", "down", "following")
SMALL = {"hidden": 256, "heads_width": 512, "inner": 768, "next_width": 384}
SMALL_WHOLE = {"hidden": 256, "inner": 512, "heads": 2, "kv_heads": 1, "next": 384}


def narrowed(call: dict[str, Any], kind: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call with weights in eight bits, and the same with these widened: scales are powers of two, so nothing is rounded."""
    small, wide, scales = dict(call), dict(call), list[Any]()
    for name in WEIGHTS:
        if call.get(name) is None:
            scales.append(None)
            continue
        matrix = call[name].astype(jnp.float32)
        most = 128 if kind == jnp.int8 else 256
        scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.abs(matrix).max(axis=1)))) / most
        values = matrix / scale[:, None]
        values = jnp.clip(jnp.round(values), -128, 127).astype(kind) if kind == jnp.int8 else values.astype(kind)
        small[name], wide[name] = (
            interleave_columns(values),
            (values.astype(jnp.float32) * scale[:, None]).astype(jnp.bfloat16),
        )
        scales.append(scale)
    return small | {"scales": tuple(scales)}, wide


def with_outliers(call: dict[str, Any]) -> dict[str, Any]:
    """A call in which some of a product's inputs are a thousand times what the others are."""
    hidden, inner = call["down"].shape
    few, inner_few = (jnp.where(jnp.arange(size) % 131 == 7, 1000.0, 1.0) for size in (hidden, inner))
    norms = {name: (call[name] * few).astype(call[name].dtype) for name in ("post_norm", "next_norm")}
    # Whoever multiplies a large number has small weights.
    weights = {name: (call[name] / few).astype(call[name].dtype) for name in ("gate_up", "following")}
    up = jnp.concatenate([jnp.ones(inner), inner_few])
    weights["gate_up"] = (weights["gate_up"] * up[:, None]).astype(call["gate_up"].dtype)
    weights["down"] = (call["down"] / inner_few).astype(call["down"].dtype)
    return call | norms | weights


@pytest.mark.few("float8*")
@pytest.mark.parametrize(
    ("kind", "rows", "ctas", "zero_centered"), [(jnp.int8, 3, 9, False), (jnp.float8_e4m3fn, 11, 6, True)]
)
def test_products(kind: Any, rows: int, ctas: int, zero_centered: bool) -> None:
    small, wide = narrowed(products.make(rows, SMALL, zero_centered=zero_centered), kind)
    products.check(wide, products.interpreted(small, ctas, zero_centered), zero_centered)


@pytest.mark.parametrize(("kind", "lost", "binades"), [(jnp.int8, 1 / 32640, 7), (jnp.float8_e4m3fn, 2**-21, 13)])
def test_what_digits_lose(kind: Any, lost: float, binades: int) -> None:
    """At most a share of a row's largest number, and nothing of those near it."""
    rng = np.random.default_rng(0)
    x = rng.choice([-1.0, 1.0], (300, 256)) * np.exp2(rng.uniform(-40, 0, (300, 256)) + rng.integers(-60, 60, (300, 1)))
    x = np.asarray(jnp.asarray(np.concatenate([x, np.zeros((1, 256))])).astype(jnp.bfloat16), np.float32)
    digits, unit = digits_of(jnp.asarray(x), kind)
    first, second = np.split(np.asarray(digits, np.float64), 2)
    found = (first * 256 + second if kind == jnp.int8 else first + second / 16) * np.asarray(unit, np.float64)[:, None]
    largest = np.abs(x).max(axis=1, keepdims=True)
    assert (np.abs(found - x) <= lost * largest).all()
    near = (np.abs(x) >= largest * 2.0**-binades) & (np.abs(x) < largest if kind == jnp.int8 else True)
    assert (found == x)[near].all()


@pytest.mark.few  # its products are tested alone, its attention over pages in 16 bits
def test_with_attention() -> None:
    """Of one kind: how it multiplies is the same code in both chains."""
    small, wide = narrowed(whole.make(3, [70], [3], SMALL_WHOLE), jnp.int8)
    whole.check(wide, attention.interpreted(small, ctas=4))


@pytest.mark.few("float8_e4m3fn")
@pytest.mark.parametrize("kind", KINDS)
def test_the_definition(kind: Any) -> None:
    small, wide = narrowed(products.make(5, SMALL), kind)
    given, expected = (
        layer_chain(**call, exchange=None, eps=products.EPS, implementation="xla") for call in (small, wide)
    )
    for ours, theirs in zip(given, expected, strict=True):
        assert np.array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


@pytest.mark.parametrize("sizes", [products.QWEN3_4B, products.QWEN3_8B])
def test_schedule(sizes: dict[str, int]) -> None:
    """Every weight is in one slot, activations and weights of a slot are the same columns, and both rings fit."""
    found = plan(live=16, ctas=132, eps=1e-6, itemsize=1, **sizes)  # type: ignore[arg-type]
    for product in found.products:
        assert product.k_tiles * 256 == product.matrices * product.depth
        assert product.splits * product.tiles <= 132
    assert found.x_blocks == 4
    assert found.kept_bytes + found.stages * found.stage_rows * 128 <= SHARED_MEMORY


@pytest.mark.few("int8*")
@pytest.mark.parametrize(("kind", "rows"), [(jnp.int8, 1), (jnp.float8_e4m3fn, 16)])
def test_lowers_for_an_h200(kind: Any, rows: int) -> None:
    call = jax.eval_shape(lambda: narrowed(products.make(rows, products.QWEN3_4B), kind)[0])

    def run(call: dict[str, Any]) -> Any:
        (x, layer), exchange = products.arrays(call), jax.new_ref(chain_exchange(call["stream"], call["down"]))
        return launch_products(x, layer, layer.o, exchange, eps=products.EPS, ctas=132)

    with h200():
        text = jax.jit(run).trace(call).lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu_v2" in text


def test_refusals_name_their_reason() -> None:
    with pytest.raises(NotImplementedError, match="widths that 256 divides, not inner 640"):
        plan(live=1, ctas=132, eps=1e-6, itemsize=1, **(SMALL | {"inner": 640}))  # type: ignore[arg-type]
    small, _ = narrowed(products.make(1, SMALL), jnp.int8)
    with pytest.raises(
        NotImplementedError, match="not bfloat16, bfloat16, bfloat16, int8, int8, int8, int8, or weights all in int8"
    ):
        products.interpreted(small | {"scales": None}, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "outliers"), [(1, False), (16, False), (16, True)])
def test_products_at_full_size(kind: Any, rows: int, outliers: bool) -> None:
    call = products.make(rows, products.QWEN3_4B)
    small, wide = narrowed(with_outliers(call) if outliers else call, kind)

    @jax.jit
    def run(call: dict[str, Any]) -> Any:
        exchange = jax.new_ref(chain_exchange(call["stream"], call["down"]))
        return layer_chain(**call, exchange=exchange, eps=products.EPS, implementation="mosaic_gpu")

    out, again = run(small), run(small)
    products.check(wide, out)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(out, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_products_between_gated_delta_nets(kind: Any) -> None:
    """Norms zero-centered, and gates' rows in two numbers behind a projection of Qwen3.5-9B."""
    sizes = {"hidden": 4096, "heads_width": 4096, "inner": 12288, "next_width": 12352 + 64}
    small, wide = narrowed(products.make(16, sizes, zero_centered=True), kind)
    out, again = (products.on_gpu(small, zero_centered=True) for _ in range(2))
    products.check(wide, out, zero_centered=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(out, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "length"), [(1, 1000), (16, 1040), (16, 16)])
def test_with_attention_at_full_size(kind: Any, tokens: int, length: int) -> None:
    call = whole.make(tokens, [length], [tokens], whole.QWEN3_4B, width=20)
    small, wide = narrowed(call, kind)

    @jax.jit
    def run(call: dict[str, Any]) -> Any:
        heads = {"heads": 32, "kv_heads": 8}
        exchange = attention_chain_exchange(call["stream"], call["down"], 1, tokens, **heads)
        refs = tuple(map(jax.new_ref, exchange))
        out = attention_chain(**call, exchange=refs, eps=whole.EPS, implementation="mosaic_gpu")
        return out.stream[:, :tokens], out.projected, out.k_pages, out.v_pages

    stream, *others = run(small)
    stream = jnp.pad(stream, ((0, 0), (0, call["stream"].shape[1] - tokens)))
    whole.check(wide, (stream, *others))
