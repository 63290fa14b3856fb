"""The gated delta rule in the shapes of Qwen3.5 models (heads of 128, 16 for keys, bf16) against the memory floor.

    python benchmarks/delta_rule.py --heads 32 --batch 1 8

A figure is the time of one layer inside one compiled loop on the device: the host's clock around many layers, divided by their
number. Each of 32 layers has states of its own, 64 MB or more in all, so that nothing is left in the L2. `verify` is of 16 tokens,
`fold` of as many as stand, `cycle` both, `step` of one token. The floor is the bytes of states and factors over the card's
bandwidth. Correctness is checked first: one layer against the recurrence, token after token. 32 value heads are Qwen3.5-4B, 9B and
35B-A3B, 48 are 27B.
"""

import functools
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
from dflash_kernels import DeltaShape, DeltaState, DeltaWeights, delta_fold, delta_step, delta_verify
from record import Record, arguments

LAYERS, TOKENS, KEY_HEADS, WIDTH, EPS = 32, 16, 16, 128, 1e-6
NAMES = ("mosaic_gpu", "xla")
KINDS = ("verify", "fold", "cycle", "step")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def inputs(shape: DeltaShape, batch: int, tokens: int, seed: Any) -> tuple[Any, DeltaWeights, DeltaState]:
    """Projected rows, a layer's weights and its states."""
    keys = jax.random.split(jax.random.key(seed), 7)
    draw = jax.random.normal
    weights = DeltaWeights(
        (draw(keys[0], (shape.channels, 4)) / 2).astype(jnp.bfloat16),
        jnp.log(jax.random.uniform(keys[1], (shape.value_heads,), minval=0.01, maxval=16)),
        draw(keys[2], (shape.value_heads,)),
        (1 + draw(keys[3], (WIDTH,)) / 8).astype(jnp.bfloat16),
    )
    s = draw(keys[4], (batch, shape.value_heads, WIDTH, WIDTH))
    conv = draw(keys[5], (batch, 3, shape.channels), jnp.bfloat16)
    return draw(keys[6], (batch, tokens, shape.columns), jnp.bfloat16), weights, DeltaState(s, conv)


def floor_us(kind: str, shape: DeltaShape, batch: int) -> float:
    state = 4 * shape.value_heads * WIDTH**2
    tokens = 1 if kind == "step" else TOKENS
    rows = 2 * tokens * (shape.columns + shape.value_heads * WIDTH)
    factors = tokens * (4 * WIDTH * (shape.key_heads + shape.value_heads) + 2 * shape.channels)
    size = {
        "verify": state + rows + factors, "fold": 2 * state + factors, "cycle": 3 * state + rows + 2 * factors,
        "step": 2 * state + rows,
    }[kind]  # fmt: skip
    return batch * size / card().bandwidth * 1e6


def one(kind: str, name: str, shape: DeltaShape) -> Callable[..., tuple[Any, Any]]:
    """A layer: what of it counts besides the state, and the state."""

    def layer(projected: Any, weights: Any, state: Any, factors: Any, counts: Any) -> tuple[Any, Any]:
        if kind == "step":
            return delta_step(projected, weights, state, counts > 0, shape, eps=EPS, implementation=name)
        if kind == "fold":
            return None, delta_fold(state, factors, counts, implementation=name)
        out, factors = delta_verify(projected, weights, state, shape, eps=EPS, implementation=name)
        if kind == "verify":
            return (out, factors), state
        return out, delta_fold(state, factors, counts, implementation=name)

    return layer


def looped(kind: str, name: str, shape: DeltaShape) -> Callable[..., Any]:
    """`rounds` times all layers; the results are the last round's and the states."""
    layer = one(kind, name, shape)

    def many(projected: Any, weights: Any, states: Any, factors: Any, counts: Any, rounds: Any) -> Any:
        def body(index: Any, carry: Any) -> Any:
            _, states = carry
            # Sums the compiler cannot see through: nothing of a round is taken out of the loop.
            nothing = jnp.minimum(index, 0)
            given, stand = projected + nothing.astype(projected.dtype), counts + nothing
            found = [layer(given, w, s, f, stand) for w, s, f in zip(weights, states, factors, strict=True)]
            return [out for out, _ in found], [state for _, state in found]

        first = jax.eval_shape(lambda: body(jnp.int32(0), (None, states))[0])
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
        return jax.lax.fori_loop(0, rounds, body, (empty, states))

    return jax.jit(many, donate_argnums=2)


def check(shape: DeltaShape, name: str) -> float:
    """The largest error of a layer's states after a cycle and a step, relative to the largest number."""
    worst, counts = 0.0, jnp.array([TOKENS, 5, 0])
    for kind, tokens in (("cycle", TOKENS), ("step", 1)):
        projected, weights, state = inputs(shape, 3, tokens, 0)
        found, true = (
            np.asarray(one(kind, way, shape)(projected, weights, state, None, counts)[1].s, np.float64)
            for way in (name, "reference")
        )
        worst = max(worst, float(np.abs(found - true).max() / np.abs(true).max()))
    if not worst < 2e-6:
        raise SystemExit(f"{shape}, {name}: error {worst:.2e} against the recurrence")
    return worst


def measure(kind: str, name: str, shape: DeltaShape, batch: int) -> list[float]:
    """Microseconds of a layer."""
    tokens = 1 if kind == "step" else TOKENS
    layers = [inputs(shape, batch, tokens, seed) for seed in range(LAYERS)]
    projected, weights, states = layers[0][0], [w for _, w, _ in layers], [s for _, _, s in layers]
    verify = jax.jit(functools.partial(delta_verify, shape=shape, eps=EPS, implementation="xla"))
    factors = [verify(projected, w, s)[1] if kind == "fold" else None for w, s in zip(weights, states, strict=True)]
    counts, run = jnp.full((batch,), 7, jnp.int32), looped(kind, name, shape)

    def clock(rounds: int) -> float:
        nonlocal states
        started = time.perf_counter()
        _, states = jax.block_until_ready(run(projected, weights, states, factors, counts, jnp.int32(rounds)))
        return time.perf_counter() - started

    clock(2)
    return [(clock(22) - clock(2)) / (20 * LAYERS) * 1e6 for _ in range(9)]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--heads", nargs="+", type=int, default=[32, 48], help="value heads")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--implementations", nargs="+", default=list(NAMES), choices=NAMES)
    options = parser.parse_args()
    record = Record("delta_rule", options)
    for heads in options.heads:
        shape = DeltaShape(KEY_HEADS, heads, WIDTH, WIDTH)
        errors = {name: check(shape, name) for name in options.implementations}
        for batch in options.batch:
            for kind in options.kinds:
                for name in options.implementations:
                    times, way = (
                        measure(kind, name, shape, batch),
                        "" if name == NAMES[0] else f", implementation {name}",
                    )
                    record.add(
                        f"delta {kind} H{heads} B{batch}", f"time per layer{way}",
                        round(statistics.median(times), 1), "us", floor=round(floor_us(kind, shape, batch), 1), implementation=name,
                        spread=[round(min(times), 1), round(max(times), 1)], error_reference=errors[name],
                    )  # fmt: skip
    print(record.write())


if __name__ == "__main__":
    main()
