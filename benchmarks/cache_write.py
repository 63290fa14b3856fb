"""Norm, rotation and cache write of one layer in the shapes of Qwen3 (32 query and 8 KV heads of 128), bf16, against the floor.

    python benchmarks/cache_write.py

A figure is the time of one layer inside one compiled loop on the device over 36 layers with pools and projections of their own,
as a decode step has them: the host's clock around many rounds, divided by rounds and layers. "apart" is norm, rotation and two
scatters as jnp operations, the form the models had before the operation; what the kernel gives is compared with it first. The
floor is the bytes that must move over the memory's bandwidth; a launch inside the loop takes 1.3 us or more whatever it does, and
about 0.5 us of each figure is the loop's own round with the step's tables, shared out among its layers.
`draft` rows are the drafter's context: five layers' keys and values in one call, and the time is that of the call.
"""

import functools
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from card import card
from dflash_kernels import cache_write, kv_write, qkv_write
from record import Record, arguments

HEADS, KV_HEADS, HEAD_DIM, LAYERS, DRAFT_LAYERS = 32, 8, 128, 36, 5
PAGES, PAGE_SIZE = 64, 64
HALF = HEAD_DIM // 2


def turned(x: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Norm and rotation as separate jnp operations."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    wide = (weight * wide.astype(x.dtype)).astype(jnp.float32)
    first, second = wide[..., :HALF], wide[..., HALF:]
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def apart(k_pages, v_pages, qkv, slots, cos, sin, *, q_norm, k_norm, **scales):
    heads = qkv.reshape(qkv.shape[0], -1, HEAD_DIM)
    q, k, v = jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)
    q, k = turned(q, q_norm, cos, sin), turned(k, k_norm, cos, sin)
    return q, *cache_write(k_pages, v_pages, k, v, slots), None


def apart_layers(k_pages, v_pages, kv, slots, cos, sin, *, k_norm):
    both = kv.reshape(kv.shape[0], DRAFT_LAYERS, 2, KV_HEADS, HEAD_DIM)
    keys = jnp.stack([turned(both[:, i, 0], k_norm[i], cos, sin) for i in range(DRAFT_LAYERS)])
    written = [cache_write(k_pages[i], v_pages[i], keys[i], both[:, i, 1], slots) for i in range(DRAFT_LAYERS)]
    return tuple(k for k, _ in written), tuple(v for _, v in written), None


