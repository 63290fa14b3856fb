"""gpt-oss in float64 NumPy, from its model card and the keys of `config.json`; random files and weights of it."""

import math
from typing import Any

import numpy as np

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def random_file(seed: int, **changes: Any) -> dict[str, Any]:
    """The `config.json` of a small model whose sizes are drawn; windows and the stretched rotation act within 100 tokens."""
    rng = np.random.default_rng(seed)
    kv_heads, group, dim = int(rng.integers(1, 4)), int(rng.integers(1, 4)), 2 * int(rng.integers(3, 7))
    experts = int(rng.integers(4, 10))
    file = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": 32 * int(rng.integers(1, 3)), "num_hidden_layers": 3, "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads, "head_dim": dim, "rms_norm_eps": 1e-5, "num_local_experts": experts,
        "num_experts_per_tok": int(rng.integers(1, 4)), "sliding_window": int(rng.integers(3, 20)), "attention_bias": True,
        "layer_types": [("sliding_attention", "full_attention")[i % 2] for i in range(3)], "max_position_embeddings": 512,
        "rope_theta": float(rng.choice([1e4, 1.5e5])), "swiglu_limit": float(rng.choice([2.0, 7.0])), "hidden_act": "silu",
        "rope_scaling": {
            "rope_type": "yarn", "factor": float(rng.choice([8.0, 32.0])), "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": bool(rng.integers(2)), "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False, "eos_token_id": [1, 5],
    }  # fmt: skip
    return file | changes


