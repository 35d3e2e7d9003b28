"""What the chaos and load commands write into docs/reliability.md."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.chaos.load import LoadFigures
from deploy.chaos.run import ChaosFigures
from deploy.sections import write_section

HEAD = """# Reliability

What happens when replicas die, hang, or are asked for more than they can do. The sections with figures were written by
the commands named in them, with the day and the machine.

| what goes wrong | what happens | what counts it |
|---|---|---|
| a prefill replica dies, hangs, or its handoff does not arrive | it is asked for again, at most \
`recovery.prefill_retries` times, each for at most `recovery.prefill_timeout_s`; then the decode replica computes the \
prompt itself | `truespec_prefill_failures_total` by reason |
| a handoff is damaged, cut, of another request, model, or version | it is refused, and the prompt is computed anew | \
`truespec_handoff_refusals_total` by reason |
| a decode replica dies, with a stream router in front | requests with `resume` go on on another replica | \
`truespec_resumes_total` by result |
| the same without a router, or without `resume` | the request fails: 503, or an error event once it streams | \
`truespec_requests_total{outcome="error"}` |
| an engine gives a request up, with `resume` | another replica goes on with it | the same |
| a replica is stopped (`serve deploy`, scaling down) | it takes nothing new, finishes what it has, at most \
`limits.request_timeout_s`, and ends | |
| more comes than can be served | 429 or 503 with Retry-After, at once | `truespec_requests_total{outcome="rejected"}` |

**Resuming.** `pools.router` puts a stream router before the replicas that decode; `recovery.resume: true` does so too,
and resumes requests that do not say. A request says with `"resume": true` or `false`. The router knows every token that
it has passed on. When a replica is lost, another computes prompt and tokens again and goes on after them: the client
sees a pause. No token comes twice and none is missing, inside a character, a stop string or a structure too; logprobs
that were told are not told again; every choice of `n` goes on, each on its own.

What is promised of the text: a request with `"reproducible": true` gets the text that it would have had (up to ties
closer than float32 can tell). Of any other, the law of the tokens is the same, and the text after the break may be
another one: what is drafted after it may differ, and with it where the random numbers go.

What is not promised: the router itself is one more process, and a stream ends with the router that serves it. A handoff
carries a checksum, not a signature: it tells damage from soundness, not friend from foe; see Ray's token authentication
for that.
"""


def write_chaos(path: Path, figures: ChaosFigures, command: str, model: str) -> None:
    """Put what a run under fire gave into the page."""
    rows = (
        ("requests", figures.requests),
        ("complete", figures.complete),
        ("identical to the undisturbed run (text, tokens, number of logprobs, reason)", figures.identical),
        ("tokens that came twice", figures.duplicated_tokens),
        ("tokens that were missing", figures.missing_tokens),
        ("held with nobody there", _leaked(figures)),
        ("more objects in Ray's store than before, free to be dropped", figures.unpinned_objects),
        ("replicas killed", _kills(figures)),
        ("requests that went on elsewhere", figures.resumed),
        ("prefills that failed", figures.prefill_failures),
        ("tokens streamed", figures.tokens),
        ("seconds, undisturbed and under fire", f"{figures.undisturbed_s:g} and {figures.disturbed_s:g}"),
    )
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    body = f"""## Replicas killed under load: {model}

`{command}`, {_when_and_where()}.

| | |
|---|---|
{table}"""
    write_section(path, "chaos", model, body, head=HEAD)


def write_load(path: Path, stretches: Sequence[LoadFigures], command: str, model: str) -> None:
    """Put what stretches of load gave into the page."""
    rows = "\n".join(
        f"| {one.rate_per_s:g} | {one.seconds:g} | {_statuses(one)} | {one.broken} | {one.served_per_s:g} | "
        f"{one.first_token_p50_s:g} / {one.first_token_p95_s:g} | "
        f"{one.whole_p50_s:g} / {one.whole_p95_s:g} / {one.whole_max_s:g} | "
        f"{one.memory_begin_mib:g} → {one.memory_end_mib:g} |"
        for one in stretches
    )
    body = f"""## Load beyond saturation: {model}

`{command}`, {_when_and_where()}. The first row is at the rate that the service completes when its clients never pause,
the second at twice that. Latencies are of requests that were let in.

| requests/s | s | answers | broken | served/s | first token p50 / p95, s | whole p50 / p95 / max, s | memory, MiB |
|---|---|---|---|---|---|---|---|
{rows}"""
    write_section(path, "load", model, body, head=HEAD)


def _leaked(figures: ChaosFigures) -> str:
    found = [f"{value:g} {kind.replace('_', ' ')}" for kind, value in figures.leaked.items() if value]
    return ", ".join(found) or "nothing"


def _kills(figures: ChaosFigures) -> str:
    return f"{figures.kills} ({', '.join(f'{count} {name}' for name, count in figures.kills_by_deployment.items())})"


def _statuses(one: LoadFigures) -> str:
    return ", ".join(f"{count} × {status}" for status, count in one.statuses.items())


def _when_and_where() -> str:
    return f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores"
