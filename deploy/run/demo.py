"""`truespec demo`: serve a real model on this machine, check its answers, put a fault in, and measure its speed."""

import json
import shlex
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from deploy.exchange.client import Client, ServiceError
from deploy.options import api_key
from deploy.run.quiet import Others
from serve_app.referee.wire.exchange import CHAT
from serve_app.referee.wire.reply import Reply
from serve_app.telemetry.metric_summary import MetricSummary, summarise
from serve_app.text.tokenizer import Tokenizer

QUESTION = "What is the capital of France, and what is it famous for? Answer in two sentences."
_TEXT = (
    "The lighthouse stands on a small island two miles from the harbour. It was built in 1856 of granite that ships "
    "brought from the mainland, and its light can be seen from a distance of twenty miles. For more than a hundred "
    "years a keeper and his family lived beside the tower. They kept goats, grew potatoes, and waited for the boat "
    "that brought them letters every second week. Since 1971 the light has worked without a keeper, and the house is "
    "open to visitors in summer."
)
_MAX_TOKENS = 96
_ROUNDS = 6  # an even number: each answer is computed again while the next one is measured
BUSY_CORES = 0.25  # of others: beyond it, a small model's speed is theirs as much as speculation's


@dataclass(frozen=True, slots=True)
class Task:
    """A task that people ask for."""

    name: str
    prompt: str
    temperature: float = 0.0  # sampled answers are what the self-checks count


TASKS = (
    Task("an edit", f"Correct any spelling mistakes in the text below, and give the whole text again.\n\n{_TEXT}"),
    Task("a question", "Why is the sky blue?"),
    Task("a story, sampled", "Write a short story about a lighthouse keeper and a storm.", temperature=1.0),
    Task("code", "Write a Python class for a stack, with push, pop and peek, and a docstring for each."),
)


_REHEARSAL_S = 120.0
_NEXT_ANSWERS = 2  # that a client asks for while speculation is off
_REPLAY_WAIT_S = 60.0
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A streamed answer and how fast it came."""

    text: str
    num_tokens: int
    first_token_s: float
    decode_s: float  # from the first message to the last

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first message, over the time they took; 0 where there was nothing to measure."""
        return (self.num_tokens - 1) / self.decode_s if self.decode_s > 0 and self.num_tokens > 1 else 0.0


class Service:
    """A running service and the model that it serves; asked with the key of `TRUESPEC_API_KEY`, where that is set.

    tokenizer: the model's; None where that is on other machines only.
    """

    def __init__(self, base_url: str, model_name: str, tokenizer: Tokenizer | None = None) -> None:
        self.base_url = base_url
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.client = Client(base_url, api_key(), _TIMEOUT_S)

    def chat(self, content: str, *, on_text: Callable[[str], None] = lambda _: None, **options: object) -> ChatAnswer:
        """Ask one question and stream the answer. Raises ServiceError: the service refused or broke off."""
        question = {"messages": [{"role": "user", "content": content}], "stream_options": {"include_usage": True}}

        def show(said: Reply) -> None:
            if said.first.text:
                on_text(said.first.text)

        found = self.client.stream({"model": self.model_name, **question, **options}, CHAT, show)
        if not found.ok:
            raise ServiceError(f"{self.base_url}{CHAT}: {found.reported()}")
        reply = found.reply
        first_s = found.first_s or found.seconds
        return ChatAnswer(reply.first.text, reply.num_tokens or 0, first_s, max(0.0, found.last_s - first_s))

    def verdict(self, content: str) -> str:
        """The verdict on the answer to a question, once it was computed again."""
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": _MAX_TOKENS, "verify": True}
        found = self.client.post({"model": self.model_name, **body}, CHAT)
        return str(json.loads(found.content)["verdict"]) if found.ok else found.reported()

    def metrics(self) -> MetricSummary:
        """The service's own figures, summed over its replicas. Raises ServiceError: it does not report them."""
        return summarise(self.client.fetch("/metrics"))


