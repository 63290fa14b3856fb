"""Two products with a norm between them: the definition, and the Hopper kernel in Pallas's interpreter, lowered for an H200, and
for real (`-m gpu`)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import NoImplementationError, linear_chain, linear_chain_exchange, linear_chain_refusal
from dflash_kernels.fused.linear_pair.mosaic_gpu import launch, plan
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..devices import h200

type Call = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

EPS = 1e-6
QWEN3_4B = {"depth": 12800, "hidden": 2560, "features": 10240}
QWEN3_8B = {"depth": 20480, "hidden": 4096, "features": 10240}


def make(rows: int, *, depth: int, hidden: int, features: int, dtype: Any = jnp.bfloat16) -> Call:
    """Arguments of a call; the rows of few tokens are the first ones of many."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (16, depth))[:rows]
    first = jax.random.normal(keys[1], (hidden, depth)) * depth**-0.5
    norm = 1 + 0.1 * jax.random.normal(keys[2], (hidden,))
    second = jax.random.normal(keys[3], (features, hidden)) * hidden**-0.5
    return x.astype(dtype), first.astype(dtype), norm.astype(dtype), second.astype(dtype)


def check(call: Call, out: jax.Array) -> None:
    """Errors of some units in the last place of the largest result, against float64."""
    x, first, norm, second = (np.asarray(array, np.float64) for array in call)
    wide = x @ first.T
    true = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * norm @ second.T
    assert out.shape == true.shape
    assert out.dtype == call[0].dtype
    assert np.abs(np.asarray(out, np.float64) - true).max() <= 8 * float(jnp.finfo(out.dtype).eps) * np.abs(true).max()


@pytest.mark.few("3-*")
@pytest.mark.parametrize(("rows", "depth", "features", "ctas"), [(3, 384, 256, 7), (16, 640, 384, 4)])
def test_agrees_with_float64(rows: int, depth: int, features: int, ctas: int) -> None:
    call = make(rows, depth=depth, hidden=128, features=features)
    options: Any = {"eps": EPS, "ctas": ctas, "interpret": plgpu.InterpretGPUParams()}
    check(call, jax.jit(lambda *call: launch(*call, exchange=None, **options))(*call))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_definition(dtype: Any) -> None:
    call = make(5, depth=256, hidden=128, features=128, dtype=dtype)
    check(call, linear_chain(*call, exchange=None, eps=EPS, implementation="xla"))


@pytest.mark.few
@pytest.mark.parametrize("sizes", [QWEN3_4B, QWEN3_8B])
def test_lowers_for_an_h200(sizes: dict[str, int]) -> None:
    call = jax.eval_shape(lambda: make(16, **sizes))
    with h200():

        def twice(call: Call) -> Any:
            exchange = jax.new_ref(linear_chain_exchange(16, **sizes))
            return [linear_chain(*call, exchange=exchange, eps=EPS, implementation="mosaic_gpu") for _ in range(2)]

        text = jax.jit(twice).trace(call).lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu_v2" in text
    assert "output_operand_alias" in text


@pytest.mark.parametrize("sizes", [QWEN3_4B, QWEN3_8B])
def test_schedule(sizes: dict[str, int]) -> None:
    """Both products keep nearly all multiprocessors busy, and read every weight."""
    for product in plan(16, **sizes, ctas=132, eps=EPS).products:
        assert 120 <= product.ctas <= 132
        assert product.k_tiles * 2 * 64 == product.depth
        assert product.rows * product.tiles >= product.features


def test_an_exchange_of_other_sizes() -> None:
    call = make(2, depth=256, hidden=128, features=128)

    def run(call: Call) -> jax.Array:
        return launch(*call, jax.new_ref(jnp.zeros((32,), jnp.int32)), eps=EPS, ctas=2)

    with h200(), pytest.raises(ValueError, match="the exchange must have"):
        jax.eval_shape(run, call)


def test_refusals() -> None:
    with h200():
        assert linear_chain_refusal(16, jnp.bfloat16, **QWEN3_4B) is None
        assert "up to 16 rows" in str(linear_chain_refusal(17, jnp.bfloat16, **QWEN3_4B))
        assert "bfloat16" in str(linear_chain_refusal(16, jnp.float32, **QWEN3_4B))
        assert "less time" in str(linear_chain_refusal(16, jnp.bfloat16, depth=256, hidden=128, features=128))
    call = make(2, depth=200, hidden=128, features=128)
    with pytest.raises(NotImplementedError, match="depth 200"):
        launch(*call, None, eps=EPS, ctas=2)
    with pytest.raises(NoImplementationError):
        linear_chain(*make(2, depth=256, hidden=128, features=128), exchange=None, eps=EPS, implementation="mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_on_a_gpu(rows: int) -> None:
    """Three calls in turn through one exchange."""
    call = make(rows, **QWEN3_4B)

    @jax.jit
    def thrice(call: Call) -> list[jax.Array]:
        exchange = jax.new_ref(linear_chain_exchange(rows, **QWEN3_4B))
        return [linear_chain(*call, exchange=exchange, eps=EPS, implementation="mosaic_gpu") for _ in range(3)]

    for out in thrice(call):
        check(call, out)
