"""A text while it is made, where somebody looks: in place in a notebook, on stdout elsewhere."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from html import escape
from typing import Any

from dflash_jax.generation import STREAM_CYCLES, Writer, check_flags, check_single, make_requests
from dflash_jax.model import Model
from dflash_jax.sampling_params import SamplingParams
from dflash_jax.text.completion import Completion
from dflash_jax.text.prompts import Prompt

UPDATE_S = 0.05  # between two updates of a notebook's output


def show(
    model: Model,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    draft: bool = True,
    chat: bool = False,
    chat_options: Mapping[str, Any] | None = None,
) -> Completion | None:
    """Shows one prompt's text while it is made: in a notebook in place, with tokens coloured at the end, elsewhere on stdout.

    Args:
      as those of `generate`, for one prompt.

    Returns:
      The completion. Where an interrupt (Ctrl-C, a notebook's stop button) ended it, what there was until then, with the finish
      reason "abort"; None where there was nothing.

    Raises:
      PromptError, CapacityError, ParameterError, TokenizerError: before any work starts.
    """
    draft, chat = check_flags(model, draft, chat, chat_options)
    check_single(params, single=True)
    (request,) = make_requests(model, [prompt], params, chat=chat, chat_options=chat_options)
    run, writer = model.engine.run([request], draft=draft, cycles=STREAM_CYCLES), Writer(model, request)
    update, text, shown = _notebook(), "", 0.0
    try:
        with closing(run):
            for gained in run:
                piece = writer.write(gained)
                text += piece.text
                if update is None:
                    print(piece.text, end="", flush=True)
                elif (now := time.monotonic()) - shown >= UPDATE_S and piece.completion is None:
                    update(_plain(text))
                    shown = now
                if piece.completion is not None:
                    return _shown(piece.completion, update)
    except KeyboardInterrupt:
        return _shown(writer.so_far(), update) if writer.tokens else None
    raise AssertionError("a run ends with a completion")


def _shown(completion: Completion, update: Callable[[str], None] | None) -> Completion:
    if update is None:
        print(flush=True)
    else:
        update(completion._repr_html_())
    return completion


def _plain(text: str) -> str:
    return f'<pre style="white-space: pre-wrap">{escape(text)}</pre>'


def _notebook() -> Callable[[str], None] | None:
    """Function that replaces a notebook cell's output by HTML; None outside of a notebook."""
    if "IPython" not in sys.modules:  # a kernel has it
        return None
    from IPython import get_ipython
    from IPython.display import HTML, display

    shell = get_ipython()
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    handle = display(HTML(""), display_id=True)
    return None if handle is None else lambda html: handle.update(HTML(html))
