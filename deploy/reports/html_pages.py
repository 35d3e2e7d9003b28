"""Parts of reports as one self-contained HTML file, with light and dark themes."""

import html
from collections.abc import Iterable, Mapping

from deploy.reports.model import Cell, ReportTable, Shown

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2433; --soft: #5b6475; --page: #fbfbfd; --card: #ffffff; --rule: #dfe3ea;
  --ok: #1a7f4b; --bad: #c02b33; --unclear: #8a6100; --none: #697386; --bar: #4c6fd1; --mark: #c02b33; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --soft: #a3acbd; --page: #14171e; --card: #1c2029;
  --rule: #323947; --ok: #5cc98d; --bad: #ff7b80; --unclear: #e0b04c; --none: #98a2b5; --bar: #7c9bf2;
  --mark: #ff9a9e; } }
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
td small { color: var(--soft); display: block; }
.ok, .bad, .unclear, .none { font-weight: 600; white-space: nowrap; }
.ok { color: var(--ok); } .bad { color: var(--bad); } .unclear { color: var(--unclear); }
.none { color: var(--none); font-weight: 400; white-space: normal; }
.scrolled { overflow-x: auto; } .scrolled td { overflow-wrap: normal; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .3rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre { margin: .2rem 0 0; padding: .5rem .7rem; background: var(--page); border-radius: 6px; overflow-x: auto;
  font-size: .82rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(18rem, 1fr)); gap: .8rem; }
figure { margin: 0; background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .6rem; }
figcaption { color: var(--soft); font-size: .85rem; }
svg { width: 100%; height: auto; display: block; }
svg rect { fill: var(--bar); } svg text { fill: var(--soft); font-size: 10px; }
svg .axis { stroke: var(--rule); } svg .mark { stroke: var(--mark); stroke-width: 2; }
svg .dot { fill: var(--bar); } svg .line { fill: none; stroke: var(--bar); stroke-width: 2; }
@media (max-width: 40rem) { .wide { display: none; } dl { grid-template-columns: 1fr; } dt { margin-top: .3rem; } }
"""


def document(title: str, parts: Iterable[str]) -> str:
    """The whole file; parts: of its body, as HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escaped(title)}</title>'
    body = "".join(parts)
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n'


def card(content: str, kind: str = "") -> str:
    """A framed part of the page; kind: another class of it."""
    return f'<div class="{f"card {kind}".strip()}">{content}</div>'


def facts(found: Mapping[str, object]) -> str:
    """Names with their values."""
    rows = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in found.items())
    return f"<dl>{rows}</dl>"


def table(shown: ReportTable) -> str:
    """A table; its title stands above it where the page has one."""
    kinds = [
        " ".join(name for name, places in (("number", shown.numbers), ("wide", shown.optional)) if place in places)
        for place in range(len(shown.columns))
    ]
    head = "".join(f"<th{_class(kind)}>{escaped(name)}</th>" for kind, name in zip(kinds, shown.columns, strict=True))
    rows = ("".join(map(_cell, row, kinds)) for row in shown.cells())
    made = f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"
    return f'<div class="scrolled">{made}</div>' if shown.numbers else made


def findings(found: Iterable[Shown]) -> str:
    """A framed part for each thing that was found, with a heading above them; nothing if there is none."""
    cards = ""
    for one in found:
        where = f" · {escaped(one.where)}" if one.where else ""
        body = f"{facts(one.facts)}{example(one.named, one.example)}"
        cards += card(f'<b class="bad">{escaped(one.title)}</b>{where}{body}', "finding")
    return f"<h2>Findings</h2>{cards}" if cards else ""


def example(named: str, shown: Mapping[str, object] | str) -> str:
    """An example of something that was found, folded up; nothing if there is none."""
    if not shown:
        return ""
    body = f"<pre>{escaped(shown)}</pre>" if isinstance(shown, str) else facts(shown)
    return f"<details><summary>{escaped(named)}</summary>{body}</details>"


def figures(title: str, drawn: Iterable[str]) -> str:
    """Plots beside each other, with a heading above them; nothing if there is none."""
    shown = "".join(drawn)
    return f'<h2>{title}</h2><div class="plots">{shown}</div>' if shown else ""


def _cell(cell: Cell, kind: str) -> str:
    detail = f"<small>{escaped(cell.detail)}</small>" if cell.detail else ""
    return f"<td{_class(' '.join(filter(None, (kind, cell.kind))))}>{escaped(cell.text)}{detail}</td>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def escaped(value: object) -> str:
    """Escape a value as text of the page."""
    return html.escape(str(value))
