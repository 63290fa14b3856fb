"""Draws the README's chart from measured rows: `python benchmarks/chart.py` writes docs/tokens_per_second.svg.

Tokens per second of all users in Qwen3-4B's shapes, without a drafter and with one, from `results/bench.json`. A test compares the
file with what this draws.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = ROOT / "docs" / "tokens_per_second.svg"
USERS = (1, 8, 64)
KINDS = {"alone": ("one token at a time", "#9aa5b1"), "auto": ("DFlash", "#2f7d4f")}
BAR, GAP, HEIGHT, TOP, LEFT = 78, 64, 190, 84, 40


def values(card: str = "NVIDIA H200") -> dict[tuple[int, str], float]:
    """Tokens per second by users and kind, of prompts of 512 tokens."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "bench.json").read_text(encoding="utf-8"))
    found = {
        row["case"]: row["value"] for row in rows if row["metric"] == "tokens of all users" and row["device"] == card
    }
    return {(users, kind): found[f"bench qwen3-4b in512 U{users} {kind}"] for users in USERS for kind in KINDS}


def drawn(of: dict[tuple[int, str], float], card: str = "H200") -> str:
    """The chart as SVG."""
    most, width = max(of.values()), LEFT * 2 + len(USERS) * (2 * BAR + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 52}" width="{width}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        f'<rect width="{width}" height="{TOP + HEIGHT + 52}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="28" font-size="17" font-weight="600" fill="#1f2933">Tokens per second, Qwen3-4B shapes, '
        f"one {card}, bfloat16</text>",
        f'<text x="{LEFT}" y="50" fill="#52606d">prompts of 512 tokens, 128 generated; random weights, drafting set to gain '
        "6 tokens a cycle</text>",
    ]
    for place, users in enumerate(USERS):
        x = LEFT + place * (2 * BAR + GAP)
        for offset, (kind, (_, color)) in enumerate(KINDS.items()):
            value = of[users, kind]
            tall = round(HEIGHT * value / most)
            left, top = x + offset * BAR, TOP + HEIGHT - tall
            parts.append(f'<rect x="{left}" y="{top}" width="{BAR - 6}" height="{tall}" rx="3" fill="{color}"/>')
            middle = left + (BAR - 6) / 2
            parts.append(f'<text x="{middle:g}" y="{top - 7}" text-anchor="middle" fill="#1f2933">{value:,.0f}</text>')
        label = "1 user" if users == 1 else f"{users} users"
        parts.append(
            f'<text x="{x + BAR - 3}" y="{TOP + HEIGHT + 20}" text-anchor="middle" fill="#1f2933">{label}</text>'
        )
    for place, (word, color) in enumerate(KINDS.values()):
        x = LEFT + place * 190
        parts.append(f'<rect x="{x}" y="{TOP + HEIGHT + 32}" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="{TOP + HEIGHT + 43}" fill="#1f2933">{word}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    CHART.write_text(drawn(values()), encoding="utf-8")