def tables(step: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Slots, cos and sin of a step: computed once for all layers."""
    positions = step + jnp.arange(tokens)
    angles = positions[:, None].astype(jnp.float32) * 1e6 ** -(jnp.arange(HALF) / HALF)
    return positions % (PAGES * PAGE_SIZE), jnp.cos(angles), jnp.sin(angles)


def pool(dtype: Any) -> jax.Array:
    return jnp.zeros((PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM), dtype)


def target_program(
    tokens: int, write: Callable[..., Any], dtype: Any, layers: int = LAYERS
) -> tuple[Callable[..., Any], Any, int]:
    """One round over the layers of a target as `program(state, rounds) -> state`."""
    rng = np.random.default_rng(0)
    shape = (tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    qkv = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(layers)]
    norms = {name: jnp.asarray(rng.uniform(0.5, 1.5, HEAD_DIM), jnp.bfloat16) for name in ("q_norm", "k_norm")}
    fixed: dict[str, Any] = {}
    if dtype == jnp.float8_e4m3fn:
        fixed = {"k_scale": jnp.full((KV_HEADS,), 0.02), "v_scale": jnp.full((KV_HEADS,), 0.02)}
    if dtype == jnp.int8:
        fixed = {"v_scale": jnp.full((KV_HEADS, HEAD_DIM), 0.03)}

    def layer_state() -> tuple[jax.Array | None, ...]:
        scale = jnp.zeros((PAGES, KV_HEADS, PAGE_SIZE)) if dtype == jnp.int8 else None
        return pool(dtype), pool(dtype), scale, jnp.zeros((tokens, HEADS, HEAD_DIM), jnp.bfloat16)

    state = [layer_state() for _ in qkv]

    def program(state, rounds):
        def body(step, state):
            slots, cos, sin = tables(step, tokens)
            after = []
            for x, (k, v, scale, _) in zip(qkv, state, strict=True):
                # Tied to the step, so that no part of the work is taken out of the loop.
                x, _ = jax.lax.optimization_barrier((x, step))
                scales = fixed if scale is None else fixed | {"k_scale": scale}
                q, k, v, new_scale = write(k, v, x, slots, cos, sin, **norms, **scales)
                after.append((k, v, None if scale is None else new_scale, q))
            return after

        return jax.lax.fori_loop(0, rounds, body, state)

    return program, state, layers


def draft_program(tokens: int, write: Callable[..., Any]) -> tuple[Callable[..., Any], Any, int]:
    """Twelve calls, each for the five layers of a drafter, as `program(state, rounds) -> state`."""
    rng = np.random.default_rng(0)
    calls = 12
    kv = [
        jnp.asarray(rng.standard_normal((tokens, DRAFT_LAYERS * 2 * KV_HEADS * HEAD_DIM)), jnp.bfloat16)
        for _ in range(calls)
    ]
    norms = tuple(jnp.asarray(rng.uniform(0.5, 1.5, HEAD_DIM), jnp.bfloat16) for _ in range(DRAFT_LAYERS))
    pools = [tuple(pool(jnp.bfloat16) for _ in range(DRAFT_LAYERS)) for _ in range(2 * calls)]
    state = list(zip(pools[:calls], pools[calls:], strict=True))

    def program(state, rounds):
        def body(step, state):
            slots, cos, sin = tables(step, tokens)
            after = []
            for x, (k, v) in zip(kv, state, strict=True):
                x, _ = jax.lax.optimization_barrier((x, step))
                after.append(tuple(write(k, v, x, slots, cos, sin, k_norm=norms)[:2]))
            return after

        return jax.lax.fori_loop(0, rounds, body, state)

    return program, state, calls


def check(tokens: int) -> None:
    """Stops the run where the kernel is wrong: against the jnp operations, within two roundings of bfloat16."""
    program = [target_program(tokens, form, jnp.bfloat16, layers=1) for form in (qkv_write, apart)]
    ours, theirs = (jax.jit(run)(state, 2) for run, state, _ in program)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        wide = [np.asarray(x, np.float32) for x in (one, other)]
        if not (np.abs(wide[0] - wide[1]) <= 0.02 * np.abs(wide[1]).max()).all():
            raise SystemExit(f"T{tokens}: the kernel and the jnp operations disagree")


def measure(program: Callable[..., Any], state: Any, calls: int) -> list[float]:
    """Microseconds of one call, in each of several runs."""
    run = jax.jit(program, donate_argnums=0)
    rounds = max(8_000 // calls, 1)
    text, whole = str(run.lower(state, rounds).compile().as_text()), ",".join(map(str, pool(jnp.int8).shape))
    if re.search(rf"= \w+\[{whole}\]\S* copy\(", text):
        raise SystemExit("the program copies a pool")
    state, times = run(state, 10), []
    for _ in range(7):
        jax.block_until_ready(state)
        started = time.perf_counter()
        state = jax.block_until_ready(run(state, rounds))
        times.append((time.perf_counter() - started) * 1e6 / (rounds * calls))
    return times


def main() -> None:
    parser = arguments(str(__doc__))
    record = Record("cache_write", parser.parse_args())
    row = 2 * HEAD_DIM  # bytes of a head in bf16
    forms = {"mosaic_gpu": functools.partial(qkv_write, implementation="mosaic_gpu"), "apart": apart}

    def add(case: str, name: str, times: list[float], moved: int) -> None:
        metric = "time per call" if name == "mosaic_gpu" else f"time per call, {name}"
        spread = [round(min(times), 2), round(max(times), 2)]
        floor = round(moved / card().bandwidth * 1e6, 2)
        record.add(
            case, metric, round(statistics.median(times), 2), "us", floor=floor, spread=spread, implementation=name
        )

    def of_target(tokens: int, name: str) -> None:
        times = measure(*target_program(tokens, forms[name], jnp.bfloat16))
        add(f"qkv write T{tokens} bf16", name, times, 2 * tokens * (HEADS + 2 * KV_HEADS) * row)

    # What is quoted comes first; jnp operations take long to compile.
    for tokens in (1, 16):
        check(tokens)
        for name in forms:
            of_target(tokens, name)
    for kind, dtype in (("fp8", jnp.float8_e4m3fn), ("int8", jnp.int8)):
        times = measure(*target_program(16, forms["mosaic_gpu"], dtype))
        add(f"qkv write T16 {kind} pages", "mosaic_gpu", times, 16 * (2 * HEADS + 3 * KV_HEADS) * row)
    for name, write in (("mosaic_gpu", kv_write), ("apart", apart_layers)):
        moved = 2 * 16 * DRAFT_LAYERS * 2 * KV_HEADS * row
        add("kv write draft T16 bf16", name, measure(*draft_program(16, write)), moved)
    for name in forms:
        for tokens in (128, 512):
            check(tokens)
            of_target(tokens, name)


if __name__ == "__main__":
    main()
