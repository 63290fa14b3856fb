"""Gemma 3 and Gemma 4 in float64 NumPy, from the keys of `config.json`; random files and weights of them."""

from typing import Any

import numpy as np

SLIDING, FULL = "sliding_attention", "full_attention"


def random_file(kind: str, seed: int, **changes: Any) -> dict[str, Any]:
    """The `config.json` of a small model whose sizes are drawn; windows act within 100 tokens.

    Kinds are "gemma3", "gemma4", "gemma4_moe", and "gemma4_small", whose last layers share keys and whose layers have embeddings of
    their own.
    """
    rng = np.random.default_rng(seed)
    kv_heads, group, dim = int(rng.integers(1, 4)), int(rng.integers(1, 4)), 2 * int(rng.integers(3, 7))
    file: dict[str, Any] = {
        "architectures": [f"Gemma{kind[5]}ForCausalLM"], "model_type": f"{kind[:6]}_text", "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": int(rng.integers(20, 60)), "num_hidden_layers": 3, "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads, "head_dim": dim, "rms_norm_eps": 1e-6, "sliding_window": int(rng.integers(3, 20)),
        "layer_types": [SLIDING, SLIDING, FULL], "max_position_embeddings": 512, "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh", "eos_token_id": [1, 106],
        "final_logit_softcapping": [None, 5.0][int(rng.integers(2))],
    }  # fmt: skip
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": float(rng.choice([1e4, 1e6]))}
    if kind == "gemma3":
        file |= {"query_pre_attn_scalar": int(rng.integers(4, 20)), "attn_logit_softcapping": [None, 3.0][seed % 2]}
        full |= [{}, {"rope_type": "linear", "factor": 8.0}][int(rng.integers(2))]
    else:
        global_dim = 2 * dim if seed % 2 else dim + 4
        file |= {"attention_k_eq_v": bool(seed % 2), "global_head_dim": global_dim, "num_kv_shared_layers": 0}
        file |= {"num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0, "enable_moe_block": False}
        if kind == "gemma4_moe":
            experts = {"num_experts": int(rng.integers(4, 10)), "top_k_experts": int(rng.integers(1, 4))}
            file |= experts | {"enable_moe_block": True, "moe_intermediate_size": int(rng.integers(6, 20))}
        if kind == "gemma4_small":
            file |= {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": bool(rng.integers(2))}
            file |= {"layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "attention_k_eq_v": False}
            file |= {"hidden_size_per_layer_input": int(rng.integers(4, 9)), "vocab_size_per_layer_input": 97}
        full |= {"rope_type": "proportional", "partial_rotary_factor": 0.25 if global_dim >= 16 else 0.5}
    file["rope_parameters"] = {SLIDING: {"rope_type": "default", "rope_theta": 1e4}, FULL: full}
    return file | changes


def head_shape(file: dict[str, Any], index: int) -> tuple[int, int]:
    """Key heads and size of heads of layer `index`."""
    kv_heads, dim = file["num_key_value_heads"], file["head_dim"]
    if file["model_type"] == "gemma3_text" or file["layer_types"][index] == SLIDING:
        return kv_heads, dim
    own = file.get("num_global_key_value_heads")
    return own if own and file["attention_k_eq_v"] else kv_heads, file["global_head_dim"]


def source(file: dict[str, Any], index: int) -> int:
    """The layer whose keys layer `index` attends to."""
    own = file["num_hidden_layers"] - file.get("num_kv_shared_layers", 0)
    types = file["layer_types"]
    return index if index < own else max(i for i in range(own) if types[i] == types[index])


def random_tensors(file: dict[str, Any], seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    """float32 weights under their published names, matrices times `scale`."""
    rng, found = np.random.default_rng(seed), dict[str, np.ndarray]()
    width, inner, heads = file["hidden_size"], file["intermediate_size"], file["num_attention_heads"]
    centered = file["model_type"] == "gemma3_text"
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]

    def draw(name: str, *shape: int, times: float = 1.0) -> None:
        found[name] = (rng.standard_normal(shape) * scale * times / np.sqrt(shape[-1])).astype(np.float32)

    def norm(name: str, size: int) -> None:
        found[name] = (rng.uniform(0.5, 1.5, size) - centered).astype(np.float32)

    # Rows of about the length that the factor on embeddings makes 1.
    draw("model.embed_tokens.weight", file["vocab_size"], width, times=1.0)
    for i in range(file["num_hidden_layers"]):
        layer, (kv_heads, dim) = f"model.layers.{i}.", head_shape(file, i)
        rows = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
        if not centered and file["attention_k_eq_v"] and file["layer_types"][i] == FULL:
            del rows["v"]
        shares = source(file, i) != i
        rows = {"q": rows["q"]} if shares else rows
        wide = 2 * inner if shares and file["use_double_wide_mlp"] else inner
        for name, count in rows.items():
            draw(f"{layer}self_attn.{name}_proj.weight", count, width)
        draw(f"{layer}self_attn.o_proj.weight", width, heads * dim)
        for name, shape in (("gate", (wide, width)), ("up", (wide, width)), ("down", (width, wide))):
            draw(f"{layer}mlp.{name}_proj.weight", *shape)
        for name in norms:
            norm(f"{layer}{name}.weight", width)
        for name in ("q_norm", "k_norm")[: 1 if shares else 2]:
            norm(f"{layer}self_attn.{name}.weight", dim)
            if not centered:  # scores have no scale there
                found[f"{layer}self_attn.{name}.weight"] *= np.float32(0.6)
        if not centered:
            found[f"{layer}layer_scalar"] = rng.uniform(0.5, 1.5, 1).astype(np.float32)
        if own := file.get("hidden_size_per_layer_input"):
            draw(f"{layer}per_layer_input_gate.weight", own, width)
            draw(f"{layer}per_layer_projection.weight", width, own)
            norm(f"{layer}post_per_layer_input_norm.weight", width)
        if file.get("enable_moe_block"):
            experts, small = file["num_experts"], file["moe_intermediate_size"]
            draw(f"{layer}router.proj.weight", experts, width, times=3.0)
            draw(f"{layer}experts.gate_up_proj", experts, 2 * small, width)
            draw(f"{layer}experts.down_proj", experts, width, small)
            norm(f"{layer}router.scale", width)
            norm(f"{layer}router.per_expert_scale", experts)
            for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
                norm(f"{layer}{name}.weight", width)
    if own := file.get("hidden_size_per_layer_input"):
        rows = own * file["num_hidden_layers"]
        draw(
            "model.embed_tokens_per_layer.weight", file["vocab_size_per_layer_input"], rows, times=rows**0.5 / own**0.5
        )
        draw("model.per_layer_model_projection.weight", rows, width)
        norm("model.per_layer_projection_norm.weight", own)
    norm("model.norm.weight", width)
    if not file["tie_word_embeddings"]:
        draw("lm_head.weight", file["vocab_size"], width, times=2.0)
    return found


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def forward(file: dict[str, Any], tensors: dict[str, np.ndarray], ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[T, V]` and the residual streams after every layer `[L, T, D]`, float64."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    centered, count, heads = file["model_type"] == "gemma3_text", len(ids), file["num_attention_heads"]

    def norm(x: np.ndarray, name: str | None = None) -> np.ndarray:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + file["rms_norm_eps"])
        return x if name is None else x * (w[f"{name}.weight"] + centered)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T

    def turn(x: np.ndarray, freqs: np.ndarray) -> np.ndarray:
        angles, (a, b) = np.arange(count)[:, None, None] * freqs, np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def capped(x: np.ndarray, key: str) -> np.ndarray:
        return np.tanh(x / cap) * cap if (cap := file.get(key)) else x

    apart = np.arange(count)[:, None] - np.arange(count)
    x, streams, kept = w["model.embed_tokens.weight"][ids] * file["hidden_size"] ** 0.5, [], {}
    if own := file.get("hidden_size_per_layer_input"):
        inputs = linear(x, "model.per_layer_model_projection") * file["hidden_size"] ** -0.5
        inputs = norm(inputs.reshape(count, -1, own), "model.per_layer_projection_norm")
        rows = w["model.embed_tokens_per_layer.weight"][ids] * own**0.5
        inputs = (inputs + rows.reshape(count, -1, own)) / 2**0.5
    for i, kind in enumerate(file["layer_types"]):
        layer, (kv_heads, dim) = f"model.layers.{i}.", head_shape(file, i)
        attn, freqs = f"{layer}self_attn.", frequencies(file["rope_parameters"][kind], dim)
        y = norm(x, f"{layer}input_layernorm")
        q = turn(norm(linear(y, f"{attn}q_proj").reshape(count, heads, dim), f"{attn}q_norm"), freqs)
        if source(file, i) == i:
            k = v = linear(y, f"{attn}k_proj").reshape(count, kv_heads, dim)
            if f"{attn}v_proj.weight" in w:
                v = linear(y, f"{attn}v_proj").reshape(count, kv_heads, dim)
            kept[i] = turn(norm(k, f"{attn}k_norm"), freqs), v if centered else norm(v)
        k, v = (np.repeat(one, heads // kv_heads, axis=1) for one in kept[source(file, i)])
        seen = (apart >= 0) & (apart < (file["sliding_window"] if kind == SLIDING else np.inf))
        scores = np.einsum("tnh,snh->nts", q, k) * (file["query_pre_attn_scalar"] ** -0.5 if centered else 1.0)
        scores = np.where(seen, capped(scores, "attn_logit_softcapping"), -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), v).reshape(count, -1)
        x = x + norm(linear(mixed, f"{attn}o_proj"), f"{layer}post_attention_layernorm")
        y = norm(x, f"{layer}pre_feedforward_layernorm")
        y = linear(gelu(linear(y, f"{layer}mlp.gate_proj")) * linear(y, f"{layer}mlp.up_proj"), f"{layer}mlp.down_proj")
        if file.get("enable_moe_block"):
            scores = (
                norm(x) * w[f"{layer}router.scale"] * file["hidden_size"] ** -0.5 @ w[f"{layer}router.proj.weight"].T
            )
            z = mixture(file, w, layer, norm(x, f"{layer}pre_feedforward_layernorm_2"), scores)
            y = norm(y, f"{layer}post_feedforward_layernorm_1") + norm(z, f"{layer}post_feedforward_layernorm_2")
        x = x + norm(y, f"{layer}post_feedforward_layernorm")
        if own:
            y = gelu(linear(x, f"{layer}per_layer_input_gate")) * inputs[:, i]
            x = x + norm(linear(y, f"{layer}per_layer_projection"), f"{layer}post_per_layer_input_norm")
        x = x * w.get(f"{layer}layer_scalar", 1.0)
        streams.append(x)
    head = "model.embed_tokens.weight" if file["tie_word_embeddings"] else "lm_head.weight"
    return capped(norm(x, "model.norm") @ w[head].T, "final_logit_softcapping"), np.stack(streams)


def mixture(
    file: dict[str, Any], w: dict[str, np.ndarray], layer: str, x: np.ndarray, scores: np.ndarray
) -> np.ndarray:
    """Every expert on every token, weighted by the shares of a token's best few, which sum to 1, times each expert's scale."""
    least = np.sort(scores, axis=-1)[:, -file["top_k_experts"]][:, None]
    weights = np.where(scores >= least, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights = weights / weights.sum(-1, keepdims=True) * w[f"{layer}router.per_expert_scale"]
    gate, up = np.split(np.einsum("td,efd->etf", x, w[f"{layer}experts.gate_up_proj"]), 2, axis=-1)
    return np.einsum("te,edf,etf->td", weights, w[f"{layer}experts.down_proj"], gelu(gate) * up)


def frequencies(rope: dict[str, Any], dim: int) -> np.ndarray:
    """Of each pair of entries. Proportional: those of a whole head, and 0 past the part that turns."""
    pairs = np.arange(dim // 2)
    freqs = rope["rope_theta"] ** (-2 * pairs / dim) / rope.get("factor", 1.0)
    part = rope.get("partial_rotary_factor", 1.0) if rope["rope_type"] == "proportional" else 1.0
    return np.where(pairs < int(part * dim // 2), freqs, 0.0)
