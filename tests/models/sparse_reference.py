"""DeepSeek-V3.2 and GLM-MoE-DSA in float64 NumPy, from the keys of `config.json`; random files and weights of them."""

from typing import Any

import ml_dtypes
import numpy as np

from dflash_jax.models import family_of, to_huggingface

Tensors = dict[str, np.ndarray]


def random_file(number: int) -> dict[str, Any]:
    """The `config.json` of a small model with drawn sizes; both kinds take turns, GLM's with a layer that has no indexer."""
    rng, glm = np.random.default_rng(number), number % 2 == 1
    rotary, heads = 2 * int(rng.integers(1, 5)), int(rng.integers(1, 5))
    groups = int(rng.choice([1, 2]))
    return {
        "architectures": ["GlmMoeDsaForCausalLM" if glm else "DeepseekV32ForCausalLM"], "vocab_size": 61,
        "hidden_size": int(rng.integers(20, 41)), "intermediate_size": int(rng.integers(20, 60)), "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": int(rng.integers(9, 30)),
        "kv_lora_rank": int(rng.integers(9, 30)), "qk_nope_head_dim": int(rng.integers(3, 12)), "qk_rope_head_dim": rotary,
        "v_head_dim": int(rng.integers(3, 12)), "n_routed_experts": 4 * groups, "num_experts_per_tok": 2, "n_group": groups,
        "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": int(rng.integers(8, 20)), "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7, "norm_topk_prob": True, "rms_norm_eps": float(rng.choice([1e-5, 1e-6])),
        "max_position_embeddings": 512, "index_topk": int(rng.integers(5, 40)), "index_n_heads": int(rng.integers(3, 20)),
        "index_head_dim": int(2 ** rng.integers(3, 6)), "indexer_types": ["full", "shared" if glm else "full"],
        "rope_parameters": {"rope_type": "default", "rope_theta": float(rng.choice([1e4, 1e6]))}, "num_nextn_predict_layers": 0,
    }  # fmt: skip


