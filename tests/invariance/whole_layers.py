"""Operations that hold several: a layer's products in one launch, with its attention, and attention from the projection on; and
gated delta nets over states of slots."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from dflash_kernels import (
    DeltaShape,
    DeltaState,
    DeltaWeights,
    attention_chain,
    attention_chain_exchange,
    chain_exchange,
    chain_stream,
    delta_fold,
    delta_step,
    delta_verify,
    layer_chain,
    qkv_attention,
)
from dflash_kernels.attention.paged.launch import Tuning
from dflash_kernels.fused.arguments import Heads
from dflash_kernels.fused.layer.arguments import Layer
from dflash_kernels.fused.layer.mosaic_gpu import launch_layer, launch_products
from dflash_kernels.fused.qkv_attention.mosaic_gpu import launch as launch_qkv_attention
from dflash_kernels.recurrent.delta_rule.mosaic_gpu import launch_fold, launch_step, launch_verify
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_jax.quantization.weights import quantize

from .over_pages import EPS, FP8, REAL_MIDDLE, angles, lengths, pages, pool, read, slots
from .people import Call, Form, Operation, matrix, norm_weight, numbers, of_people

INTERPRET = plgpu.InterpretGPUParams()
HEAD_DIM = 128


def _layer(hidden: int, inner: int, heads_width: int, following: int, kind: Any) -> dict[str, Any]:
    """Weights of a layer from its output projection on; with `kind` in eight bits."""
    shapes = {
        "o": (hidden, heads_width),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "following": (following, hidden),
    }
    weights: dict[str, Any] = {name: matrix(*shape, salt=salt) for salt, (name, shape) in enumerate(shapes.items())}
    norms = {"post_norm": norm_weight(hidden), "next_norm": norm_weight(hidden, salt=1)}
    if kind is None:
        return weights | norms
    narrow = {name: quantize(weight, kind) for name, weight in weights.items()}
    scales = tuple(each.scales for each in narrow.values())
    return {name: each.values for name, each in narrow.items()} | norms | {"scales": scales}


def products_of_a_layer(real: bool, *, kind: Any = None) -> Form:
    hidden, inner, heads_width, following = (2560, 9728, 4096, 6144) if real else (128 if kind is None else 256,) * 4
    weights = _layer(hidden, inner, heads_width, following, kind)

    def draw(call: Call) -> dict[str, jax.Array]:
        return {"x": numbers(call, heads_width), "stream": numbers(call, hidden, salt=1)}

    def run(args: dict[str, jax.Array]) -> Any:
        b, t, _ = args["x"].shape
        x, stream = args["x"].reshape(b * t, -1), chain_stream(args["stream"].reshape(b * t, -1))
        if real:
            exchange = jax.new_ref(chain_exchange(stream, weights["down"]))
            out, projected = layer_chain(x, stream, **weights, exchange=exchange, eps=EPS, implementation="mosaic_gpu")
        else:
            layer = Layer(stream=stream, **weights)
            out, projected = launch_products(x, layer, None, None, eps=EPS, ctas=4, interpret=INTERPRET)
        assert projected is not None
        return out.T[: b * t].reshape(b, t, -1), projected.reshape(b, t, -1)

    return Form(draw, run)


def whole_layer(real: bool, *, stored: Any = jnp.bfloat16, kind: Any = None) -> Form:
    """One sequence's, with its attention. Keys before a block are those that the launch itself has written."""
    hidden, inner, heads, kv_heads, following, middle = (
        (2560, 9728, 32, 8, 6144, REAL_MIDDLE) if real else (128 if kind is None else 256, 256, 2, 1, 256, 126)
    )
    weights, table = _layer(hidden, inner, heads * HEAD_DIM, following, kind), pages(middle)
    scales: dict[str, Any] = {}
    if stored == FP8:
        scales = {"k_scale": jnp.full(kv_heads, 0.5), "v_scale": jnp.full(kv_heads, 2.0)}
    norms = {"q_norm": norm_weight(HEAD_DIM), "k_norm": norm_weight(HEAD_DIM, salt=1)}

    def draw(call: Call) -> dict[str, jax.Array]:
        qkv = numbers(call, (heads + 2 * kv_heads) * HEAD_DIM)
        given = {"qkv": qkv, "stream": numbers(call, hidden, salt=1), "places": slots(call, table)}
        return given | {"page_table": jnp.asarray(table[call.who])} | lengths(call) | angles(call, HEAD_DIM // 2)

    def run(args: dict[str, jax.Array], pools: tuple[jax.Array, ...]) -> tuple[Any, tuple[jax.Array, ...]]:
        (b, t, _), places = args["qkv"].shape, args["places"]
        names = ("page_table", "seq_lens", "q_lens", "cos", "sin")
        given = (*pools, args["qkv"].reshape(b * t, -1), *(args[name] for name in names))
        stream = chain_stream(args["stream"].reshape(b * t, -1))
        if real:
            start = attention_chain_exchange(stream, weights["down"], b, t, heads=heads, kv_heads=kv_heads)
            more: Any = {"exchange": tuple(map(jax.new_ref, start)), "implementation": "mosaic_gpu"}
            op: Any = attention_chain
            out, projected, *after = op(*given, stream, **weights, **norms, **scales, eps=EPS, **more)
        else:
            how: Any = {"causal": True, "scale": HEAD_DIM**-0.5, "eps": EPS, "ctas": 4, "interpret": INTERPRET}
            both = Heads(*given, **norms, **scales), Layer(stream=stream, **weights)
            out, projected, *after = launch_layer(*both, None, **how)
        assert projected is not None
        rows = (
            out.T[: b * t].reshape(b, t, -1),
            projected.reshape(b, t, -1),
            *(read(each, places, (b, t)) for each in after),
        )
        return rows, tuple(after)

    first = tuple(pool(table.size, kv_heads, HEAD_DIM, stored, salt=salt) for salt in range(2))
    return Form(draw, run, middle=middle, kept=first)


def attention_from_projection(real: bool, *, splits: int = 2) -> Form:
    """Norm, rotation, write and attention as one launch. Keys before a block are those that the launch itself has written."""
    heads, kv_heads, middle = (32, 8, REAL_MIDDLE) if real else (4, 1, 126)
    table = pages(middle)
    norms = {"q_norm": norm_weight(HEAD_DIM), "k_norm": norm_weight(HEAD_DIM, salt=1)}

    def draw(call: Call) -> dict[str, jax.Array]:
        given = {"qkv": numbers(call, (heads + 2 * kv_heads) * HEAD_DIM), "places": slots(call, table)}
        return given | {"page_table": jnp.asarray(table[call.who])} | lengths(call) | angles(call, HEAD_DIM // 2)

    def run(args: dict[str, jax.Array], pools: tuple[jax.Array, ...]) -> tuple[Any, tuple[jax.Array, ...]]:
        (b, t, _), places = args["qkv"].shape, args["places"]
        names = ("page_table", "seq_lens", "q_lens", "cos", "sin")
        given = (*pools, args["qkv"].reshape(b * t, -1), *(args[name] for name in names))
        if real:
            out, *after = qkv_attention(*given, **norms, eps=EPS, implementation="mosaic_gpu")
        else:
            tuning = Tuning(splits=splits, stages=2, together=splits == 2)
            how: Any = {"causal": True, "scale": HEAD_DIM**-0.5, "eps": EPS, "tuning": tuning, "interpret": INTERPRET}
            out, *after = launch_qkv_attention(Heads(*given, **norms), **how)
        return (out.reshape(b, t, -1), *(read(each, places, (b, t)) for each in after)), tuple(after)

    first = tuple(pool(table.size, kv_heads, HEAD_DIM, salt=salt) for salt in range(2))
    return Form(draw, run, middle=middle, kept=first)


def delta_net(real: bool) -> tuple[DeltaShape, DeltaWeights, Callable[[Call], DeltaState]]:
    """Sizes, weights, and states of sequences before the token that blocks begin with."""
    shape = DeltaShape(16, 32, 128, 128) if real else DeltaShape(1, 2, 128, 128)
    sizes = (shape.channels, 4), (shape.value_heads,)
    conv, bias = (jax.random.normal(jax.random.key(salt), size) for salt, size in enumerate(sizes))
    decay = jnp.log(jax.random.uniform(jax.random.key(2), (shape.value_heads,), minval=0.01, maxval=16))

    def states(call: Call) -> DeltaState:
        b, width = len(call.who), shape.value_heads * shape.key_dim * shape.value_dim
        s = of_people(call, width, salt=5).reshape(b, shape.value_heads, shape.key_dim, shape.value_dim)
        return DeltaState(s, of_people(call, 3 * shape.channels, jnp.bfloat16, salt=6).reshape(b, 3, shape.channels))

    return shape, DeltaWeights(conv.astype(jnp.bfloat16) / 2, decay, bias, norm_weight(128)), states


def delta_verification(real: bool) -> Form:
    shape, weights, states = delta_net(real)
    op: Any = (
        partial(delta_verify, implementation="mosaic_gpu") if real else partial(launch_verify, interpret=INTERPRET)
    )

    def draw(call: Call) -> Any:
        return numbers(call, shape.columns), states(call)

    def run(args: Any) -> Any:
        projected, state = args
        out, factors = op(projected, weights, state, shape, eps=EPS)
        return out, *factors

    return Form(draw, run)


def delta_one_token(real: bool) -> Form:
    shape, weights, states = delta_net(real)
    op: Any = partial(delta_step, implementation="mosaic_gpu") if real else partial(launch_step, interpret=INTERPRET)

    def draw(call: Call) -> Any:
        return numbers(call, shape.columns), states(call), jnp.asarray(call.first >= 0)

    def run(args: Any) -> Any:
        out, state = op(args[0], weights, *args[1:], shape, eps=EPS)
        return out, *(each[:, None] for each in state)

    return Form(draw, run)


def delta_folding(real: bool) -> Form:
    """The state after each number of a block's tokens, from factors that have the same bits: see the verification."""
    shape, weights, states = delta_net(real)
    op: Any = partial(delta_fold, implementation="mosaic_gpu") if real else partial(launch_fold, interpret=INTERPRET)
    made: Any = partial(delta_verify, implementation="mosaic_gpu" if real else "reference")

    def draw(call: Call) -> Any:
        state, rows = states(call), numbers(call, shape.columns)
        return state, made(rows, weights, state, shape, eps=EPS)[1]

    def run(args: Any) -> Any:
        state, factors = args
        slots_, tokens = factors.cum.shape[:2]
        after = [op(state, factors, jnp.full(slots_, count + 1)) for count in range(tokens)]
        return jax.tree.map(lambda *each: jnp.stack(each, axis=1), *after)

    return Form(draw, run)


WHOLE_LAYERS = {
    "layer's products": Operation(products_of_a_layer, [(1, 4), (3, 4)], "TB", most=16),
    "layer's products, int8": Operation(partial(products_of_a_layer, kind="int8"), [(1, 4), (3, 4)], "TB", most=16),
    "layer's products, fp8": Operation(partial(products_of_a_layer, kind="fp8"), [(1, 4), (3, 4)], "TB", most=16),
    "layer with attention": Operation(whole_layer, [(1, 4)], most=16, real=[(1, 16), (1, 5)]),
    "layer with attention over float8 pages": Operation(
        partial(whole_layer, stored=FP8), [(1, 4)], most=16, real=[(1, 16), (1, 5)]
    ),
    "layer with attention over float8 pages, int8": Operation(
        partial(whole_layer, stored=FP8, kind="int8"), [], most=16, real=[(1, 16)]
    ),
    "layer with attention over float8 pages, fp8": Operation(
        partial(whole_layer, stored=FP8, kind="fp8"), [], most=16, real=[(1, 16)]
    ),
    "layer with attention, int8": Operation(partial(whole_layer, kind="int8"), [(1, 4)], most=16, real=[(1, 16)]),
    "attention from the projection": Operation(attention_from_projection, real=[(2, 16), (8, 16), (17, 5), (33, 16)]),
    "attention from the projection, one split": Operation(
        partial(attention_from_projection, splits=1), real=[(33, 16)]
    ),
    "gated delta net, verification": Operation(delta_verification, [(3, 4), (1, 4)], "B", moves=False),
    "gated delta net, one token": Operation(delta_one_token, [(3, 1), (1, 1)], "B", moves=False, real=[(1, 1), (8, 1), (33, 1)]),
    "gated delta net, fold": Operation(delta_folding, [(3, 3), (1, 3)], "B", moves=False, real=[(1, 16), (8, 16), (33, 16)]),
}  # fmt: skip
