"""Operations that know rows alone: norms, products, heads, experts, and what chooses tokens."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from dflash_kernels import (
    Float8Rows,
    add_norm,
    add_norm_scores,
    chain_stream,
    dense,
    dense_best,
    dense_gated,
    dense_onto,
    dense_parts,
    dense_scores,
    embed_norm,
    few_linear,
    filtered_choice,
    float8_candidates,
    float8_dense,
    float8_gated,
    float8_onto,
    float8_rows,
    in_column_blocks,
    mixture,
    mxfp4_mixture,
    mxfp4_tiles,
    quantize_tensor,
    quantized_linear,
    reduce_add_norm,
    reduce_ranks,
    routed_experts,
    stream_norm,
)
from dflash_kernels.fused.experts.mosaic_gpu import launch as launch_experts
from dflash_kernels.fused.experts.mosaic_gpu_mxfp4 import launch as launch_mxfp4
from dflash_kernels.fused.experts.plan_mxfp4 import Gate
from dflash_kernels.matmul.dense import mosaic_gpu as of_dense
from dflash_kernels.matmul.few.mosaic_gpu import launch as launch_few
from dflash_kernels.matmul.float8 import mosaic_gpu as of_float8
from dflash_kernels.matmul.grouped.mosaic_gpu import launch as launch_grouped
from dflash_kernels.matmul.weight_only.mosaic_gpu import launch as launch_weight_only
from dflash_kernels.norm import mosaic_gpu as of_norm
from dflash_kernels.ranks.mosaic_gpu import launch_reduce_ranks
from dflash_kernels.sampling.mosaic_gpu import launch as launch_choice
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu

from dflash_jax.config import RopeConfig
from dflash_jax.decoding.adjustments import Adjustments, adjusted_best, adjusted_logits
from dflash_jax.decoding.grammar_masks import masked
from dflash_jax.decoding.sampling import Mode, RequestArrays, sample
from dflash_jax.execution.plan import EXACT_PRODUCTS
from dflash_jax.models import moe
from dflash_jax.models.layers import rms_norm, rotary_tables, rotate
from dflash_jax.quantization.weights import product, quantize

from .people import Call, Form, Operation, matrix, norm_weight, numbers, of_people

INTERPRET = plgpu.InterpretGPUParams()
FEW: Any = {"multiprocessors": 4, "interpret": INTERPRET}
EPS = 1e-6
KERNEL: Any = {"implementation": "mosaic_gpu"}


def rowwise(draw: Callable[[Call], Any], op: Callable[..., Any], **options: Any) -> Form:
    """`op` of rows `[M, ...]`, those of a call one after the other."""

    def run(given: dict[str, jax.Array]) -> Any:
        b, t = next(iter(given.values())).shape[:2]
        flat = {name: array.reshape(b * t, *array.shape[2:]) for name, array in given.items()}
        return jax.tree.map(lambda found: found.reshape(b, t, *found.shape[1:]), op(**flat))

    return Form(draw, run, options)


def in_rows(*names: str, width: int, dtype: Any = jnp.bfloat16) -> Callable[[Call], dict[str, jax.Array]]:
    """Rows of numbers by name."""
    return lambda call: {name: numbers(call, width, dtype, salt=salt) for salt, name in enumerate(names)}


def norm_of_embedding(real: bool, *, zero_centered: bool = False) -> Form:
    width, vocab = (2560, 5000) if real else (512, 40)
    table, weight = matrix(vocab, width), norm_weight(width)
    op = embed_norm if real else partial(of_norm.launch_embed_norm, interpret=INTERPRET)

    def draw(call: Call) -> dict[str, jax.Array]:
        return {"ids": ((numbers(call, 1, jnp.float32)[..., 0] + 1) * vocab / 2).astype(jnp.int32)}

    return rowwise(draw, lambda ids: op(table, ids, weight, eps=EPS, zero_centered=zero_centered))


def norm_of_stream(real: bool) -> Form:
    width = 2560 if real else 512
    weight = norm_weight(width)
    op = stream_norm if real else partial(of_norm.launch_stream_norm, interpret=INTERPRET)
    return rowwise(in_rows("x", width=width), lambda x: op(chain_stream(x), len(x), weight, eps=EPS))


def norm_of_sum(real: bool, *, zero_centered: bool = False) -> Form:
    """Of split-K's parts with the residual stream."""
    width = 2560 if real else 512
    weight = norm_weight(width)
    op = add_norm if real else partial(of_dense.launch_add_norm, interpret=INTERPRET)

    def run(stream: jax.Array, **parts: jax.Array) -> Any:
        return op(jnp.stack(list(parts.values())), stream, weight, eps=EPS, zero_centered=zero_centered)

    return rowwise(in_rows("stream", "part0", "part1", "part2", width=width), run)


