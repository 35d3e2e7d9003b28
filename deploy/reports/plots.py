"""Small plots as inline SVG, without a library or script."""

import html
import math
from collections.abc import Sequence

_WIDTH, _HEIGHT = 320, 150
_LEFT, _BOTTOM, _TOP = 42, 22, 8


def histogram(values: Sequence[float], label: str, *, num_bins: int = 20) -> str:
    """A histogram of values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    width = (high - low) / num_bins or 1.0
    counts = [0] * num_bins
    for value in values:
        counts[min(num_bins - 1, max(0, int((value - low) / width)))] += 1
    return _bars(counts, [f"{low + width * index:.3g}" for index in range(num_bins)], label, f"{high:.3g}")


def log_histogram(values: Sequence[float], label: str) -> str:
    """A histogram of positive values on a log scale."""
    logs = [math.log10(max(value, 1e-9)) for value in values]
    low, high = math.floor(min(logs, default=0)), math.ceil(max(logs, default=1))
    num = max(1, 2 * (high - low))
    counts = [0] * num
    for value in logs:
        counts[min(num - 1, max(0, int((value - low) * 2)))] += 1
    names = [f"1e{low + index // 2}" if index % 2 == 0 else "" for index in range(num)]
    return _bars(counts, names, label, f"1e{high}")


def compared(observed: Sequence[float], expected: Sequence[float], label: str) -> str:
    """Observed shares as bars, with marks at the expected ones."""
    if not observed:
        return ""
    top = max([*observed, *expected]) or 1.0
    step = (_WIDTH - _LEFT - 6) / len(observed)
    marks = []
    for index, (seen, wanted) in enumerate(zip(observed, expected, strict=True)):
        left = _LEFT + step * index
        marks.append(_bar(left, step * 0.8, seen / top, f"observed {seen:.3f}, expected {wanted:.3f}"))
        height = _level(wanted / top)
        marks.append(
            f'<line class="mark" x1="{left:.1f}" x2="{left + step * 0.8:.1f}" y1="{height:.1f}" y2="{height:.1f}"/>'
        )
    return _frame("".join(marks), label, f"{top:.2f}", "", "")


def line(values: Sequence[float], label: str) -> str:
    """A line plot of values in order."""
    if not values:
        return ""
    top = max(values) or 1.0
    step = (_WIDTH - _LEFT - 6) / max(len(values) - 1, 1)
    points = " ".join(f"{_LEFT + step * i:.1f},{_level(value / top):.1f}" for i, value in enumerate(values))
    return _frame(f'<polyline class="line" points="{points}"/>', label, f"{top:.2g}", "", "")


def timeline(points: Sequence[tuple[float, float]], label: str, marks: Sequence[float], first: str, last: str) -> str:
    """A line through points (time, value), with level lines at `marks`; first, last: what the ends of the axis say."""
    values = [*(value for _, value in points), *marks]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin, high + margin
    began, seconds = points[0][0], (points[-1][0] - points[0][0]) or 1.0
    width = _WIDTH - _LEFT - 6
    places = [(_LEFT + width * (at - began) / seconds, _level((value - low) / (high - low))) for at, value in points]
    drawn = [f'<polyline class="line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>']
    drawn += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in places]
    for mark in marks:
        height = _level((mark - low) / (high - low))
        drawn.append(f'<line class="mark" x1="{_LEFT}" x2="{_WIDTH - 6}" y1="{height:.1f}" y2="{height:.1f}"/>')
        drawn.append(f'<text x="{_LEFT - 5}" y="{height + 3:.1f}" text-anchor="end">{mark:.3g}</text>')
    return _frame("".join(drawn), label, "", first, last)


def _bars(counts: Sequence[int], names: Sequence[str], label: str, last: str) -> str:
    top = max(counts) or 1
    step = (_WIDTH - _LEFT - 6) / len(counts)
    bars = [
        _bar(_LEFT + step * index, step * 0.9, count / top, f"{name}: {count}")
        for index, (count, name) in enumerate(zip(counts, names, strict=True))
    ]
    return _frame("".join(bars), label, f"{top:.0f}", names[0], last)


def _bar(left: float, width: float, share: float, title: str) -> str:
    top = _level(share)
    height = _HEIGHT - _BOTTOM - top
    shape = f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{max(height, 0):.1f}"'
    return f"<rect {shape}><title>{html.escape(title)}</title></rect>"


def _level(share: float) -> float:
    return _TOP + (1 - share) * (_HEIGHT - _BOTTOM - _TOP)


def _frame(marks: str, label: str, top: str, first: str, last: str) -> str:
    base = _HEIGHT - _BOTTOM
    axis = f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 6}" y1="{base}" y2="{base}"/>'
    texts = (
        f'<text x="{_LEFT - 5}" y="{_TOP + 9}" text-anchor="end">{html.escape(top)}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{html.escape(first)}</text>'
        f'<text x="{_WIDTH - 6}" y="{_HEIGHT - 6}" text-anchor="end">{html.escape(last)}</text>'
    )
    name = html.escape(label)
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">{marks}{axis}{texts}</svg>'
        f"<figcaption>{name}</figcaption></figure>"
    )
