"""The DFlash drafter in plain torch, float32, written from its definition (arXiv 2602.06036, section 4).

Every option a published drafter uses is a field of `Spec` and one visible line below. Nothing here reads a config.json:
a case states by hand what its config must come to mean, so a wrong reading of the config shows as a wrong number.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, silu

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One drafter; `causal` and `window` are per layer, a window counts the query itself; `inv_freq [rotary / 2]`."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    inv_freq: torch.Tensor
    rope_factor: float
    mask_token_id: int
    block: int
    causal: tuple[bool, ...]
    window: tuple[int | None, ...]
    value_scale: float = 1.0
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(spec: Spec, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`x [B,S,heads,H]`, `positions [B,S]`: the first `2 * len(inv_freq)` dims turn, i with i + half; the rest stay."""
    angle = (positions[..., None].float() * spec.inv_freq)[:, :, None]
    cos, sin = angle.cos() * spec.rope_factor, angle.sin() * spec.rope_factor
    half = spec.inv_freq.shape[0]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def visible(spec: Spec, layer: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """bool `[B,T,S]` from positions `[B,T]` and `[B,S]`. All context lies before the block."""
    back = queries[:, :, None] - keys[:, None, :]
    seen = torch.ones_like(back, dtype=torch.bool)
    if spec.causal[layer]:
        seen &= back >= 0
    if (window := spec.window[layer]) is not None:
        seen &= back < window
        if not spec.causal[layer]:
            seen &= -back < window
    return seen


def project(spec: Spec, tensors: Tensors, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
    """`x [B,S,D]` through one of q_proj, k_proj, v_proj, in heads `[B,S,heads,H]`; q and k get their per-head norm."""
    prefix = f"layers.{layer}.self_attn.{name}"
    out = linear(x, tensors[f"{prefix}_proj.weight"], tensors.get(f"{prefix}_proj.bias"))
    out = out.unflatten(-1, (-1, spec.head_dim))
    return out if name == "v" else norm(out, tensors[f"{prefix}_norm.weight"], spec.eps)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """`q [B,T,N,H]`, `k, v [B,S,K,H]`; a sink is one more term exp(sink) in a head's denominator, with no value."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    weights = torch.exp(scores.masked_fill(~seen[:, None], -torch.inf))
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks)[None, :, None, None]
    return torch.einsum("bnts,bsnh->btnh", weights / total, v)


def draft(spec: Spec, tensors: Tensors, inputs: Tensors) -> dict[str, torch.Tensor]:
    """One block of every sequence; tensors by checkpoint name without the "model." some files carry.

    Inputs: `features [B,C,n*Dt]`, `context_positions [B,C]`, `pending [B]`, `block_positions [B,G]`, and the target's
    `embed [V,D]` and `head [V,D]` unless the drafter has its own.
    """
    context = norm(linear(inputs["features"], tensors["fc.weight"]), tensors["hidden_norm.weight"], spec.eps)
    at, ahead = inputs["context_positions"], inputs["block_positions"]
    embed = tensors.get("embed_tokens.weight", inputs.get("embed"))
    mask = tensors.get("mask_embedding", embed[spec.mask_token_id]).reshape(-1)
    x = torch.stack([embed[inputs["pending"]], *[mask.expand(len(at), -1)] * (spec.block - 1)], 1) * spec.embed_scale
    out = {"context": context, "block_embeddings": x}

    keys, values = [], []
    for layer in range(len(spec.causal)):
        weights = {name.removeprefix(f"layers.{layer}."): value for name, value in tensors.items()}
        keys.append(rotate(spec, project(spec, tensors, layer, "k", context), at))
        values.append(project(spec, tensors, layer, "v", context))
        h = norm(x, weights["input_layernorm.weight"], spec.eps)
        q = rotate(spec, project(spec, tensors, layer, "q", h), ahead)
        k = torch.cat([keys[-1], rotate(spec, project(spec, tensors, layer, "k", h), ahead)], 1)
        v = torch.cat([values[-1], project(spec, tensors, layer, "v", h)], 1) * spec.value_scale
        seen = visible(spec, layer, ahead, torch.cat([at, ahead], 1))
        o = attention(q, k, v, seen, weights.get("self_attn.attention_sink_bias"))
        x = x + linear(o.flatten(-2), weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias"))
        h = norm(x, weights["post_attention_layernorm.weight"], spec.eps)
        gated = silu(linear(h, weights["mlp.gate_proj.weight"])) * linear(h, weights["mlp.up_proj.weight"])
        x = x + linear(gated, weights["mlp.down_proj.weight"])
        out[f"q{layer}"] = q
    out |= {"context_k": torch.stack(keys), "context_v": torch.stack(values)}
    out["hidden"] = norm(x, tensors["norm.weight"], spec.eps)
    out["logits"] = logits(spec, tensors, out["hidden"], inputs)
    return out


def logits(spec: Spec, tensors: Tensors, hidden: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """float32 `[B,G,V]` over the target's vocabulary; tokens a reduced draft vocabulary lacks are -inf."""
    small = linear(hidden, tensors.get("lm_head.weight", inputs.get("head"))) * spec.logit_scale
    if spec.softcap is not None:
        small = spec.softcap * torch.tanh(small / spec.softcap)
    if "d2t" not in tensors:
        return small
    target = torch.arange(small.shape[-1]) + tensors["d2t"]
    return torch.full((*small.shape[:-1], int(inputs["vocab"])), -torch.inf).index_copy(-1, target, small)