def random_tensors(file: dict[str, Any], seed: int) -> Tensors:
    """float32 weights under their published names."""
    rng, family = np.random.default_rng(seed), family_of(file)
    table = family.parameters(family.config(file))
    params = {}
    for row in table:
        scale = 0.3 if len(row.shape) == 1 else row.shape[-1] ** -0.5
        params[row.name] = (rng.normal(size=row.shape) * scale + (row.name.endswith("norm.weight"))).astype(np.float32)
    return {name: np.ascontiguousarray(array) for name, array in to_huggingface(table, params).items()}


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def turned(x: np.ndarray, theta: float, *, pairs: bool) -> np.ndarray:
    """`[T, ..., r]` at positions 0, 1, ...; even and odd dimensions turn together, or halves."""
    r = x.shape[-1]
    angles = np.arange(len(x))[:, None] * theta ** -(np.arange(0, r, 2) / r)
    turn = np.exp(1j * angles).reshape(len(x), *[1] * (x.ndim - 2), r // 2)
    first, second = (slice(0, None, 2), slice(1, None, 2)) if pairs else (slice(0, r // 2), slice(r // 2, None))
    z, out = (x[..., first] + 1j * x[..., second]) * turn, np.empty_like(x)
    out[..., first], out[..., second] = z.real, z.imag
    return out


def in_eight_bits(x: np.ndarray) -> np.ndarray:
    """Rows after the Hadamard transform as float8 with a scale that is a power of two keeps them."""
    matrix = np.ones((1, 1))
    while len(matrix) < x.shape[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = x @ matrix / np.sqrt(len(matrix))
    scale = np.exp2(np.ceil(np.log2(np.maximum(np.abs(x).max(-1, keepdims=True), 1e-4) / 448)))
    return (x / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def forward(file: dict[str, Any], tensors: Tensors, ids: np.ndarray, *, eight: bool) -> tuple[np.ndarray, float]:
    """Logits `[T, V]`, and the least gap between a query's last choice and its first refusal, but for those that are equal.

    `eight`: index queries and keys are kept in float8.
    """
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    n, p, r, vh = (file[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, eps, theta = file["kv_lora_rank"], file["rms_norm_eps"], file["rope_parameters"]["rope_theta"]
    heads, width, count = file["index_n_heads"], file["index_head_dim"], file["index_topk"]
    glm, t = "Glm" in file["architectures"][0], len(ids)
    x, visible, gap = w["model.embed_tokens.weight"][ids], np.zeros((t, t), bool), np.inf
    for i, kind in enumerate(file["indexer_types"]):
        at = f"model.layers.{i}."
        attn = f"{at}self_attn."
        y = rms(x, w[f"{at}input_layernorm.weight"], eps)
        q_latent = rms(y @ w[f"{attn}q_a_proj.weight"].T, w[f"{attn}q_a_layernorm.weight"], 1e-6)
        q = (q_latent @ w[f"{attn}q_b_proj.weight"].T).reshape(t, n, p + r)
        row = y @ w[f"{attn}kv_a_proj_with_mqa.weight"].T
        kv = rms(row[:, :rank], w[f"{attn}kv_a_layernorm.weight"], 1e-6) @ w[f"{attn}kv_b_proj.weight"].T
        k_nope, v = np.split(kv.reshape(t, n, p + vh), [p], axis=-1)
        if kind == "full":
            index = f"{attn}indexer."
            iq = (q_latent @ w[f"{index}wq_b.weight"].T).reshape(t, heads, width)
            ik = y @ w[f"{index}wk.weight"].T
            ik = (ik - ik.mean(-1, keepdims=True)) / np.sqrt(ik.var(-1, keepdims=True) + 1e-6)
            ik = ik * w[f"{index}k_norm.weight"] + w[f"{index}k_norm.bias"]
            iq, ik = (np.concatenate([turned(a[..., :r], theta, pairs=glm), a[..., r:]], -1) for a in (iq, ik))
            iq, ik = (in_eight_bits(a) if eight else a for a in (iq, ik))
            products = np.maximum(np.einsum("thd,sd->hts", iq, ik), 0)
            scores = np.einsum("th,hts->ts", y @ w[f"{index}weights_proj.weight"].T, products) * (heads * width) ** -0.5
            visible = np.zeros((t, t), bool)
            for own in range(t):
                order = np.argsort(-scores[own, : own + 1], kind="stable")
                visible[own, order[:count]] = True
                if own >= count and (apart := scores[own, order[count - 1]] - scores[own, order[count]]) > 0:
                    gap = min(gap, apart)
        z = np.einsum("tnp,snp->nts", q[..., :p], k_nope)
        z += np.einsum("tnr,sr->nts", turned(q[..., p:], theta, pairs=True), turned(row[:, rank:], theta, pairs=True))
        z = np.where(visible, z * (p + r) ** -0.5, -np.inf)
        a = np.exp(z - z.max(-1, keepdims=True))
        out = np.einsum("nts,snv->tnv", a / a.sum(-1, keepdims=True), v)
        x = x + out.reshape(t, -1) @ w[f"{attn}o_proj.weight"].T
        x = x + fed_forward(file, w, f"{at}mlp.", rms(x, w[f"{at}post_attention_layernorm.weight"], eps), dense=i == 0)
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T, float(gap)


def fed_forward(file: dict[str, Any], w: Tensors, at: str, x: np.ndarray, *, dense: bool) -> np.ndarray:
    def gated(at: str) -> np.ndarray:
        gate, up = (x @ w[f"{at}{name}_proj.weight"].T for name in ("gate", "up"))
        return silu(gate) * up @ w[f"{at}down_proj.weight"].T

    if dense:
        return gated(at)
    scores = 1 / (1 + np.exp(-(x @ w[f"{at}gate.weight"].T)))
    choice = scores + w[f"{at}gate.e_score_correction_bias"]
    grouped = choice.reshape(len(x), file["n_group"], -1)
    best = np.sort(grouped, -1)[..., -2:].sum(-1)
    taken = np.argsort(-best, axis=-1, kind="stable")[:, : file["topk_group"]]
    open_groups = (np.arange(file["n_group"]) == taken[..., None]).any(1)
    choice = np.where(open_groups[..., None], grouped, -np.inf).reshape(choice.shape)
    experts = np.argsort(-choice, axis=-1, kind="stable")[:, : file["num_experts_per_tok"]]
    weights = np.zeros_like(scores)
    np.put_along_axis(weights, experts, np.take_along_axis(scores, experts, 1), 1)
    weights *= file["routed_scaling_factor"] / weights.sum(-1, keepdims=True)
    routed = sum(weights[:, e, None] * gated(f"{at}experts.{e}.") for e in range(file["n_routed_experts"]))
    return routed + gated(f"{at}shared_experts.")
