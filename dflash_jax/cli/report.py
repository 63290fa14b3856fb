"""Summaries of a generation in a line or two: speed, acceptance, and times."""

from collections import Counter
from collections.abc import Sequence

from dflash_jax.text.completion import Completion

_BARS = "▁▂▃▄▅▆▇█"


def acceptance_histogram(lengths: Sequence[int], longest: int, *, bars: bool = True) -> str:
    """Histogram of the cycles that gained 1, 2, ... `longest` tokens, on one line: as bars of eight heights, or as counts."""
    counts = Counter(lengths)
    most = max(counts.values(), default=0)
    if not bars:
        return "  ".join(f"{size}:{counts[size]}" for size in range(1, longest + 1))

    def bar(count: int) -> str:
        return "·" if count == 0 else _BARS[-(-count * len(_BARS) // most) - 1]

    return "  ".join(f"{size}{bar(counts[size])}" for size in range(1, longest + 1))


def mean_acceptance(completions: Sequence[Completion]) -> float:
    """Tokens gained in a cycle, over the cycles of all completions; 0 where there was none."""
    lengths = [length for completion in completions for length in completion.acceptance_lengths]
    return sum(lengths) / len(lengths) if lengths else 0.0


def tokens_per_second(completions: Sequence[Completion]) -> float:
    """Tokens after each completion's first, over the time of their device calls, for completions made one after the other."""
    tokens = sum(len(completion.token_ids) - 1 for completion in completions)
    seconds = sum(completion.stats.decode_s for completion in completions)
    return tokens / seconds if seconds else 0.0


def position_line(shares: Sequence[float]) -> str:
    """Acceptance by position in percent; empty where nothing was drafted."""
    return f"accepted drafts by position, %: {' '.join(f'{share * 100:.0f}' for share in shares)}" if shares else ""


def stats_lines(completion: Completion, longest: int, *, bars: bool = True) -> list[str]:
    """One completion's figures; the second line and the third only where a drafter was used."""
    stats, tokens = completion.stats, len(completion.token_ids)
    lines = [
        f"{tokens} tokens ({completion.finish_reason}), {stats.tokens_per_s:.0f} tokens/s, first after "
        f"{stats.time_to_first_token_s:.3f} s, compilation {stats.compile_s:.1f} s apart, seed {completion.seed}"
    ]
    if longest > 1:
        shape = acceptance_histogram(completion.acceptance_lengths, longest, bars=bars)
        lines.append(f"{stats.tokens_per_cycle:.2f} tokens per cycle: {shape}")
    if stats.acceptance_by_position:
        lines.append(position_line(stats.acceptance_by_position))
    return lines