def norm_and_router(real: bool) -> Form:
    width, experts = (2048, 128) if real else (512, 8)
    weight, scorer = norm_weight(width), matrix(experts, width)
    op = add_norm_scores if real else partial(of_dense.launch_add_norm_scores, interpret=INTERPRET)
    return rowwise(
        in_rows("stream", "part", width=width), lambda stream, part: op(part[None], stream, weight, scorer, eps=EPS),
        **(EXACT_PRODUCTS if real else {}),
    )  # fmt: skip


def few_products(real: bool, *, parts: bool) -> Form:
    """With a bias, added up where parts are left to others."""
    depth, features = (4096, 2880) if real else (192, 128)
    weight, bias = matrix(features, depth), norm_weight(features)
    op = few_linear if real else partial(launch_few, interpret=INTERPRET)

    def run(x: jax.Array) -> jax.Array:
        found = op(x, weight, bias, parts=parts)
        return found.sum(axis=0) if parts else found

    return rowwise(in_rows("x", width=depth), run)


def norm_over_ranks(real: bool) -> Form:
    """What each of three ranks adds up; on one GPU its own share alone."""
    width = 2560 if real else 512
    weight = norm_weight(width)

    def run(stream: jax.Array, **parts: jax.Array) -> Any:
        if real:
            return reduce_add_norm(jnp.stack(list(parts.values())), stream, weight, eps=EPS)
        of_ranks = jnp.stack([jnp.stack([part, part[::1] * 0.5]) for part in parts.values()])
        return of_norm.launch_reduce_add_norm(of_ranks, stream, weight, eps=EPS, interpret=INTERPRET)

    return rowwise(in_rows("stream", "part0", "part1", "part2", width=width), run)


def sum_over_ranks(real: bool) -> Form:
    """What each of three ranks adds up; on one GPU its own share alone."""

    def run(**parts: jax.Array) -> jax.Array:
        if real:
            return reduce_ranks(next(iter(parts.values())))
        return launch_reduce_ranks(jnp.stack(list(parts.values())), interpret=INTERPRET)

    return rowwise(in_rows("part0", "part1", "part2", width=2880 if real else 520), run)


def norm_of_heads(real: bool) -> Form:
    """XLA's norm of heads and rotation, of layers that no kernel takes."""
    heads, dim = (32, 128) if real else (4, 16)
    weight = norm_weight(dim)

    def draw(call: Call) -> dict[str, jax.Array]:
        return {"q": numbers(call, heads * dim), "positions": jnp.asarray(call.positions)}

    def run(q: jax.Array, positions: jax.Array) -> jax.Array:
        turned = rotary_tables(positions, RopeConfig(theta=1e6), dim)
        return rotate(rms_norm(q.reshape(-1, heads, dim), weight, EPS), turned)

    return rowwise(draw, run, **(EXACT_PRODUCTS if real else {}))


