"""A layer's weights in eight bits: both chains against what they give for the same weights widened, in Pallas's interpreter, and
for real (`-m gpu`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import attention_chain, attention_chain_exchange, chain_exchange, layer_chain
from dflash_kernels.layer_chain.mosaic_gpu_plan import SHARED_MEMORY, plan
from dflash_kernels.quantised_linear.columns import in_pairs

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
        small[name], wide[name] = in_pairs(values), (values.astype(jnp.float32) * scale[:, None]).astype(jnp.bfloat16)
        scales.append(scale)
    return small | {"scales": tuple(scales)}, wide


@pytest.mark.parametrize(("kind", "rows", "ctas"), [(jnp.int8, 3, 9), (jnp.float8_e4m3fn, 11, 6)])
def test_products(kind: Any, rows: int, ctas: int) -> None:
    small, wide = narrowed(products.make(rows, SMALL), kind)
    products.check(wide, products.interpreted(small, ctas))


def test_with_attention() -> None:
    """Of one kind: how weights widen is the same code in both chains."""
    small, wide = narrowed(whole.make(3, [70], [3], SMALL_WHOLE), jnp.int8)
    whole.check(wide, attention.interpreted(small, ctas=4))


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
    found = plan(live=16, ctas=132, eps=1e-6, itemsize=1, **sizes)
    for product in found.products:
        assert product.steps * 256 == product.parts * product.depth
        assert product.splits * product.tiles <= 132
    assert found.products[1].pieces == [(0, 0), (1, 0), (2, 64)]  # gate, up, and what 64 rows of each leave
    assert found.x_blocks == 4
    assert found.kept_bytes + found.slots * found.slot_rows * 128 <= SHARED_MEMORY


def test_refusals_name_their_reason() -> None:
    with pytest.raises(NotImplementedError, match="widths that 256 divides, not inner 640"):
        plan(live=1, ctas=132, eps=1e-6, itemsize=1, **(SMALL | {"inner": 640}))
    small, _ = narrowed(products.make(1, SMALL), jnp.int8)
    with pytest.raises(
        NotImplementedError, match="not bfloat16, bfloat16, bfloat16, int8, int8, int8, int8, or weights all in int8"
    ):
        products.interpreted(small | {"scales": None}, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16])
def test_products_at_full_size(kind: Any, rows: int) -> None:
    small, wide = narrowed(products.make(rows, products.QWEN3_4B), kind)

    @jax.jit
    def run(call: dict[str, Any]) -> Any:
        exchange = jax.new_ref(chain_exchange(call["stream"], call["down"]))
        return layer_chain(**call, exchange=exchange, eps=products.EPS, implementation="mosaic_gpu")

    out, again = run(small), run(small)
    products.check(wide, out)
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
