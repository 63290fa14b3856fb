"""Goldens of the drafter: the plain reference and transformers' class compute every case and must agree."""

import torch
from golden import dflash_reference, muse_oracle
from golden.dflash_cases import BASE, CASES, Case
from golden.dflash_reference import Spec
from golden.store import Draw, save
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

BATCH, CONTEXT = 2, 19
AGREE = 3e-6
SHARED_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)


def write_all() -> dict[str, int]:
    """Writes every case and returns the sizes in bytes by case.

    Raises:
      ValueError: the reference and transformers differ by more than float32 rounding.
    """
    return {name: _write(name, case) for name, case in CASES.items()}


@torch.no_grad()
def _write(name: str, case: Case) -> int:
    draw = Draw(name)
    config = {key: value for key, value in (BASE | case.config).items() if value is not None}
    spec = _spec(case, config)
    tensors = {tensor: draw.weight(tensor, shape) for tensor, shape in (_shapes(case, config) | case.extra).items()}
    vocab, width = config["vocab_size"], config["hidden_size"]
    if "d2t" in tensors:
        chosen = draw.normal("chosen", (vocab,)).argsort()[: len(tensors["d2t"])].sort().values
        tensors["d2t"] = chosen - torch.arange(len(chosen))
    start = torch.tensor([[0], [31]])
    inputs = {
        "features": draw.normal("features", (BATCH, CONTEXT, len(case.taps) * config.get("target_hidden_size", width))),
        "context_positions": start + torch.arange(CONTEXT),
        "block_positions": start + CONTEXT + torch.arange(case.block),
        "pending": draw.integers("pending", (BATCH,), vocab),
        "vocab": torch.tensor(vocab),
    }
    if "embed_tokens.weight" not in tensors:
        inputs |= {
            "embed": draw.normal("embed", (vocab, width), 0.05),
            "head": draw.normal("head", (vocab, width), 0.2),
        }

    outputs = dflash_reference.draft(spec, tensors, inputs)
    shared = {key: config[key] for key in SHARED_KEYS}
    settings = muse_oracle.muse_config(shared, spec, case.rope, list(case.taps))
    muse = muse_oracle.draft(settings, spec, tensors, inputs, outputs["block_embeddings"])
    for key, value in muse.items():
        error = ((outputs[key] - value).abs().max() / value.abs().max()).item()
        if error > AGREE:
            raise ValueError(f"{name}: {key} of the reference is {error:.1e} away from transformers")
    outputs |= muse | {"logits": dflash_reference.logits(spec, tensors, muse["hidden"], inputs)}
    return save(name, config, {case.prefix + key: value for key, value in tensors.items()}, inputs, outputs)


def _spec(case: Case, config: dict[str, object]) -> Spec:
    default = Qwen3NextRotaryEmbedding.compute_default_rope_parameters
    rotary = Qwen3Config(head_dim=config["head_dim"], rope_parameters=dict(case.rope), max_position_embeddings=512)
    inv_freq, factor = ROPE_INIT_FUNCTIONS.get(case.rope["rope_type"], default)(rotary)
    return Spec(
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        eps=config["rms_norm_eps"],
        inv_freq=inv_freq,
        rope_factor=factor,
        mask_token_id=case.mask_token_id,
        block=case.block,
        **case.meaning,
    )


def _shapes(case: Case, config: dict[str, object]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors every drafter has."""
    d, f, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, k = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    shapes = {
        "fc.weight": (d, len(case.taps) * config.get("target_hidden_size", d)),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    for index in range(config["num_hidden_layers"]):
        rows = {
            "self_attn.q_proj": (q, d),
            "self_attn.k_proj": (k, d),
            "self_attn.v_proj": (k, d),
            "self_attn.o_proj": (d, q),
        }
        if config["attention_bias"]:
            shapes |= {f"layers.{index}.{name}.bias": shape[:1] for name, shape in rows.items()}
        rows |= {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
        rows |= {
            "self_attn.q_norm": (h,),
            "self_attn.k_norm": (h,),
            "input_layernorm": (d,),
            "post_attention_layernorm": (d,),
        }
        shapes |= {f"layers.{index}.{name}.weight": shape for name, shape in rows.items()}
    return shapes
