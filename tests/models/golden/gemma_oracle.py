"""Golden of the small Gemma 4 releases' text model: layers that share keys, and embeddings that each layer has of its own.

Experts beside dense feed-forwards and keys for values are in it as well, which no release has together.
"""

import numpy as np
import torch
from golden.store import FOLDER
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

SLIDING, FULL = "sliding_attention", "full_attention"
CONFIG = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL], "sliding_window": 9, "final_logit_softcapping": 5.0,
    "max_position_embeddings": 256, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8,
}  # fmt: skip
TOKENS = 40


def write_all() -> dict[str, int]:
    """Writes `gemma4_folder` and returns the size of its weights in bytes by name."""
    torch.manual_seed(0)
    folder = FOLDER / "gemma4_folder"
    model = Gemma4ForCausalLM(Gemma4TextConfig(**CONFIG, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.ndim == 1 and ("norm" in name or "router." in name or name.endswith("layer_scalar")):
                tensor.uniform_(0.5, 1.5)
            elif tensor.ndim > 1:
                tensor.normal_(std=tensor.shape[-1] ** -0.5)
    ids = torch.randint(0, CONFIG["vocab_size"], (TOKENS,))
    taps: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _m, _i, out, index=index: taps.update({index: out.detach().clone()[0]}))
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    model.save_pretrained(folder)
    stacked = np.stack([taps[i].numpy() for i in range(len(taps))])
    np.savez_compressed(folder / "expected.npz", ids=ids.numpy(), logits=logits.numpy(), taps=stacked)
    return {"gemma4_folder": (folder / "model.safetensors").stat().st_size}
