"""From one layer's attention to the next layer's projection: the definition, and the Hopper kernel in Pallas's interpreter,
lowered for an H200, and for real (`-m gpu`)."""

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, chain_exchange, chain_stream, layer_chain, layer_chain_refusal
from dflash_kernels.core.device import SHARED_MEMORY
from dflash_kernels.fused.layer.arguments import Layer
from dflash_kernels.fused.layer.mosaic_gpu import launch_products
from dflash_kernels.fused.layer.plan import plan
from dflash_kernels.fused.plan import padded_rows
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200
from .drawn import drawn

EPS = 1e-6
QWEN3_4B = {"hidden": 2560, "heads_width": 4096, "inner": 9728, "next_width": 6144}
QWEN3_8B = {"hidden": 4096, "heads_width": 4096, "inner": 12288, "next_width": 6144}
# Between two gated delta nets, whose projection has a width of its own.
QWEN35_4B = {"hidden": 2560, "heads_width": 4096, "inner": 9216, "next_width": 12352}
QWEN35_27B = {"hidden": 5120, "heads_width": 6144, "inner": 17408, "next_width": 16480}
TINY = {"hidden": 128, "heads_width": 256, "inner": 256, "next_width": 128}


def make(
    rows: int, sizes: dict[str, int], *, dtype: Any = jnp.bfloat16, seed: int = 0, zero_centered: bool = False
) -> dict[str, Any]:
    """Arguments of a call; the rows of few tokens are the first ones of many."""
    mean = 0.0 if zero_centered else 1.0
    d, a, f, g = (sizes[name] for name in ("hidden", "heads_width", "inner", "next_width"))
    call = drawn(
        seed, dtype, x=((64, a), 1.0, 0.0), stream=((64, d), 1.0, 0.0), o=((d, a), a**-0.5, 0.0), post_norm=((d,), 0.1, mean),
        gate_up=((2 * f, d), d**-0.5, 0.0), down=((d, f), f**-0.5, 0.0), next_norm=((d,), 0.1, mean),
        following=((g, d), d**-0.5, 0.0),
    )  # fmt: skip
    return call | {"x": call["x"][:rows], "stream": chain_stream(call["stream"][:rows])}


def truth(call: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Both results in float64: the stream `[M, D]` and the projection."""
    wide = {name: np.asarray(value, np.float64) for name, value in call.items()}

    def norm(stream: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return stream / np.sqrt((stream**2).mean(-1, keepdims=True) + EPS) * weight

    stream = wide["stream"].T[: len(wide["x"])] + wide["x"] @ wide["o"].T
    gate, up = np.split(norm(stream, wide["post_norm"]) @ wide["gate_up"].T, 2, axis=-1)
    stream = stream + (gate / (1 + np.exp(-gate)) * up) @ wide["down"].T
    return stream, norm(stream, wide["next_norm"]) @ wide["following"].T


def separate(call: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Both results of separate operations on a stream in the activations' dtype."""
    dtype, rows = call["x"].dtype, len(call["x"])

    def norm(stream: jax.Array, weight: jax.Array) -> jax.Array:
        wide = stream.astype(jnp.float32)
        normed = (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + EPS)).astype(dtype)
        return (weight * normed).astype(dtype)

    stream = call["stream"].T[:rows].astype(dtype) + call["x"] @ call["o"].T
    gate, up = jnp.split(norm(stream, call["post_norm"]) @ call["gate_up"].T, 2, axis=-1)
    stream = stream + (jax.nn.silu(gate) * up) @ call["down"].T
    return np.asarray(stream, np.float64), np.asarray(norm(stream, call["next_norm"]) @ call["following"].T, np.float64)


@partial(jax.jit, static_argnames="zero_centered")
def on_gpu(call: dict[str, Any], zero_centered: bool = False) -> tuple[Any, Any]:
    exchange = jax.new_ref(chain_exchange(call["stream"], call["down"]))
    return layer_chain(**call, exchange=exchange, eps=EPS, zero_centered=zero_centered, implementation="mosaic_gpu")


