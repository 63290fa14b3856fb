"""Qwen3.5 and Qwen3-Next token by token in float64 NumPy, on a checkpoint's tensors under their published names.

Held against transformers by the folders in `golden/hybrid` (its logits, taps and states), so that it can judge other sizes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turn(x: np.ndarray, rope: Mapping[str, Any]) -> np.ndarray:
    """`x [T, heads, H]` with its first dims turned, halves paired."""
    half = int(x.shape[-1] * rope["partial_rotary_factor"]) // 2
    angles = np.arange(len(x))[:, None] * rope["rope_theta"] ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attend(config: Mapping[str, Any], w: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    heads, kv, dim, eps = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    )
    count, rope = len(x), config["rope_parameters"]
    both = (x @ w["q_proj.weight"].T).reshape(count, heads, 2, dim)
    k, v = ((x @ w[f"{one}_proj.weight"].T).reshape(count, kv, dim) for one in "kv")
    q = turn(norm(both[:, :, 0], 1 + w["q_norm.weight"], eps), rope)
    k = turn(norm(k, 1 + w["k_norm.weight"], eps), rope)
    k, v = (np.repeat(one, heads // kv, axis=1) for one in (k, v))
    scores = np.where(np.tri(count, dtype=bool), np.einsum("tnh,snh->nts", q, k) / np.sqrt(dim), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v) / (1 + np.exp(-both[:, :, 1]))
    return out.reshape(count, -1) @ w["o_proj.weight"].T


def delta_net(config: Mapping[str, Any], w: Mapping[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mixer's output, and the state after the last token."""
    hk, hv, dk, dv = (
        config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    count, r = len(x), hv // hk
    if "in_proj_qkvz.weight" in w:
        mixed = (x @ w["in_proj_qkvz.weight"].T).reshape(count, hk, -1)
        q, k, v, z = np.split(mixed, [dk, 2 * dk, 2 * dk + r * dv], -1)
        ba = (x @ w["in_proj_ba.weight"].T).reshape(count, hk, 2 * r)
        b, a = ba[..., :r].reshape(count, hv), ba[..., r:].reshape(count, hv)
        rows = np.concatenate([one.reshape(count, -1) for one in (q, k, v)], -1)
    else:
        rows, z, b, a = (x @ w[f"in_proj_{one}.weight"].T for one in ("qkv", "z", "b", "a"))
    conv, past = w["conv1d.weight"][:, 0], np.concatenate([np.zeros((3, rows.shape[1])), rows])
    mixed = silu(sum(past[tap : tap + count] * conv[:, tap] for tap in range(4)))
    q, k, v = np.split(mixed, [hk * dk, 2 * hk * dk], -1)
    q, k = (one.reshape(count, hk, dk) for one in (q, k))
    q, k = (np.repeat(one / np.sqrt((one**2).sum(-1, keepdims=True) + 1e-6), r, axis=1) for one in (q, k))
    v, z = v.reshape(count, hv, dv), z.reshape(count, hv, dv)
    decay = np.exp(-np.exp(w["A_log"]) * np.logaddexp(0, a + w["dt_bias"]))
    state, out = np.zeros((hv, dk, dv)), np.zeros_like(v)
    for t in range(count):
        state = state * decay[t][:, None, None]
        u = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) / (1 + np.exp(-b[t]))[:, None]
        state = state + k[t][:, :, None] * u[:, None]
        out[t] = np.einsum("hkv,hk->hv", state, q[t]) * dk**-0.5
    gated = norm(out, w["norm.weight"], config["rms_norm_eps"]) * silu(z)
    return gated.reshape(count, -1) @ w["out_proj.weight"].T, state


def feed_forward(w: Mapping[str, np.ndarray], x: np.ndarray, prefix: str = "") -> np.ndarray:
    gate, up, down = (w[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def mixture(config: Mapping[str, Any], w: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    scores = np.exp(x @ w["gate.weight"].T)
    scores /= scores.sum(-1, keepdims=True)
    shared = feed_forward(w, x, "shared_expert.") / (1 + np.exp(-x @ w["shared_expert_gate.weight"].T))
    for row, score, out in zip(x, scores, shared, strict=True):
        taken = np.argsort(-score)[: config["num_experts_per_tok"]]
        for expert in taken:
            if "experts.gate_up_proj" in w:
                gate, up = np.split(w["experts.gate_up_proj"][expert], 2)
                one = w["experts.down_proj"][expert] @ (silu(gate @ row) * (up @ row))
            else:
                one = feed_forward(w, row, f"experts.{expert}.")
            out += one * score[expert] / score[taken].sum()
    return shared


def forward(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], ids: np.ndarray
) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Logits `[T, V]`, the residual stream after each layer, and the states of the gated delta nets."""
    w = {name.removeprefix("model."): np.asarray(array, np.float64) for name, array in tensors.items()}
    eps, x, streams, states = config["rms_norm_eps"], w["embed_tokens.weight"][ids], [], []
    for i, kind in enumerate(config["layer_types"]):
        layer = f"layers.{i}."
        here = {name.removeprefix(layer): array for name, array in w.items() if name.startswith(layer)}

        def part(prefix: str, here: Mapping[str, np.ndarray] = here) -> dict[str, np.ndarray]:
            return {name.removeprefix(prefix): array for name, array in here.items() if name.startswith(prefix)}

        y = norm(x, 1 + here["input_layernorm.weight"], eps)
        if kind == "full_attention":
            x = x + attend(config, part("self_attn."), y)
        else:
            mixed, state = delta_net(config, part("linear_attn."), y)
            x = x + mixed
            states.append(state)
        y, mlp = norm(x, 1 + here["post_attention_layernorm.weight"], eps), part("mlp.")
        x = x + (mixture(config, mlp, y) if "gate.weight" in mlp else feed_forward(mlp, y))
        streams.append(x)
    head = w.get("lm_head.weight", w["embed_tokens.weight"])
    return norm(x, 1 + w["norm.weight"], eps) @ head.T, streams, states