def run_demo(
    service: Service, progress: Callable[[str], None], on_text: Callable[[str], None], admin_token: str | None = None
) -> dict[str, Any]:
    """Ask, measure speculation on against off on the same tasks, wait for what was answered to be checked, and with an
    operator's token, have a replica rehearse a fault. Returns figures for JSON; rates are the service's own metrics.
    Raises ServiceError: the service refused something, or nothing was replayed in time."""
    progress(f"asking: {QUESTION}")
    answer = service.chat(QUESTION, on_text=on_text, max_tokens=_MAX_TOKENS, temperature=0)
    on_text("\n")
    # Without speculation and with it.
    answers: dict[str, list[tuple[ChatAnswer, ChatAnswer]]] = {task.name: [] for task in TASKS}
    others = Others()
    for number in range(1, _ROUNDS + 1):
        progress(f"measuring {len(TASKS)} tasks with speculation off and on, round {number} of {_ROUNDS}")
        for task in TASKS:
            ask = partial(service.chat, task.prompt, max_tokens=_MAX_TOKENS, temperature=task.temperature)
            on_first = ask() if number % 2 == 0 else None
            answers[task.name].append((ask(speculate=False), on_first or ask()))
    others_cores = others.cores()
    progress("waiting for the answers to be computed again and compared")
    metrics, seen, deadline = service.metrics(), -1.0, time.monotonic() + _REPLAY_WAIT_S
    while not 0 < metrics["replayed_tokens"] == seen:
        if time.monotonic() > deadline:
            raise ServiceError(f"No request was replayed within {_REPLAY_WAIT_S:.0f} s; is replay.sample_rate above 0?")
        seen = metrics["replayed_tokens"]
        time.sleep(2.0)
        metrics = service.metrics()
    verdicts = {name: int(count) for name, count in metrics["verdicts"].items()}
    counted = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in verdicts.items() if count)
    on_text(f"\nAnswers computed again without speculation: {counted}.\n\n")
    return {
        "answer": answer.text,
        "acceptance_rate": metrics["acceptance_rate"],
        "mean_accepted_length": metrics["mean_accepted_length"],
        "tasks": [_speed(name, pairs) for name, pairs in answers.items()],
        "tme": metrics["tme"],
        "replayed_tokens": int(metrics["replayed_tokens"]),
        "verdicts": verdicts,
        "selfcheck_terms": int(metrics["selfcheck_terms"]),
        "selfcheck_alarms": int(metrics["selfcheck_alarms"]),
        "first_token_s": answer.first_token_s,
        # What found it and when, and what came after; None = there was no rehearsal.
        "fault": None if admin_token is None else _rehearse(service, admin_token, progress, on_text),
        "others_cores": others_cores,  # that others than the demo used while it measured; None where it is not known
    }


def _rehearse(
    service: Service, admin_token: str, progress: Callable[[str], None], on_text: Callable[[str], None]
) -> dict[str, Any]:
    """Put a fault in, and report what becomes of it. Raises ServiceError: the service refused, or the rehearsal does
    not end."""
    on_text(
        "Now a known fault is put into the running service, in requests of its own: of each round, the first draft is\n"
    )
    on_text("committed although verification has rejected it.\n")
    with Client(service.base_url, admin_token, _TIMEOUT_S) as operator:
        ordered = operator.post({}, "/admin/rehearsal")
        if not ordered.ok:
            raise ServiceError(f"{service.base_url}/admin/rehearsal: {ordered.reported()}")
        rehearsed = _wait_for(operator, lambda one: one["rehearsal"]["state"] != "running")["rehearsal"]
        if rehearsed["state"] != "found":
            on_text(f"  {rehearsed['state']} after {rehearsed['num_tokens']} tokens; the status page says more\n\n")
            return dict(rehearsed)
        found_s = rehearsed["found_at"] - rehearsed["began_at"]
        after = f"{rehearsed['num_tokens']} tokens and {found_s:.1f} s"
        on_text(f"  found     by the check of {rehearsed['found_by']}, after {after}\n")
        on_text("  off       speculation on this replica\n")
        verdicts = [service.verdict(task.prompt) for task in TASKS[:_NEXT_ANSWERS]]
        on_text(f"  answered  the next questions of a client: {', '.join(verdicts)}\n")
        progress("waiting until requests of the replica's own have shown that speculation is right again")
        back_s = _wait_for(operator, lambda one: one["breaker"] == "closed")["since"] - rehearsed["found_at"]
    on_text(f"  on        speculation, after {back_s:.1f} s\n  shown     on {service.base_url}/ while it runs\n\n")
    return {**rehearsed, "verdicts": verdicts, "back_s": back_s}


def _wait_for(operator: Client, ready: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The status of the replica that rehearses, once it has come so far. Raises ServiceError."""
    deadline = time.monotonic() + _REHEARSAL_S
    while time.monotonic() < deadline:
        for one in json.loads(operator.fetch("/admin/speculation"))["replicas"]:
            if one["rehearsal"] is not None and ready(one):
                return dict(one)
        time.sleep(0.5)
    raise ServiceError("The rehearsal does not come to its end; the replica's log says why.")


def curl_line(service: Service) -> str:
    """A command to try by hand: a question, or the beginning of a text for a model that has no chat template."""
    chats = service.tokenizer is None or bool(service.tokenizer.chat_template().source)
    asked: dict[str, object] = {"prompt": "The capital of France is"}
    if chats:
        asked = {"messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]}
    settings = {"temperature": 0, "max_tokens": _MAX_TOKENS, "stream": True}
    body = json.dumps({"model": service.model_name, **asked, **settings})
    url = shlex.quote(f"{service.base_url}/v1/{'chat/' if chats else ''}completions")
    return f"curl -N {url} -H 'content-type: application/json' -d {shlex.quote(body)}"


def _speed(name: str, pairs: Sequence[tuple[ChatAnswer, ChatAnswer]]) -> dict[str, Any]:
    """Medians of a task, and the least and most of its rounds; a ratio is 0 where nothing was measured."""
    off, on = (statistics.median(pair[which].tokens_per_s for pair in pairs) for which in (0, 1))
    ratios = [_ratio(without.tokens_per_s, withit.tokens_per_s) for without, withit in pairs]
    speeds = {"tokens_per_s_off": off, "tokens_per_s_on": on, "ratio": _ratio(off, on)}
    return {"task": name, **speeds, "least_ratio": min(ratios), "most_ratio": max(ratios)}


def _ratio(off: float, on: float) -> float:
    return on / off if off else 0.0