def arrays(call: dict[str, Any]) -> tuple[jax.Array, Layer]:
    """A call as implementations get it."""
    return call["x"], Layer(**{name: array for name, array in call.items() if name != "x"})


def interpreted(call: dict[str, Any], ctas: int, zero_centered: bool = False) -> tuple[Any, Any]:
    options = {"eps": EPS, "ctas": ctas, "zero_centered": zero_centered, "interpret": plgpu.InterpretGPUParams()}
    return jax.jit(lambda x, layer: launch_products(x, layer, None, None, **options))(*arrays(call))


def check(call: dict[str, Any], out: tuple[Any, Any], zero_centered: bool = False) -> None:
    """Errors of at most twice those of separate operations, and two units in the last place."""
    if zero_centered:
        call = call | {name: 1 + call[name].astype(jnp.float32) for name in ("post_norm", "next_norm")}
    eps, rows = float(jnp.finfo(call["x"].dtype).eps), len(call["x"])
    found = (np.asarray(out[0], np.float64).T[:rows], np.asarray(out[1], np.float64))
    for ours, theirs, true in zip(found, separate(call), truth(call), strict=True):
        bound = 2 * np.abs(theirs - true).max() + 2 * eps * np.abs(true).max()
        assert np.abs(ours - true).max() <= bound


ODD = {"hidden": 128, "heads_width": 384, "inner": 640, "next_width": 416}


@pytest.mark.few("33*")
@pytest.mark.parametrize(("rows", "sizes", "ctas", "zero_centered"), [(3, ODD, 7, True), (33, TINY, 2, False)])
def test_agrees_with_float64(rows: int, sizes: dict[str, int], ctas: int, zero_centered: bool) -> None:
    call = make(rows, sizes, zero_centered=zero_centered)
    check(call, interpreted(call, ctas, zero_centered), zero_centered)


@pytest.mark.few
def test_last_layer_projects_nothing() -> None:
    call = make(2, TINY)
    del call["next_norm"], call["following"]
    stream, projected = interpreted(call, 2)
    assert projected is None
    np.testing.assert_allclose(np.asarray(stream).T[:2], truth(make(2, TINY))[0], atol=0.05)


@pytest.mark.parametrize(("dtype", "zero_centered"), [(jnp.float32, True), (jnp.bfloat16, False), (jnp.bfloat16, True)])
def test_the_definition(dtype: Any, zero_centered: bool) -> None:
    call = make(5, TINY, dtype=dtype, zero_centered=zero_centered)
    options: Any = {"eps": EPS, "zero_centered": zero_centered, "implementation": "xla"}
    check(call, layer_chain(**call, exchange=None, **options), zero_centered)


@pytest.mark.few
@pytest.mark.parametrize(
    ("rows", "sizes", "count"),
    [(1, QWEN3_4B, 2), (64, QWEN3_4B, 1), (16, QWEN3_8B, 1), (16, QWEN35_4B, 1), (1, QWEN35_27B, 1)],
)
def test_lowers_for_an_h200(rows: int, sizes: dict[str, int], count: int) -> None:
    """Layers one after the other; the exchange is changed in place."""
    call = jax.eval_shape(lambda: make(rows, sizes))

    def layers(call: dict[str, Any]) -> Any:
        (x, layer), exchange = arrays(call), jax.new_ref(chain_exchange(call["stream"], call["down"]))
        projected = []
        for _ in range(count):
            options: Any = {"eps": EPS, "ctas": 132, "zero_centered": sizes in (QWEN35_4B, QWEN35_27B)}
            stream, out = launch_products(x, layer, layer.o, exchange, **options)
            layer = layer._replace(stream=stream)
            projected.append(out)
        return layer.stream, projected

    with h200():
        text = jax.jit(layers).trace(call).lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu_v2" in text
    assert "output_operand_alias" in text