def random_tensors(file: dict[str, Any], seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    """float32 weights under their published names, matrices times `scale`. At 2, greedy choices are stable and clamps act."""
    rng, found = np.random.default_rng(seed), dict[str, np.ndarray]()
    width, inner, experts = file["hidden_size"], file["intermediate_size"], file["num_local_experts"]
    heads, kv = (file[f"num_{one}_heads"] * file["head_dim"] for one in ("attention", "key_value"))

    def draw(name: str, *shape: int, times: float = 1.0, depth: int = -1) -> None:
        found[name] = (rng.standard_normal(shape) * scale * times / np.sqrt(shape[depth])).astype(np.float32)

    def biases(name: str, *shape: int) -> None:
        found[name] = (rng.standard_normal(shape) * 0.5).astype(np.float32)

    draw("model.embed_tokens.weight", file["vocab_size"], width, times=2.0)
    for i in range(file["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name, rows, depth in (("q", heads, width), ("k", kv, width), ("v", kv, width), ("o", width, heads)):
            draw(f"{layer}self_attn.{name}_proj.weight", rows, depth)
            if file["attention_bias"]:
                biases(f"{layer}self_attn.{name}_proj.bias", rows)
        biases(f"{layer}self_attn.sinks", file["num_attention_heads"])
        draw(f"{layer}mlp.router.weight", experts, width)
        biases(f"{layer}mlp.router.bias", experts)
        draw(f"{layer}mlp.experts.gate_up_proj", experts, width, 2 * inner, times=2.0, depth=1)
        draw(f"{layer}mlp.experts.down_proj", experts, inner, width, depth=1)
        biases(f"{layer}mlp.experts.gate_up_proj_bias", experts, 2 * inner)
        biases(f"{layer}mlp.experts.down_proj_bias", experts, width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{name}.weight"] = rng.uniform(0.5, 1.5, width).astype(np.float32)
    found["model.norm.weight"] = rng.uniform(0.5, 1.5, width).astype(np.float32)
    if not file["tie_word_embeddings"]:
        draw("lm_head.weight", file["vocab_size"], width, times=2.0)
    return found


def packed(tensors: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """The same with random experts in MXFP4, of about the size that they had."""
    rng, found = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, array in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = array
            continue
        experts, columns, rows = array.shape
        middle = 127 + round(math.log2(float(array.std()) / 2.9))
        found[f"{name}_blocks"] = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        found[f"{name}_scales"] = rng.integers(middle - 1, middle + 2, (experts, rows, columns // 32)).astype(np.uint8)
    return found


def unpacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts in MXFP4 as a release in floating point has them: numbers of the table times powers of two, input channels first."""
    found = dict(tensors)
    for name in [one for one in tensors if one.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        rows = mxfp4(found.pop(name), found.pop(f"{stem}_scales"))
        found[stem] = np.ascontiguousarray(rows.swapaxes(1, 2))
    return found


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """`[..., n, 16]` bytes and `[..., n]` scales to `[..., 32 n]` float32, each byte's lower half first."""
    numbers = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
    with np.errstate(over="ignore"):
        return np.ldexp(numbers, scales.astype(int)[..., None] - 127).reshape(*scales.shape[:-1], -1)


def forward(file: dict[str, Any], tensors: dict[str, np.ndarray], ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[T, V]` and the residual streams after every layer `[L, T, D]`, float64."""
    w = {name: array.astype(np.float64) for name, array in unpacked(tensors).items()}
    count, dim = len(ids), file["head_dim"]
    freqs, factor = _rotation(file, dim)
    angles = np.arange(count)[:, None] * freqs
    cos, sin = factor * np.cos(angles)[:, None], factor * np.sin(angles)[:, None]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + file["rms_norm_eps"]) * w[f"{name}.weight"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def turn(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    apart = np.arange(count)[:, None] - np.arange(count)
    x, streams = w["model.embed_tokens.weight"][ids], []
    for i, kind in enumerate(file["layer_types"]):
        layer = f"model.layers.{i}."
        y = norm(x, f"{layer}input_layernorm")
        q, k, v = (linear(y, f"{layer}self_attn.{one}_proj").reshape(count, -1, dim) for one in "qkv")
        q, k = turn(q), turn(k)
        k, v = (np.repeat(one, q.shape[1] // k.shape[1], axis=1) for one in (k, v))
        seen = (apart >= 0) & (apart < (file["sliding_window"] if kind == "sliding_attention" else np.inf))
        scores = np.exp(np.where(seen, np.einsum("tnh,snh->nts", q, k) / np.sqrt(dim), -np.inf))
        sinks = np.exp(w[f"{layer}self_attn.sinks"])[:, None, None]
        heads = np.einsum("nts,snh->tnh", scores / (scores.sum(-1, keepdims=True) + sinks), v).reshape(count, -1)
        x = x + linear(heads, f"{layer}self_attn.o_proj")
        x = x + _mixture(file, w, f"{layer}mlp.", norm(x, f"{layer}post_attention_layernorm"))
        streams.append(x)
    head = "model.embed_tokens.weight" if file["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm") @ w[head].T, np.stack(streams)


def _mixture(file: dict[str, Any], w: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    """Every expert on every token, weighted by a softmax over the best few of a token's scores."""
    scores = x @ w[f"{name}router.weight"].T + w[f"{name}router.bias"]
    least = np.sort(scores, axis=-1)[:, -file["num_experts_per_tok"]][:, None]
    weights = np.where(scores >= least, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights /= weights.sum(-1, keepdims=True)
    both = np.einsum("td,edf->etf", x, w[f"{name}experts.gate_up_proj"])
    both += w[f"{name}experts.gate_up_proj_bias"][:, None]
    limit, alpha = file["swiglu_limit"], file.get("swiglu_alpha", 1.702)
    gate, up = np.minimum(both[..., 0::2], limit), np.clip(both[..., 1::2], -limit, limit)
    inner = (up + 1) * gate / (1 + np.exp(-alpha * gate))
    out = np.einsum("etf,efd->etd", inner, w[f"{name}experts.down_proj"])
    return np.einsum("te,etd->td", weights, out + w[f"{name}experts.down_proj_bias"][:, None])


def _rotation(file: dict[str, Any], dim: int) -> tuple[np.ndarray, float]:
    """Frequencies by YaRN and the factor on both sides of a score: those that turn often stay, those that turn little slow down."""
    theta, scaling, pairs = file["rope_theta"], file["rope_scaling"], np.arange(dim // 2)
    freqs = theta ** (-2 * pairs / dim)

    def place(turns: float) -> float:
        return (
            dim * math.log(scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))
        )

    low, high = place(scaling["beta_fast"]), place(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = np.clip((pairs - low) / max(high - low, 1e-3), 0, 1)
    return freqs * (1 - slowed) + freqs / scaling["factor"] * slowed, 0.1 * math.log(scaling["factor"]) + 1