def products(real: bool, form: Any) -> Form:
    """Dense products of few rows, with what follows them."""
    depth, features = (2560, 6144) if real else (256, 512)
    weight, stream_weight = matrix(features, depth), norm_weight(features)
    both: Any = {"store": dense, "swiglu": dense_gated}

    def run(x: jax.Array, **rest: jax.Array) -> Any:
        if form == "blocks":
            blocks = in_column_blocks(weight)
            return dense(x, blocks, **KERNEL) if real else of_dense.launch("store", x, blocks, **FEW)[0]
        if form == "parts":
            parts = dense_parts(x, weight, **KERNEL) if real else of_dense.launch("split_k", x, weight, **FEW)[0]
            return jnp.moveaxis(parts, 0, 1)
        if form == "onto":
            given = (x, weight, rest["stream"], stream_weight)
            return dense_onto(*given, eps=EPS) if real else of_dense.launch_onto(*given, eps=EPS, **FEW)
        return both[form](x, weight, **KERNEL) if real else of_dense.launch(form, x, weight, **FEW)[0]

    def draw(call: Call) -> dict[str, jax.Array]:
        stream = {"stream": numbers(call, features, salt=1)} if form == "onto" else {}
        return {"x": numbers(call, depth)} | stream

    return rowwise(draw, run)


def products_of_xla(real: bool, kind: Any = None) -> Form:
    """As the mode has them compiled."""
    depth, features = (2560, 6144) if real else (256, 512)
    weight = matrix(features, depth)
    if kind is None:
        return rowwise(in_rows("x", width=depth), lambda x: x @ weight.T, **(EXACT_PRODUCTS if real else {}))
    narrow = quantize(weight, kind)
    op = partial(quantized_linear, paired=narrow.paired, implementation="xla")
    return rowwise(
        in_rows("x", width=depth),
        lambda x: op(x, narrow.values, narrow.scales),
        **(EXACT_PRODUCTS if real else {}),
    )


def weight_only(real: bool, kind: Any) -> Form:
    depth, features = (2560, 6144) if real else (1280, 136)
    narrow = quantize(matrix(features, depth), kind)
    op = partial(quantized_linear, **KERNEL) if real else partial(launch_weight_only, **FEW)
    return rowwise(in_rows("x", width=depth), lambda x: op(x, narrow.values, narrow.scales, paired=narrow.paired))


def rounded_rows(real: bool, form: Any) -> Form:
    """W8A8 of many rows: each is rounded by its own largest number."""
    depth, features = (2560, 6144) if real else (512, 512)
    narrow, norm = quantize(matrix(features, depth), "fp8_dynamic"), norm_weight(features)
    pairs = narrow.values, narrow.scales
    both: Any = {"store": float8_dense, "swiglu": float8_gated}

    def run(x: jax.Array, **rest: jax.Array) -> Any:
        if real:
            rows = float8_rows(x, paired=True, **KERNEL)
            if form == "onto":
                return tuple(float8_onto(rows, *pairs, rest["stream"], norm, eps=EPS, paired=True))
            return both[form](rows, *pairs, **KERNEL)
        rows = of_float8.launch_rows(x, interpret=INTERPRET)
        if form == "onto":
            added, found = of_float8.launch_onto(rows, *pairs, rest["stream"], norm, eps=EPS, **FEW)
            return added, found.values.astype(jnp.float32), found.scales
        return of_float8.launch(form, rows, *pairs, jnp.bfloat16, **FEW)[0]

    def draw(call: Call) -> dict[str, jax.Array]:
        stream = {"stream": numbers(call, features, salt=1)} if form == "onto" else {}
        return {"x": numbers(call, depth)} | stream

    return rowwise(draw, run)


def head(real: bool, form: str) -> Form:
    """`logits`: the target's, which tokens are chosen from; `best`: its greatest alone; `shortlist`: a drafter's, in float8."""
    depth, vocab = (2560, 151_936) if real else (128, 608)
    weight = matrix(vocab, depth)
    if form == "logits":
        return rowwise(
            in_rows("x", width=depth),
            lambda x: (x @ weight.T).astype(jnp.float32),
            **(EXACT_PRODUCTS if real else {}),
        )
    if form in ("int8", "fp8"):
        narrow = quantize(weight, form)
        return rowwise(in_rows("x", width=depth), lambda x: product(x, narrow), **(EXACT_PRODUCTS if real else {}))
    if form == "best":
        op = partial(dense_best, **KERNEL) if real else partial(of_dense.launch_best, **FEW)
        return rowwise(in_rows("x", width=depth), lambda x: op(x, weight))
    narrow = quantize(weight, "fp8")

    def shortlist(x: jax.Array) -> jax.Array:
        if real:
            return float8_candidates(float8_rows(x, paired=narrow.paired), narrow.values, narrow.scales, 16, **KERNEL)
        rows = Float8Rows((x * 128).astype(jnp.float8_e4m3fn), jnp.ones(len(x)))
        return of_float8.launch_candidates(rows, narrow.values, narrow.scales, 2, **FEW)

    return rowwise(in_rows("x", width=depth), shortlist)