@pytest.mark.parametrize("sizes", [QWEN3_4B, QWEN3_8B, QWEN35_4B])
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_schedule(rows: int, sizes: dict[str, int]) -> None:
    """Every product keeps nearly all multiprocessors busy, and reads every weight."""
    made = plan(live=rows, ctas=132, eps=EPS, **sizes)
    for product in made.products:
        assert 120 <= product.ctas <= 132
        assert product.k_tiles * 2 * 64 == product.matrices * product.depth
        assert product.rows * product.tiles >= product.features
        covered = {offset + row for offset in product.offsets for row in range(64)}
        assert covered >= set(range(product.rows))
    memory = 128 * (made.stages * made.stage_rows + made.x_stages * 2 * made.tokens)
    assert 100 * 1024 < memory < SHARED_MEMORY
    assert made.tokens == padded_rows(rows) >= rows
    assert 1 <= made.x_group <= made.x_stages // 2, "a group would wait for stages that only its own first one frees"


@pytest.mark.parametrize("sizes", [QWEN3_4B, QWEN3_8B, TINY])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_exchange_has_room_for_every_result(rows: int, sizes: dict[str, int]) -> None:
    """Places lie one after the other, each where vectors of four words may begin, and CTAs together empty all of an area."""
    made = plan(live=rows, ctas=132, eps=EPS, **sizes)
    mailbox, reducers = made.mailbox, made.hidden // 64
    assert all(product.ctas * 64 * made.tokens <= mailbox.squares for product in made.products[::2])
    assert mailbox.squares + reducers * made.tokens <= mailbox.scaled
    assert mailbox.scaled + made.tokens * made.hidden // 2 <= mailbox.projection
    assert mailbox.gated + made.tokens * sizes["inner"] // 2 <= mailbox.ctas * mailbox.share
    assert mailbox.area(1) - mailbox.area(0) == mailbox.words - mailbox.area(1) == mailbox.ctas * mailbox.share
    places = (mailbox.area(0), mailbox.share, mailbox.squares, mailbox.scaled, mailbox.projection, mailbox.gated)
    assert not any(place % 4 for place in places)


def test_an_exchange_of_other_shapes_is_refused() -> None:
    call = jax.eval_shape(lambda: make(2, TINY))
    other = jax.eval_shape(lambda: make(16, TINY))

    def run(call: dict[str, Any]) -> Any:
        exchange = jax.new_ref(chain_exchange(jnp.zeros(other["stream"].shape), call["down"]))
        return launch_products(*arrays(call), None, exchange, eps=EPS, ctas=132)

    with h200(), pytest.raises(ValueError, match="the exchange must have"):
        jax.eval_shape(run, call)


