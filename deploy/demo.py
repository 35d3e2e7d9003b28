"""`truespec demo`: serve a real model on this machine, talk to it, and show what its metrics say."""

import json
import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from deploy.client import Answer, Client, ServiceError
from serve_app.telemetry.metric_summary import MetricSummary

QUESTION = "What is the capital of France, and what is it famous for? Answer in two sentences."
TASKS = (  # and the temperature: sampled answers are what the self-checks count
    ("Why is the sky blue?", 0.0),
    ("Write a short story about a lighthouse keeper and a storm.", 1.0),
    ("Give me five tips for learning a new language.", 0.0),
)
_MAX_TOKENS = 96
_REPLAY_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """What the demo measured. Rates are those of the service's own metrics; speeds are medians over the tasks."""

    answer: str
    acceptance_rate: float | None
    mean_accepted_length: float | None
    tokens_per_s_on: float
    tokens_per_s_off: float
    tme: float | None
    replayed_tokens: int
    verdicts: dict[str, int]  # verified, suspect, unverified
    selfcheck_terms: int  # zero-mean terms that the engines took of themselves
    selfcheck_alarms: int
    breaker_trips: int
    handoffs: int
    first_token_s: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def run_demo(client: Client, progress: Callable[[str], None], on_text: Callable[[str], None]) -> DemoFigures:
    """Ask, measure speculation on against off on the same tasks, and wait for what was answered to be checked."""
    progress(f"asking: {QUESTION}")
    answer = client.chat(QUESTION, on_text=on_text, max_tokens=_MAX_TOKENS, temperature=0)
    on_text("\n")
    on: list[Answer] = []
    off: list[Answer] = []
    for number, (task, temperature) in enumerate(TASKS, start=1):
        progress(f"measuring task {number} of {len(TASKS)}, speculation off and on")
        off.append(client.chat(task, max_tokens=_MAX_TOKENS, temperature=temperature, speculate=False))
        on.append(client.chat(task, max_tokens=_MAX_TOKENS, temperature=temperature))
    progress("waiting for the answers to be computed again and compared")
    metrics = _wait_for_replay(client)
    return DemoFigures(
        answer=answer.text,
        acceptance_rate=metrics["acceptance_rate"],
        mean_accepted_length=metrics["mean_accepted_length"],
        tokens_per_s_on=statistics.median(one.tokens_per_s for one in on),
        tokens_per_s_off=statistics.median(one.tokens_per_s for one in off),
        tme=metrics["tme"],
        replayed_tokens=int(metrics["replayed_tokens"]),
        verdicts={name: int(count) for name, count in metrics["verdicts"].items()},
        selfcheck_terms=int(metrics["selfcheck_terms"]),
        selfcheck_alarms=int(metrics["selfcheck_alarms"]),
        breaker_trips=int(metrics["breaker_trips"]),
        handoffs=int(metrics["handoffs"]),
        first_token_s=answer.first_token_s,
    )


def curl_line(client: Client) -> str:
    """A command to try by hand."""
    asked = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    settings = {"temperature": 0, "max_tokens": _MAX_TOKENS, "stream": True}
    body = json.dumps({"model": client.model_name, "messages": asked, **settings})
    url = shlex.quote(f"{client.base_url}/v1/chat/completions")
    return f"curl -N {url} -H 'content-type: application/json' -d {shlex.quote(body)}"


def _wait_for_replay(client: Client) -> MetricSummary:
    """The metrics, once no more replays are on their way.

    Raises:
        ServiceError: nothing was replayed in time.
    """
    deadline = time.monotonic() + _REPLAY_WAIT_S
    seen = -1.0
    while time.monotonic() < deadline:
        metrics = client.metrics()
        if metrics["replayed_tokens"] > 0 and metrics["replayed_tokens"] == seen:
            return metrics
        seen = metrics["replayed_tokens"]
        time.sleep(2.0)
    raise ServiceError(f"No request was replayed within {_REPLAY_WAIT_S:.0f} s; is replay.sample_rate above 0?")
