"""A completion as a notebook shows it: tokens coloured by where they came from, a bar where a cycle ends, acceptance as a strip."""

import itertools
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_jax.text.completion import Completion

MOST_TOKENS = 4000
MOST_CYCLES = 400
# Blue and orange differ for the colour-blind, and in lightness as well. The text's colour stands beside them, as a notebook's theme
# may be dark where the system is light. Notebooks set the text of HTML in the font of prose, code would lose its columns.
_STYLE = """<style>
.dflash pre { font-family: var(--jp-code-font-family, monospace); font-size: var(--jp-code-font-size, 13px);
  white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.5; margin: 0.5em 0 }
.dflash .d { background: #cfe3f7; color: #111 } .dflash .t { background: #f2b675; color: #111 }
.dflash .e { box-shadow: inset -2px 0 #777 } .dflash p { margin: 0.5em 0 }
.dflash .bar { display: inline-block; width: 4px; margin-right: 1px; background: #4a85bd; vertical-align: bottom }
@media (prefers-color-scheme: dark) {
  .dflash .d { background: #1f3d5c; color: #eee } .dflash .t { background: #8f5a1c; color: #eee }
}
</style>"""


def completion_html(done: "Completion") -> str:
    """HTML without scripts, everything in it escaped. Of more than 4,000 tokens the first are shown."""
    left = len(done.token_ids) - MOST_TOKENS
    more = f"<p>… {left:,} more tokens</p>" if left > 0 else ""
    legend = (
        '<span class="d">proposed by the drafter</span> <span class="t">the target\'s own</span> '
        '<span class="e">a cycle ends&nbsp;</span>'
    )
    stats = done.stats
    figures = (
        f"{len(done.token_ids):,} tokens, {stats.tokens_per_cycle:.2f} tokens per cycle, {stats.tokens_per_s:.0f} tokens/s, "
        f"ended by: {escape(done.finish_reason)}"
    )
    text = "".join(_spans(done))
    return f'{_STYLE}<div class="dflash"><pre>{text}</pre>{more}{_strip(done)}<p>{figures}</p><p>{legend}</p></div>'


def _spans(done: "Completion") -> Iterator[str]:
    """One for each token, or for several that make one character."""
    if len(done.text_ends) != len(done.token_ids):
        yield escape(done.text)
        return
    # The prompt's call gave the first token: cycle 0.
    cycles = itertools.chain([0], *([place] * count for place, count in enumerate(done.acceptance_lengths, 1)))
    of = list(itertools.islice(cycles, len(done.token_ids)))
    of += [of[-1] if of else 0] * (len(done.token_ids) - len(of))
    start, first = 0, 0
    for place, end in enumerate(done.text_ends[:MOST_TOKENS]):
        last = place + 1 == len(done.token_ids)
        if end == start and not last:
            continue
        ids = " ".join(map(str, done.token_ids[first : place + 1]))
        told = f"id {ids}, cycle {of[place]}"
        if done.logprobs is not None:
            told += f", logprob {done.logprobs[place].logprob:.2f}"
        kinds = "d" if done.from_draft[place] else "t"
        if last or of[place + 1] != of[place]:
            kinds += " e"
        yield f'<span class="{kinds}" title="{escape(told)}">{escape(done.text[start:end])}</span>'
        start, first = end, place + 1


def _strip(done: "Completion") -> str:
    """A bar for each cycle, as high as what it gained."""
    lengths = done.acceptance_lengths[:MOST_CYCLES]
    if not lengths:
        return ""
    bars = "".join(f'<span class="bar" style="height: {3 * length}px" title="{length}"></span>' for length in lengths)
    return f"<div>{bars}</div>"
