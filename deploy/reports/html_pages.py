"""A report as one self-contained HTML file, with light and dark themes."""

import html
from collections.abc import Sequence

from deploy.reports.model import Block, Cell, Document, Facts, ReportTable, Shown, Timeline

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2433; --soft: #5b6475; --page: #fbfbfd; --card: #ffffff; --rule: #dfe3ea;
  --ok: #1a7f4b; --bad: #c02b33; --unclear: #8a6100; --none: #697386; --bar: #4c6fd1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --soft: #a3acbd; --page: #14171e; --card: #1c2029;
  --rule: #323947; --ok: #5cc98d; --bad: #ff7b80; --unclear: #e0b04c; --none: #98a2b5; --bar: #7c9bf2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h1.verdict { white-space: normal; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; }
p.lead { color: var(--soft); margin: .4rem 0 0; overflow-wrap: anywhere; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .8rem 1rem; }
.card + .card { margin-top: .8rem; }
.finding { border-left: 4px solid var(--bad); }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .4rem .9rem .4rem 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
td small { color: var(--soft); display: block; font-weight: 400; white-space: normal; }
.ok, .bad, .unclear, .none { font-weight: 600; white-space: nowrap; }
.ok { color: var(--ok); } .bad { color: var(--bad); } .unclear { color: var(--unclear); }
.none { color: var(--none); font-weight: 400; white-space: normal; }
.scrolled { overflow-x: auto; } .scrolled td { overflow-wrap: normal; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .3rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: .8rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .6rem; }
figcaption { color: var(--soft); font-size: .85rem; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 8px; }
svg .axis { stroke: var(--rule); } svg .band { fill: var(--bar); opacity: .15; }
svg .dot { fill: var(--bar); } svg .outside { fill: var(--bad); }
svg .line { fill: none; stroke: var(--bar); stroke-width: 2; }
footer { margin-top: 2rem; display: flex; flex-wrap: wrap; gap: 1rem; } a { color: var(--bar); }
#stale { position: sticky; bottom: 0; margin: 1rem 0 0; padding: .6rem 1rem; background: var(--bad); color: #fff; }
@media (max-width: 40rem) { .scrolled tr:first-child { display: none; } .scrolled td { border: 0; padding: 0; }
  .scrolled tr + tr { display: flex; flex-wrap: wrap; gap: 0 1rem; padding: .3rem 0; }
  .scrolled td:first-child { flex-basis: 100%; } .number::before { content: attr(data-name) " "; color: var(--soft); }
  dl { grid-template-columns: 1fr; } dt { margin-top: .3rem; } }
"""


def page(shown: Document) -> str:
    """The whole file."""
    notes = "".join(f"<li>{escaped(note)}</li>" for note in shown.notes)
    parts = [
        f'<h1 class="verdict {shown.verdict.kind}">{escaped(shown.verdict.text)}</h1>',
        f'<p class="lead">{escaped(shown.about)}</p>',
        f"<ul>{notes}</ul>" if notes else "",
        *(f"<h2>{escaped(one.title)}</h2>{_blocks(one.blocks)}" for one in shown.sections if one.blocks),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escaped(shown.title)}'
    head += f"</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body><main>{"".join(parts)}</main></body></html>\n'


def _blocks(blocks: Sequence[Block]) -> str:
    drawn = "".join(timeline(block) for block in blocks if isinstance(block, Timeline))
    rest = "".join(_block(block) for block in blocks if not isinstance(block, Timeline))
    return rest + (f'<div class="plots">{drawn}</div>' if drawn else "")


def _block(block: Block) -> str:
    if isinstance(block, Shown):
        where = f" · {escaped(block.where)}" if block.where else ""
        folded = f"<details><summary>{escaped(block.named)}</summary>{facts(block.example)}</details>"
        body = f'<b class="bad">{escaped(block.title)}</b>{where}{facts(block.facts)}{folded if block.example else ""}'
        return f'<div class="card finding">{body}</div>'
    if isinstance(block, ReportTable):
        title = f"<p>{escaped(block.title)}</p>" if block.title else ""
        return f'{title}<div class="card">{table(block)}</div>'
    return "" if isinstance(block, Timeline) else f'<div class="card">{facts(block)}</div>'


def facts(found: Facts) -> str:
    """Names with their values."""
    rows = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in found.items())
    return f"<dl>{rows}</dl>"


def table(shown: ReportTable) -> str:
    """A table; its title stands above it where the page has one."""
    kinds = [
        f' class="number" data-name="{escaped(name)}"' * (at in shown.numbers) for at, name in enumerate(shown.columns)
    ]
    head = "".join(f"<th{kind}>{escaped(name)}</th>" for kind, name in zip(kinds, shown.columns, strict=True))
    rows = ("".join(map(_cell, row, kinds)) for row in shown.cells())
    made = f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    return f'<div class="scrolled">{made}</div>' if shown.numbers else made


def _cell(cell: Cell, kind: str) -> str:
    detail = f"<small>{escaped(cell.detail)}</small>" if cell.detail else ""
    text = f'<span class="{cell.kind}">{escaped(cell.text)}</span>' if cell.kind else escaped(cell.text)
    return f"<td{kind}>{text}{detail}</td>"


def escaped(value: object) -> str:
    """Escape a value as text of the page."""
    return html.escape(str(value))


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BASE = 320, 150, 42, 314, 8, 128  # of a plot, and of the area in it


def timeline(plot: Timeline) -> str:
    """A plot as inline SVG, without a library or script; points outside of their band are marked."""
    usual = sorted(plot.band, key=lambda edges: edges[1] - edges[0])[len(plot.band) // 2]
    values = [*(value for _, value in plot.points), *usual]
    margin = 0.1 * (max(values) - min(values)) or 1.0
    low, high = min(values) - margin, max(values) + margin
    began, seconds = plot.points[0][0], (plot.points[-1][0] - plot.points[0][0]) or 1.0

    def y(value: float) -> float:
        return _TOP + (1 - (min(max(value, low), high) - low) / (high - low)) * (_BASE - _TOP)

    xs = [_LEFT + (_RIGHT - _LEFT) * (at - began) / seconds for at, _ in plot.points]
    places = [(x, y(value)) for x, (_, value) in zip(xs, plot.points, strict=True)]
    edges = list(zip(xs, plot.band, strict=True)) if len(xs) > 1 else [(_LEFT, usual), (_RIGHT, usual)]
    around = [(x, y(most)) for x, (_, most) in edges] + [(x, y(least)) for x, (least, _) in reversed(edges)]
    drawn = [f'<polygon class="band" points="{_points(around)}"/><polyline class="line" points="{_points(places)}"/>']
    for (x, height), (_, value), (least, most) in zip(places, plot.points, plot.band, strict=True):
        kind = "dot" if least <= value <= most else "dot outside"
        drawn.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{height:.1f}" r="2"/>')
    for mark in usual:
        drawn.append(f'<text x="{_LEFT - 5}" y="{y(mark) + 3:.1f}" text-anchor="end">{round(mark, 3):g}</text>')
    drawn.append(f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BASE}" y2="{_BASE}"/>')
    drawn.append(f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{escaped(plot.first)}</text>')
    drawn.append(f'<text x="{_RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{escaped(plot.last)}</text>')
    name = escaped(plot.label)
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name}">{"".join(drawn)}</svg>'
    return f"<figure>{svg}<figcaption>{name}</figcaption></figure>"


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{height:.1f}" for x, height in places)
