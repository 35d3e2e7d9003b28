"""An audit as one self-contained HTML file, with light and dark themes."""

import html
import json
from collections.abc import Iterable

from deploy.audit.blackbox import plots
from deploy.audit.blackbox.audit import Audit
from deploy.audit.blackbox.probes import Finding, Outcome, Verdict, shortened
from deploy.audit.blackbox.render import summary

_CLASSES = {Verdict.PASSED: "ok", Verdict.FAILED: "bad", Verdict.INCONCLUSIVE: "unclear", Verdict.UNSUPPORTED: "none"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2433; --soft: #5b6475; --page: #fbfbfd; --card: #ffffff; --rule: #dfe3ea;
  --ok: #1a7f4b; --bad: #c02b33; --unclear: #8a6100; --none: #697386; --bar: #4c6fd1; --mark: #c02b33; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9f0; --soft: #a3acbd; --page: #14171e; --card: #1c2029;
  --rule: #323947; --ok: #5cc98d; --bad: #ff7b80; --unclear: #e0b04c; --none: #98a2b5; --bar: #7c9bf2;
  --mark: #ff9a9e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .7rem; }
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
svg .line { fill: none; stroke: var(--bar); stroke-width: 2; }
@media (max-width: 40rem) { .wide { display: none; } dl { grid-template-columns: 1fr; } dt { margin-top: .3rem; } }
"""


def html_page(audit: Audit) -> str:
    """The whole file."""
    title = f"Audit of {audit.facts['model']}"
    verdict = '<span class="bad">findings</span>' if audit.findings else '<span class="ok">no findings</span>'
    parts = [
        f"<h1>{_text(title)}: {verdict}</h1>",
        f'<p class="lead">{_text(audit.url)}. {_text(summary(audit))}</p>',
        _findings(audit.findings),
        f"<h2>Probes</h2>{_probes(audit.outcomes)}",
        _plots(audit.outcomes),
        f"<h2>What was audited, and how</h2>{_facts(audit)}",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(title)}</title>'
    body = "".join(parts)
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>\n'


def _findings(findings: Iterable[Finding]) -> str:
    cards = [
        f'<div class="card finding"><b class="bad">{_text(", ".join(one.faults))}</b> · {_text(one.probe)}'
        f"<dl><dt>expected</dt><dd>{_text(one.expected)}</dd><dt>observed</dt><dd>{_text(one.observed)}</dd>"
        f"<dt>seen</dt><dd>{one.count} times</dd></dl>{_request(one)}</div>"
        for one in findings
    ]
    return f"<h2>Findings</h2>{''.join(cards)}" if cards else ""


def _request(finding: Finding) -> str:
    if not finding.request:
        return ""
    body = json.dumps(shortened(finding.request), ensure_ascii=False)
    return f"<details><summary>A request that shows it</summary><pre>{_text(body)}</pre></details>"


def _probes(outcomes: Iterable[Outcome]) -> str:
    rows = [
        f"<tr><td>{_text(one.probe)}<small>{_text(one.asks)}</small></td>"
        f'<td class="{_CLASSES[one.verdict]}">{_text(one.verdict)}</td><td>{_text(one.reported)}</td>'
        f'<td class="wide">{one.num_requests}</td></tr>'
        for one in outcomes
    ]
    head = '<tr><th>probe</th><th>verdict</th><th>what was seen</th><th class="wide">requests</th></tr>'
    return f'<div class="card"><table>{head}{"".join(rows)}</table></div>'


def _plots(outcomes: Iterable[Outcome]) -> str:
    drawn: list[str] = []
    for outcome in outcomes:
        series = outcome.series
        for name, values in series.items():
            if outcome.probe == "distribution of the tokens":
                drawn.append(
                    plots.histogram(
                        values, f"{name}: ranks of tokens within the distribution, uniform if correct", uniform=True
                    )
                )
            elif name == "drift, nats":
                drawn.append(plots.log_histogram(values, "logprobs: |served - recomputed|, nats"))
            elif name.endswith(": observed"):
                place = name.removesuffix(": observed")
                drawn.append(
                    plots.compared(
                        values, series[f"{place}: expected"], f"{place} of many answers: bars observed, marks expected"
                    )
                )
            elif not name.endswith(": expected"):
                drawn.append(plots.line(values, f"{outcome.probe}: {name}"))
    return f'<h2>Plots</h2><div class="plots">{"".join(drawn)}</div>' if any(drawn) else ""


def _facts(audit: Audit) -> str:
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(_reported(value))}</dd>" for name, value in audit.facts.items())
    return f'<div class="card"><dl>{rows}</dl></div>'


def _reported(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_reported(each)}" for name, each in value.items()) or "none"
    return (
        {True: "yes", False: "no", None: "unknown"}[value] if value is None or isinstance(value, bool) else str(value)
    )


def _text(value: str) -> str:
    return html.escape(str(value))