def experts(real: bool, form: str) -> Form:
    """Up to some hundred tokens, whose parts are added in the order of a token's own experts."""
    hidden, inner, count, taken = (2048, 768, 128, 8) if real else (128, 128, 4, 2)
    gate_up, down = matrix(count, 2 * inner, hidden), matrix(count, hidden, inner, salt=1)

    def draw(call: Call) -> dict[str, jax.Array]:
        return {"x": numbers(call, hidden), "logits": numbers(call, count, jnp.float32, salt=1)}

    def run(x: jax.Array, logits: jax.Array) -> jax.Array:
        if form == "mixture" and real:
            return mixture(logits, x, gate_up, down, taken=taken, normed=True).sum(axis=0)
        weights, chosen = jax.lax.top_k(logits, taken)
        if real:
            return routed_experts(x, chosen, weights, gate_up, down).sum(axis=0)
        parts = launch_experts(x, chosen, weights, gate_up, down, ctas=3, interpret=INTERPRET)
        return jnp.moveaxis(parts, 0, 1)

    return rowwise(draw, run)


class Mixture(NamedTuple):
    """What `models.moe` asks of a configuration."""

    hidden_size: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    routing: str = "greedy"
    num_groups: int = 1
    groups_per_token: int = 1
    norm_routing_weights: bool = True
    routing_scale: float = 1.5


def experts_apart(real: bool, form: str) -> Form:
    """Other ways of a module of experts: `gathered` for few tokens, `all` of them on all tokens, `blocks` of one expert's rows."""
    hidden, inner, count, taken = (2048, 768, 64, 6) if real else (256, 128, 4, 2)
    config = Mixture(hidden_size=hidden, moe_intermediate_size=inner, num_experts=count)
    module = nnx.eval_shape(lambda: moe.Experts(config))
    module.gate_up_proj.weight = nnx.Param(matrix(count * 2 * inner, hidden))
    module.down_proj.weight = nnx.Param(matrix(count * hidden, inner, salt=1))

    def draw(call: Call) -> dict[str, jax.Array]:
        return {"x": numbers(call, hidden), "logits": numbers(call, count, jnp.float32, salt=1)}

    def run(x: jax.Array, logits: jax.Array) -> jax.Array:
        weights, chosen = jax.lax.top_k(logits, taken)
        if form != "blocks":
            return module.chosen(x, chosen, weights) if form == "gathered" else module.every(x, chosen, weights)
        with nullcontext() if real else mock.patch.object(moe, "grouped_linear", _grouped):
            return module.grouped(x, chosen, weights, implementation="mosaic_gpu")

    return rowwise(draw, run, **(EXACT_PRODUCTS if real else {}))


def _grouped(
    x: jax.Array, weight: jax.Array, *, gated: bool = False, groups: Any, count: Any, implementation: str
) -> jax.Array:
    assert implementation == "mosaic_gpu"
    return launch_grouped(x, weight, groups, count, gated=gated, interpret=INTERPRET)


def routing(real: bool, kind: str) -> Form:
    """Which experts, of open groups, and how much of each, from scores that XLA multiplies."""
    hidden, count = (2048, 64) if real else (64, 16)
    config = Mixture(routing=kind, num_groups=4, groups_per_token=2, experts_per_token=3)
    scorer, bias = matrix(count, hidden), jax.random.normal(jax.random.key(3), (count,)) / 4

    def draw(call: Call) -> dict[str, jax.Array]:
        return {"x": numbers(call, hidden)} if real else {"logits": 4 * numbers(call, count, jnp.float32)}

    def run(x: jax.Array | None = None, logits: jax.Array | None = None) -> Any:
        scores = logits if x is None else dense_scores(x, scorer)
        assert scores is not None
        return moe.route(config, scores, bias if kind == "noaux_tc" else None)

    return rowwise(draw, run, **(EXACT_PRODUCTS if real else {}))


