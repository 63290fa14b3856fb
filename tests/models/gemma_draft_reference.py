"""DeepSpec's drafter with layers of Gemma 4 in float64 NumPy, from the keys of `config.json`; random files and weights of it."""

from typing import Any

import numpy as np

from .gemma_reference import FULL, SLIDING, frequencies, gelu


def random_file(seed: int, **changes: Any) -> dict[str, Any]:
    """The `config.json` of a small drafter whose sizes are drawn, with the keys of the published one."""
    rng = np.random.default_rng(seed)
    kv_heads, group, drawn = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    dim, shared, layers = 4 * int(rng.integers(2, 6)), bool(seed % 2), changes.get("num_hidden_layers", drawn)
    rank = changes.get("markov_rank", int(rng.integers(3, 8)) if rng.integers(3) else 0)
    markov = {"markov_head_type": "vanilla", "confidence_head_with_markov": bool(rng.integers(2))}
    file = {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": int(rng.integers(20, 60)), "num_hidden_layers": layers, "num_attention_heads": kv_heads * group,
        "num_key_value_heads": 1 if shared else kv_heads, "num_global_key_value_heads": kv_heads if shared else 1,
        "head_dim": 2 * int(rng.integers(2, 9)), "global_head_dim": dim, "attention_k_eq_v": shared, "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh", "layer_types": [FULL] * layers, "max_position_embeddings": 512,
        "final_logit_softcapping": [None, 4.0][int(rng.integers(2))], "hidden_size_per_layer_input": 0,
        "enable_moe_block": False, "num_kv_shared_layers": 0, "sliding_window": 8, "tie_word_embeddings": False,
        "use_bidirectional_attention": "vision", "use_double_wide_mlp": False, "vocab_size_per_layer_input": 97,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": float(rng.choice([1e4, 1e6]))},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4}, "rope_type": "default", "rope_theta": None,
        },
        "block_size": int(rng.integers(3, 8)), "mask_token_id": 96, "target_layer_ids": [0, 1], "num_target_layers": 3,
        "num_anchors": 512, "enable_confidence_head": rank > 0, "markov_rank": rank, **(markov if rank else {}),
        "target_model_type": "gemma4", "target_text_model_type": "gemma4_text",
    }  # fmt: skip
    return file | changes


def random_tensors(file: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """float32 weights under DeepSpec's names."""
    rng, found = np.random.default_rng(seed), dict[str, np.ndarray]()
    v, d, f, r = file["vocab_size"], file["hidden_size"], file["intermediate_size"], file["markov_rank"]
    n, (k, h) = file["num_attention_heads"], head_shape(file)

    def draw(name: str, *shape: int, times: float = 1.0) -> None:
        found[name] = (rng.standard_normal(shape) * times / np.sqrt(shape[-1])).astype(np.float32)

    def norm(name: str, size: int, times: float = 1.0) -> None:
        found[f"{name}.weight"] = (rng.uniform(0.5, 1.5, size) * times).astype(np.float32)

    draw("embed_tokens.weight", v, d)
    draw("lm_head.weight", v, d, times=2.0)
    draw("fc.weight", d, len(file["target_layer_ids"]) * d)
    norm("hidden_norm", d)
    norm("norm", d)
    for i in range(file["num_hidden_layers"]):
        layer = f"layers.{i}."
        for name, rows in {"q": n, "k": k, **({} if file["attention_k_eq_v"] else {"v": k})}.items():
            draw(f"{layer}self_attn.{name}_proj.weight", rows * h, d)
        draw(f"{layer}self_attn.o_proj.weight", d, n * h)
        for name, shape in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
            draw(f"{layer}mlp.{name}_proj.weight", *shape)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            norm(f"{layer}{name}_layernorm", d)
        for name in ("q_norm", "k_norm"):  # scores have no scale
            norm(f"{layer}self_attn.{name}", h, 0.6)
        found[f"{layer}layer_scalar"] = rng.uniform(0.5, 1.5, 1).astype(np.float32)
    if r:
        draw("markov_head.markov_w1.weight", v, r)
        draw("markov_head.markov_w2.weight", v, r, times=3.0)
        draw("confidence_head.proj.weight", 1, d + (r if file["confidence_head_with_markov"] else 0))
        draw("confidence_head.proj.bias", 1)
    return found


def head_shape(file: dict[str, Any]) -> tuple[int, int]:
    """Key heads, and the size of all heads."""
    return file["num_global_key_value_heads" if file["attention_k_eq_v"] else "num_key_value_heads"], file[
        "global_head_dim"
    ]


def draft(
    file: dict[str, Any], tensors: dict[str, np.ndarray], features: np.ndarray, pending: int
) -> tuple[np.ndarray, list[int]]:
    """Hidden states `[G, D]` of a block after the tokens that `features [C, nD]` are of, float64, and its greedy proposals."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    n, (k, h), size, before = file["num_attention_heads"], head_shape(file), file["block_size"], len(features)
    freqs = frequencies(file["rope_parameters"][FULL], h)

    def norm(x: np.ndarray, name: str | None = None) -> np.ndarray:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + file["rms_norm_eps"])
        return x if name is None else x * w[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T

    def turn(x: np.ndarray, first: int) -> np.ndarray:
        angles, (a, b) = (first + np.arange(len(x)))[:, None, None] * freqs, np.split(x, 2, axis=-1)
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1
        )

    context = norm(linear(features.astype(np.float64), "fc"), "hidden_norm")
    ids = [pending] + [file["mask_token_id"]] * (size - 1)
    x = w["embed_tokens.weight"][ids] * np.sqrt(file["hidden_size"])
    for i in range(file["num_hidden_layers"]):
        layer, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        y = norm(x, f"{layer}input_layernorm")
        q = turn(norm(linear(y, f"{attn}q_proj").reshape(size, n, h), f"{attn}q_norm"), before)
        rows = np.concatenate([context, y])  # all that there is to see, the context first
        keys = linear(rows, f"{attn}k_proj").reshape(-1, k, h)
        values = keys if file["attention_k_eq_v"] else linear(rows, f"{attn}v_proj").reshape(-1, k, h)
        keys, values = (np.repeat(one, n // k, axis=1) for one in (turn(norm(keys, f"{attn}k_norm"), 0), norm(values)))
        scores = np.einsum("tnh,snh->nts", q, keys)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), values).reshape(size, -1)
        x = x + norm(linear(mixed, f"{attn}o_proj"), f"{layer}post_attention_layernorm")
        y = norm(x, f"{layer}pre_feedforward_layernorm")
        y = linear(gelu(linear(y, f"{layer}mlp.gate_proj")) * linear(y, f"{layer}mlp.up_proj"), f"{layer}mlp.down_proj")
        x = (x + norm(y, f"{layer}post_feedforward_layernorm")) * w[f"{layer}layer_scalar"]
    hidden, proposals, last = norm(x, "norm"), [], pending
    for logits in linear(hidden, "lm_head"):
        if cap := file["final_logit_softcapping"]:
            logits = np.tanh(logits / cap) * cap
        if file["markov_rank"]:
            logits = logits + w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][last]
        last = int(np.argmax(logits))
        proposals.append(last)
    return hidden, proposals
