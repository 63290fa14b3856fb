"""A curve over training steps as a picture: SVG, written by hand."""

from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 640, 320, 64, 40, 28


def curve_svg(title: str, steps: Sequence[int], values: Sequence[float]) -> str:
    """One curve with axes. Raises ValueError where there is nothing to draw."""
    if not steps or len(steps) != len(values):
        raise ValueError(f"expected as many values as steps and at least one, got {len(values)} and {len(steps)}")
    low, high = min(values), max(values)
    spread, last = (high - low) or 1.0, max(steps) or 1

    def x(step: int) -> float:
        return _LEFT + step / last * (_WIDTH - _LEFT - 16)

    def y(value: float) -> float:
        return _TOP + (high - value) / spread * (_HEIGHT - _TOP - _BOTTOM)

    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, values, strict=True))
    bottom = _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{_WIDTH - 16}" fill="none" stroke="#888"/>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value, step = low + share * spread, round(share * last)
        parts.append(f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        parts.append(f'<text x="{x(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH) / 2:.0f}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>')
    parts.append(f'<polyline points="{points}" fill="none" stroke="#0072b2" stroke-width="1.5"/>')
    return "\n".join([*parts, "</svg>", ""])
