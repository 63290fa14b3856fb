"""A decode loop over paged attention as XLA compiles it for a GPU (`pytest -m gpu`)."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_kernels import paged_attention

PAGES, KV_HEADS, PAGE, HEAD_DIM, LAYERS, STEPS = 37, 2, 64, 128, 2, 4


def pools(stored: Any) -> dict[str, jax.Array]:
    shape = (PAGES, KV_HEADS, PAGE, HEAD_DIM)
    arrays = {"k": jnp.zeros(shape, stored), "v": jnp.zeros(shape, stored)}
    if stored == jnp.int8:
        arrays["k_scale"] = jnp.zeros(shape[:3], jnp.float32)
    return arrays


def decode(stored: Any) -> Callable[..., Any]:
    """Steps that write a token of every sequence into each layer's pools and attend over them."""
    fixed = {} if stored == jnp.bfloat16 else {"v_scale": jnp.ones((KV_HEADS,)), "k_scale": jnp.ones((KV_HEADS,))}
    if stored == jnp.int8:
        fixed = {"v_scale": jnp.ones((KV_HEADS, HEAD_DIM))}

    def step(_, state):
        q, table, lens, layers = state
        page = jnp.take_along_axis(table, lens[:, None] // PAGE, axis=1)[:, 0]
        written = []
        for layer in layers:
            new = {"k": q[:, 0, :KV_HEADS].astype(stored), "v": q[:, 0, KV_HEADS : 2 * KV_HEADS].astype(stored)}
            new["k_scale"] = jnp.ones((*q.shape[:1], KV_HEADS))
            layer = {name: pool.at[page, :, lens % PAGE].set(new[name]) for name, pool in layer.items()}
            written.append(layer)
            scales = fixed | {name: layer[name] for name in ("k_scale",) if name in layer}
            q = q + paged_attention(q, layer["k"], layer["v"], table, lens + 1, implementation="mosaic_gpu", **scales)
        return q, table, lens + 1, written

    def run(q, table, lens, layers):
        return jax.lax.fori_loop(0, STEPS, step, (q, table, lens, layers))

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float8_e4m3fn, jnp.int8])
def test_no_pool_is_copied(stored: Any) -> None:
    q = jnp.ones((3, 1, 8, HEAD_DIM), jnp.bfloat16)
    table, lens = jnp.arange(36, dtype=jnp.int32).reshape(3, 12), jnp.array([70, 5, 700], jnp.int32)
    compiled = jax.jit(decode(stored), donate_argnums=3).lower(q, table, lens, [pools(stored)] * LAYERS).compile()
    text = compiled.as_text()
    assert "mosaic_gpu_v2" in text
    held = rf"\[{PAGES},{KV_HEADS},{PAGE}[,\]]"
    assert re.search(held, text), "pools have other shapes in the program: adapt the test"
    assert [line.strip() for line in text.splitlines() if re.search(rf"= \(?\w+{held}\S* copy", line)] == []
    layers = [jax.tree.map(jnp.copy, pools(stored)) for _ in range(LAYERS)]
    where = {pool.unsafe_buffer_pointer() for layer in layers for pool in layer.values()}
    out, _, _, after = compiled(q, table, lens, layers)
    assert {pool.unsafe_buffer_pointer() for layer in after for pool in layer.values()} == where
    assert np.isfinite(np.asarray(out, np.float32)).all()
