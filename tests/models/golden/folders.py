"""A golden folder: a small random model as transformers saves it, and `expected.npz` with its logits and residual streams."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from golden.store import FOLDER

TOKENS = 40


def write(
    name: str,
    model: torch.nn.Module,
    *,
    seed: int = 0,
    tapped: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    tokens: Sequence[tuple[int, int]] = (),
) -> dict[str, int]:
    """Draws the weights of `model`, writes `NAME_folder` and returns the size of its weights in bytes by name.

    Norms' weights are about 1, biases about 0, and matrices keep the scale.

    Args:
      tapped: what drafters read of a layer, by its index and its output; None for that, or the mean of several streams.
      tokens: that stand at some places of the text, which is random elsewhere.
    """
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in key or not tensor.is_floating_point():
                continue
            if tensor.ndim > 1:
                tensor.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
            elif "norm" in key:
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(std=0.3, generator=generator)
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (TOKENS,), generator=generator)
    for place, token in tokens:
        ids[place] = token
    taps: dict[int, torch.Tensor] = {}

    def keep(index: int, out: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        whole = (out if isinstance(out, torch.Tensor) else out[0]).detach().clone()
        stream = whole[0] if tapped is None else tapped(index, whole)[0]
        taps[index] = stream.mean(dim=1) if stream.ndim > 2 else stream  # of several streams drafters read the mean

    for index, layer in enumerate(model.get_decoder().layers):
        layer.register_forward_hook(lambda _m, _i, out, index=index: keep(index, out))
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    folder = FOLDER / f"{name}_folder"
    model.save_pretrained(folder)
    stacked = np.stack([taps[i].numpy() for i in range(len(taps))])
    np.savez_compressed(folder / "expected.npz", ids=ids.numpy(), logits=logits.numpy(), taps=stacked)
    return {f"{name}_folder": (folder / "model.safetensors").stat().st_size}
