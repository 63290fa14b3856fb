"""An attention implementation for transformers that keeps the q, k and v each layer hands to its attention."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3 import modeling_qwen3

NAME = "eager_recording"
recorded: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}


def recording_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager attention on `[B, heads, tokens, H]`, with gpt-oss's softmax where the layer was given sinks."""
    recorded[module.layer_idx] = tuple(array.transpose(1, 2).clone() for array in (query, key, value))
    source = modeling_gpt_oss if hasattr(module, "sinks") else modeling_qwen3
    return source.eager_attention_forward(module, query, key, value, mask, **options)


ALL_ATTENTION_FUNCTIONS.register(NAME, recording_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)


def record_output(outputs: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    """A forward hook that puts a module's output into `outputs` under `name`."""

    def hook(_module: torch.nn.Module, _inputs: Any, result: Any) -> None:
        outputs[name] = (result[0] if isinstance(result, tuple) else result).detach().clone()

    return hook
