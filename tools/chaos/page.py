"""The sections that `python -m tools.chaos` writes into docs/reliability.md."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.reports.model import ReportTable
from tools import markdown
from tools.chaos.deaths import Death
from tools.chaos.run import ChaosFigures
from tools.markdown import write_section

_DEATH_COLUMNS = (
    "requests come by",
    "killed",
    "streams that ran",
    "in prefill",
    "new requests that failed",
    "all there again",
    "counted",
    "alerts",
)
_HEAD = """# Reliability

Every section below was written by the command that stands in it, with the day and the machine.
"""


def write_chaos(path: Path, figures: ChaosFigures, command: str, model: str) -> None:
    """Put what a run under fire gave into the page."""
    by_deployment = ", ".join(f"{count} {name}" for name, count in figures.kills_by_deployment.items())
    leaked = [f"{value:g} {kind.replace('_', ' ')}" for kind, value in figures.leaked.items() if value]
    rows = (
        ("requests", figures.requests),
        ("complete", figures.complete),
        ("identical to the undisturbed run (text, tokens, number of logprobs, reason)", figures.identical),
        ("tokens that came twice", figures.duplicated_tokens),
        ("tokens that were missing", figures.missing_tokens),
        ("held with nobody there", ", ".join(leaked) or "nothing"),
        ("more objects in Ray's store than before, free to be dropped", figures.unpinned_objects),
        ("replicas killed", f"{figures.kills} ({by_deployment})"),
        *([("of them with their whole node", figures.nodes_killed)] if figures.nodes_killed else []),
        ("requests that went on elsewhere", figures.resumed),
        ("prefills that failed", figures.prefill_failures),
        ("a handoff, one at a time: mean size, time from prefill to decode", _handoff(figures)),
        ("tokens streamed", figures.tokens),
        ("seconds, undisturbed and under fire", f"{figures.undisturbed_s:g} and {figures.disturbed_s:g}"),
    )
    table = markdown.table(ReportTable("", ("", ""), [(name, str(value)) for name, value in rows]))
    name, struck = (model, "Replicas") if figures.nodes == 1 else (f"{model} on {figures.nodes} nodes", "Nodes")
    body = f"""## {struck} killed under load: {name}

`{command}`, {_when_and_where()}.

{table}"""
    write_section(path, "chaos", name, body, head=_HEAD)


def write_deaths(path: Path, deaths: Sequence[Death], command: str, model: str) -> None:
    """Put the deaths of one process of each kind into the page."""
    table = markdown.table(ReportTable("", _DEATH_COLUMNS, list(map(_death_row, deaths))))
    body = f"""## One process of each kind killed: {model}

`{command}`, {_when_and_where()}.

There are a head and a node for each replica, with a proxy on each. With HAProxy, whose files and ports two nodes of one
machine would share, all is on one node. In prefill are as many whole requests, sent 3 s before, whose prompts have
1,200 words. New requests come every half second. A raylet's node and the head are started again at once, as a kubelet
does. Metrics are the application's, without `truespec_`, and Ray's of its proxies. Prometheus evaluates the alerts with
the chart's windows.

{table}"""
    write_section(path, "deaths", model, body, head=_HEAD)


def _death_row(one: Death) -> tuple[str, ...]:
    through_head = f"; {one.through_head} of them by the head's proxy" if one.through_head else ""
    failed = f"{_counts(one.failed)}, within {one.failed_for_s:g} s" if one.failed else "none"
    return (
        one.route,
        one.process,
        _counts(one.streams) + through_head,
        _counts(one.in_prefill),
        failed,
        "not within the time observed" if one.whole_s is None else f"after {one.whole_s:g} s",
        ", ".join(f"{count:g} `{name}`" for name, count in one.counted.items()) or "nothing",
        ", ".join(f"{name} ({state})" for name, state in sorted(one.alerts.items())) or "none",
    )


def _counts(results: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {result}" for result, count in sorted(results.items()))


def _handoff(figures: ChaosFigures) -> str:
    if not figures.handoff_mib:
        return "no handoffs"
    way = "within the node" if figures.nodes == 1 else "from node to node"
    return f"{figures.handoff_mib:g} MiB, {figures.handoff_transfer_ms:g} ms {way}"


def _when_and_where() -> str:
    return f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores"