def experts_in_four_bits(real: bool) -> Form:
    hidden, inner, count, taken = (2880, 2880, 32, 4) if real else (128, 64, 4, 2)
    rng = np.random.default_rng(0)

    def tiles(rows: int, columns: int, *, gated: bool) -> Any:
        blocks = rng.integers(0, 256, (count, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(118, 122, blocks.shape[:-1]).astype(np.uint8)
        return mxfp4_tiles(jnp.asarray(blocks), jnp.asarray(scales), gated=gated, dtype=jnp.bfloat16)

    matrices = (
        tiles(2 * inner, hidden, gated=True),
        matrix(count, 2 * inner),
        tiles(hidden, inner, gated=False),
        matrix(count, hidden),
    )

    def draw(call: Call) -> dict[str, jax.Array]:
        return {"x": numbers(call, hidden), "logits": numbers(call, count, jnp.float32, salt=1)}

    def run(x: jax.Array, logits: jax.Array) -> jax.Array:
        if real:
            parts = mxfp4_mixture(logits, x, *matrices, taken=taken, alpha=1.702, limit=7.0, **KERNEL)
        else:
            how: Any = {"gate": Gate(1.702, 7.0), "ctas": 3, "interpret": INTERPRET}
            parts = launch_mxfp4(logits, x, *matrices, taken=taken, **how)
        return jnp.moveaxis(parts, 0, 1)

    return rowwise(draw, run)


def _request(call: Call) -> RequestArrays:
    """Of sequences: half of them filter, one in eight is greedy."""
    of = {name: of_people(call, 1, salt=salt)[:, 0] for salt, name in enumerate(("temperature", "top_p", "top_k"))}
    seeds = jax.vmap(lambda who: jax.random.key_data(jax.random.key(who)))(jnp.asarray(call.who))
    b = len(call.who)
    return RequestArrays(
        seeds, jnp.maximum(of["temperature"] + 0.75, 0), jnp.minimum(of["top_p"] / 4 + 0.9, 1),
        jnp.maximum(of["top_k"] * 40, 0).astype(jnp.int32), jnp.zeros(b), jnp.zeros(b, jnp.int32), jnp.full((b, 1), -1),
    )  # fmt: skip


def choosing(real: bool, mode: Mode) -> Form:
    """Noise by request and position, and filters."""
    vocab = 151_936 if real else 512

    def draw(call: Call) -> Any:
        logits = 8 * numbers(call, vocab, jnp.bfloat16 if mode == "full" else jnp.float32)
        return logits, jnp.asarray(call.positions), _request(call)

    op: Any = sample
    return Form(draw, lambda given: op(*given, mode), EXACT_PRODUCTS if real else {})


def filtering(real: bool) -> Form:
    """The kernel, told the keys of its noise."""
    vocab = 151_936 if real else 1024
    limits = ("temperature", "min_p", "top_k", "top_p")

    def draw(call: Call) -> dict[str, jax.Array]:
        request = _request(call)
        of_rows = {name: jnp.broadcast_to(getattr(request, name)[:, None], call.positions.shape) for name in limits}
        keys = jax.lax.bitcast_convert_type(numbers(call, 2, jnp.float32, salt=1), jnp.uint32)
        return {"logits": 8 * numbers(call, vocab), "keys": keys} | of_rows

    op = partial(filtered_choice, **KERNEL) if real else partial(_filtered, warpgroups=2, interpret=INTERPRET)
    return rowwise(draw, op)


def _filtered(
    logits: jax.Array, keys: jax.Array, temperature: jax.Array, *, warpgroups: int, interpret: Any, **limits: Any
):
    law = tuple(limits[name] for name in ("min_p", "top_k", "top_p"))
    return launch_choice(logits, keys, temperature, law, warpgroups=warpgroups, interpret=interpret)


def rounded_queries(real: bool) -> Form:
    """To float8 on a scale of the layer, over latent rows that are so."""
    width = 16 * 576 if real else 160
    return rowwise(in_rows("x", width=width), lambda x: quantize_tensor(x, 0.01).astype(jnp.float32))


def masking(real: bool) -> Form:
    """What a grammar allows of tokens, told as bits."""
    vocab = 151_936 if real else 96

    def draw(call: Call) -> dict[str, jax.Array]:
        words = numbers(call, vocab // 32, jnp.float32, salt=1)
        return {"logits": 8 * numbers(call, vocab), "masks": jax.lax.bitcast_convert_type(words, jnp.uint32)}

    def run(given: dict[str, jax.Array]) -> jax.Array:
        return jnp.argmax(masked(given["logits"], given["masks"]), axis=-1)

    return Form(draw, run, EXACT_PRODUCTS if real else {})


def adjusting(real: bool, *, sampled: bool) -> Form:
    """Penalties, biases and refused words, under the tokens that a block proposes before a row.

    Those of a sequence are the same in any block, so that what a token follows is, too; what was emitted before it is counted as
    the text that `seen` holds until the block.
    """
    vocab = 151_936 if real else 96

    def draw(call: Call) -> Any:
        b = len(call.who)
        ids = (numbers(call, 1, jnp.float32, salt=2)[..., 0] * vocab / 2 + vocab / 2).astype(jnp.int32)
        # What stands before the block: its pending token, counted, and those since the earliest begin of any block.
        before = Call(call.who, np.maximum(call.first - 15, 0), 16)
        texts = (numbers(before, 1, jnp.float32, salt=2)[..., 0] * vocab / 2 + vocab / 2).astype(jnp.int32)
        since = (before.positions > 110) & (before.positions <= np.maximum(call.first, 0)[:, None])
        seen = (
            jnp.zeros((b, vocab), jnp.int32)
            .at[jnp.arange(b)[:, None], jnp.where(since, texts, vocab)]
            .add(2, mode="drop")
        )
        penalties = [of_people(call, 1, salt=salt)[:, 0] for salt in (4, 5, 6)]
        adjust = Adjustments(
            bias=of_people(call, vocab, salt=3), seen=seen, presence=penalties[0], frequency=penalties[1],
            repetition=1.5 + penalties[2] / 4, words=jnp.full((b, 1, 1), -1), tail=jnp.full((b, 1), -1),
            grammar=jnp.zeros(b, jnp.int32),
        )  # fmt: skip
        return 8 * numbers(call, vocab, jnp.float32), ids, adjust

    op = adjusted_logits if sampled else adjusted_best
    return Form(draw, lambda given: op(*given), EXACT_PRODUCTS if real else {})


# Of kernels that take whole tiles.
WHOLE = ((2, 16), (8, 16), (16, 16), (32, 16))
ROWWISE = {
    "embedding and norm": Operation(norm_of_embedding, [(3, 4), (1, 2)], "TB"),
    "embedding and norm, zero-centered": Operation(
        partial(norm_of_embedding, zero_centered=True), [(3, 4), (1, 2)], "TB"
    ),
    "norm of the stream": Operation(norm_of_stream, [(2, 3), (1, 7)], "TB", most=16),
    "residual and norm": Operation(norm_of_sum, [(3, 4), (1, 2)], "TB"),
    "residual and norm, zero-centered": Operation(partial(norm_of_sum, zero_centered=True), [(3, 4), (1, 2)], "TB"),
    "residual, norm and router": Operation(norm_and_router, [(3, 4), (1, 2)], "TB", most=of_dense.SCORED_ROWS),
    "residual, norm and router, many rows": Operation(norm_and_router, [], least=of_dense.SCORED_ROWS + 1),
    "sum over ranks and norm": Operation(norm_over_ranks, [(3, 4), (1, 2)], "TB"),
    "sum over ranks": Operation(sum_over_ranks, [(3, 4), (1, 2)], "TB"),
    "norm and rotation of heads": Operation(norm_of_heads, [(3, 4), (1, 2)], "TB"),
    "product": Operation(partial(products, form="store"), [(4, 8), (4, 16)], "TB", real=WHOLE[:3]),
    "product, SwiGLU": Operation(partial(products, form="swiglu"), [(4, 8), (4, 16)], "TB", real=WHOLE),
    "product onto the stream, normed": Operation(partial(products, form="onto"), [(4, 8)], real=WHOLE),
    "product in parts": Operation(partial(products, form="parts"), [(4, 8)], real=WHOLE),
    "product by blocks of columns": Operation(partial(products, form="blocks"), [(3, 4)], most=512),
    "product of few rows": Operation(partial(few_products, parts=False), [(3, 4), (1, 2)], "TB", most=16),
    "product of few rows in parts": Operation(partial(few_products, parts=True), [(3, 4), (1, 2)], "TB", most=16),
    "product of XLA": Operation(products_of_xla, []),
    "product of XLA, int8": Operation(partial(products_of_xla, kind="int8"), []),
    "product of XLA, fp8": Operation(partial(products_of_xla, kind="fp8"), []),
    "product, int8": Operation(partial(weight_only, kind="int8"), [(3, 4), (1, 2)], "TB", most=64),
    "product, fp8": Operation(partial(weight_only, kind="fp8"), [(3, 4), (1, 2)], "TB", most=64),
    "product of rounded rows": Operation(partial(rounded_rows, form="store"), [(5, 16), (8, 16)], "TB", least=64),
    "product of rounded rows, SwiGLU": Operation(
        partial(rounded_rows, form="swiglu"), [(5, 16), (8, 16)], "TB", least=64
    ),
    "product of rounded rows onto the stream": Operation(partial(rounded_rows, form="onto"), [(5, 16)], least=64),
    "head": Operation(partial(head, form="logits"), []),
    "head, int8": Operation(partial(head, form="int8"), []),
    "head, fp8": Operation(partial(head, form="fp8"), []),
    "head, best alone": Operation(partial(head, form="best"), [(4, 8)], real=WHOLE),
    "head, float8 shortlist": Operation(partial(head, form="shortlist"), [(3, 4)]),
    "experts": Operation(partial(experts, form="routed"), [(3, 4)], most=512),
    "experts, chosen by the kernel": Operation(partial(experts, form="mixture"), [(3, 4)], most=512),
    "experts in four bits": Operation(experts_in_four_bits, [(3, 4)], most=64),
    "experts in four bits, many tokens": Operation(experts_in_four_bits, [], real=[(8, 32), (16, 32)]),
    "experts, gathered": Operation(partial(experts_apart, form="gathered"), [(3, 4)], most=10),
    "experts, all on all tokens": Operation(partial(experts_apart, form="all"), [], real=[(2, 16), (8, 16)]),
    "experts in blocks": Operation(partial(experts_apart, form="blocks"), [(3, 4)], real=[(33, 32), (16, 64)]),
    "routing among groups": Operation(partial(routing, kind="group_limited_greedy"), [(3, 4), (1, 2)]),
    "routing by sigmoids, biased": Operation(partial(routing, kind="noaux_tc"), [(3, 4), (1, 2)]),
    "queries in float8": Operation(rounded_queries, [(3, 4), (1, 2)], "TB"),
    "choice, greedy": Operation(partial(choosing, mode="greedy"), [(3, 4), (1, 2)], "TB"),
    "choice, sampled": Operation(partial(choosing, mode="sampled"), [(3, 4), (1, 2)], "TB"),
    "choice, filtered": Operation(partial(choosing, mode="full"), [(3, 4), (1, 2)], "TB"),
    "choice, filtered by the kernel": Operation(filtering, [(2, 1), (1, 3)], "TB"),
    "choice, allowed by a grammar": Operation(masking, [(3, 4), (1, 2)], "TB"),
    "choice, penalties and biases": Operation(partial(adjusting, sampled=False), [(3, 4), (1, 2)], "TB"),
    "choice, penalties and biases, sampled": Operation(partial(adjusting, sampled=True), [(3, 4), (1, 2)], "TB"),
}