@pytest.mark.parametrize(
    ("rows", "changes", "reason"),
    [
        (65, {}, "takes 1 to 64 rows, not 65"), (1, {"inner": 9730}, "widths that 128 divides, not inner 9730"),
        (1, {"hidden": 2564}, "widths that 128 divides, not hidden 2564"), (1, {"hidden": 128 * 67}, "needs 134 multiproc"),
    ],
)  # fmt: skip
def test_refusals_name_their_reason(rows: int, changes: dict[str, int], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        plan(live=rows, ctas=132, eps=EPS, **QWEN3_4B | changes)


def test_other_dtypes_are_refused() -> None:
    call = make(2, TINY, dtype=jnp.float16)
    with pytest.raises(NotImplementedError, match="takes bfloat16 throughout, not float16"):
        launch_products(*arrays(call), None, None, eps=EPS, ctas=2)
    call = make(2, TINY)
    for name, dtype in (("following", jnp.float16), ("post_norm", jnp.float32), ("next_norm", jnp.float32)):
        with pytest.raises(NotImplementedError, match=rf"takes bfloat16 throughout, .*{jnp.dtype(dtype)}"):
            launch_products(*arrays({**call, name: call[name].astype(dtype)}), None, None, eps=EPS, ctas=2)
    with pytest.raises(NotImplementedError, match=r"takes a stream in float32, .* not bfloat16"):
        launch_products(*arrays({**call, "stream": call["stream"].astype(jnp.bfloat16)}), None, None, eps=EPS, ctas=2)


def test_shapes_that_do_not_fit_are_named() -> None:
    call = make(2, TINY)
    with pytest.raises(ValueError, match=r"gate_up \(500, 128\) and down \(128, 256\) do not fit"):
        layer_chain(**{**call, "gate_up": call["gate_up"][:500]}, exchange=None)
    with pytest.raises(ValueError, match="come with the weight of its norm"):
        layer_chain(**{**call, "next_norm": None}, exchange=None)
    with pytest.raises(ValueError, match="a column for each of 2 rows"):
        layer_chain(**{**call, "stream": call["stream"][:, :1]}, exchange=None)
    # The functions themselves: in test runs a shape checker around them would speak first.
    with pytest.raises(ValueError, match=r"weights of norms \[\(64,\), \(128,\)\] must be one for each of 128 rows"):
        inspect.unwrap(layer_chain)(**{**call, "post_norm": call["post_norm"][:64]}, exchange=None)
    with pytest.raises(ValueError, match=r"scales \(5,\) must be one for each row of a weight \(128, 256\)"):
        inspect.unwrap(layer_chain)(**call, scales=(jnp.ones(5), None, None, None), exchange=None)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="for machines without a Hopper GPU")
def test_other_devices_are_refused() -> None:
    assert "needs a Hopper GPU" in str(layer_chain_refusal(1, jnp.bfloat16, **QWEN3_4B))
    with pytest.raises(NoImplementationError, match="mosaic_gpu: needs a Hopper GPU"):
        layer_chain(**make(2, TINY), exchange=None, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "sizes"), [(3, QWEN3_4B), (64, QWEN3_4B), (16, QWEN35_4B)])
def test_full_size_agrees_with_float64(rows: int, sizes: dict[str, int]) -> None:
    zero_centered = sizes == QWEN35_4B
    call = make(rows, sizes, zero_centered=zero_centered)
    out = on_gpu(call, zero_centered)
    check(call, out, zero_centered)
    again = on_gpu(call, zero_centered)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(out, again, strict=True))


@pytest.mark.gpu
def test_a_token_alone_has_the_bits_it_has_among_sixteen() -> None:
    """Plain decoding and verification go through sums of one order."""
    alone, (stream, projected) = on_gpu(make(1, QWEN3_4B)), on_gpu(make(16, QWEN3_4B))
    assert np.array_equal(np.asarray(stream)[:, 0], np.asarray(alone[0])[:, 0])
    assert np.array_equal(np.asarray(projected, np.float32)[0], np.asarray(alone[1], np.float32)[0])


@pytest.mark.gpu
def test_launches_that_share_an_exchange_give_what_each_gives_alone() -> None:
    """Areas are used in turn: the third launch finds what the first one left, emptied by the second."""
    call = make(16, QWEN3_4B)

    @jax.jit
    def several(call: dict[str, Any]) -> list[Any]:
        exchange, results = jax.new_ref(chain_exchange(call["stream"], call["down"])), []
        for _ in range(4):
            stream, projected = layer_chain(**call, exchange=exchange, eps=EPS, implementation="mosaic_gpu")
            call = call | {"stream": stream}
            results.append((stream, projected))
        return results

    for stream, projected in several(call):
        alone = on_gpu(call)
        assert np.asarray(stream).tobytes() == np.asarray(alone[0]).tobytes()
        assert np.asarray(projected).tobytes() == np.asarray(alone[1]).tobytes()
        call = call | {"stream": stream}
