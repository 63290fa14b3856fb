"""The same drafter through transformers' MuseGlimmerAssistant, which is DFlash under other names.

As shipped it covers full and symmetric sliding attention, grouped heads and the rotary kinds. What it has no option for
is put in: gpt-oss's softmax for sinks, Qwen3-Next's partial rotary, masks for causal blocks, biased projections.
"""

import contextlib
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
from golden.dflash_reference import Spec, Tensors, visible
from golden.recording import NAME, record_output, recorded
from torch import nn
from transformers import MuseGlimmerAssistantConfig
from transformers.cache_utils import DFlashCache
from transformers.models.muse_glimmer_assistant import modeling_muse_glimmer_assistant as muse
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
Json = Mapping[str, object]
ELSEWHERE = ("embed_tokens.weight", "lm_head.weight", "mask_embedding", "d2t")


def muse_config(sizes: Json, spec: Spec, rope: Json, taps: list[int]) -> MuseGlimmerAssistantConfig:
    """`sizes`: the keys both configs share. transformers' symmetric window admits distance W, DFlash's only W - 1."""
    windows = {window for window in spec.window if window is not None}
    config = MuseGlimmerAssistantConfig(
        **sizes,
        rope_parameters=dict(rope),
        sliding_window=windows.pop() - 1 if windows else 1,
        layer_types=["full_attention" if window is None else "sliding_attention" for window in spec.window],
        target_layer_ids=taps,
        block_size=spec.block,
        mask_token_id=spec.mask_token_id,
    )
    config._attn_implementation = NAME
    return config


def draft(
    config: MuseGlimmerAssistantConfig, spec: Spec, tensors: Tensors, inputs: Tensors, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """`context`, `context_k [L,B,C,K,H]`, each `q{i} [B,G,N,H]` and `hidden` for block embeddings `x [B,G,D]`."""
    model = muse.MuseGlimmerAssistantModel(config).float().eval()
    out: dict[str, torch.Tensor] = {}
    _load(model, spec, tensors)
    model.encoder.register_forward_hook(record_output(out, "context"))
    at, ahead = inputs["context_positions"], inputs["block_positions"]
    positions = torch.cat([at, ahead], 1)
    cache = DFlashCache(config=config)
    cache.set_previous_accepted_tokens(at.shape[1])
    with _partial_rotary(model, config, spec):
        out["hidden"] = model(
            noise_embeds=x,
            context_hidden_states=inputs["features"],
            position_ids=positions,
            past_key_values=cache,
            attention_mask=_causal_masks(config, spec, ahead, positions),
        ).last_hidden_state
    out |= {f"q{index}": recorded[index][0] for index in range(len(model.layers))}
    out["context_k"] = torch.stack([recorded[index][1][:, : at.shape[1]] for index in range(len(model.layers))])
    return out


def _load(model: nn.Module, spec: Spec, tensors: Tensors) -> None:
    own = {RENAMED.get(name, name): value for name, value in tensors.items() if name not in ELSEWHERE}
    model.encoder.fc = nn.Linear(*reversed(own["encoder.fc.weight"].shape), bias=False)
    for index, layer in enumerate(model.layers):
        attention = f"layers.{index}.self_attn."
        if (sinks := own.pop(f"{attention}attention_sink_bias", None)) is not None:
            layer.self_attn.sinks = sinks
        own[f"{attention}v_proj.weight"] = own[f"{attention}v_proj.weight"] * spec.value_scale
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            if f"{attention}{name}.bias" in own:
                rows, columns = own[f"{attention}{name}.weight"].shape
                setattr(layer.self_attn, name, nn.Linear(columns, rows))
    model.load_state_dict(own)


def _causal_masks(
    config: MuseGlimmerAssistantConfig, spec: Spec, ahead: torch.Tensor, positions: torch.Tensor
) -> dict | None:
    """None where the class's own masks apply; otherwise additive `[B,1,G,C+G]` by layer type."""
    if not any(spec.causal):
        return None
    masks = {}
    for index, kind in enumerate(config.layer_types):
        seen = visible(spec, index, ahead, positions)[:, None]
        masks[kind] = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return masks


@contextlib.contextmanager
def _partial_rotary(model: nn.Module, config: MuseGlimmerAssistantConfig, spec: Spec) -> Iterator[None]:
    if 2 * spec.inv_freq.shape[0] == spec.head_dim:
        yield
        return
    whole, width = muse.apply_rotary_pos_emb, 2 * spec.inv_freq.shape[0]

    def first_dims(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        turned = whole(q[..., :width], k[..., :width], cos, sin)
        return tuple(torch.cat([new, old[..., width:]], -1) for new, old in zip(turned, (q, k), strict=True))

    model.rotary_emb = Qwen3NextRotaryEmbedding(config)
    with mock.patch.object(muse, "apply_rotary_pos_emb", first_dims):
        yield
