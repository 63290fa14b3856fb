"""Llama, Qwen2 and Mistral in float64 NumPy, from their papers and the keys of `config.json`; random files and weights of them."""

from typing import Any

import numpy as np

KINDS = ("Llama", "Qwen2", "Mistral")


def random_file(seed: int, **changes: Any) -> dict[str, Any]:
    """The `config.json` of a small model whose sizes and kinds of parts are drawn; kinds take turns."""
    rng, kind = np.random.default_rng(seed), KINDS[seed % 3]
    kv_heads, group, dim = (int(rng.integers(1, 4)), int(rng.integers(1, 5)), 2 * int(rng.integers(2, 7)))
    heads = kv_heads * group
    file = {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(), "vocab_size": 97, "hidden_size": dim * heads,
        "intermediate_size": int(rng.integers(20, 60)), "num_hidden_layers": 3, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "rms_norm_eps": float(rng.choice([1e-5, 1e-6])),
        "rope_theta": float(rng.choice([1e4, 5e5])), "max_position_embeddings": 512, "hidden_act": "silu",
        "tie_word_embeddings": bool(rng.integers(2)), "eos_token_id": [1, 5],
    }  # fmt: skip
    if rng.integers(2):
        file |= {"head_dim": dim + 4}
    if rng.integers(2):
        file["rope_scaling"] = {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }  # fmt: skip
    own: dict[str, dict[str, Any]] = {
        "Llama": {"attention_bias": bool(rng.integers(2)), "mlp_bias": False, "pretraining_tp": 1},
        "Qwen2": {"use_sliding_window": bool(rng.integers(2)), "sliding_window": 11, "max_window_layers": 1},
        "Mistral": {"sliding_window": 13 if rng.integers(2) else None},
    }
    return file | own[kind] | changes


def random_tensors(file: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights under their published names, with logits far enough apart for a greedy choice to be stable."""
    rng, found = np.random.default_rng(seed), dict[str, np.ndarray]()
    width, inner, vocab = file["hidden_size"], file["intermediate_size"], file["vocab_size"]
    dim, biases = _head_dim(file), _biases(file)
    rows = {"q": file["num_attention_heads"] * dim, "o": width}
    rows |= dict.fromkeys("kv", file["num_key_value_heads"] * dim)

    def draw(name: str, *shape: int, scale: float) -> None:
        found[name] = (rng.standard_normal(shape) * scale / np.sqrt(shape[-1])).astype(np.float32)

    draw("model.embed_tokens.weight", vocab, width, scale=4.0)
    for i in range(file["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for one in "qkvo":
            depth = rows["q"] if one == "o" else width
            draw(f"{layer}self_attn.{one}_proj.weight", rows[one], depth, scale=2.0)
            if one in biases:
                found[f"{layer}self_attn.{one}_proj.bias"] = (rng.standard_normal(rows[one]) * 0.3).astype(np.float32)
        for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            draw(f"{layer}mlp.{name}_proj.weight", *shape, scale=2.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{name}.weight"] = rng.uniform(0.5, 1.5, width).astype(np.float32)
    found["model.norm.weight"] = rng.uniform(0.5, 1.5, width).astype(np.float32)
    if not file["tie_word_embeddings"]:
        draw("lm_head.weight", vocab, width, scale=4.0)
    return found


def forward(file: dict[str, Any], tensors: dict[str, np.ndarray], ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[T, V]` and the residual streams after every layer `[L, T, D]`, float64."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    dim, count = _head_dim(file), len(ids)
    angles = np.arange(count)[:, None] * _frequencies(file, dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + file["rms_norm_eps"]) * w[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def turn(x: np.ndarray) -> np.ndarray:
        if not file.get("is_neox_style", True):
            a, b = x[..., ::2], x[..., 1::2]
            return np.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    apart = np.arange(count)[:, None] - np.arange(count)
    x, streams = w["model.embed_tokens.weight"][ids], []
    for i in range(file["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        y = norm(x, f"{layer}input_layernorm")
        q, k, v = (linear(y, f"{layer}self_attn.{one}_proj").reshape(count, -1, dim) for one in "qkv")
        q, k = turn(q), turn(k)
        k, v = (np.repeat(one, q.shape[1] // k.shape[1], axis=1) for one in (k, v))
        seen = (apart >= 0) & (apart < _window(file, i))
        scores = np.where(seen, np.einsum("tnh,snh->nts", q, k) / np.sqrt(dim), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v).reshape(count, -1)
        x = x + linear(heads, f"{layer}self_attn.o_proj")
        y = norm(x, f"{layer}post_attention_layernorm")
        gate, up = (linear(y, f"{layer}mlp.{one}_proj") for one in ("gate", "up"))
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{layer}mlp.down_proj")
        streams.append(x)
    head = "model.embed_tokens.weight" if file["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm") @ w[head].T, np.stack(streams)


def _head_dim(file: dict[str, Any]) -> int:
    return file.get("head_dim") or file["hidden_size"] // file["num_attention_heads"]


def _biases(file: dict[str, Any]) -> str:
    """Letters of the projections that have one."""
    return "qkv" if file["model_type"] == "qwen2" else "qkvo" if file.get("attention_bias") else ""


def _window(file: dict[str, Any], layer: int) -> float:
    """Keys that a query of a layer sees, itself included."""
    slides = file["model_type"] == "mistral" and file["sliding_window"] is not None
    slides = slides or (file.get("use_sliding_window", False) and layer >= file["max_window_layers"])
    return file["sliding_window"] if slides else np.inf


def _frequencies(file: dict[str, Any], dim: int) -> np.ndarray:
    """Llama 3's rule: long wavelengths are stretched by the factor, short ones are not, those between lie between."""
    freqs, scaling = file["rope_theta"] ** (-np.arange(0, dim, 2) / dim), file.get("rope_scaling")
    if scaling is None:
        return freqs
    turns = scaling["original_max_position_embeddings"] * freqs / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return freqs * kept + freqs / scaling["factor"] * (1 - kept)
