"""The desk that the probes of an audit share: it asks the server, and keeps every exchange for the referee."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from deploy.exchange.client import Attempt, Client, ServiceError
from deploy.exchange.prompts import read_texts
from serve_app.referee.wire.exchange import COMPLETIONS, Exchange
from serve_app.referee.wire.reply import Json
from serve_app.referee.wire.vendors import FALLBACK, dialect_of, vendor_of
from serve_app.text.tokenizer import Tokenizer

SEED = 20_261
AT_ONCE = 8
_NUM_TOP = 3  # logprobs asked for in each token's place


@dataclass
class Desk:
    """Asks one server for completions.

    Raises:
        ServiceError: no server answers, or even a plain completion fails.
    """

    server: Client
    tokenizer: Tokenizer  # of its model
    edge_nats: float  # how far rounding may move a logit there
    dialect: str = "auto"  # its vendor; "auto" = as its list of models says
    served: str | None = None  # which of its models; None = the first
    publishing_s: float = 1.1  # the longest time between updates of its metrics
    answers: list[Attempt] = field(default_factory=list)
    fields: Json = field(default_factory=dict)  # of each request, as far as the server takes them
    _kept: list[Exchange] = field(default_factory=list)
    _takes_ids: bool = True

    def __post_init__(self) -> None:
        server, served = self.server, self.served
        cards = server.models()
        if served is not None and served not in cards:
            raise ServiceError(f"{server.url} serves {', '.join(cards)}, not {served}.")
        self.model = served or next(iter(cards))
        card = cards[self.model]
        self.limit = card.get("max_model_len")
        found = dialect_of(str(card.get("owned_by"))) or FALLBACK
        self.dialect = found if self.dialect == "auto" else self.dialect
        self._takes_ids = server.post(self.body((3, 4, 5), max_tokens=1)).ok
        plain = self.body(self.passage(0, 3), max_tokens=1)
        first = server.post(plain)
        if not first.ok:
            raise ServiceError(f"{server.url} does not answer a plain completion: {first.reported()}")
        for extras in vendor_of(self.dialect).extras(COMPLETIONS, False):
            wanted = dict(extras) | ({"logprobs": _NUM_TOP} if "logprobs" in extras else {})
            if server.post(plain | wanted).ok:
                self.fields = wanted
                break
        self.reports_ids = server.post(plain | self.fields).reply.first.token_ids is not None
        self.scores_prompts = server.post(plain | self.fields | {"prompt_logprobs": 0}).ok

    # -- prompts -------------------------------------------------------------------------------------------------------

    @cached_property
    def _corpus(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode_continuation("\n\n".join(read_texts()["summarise"])))

    def passage(self, number: int, length: int) -> tuple[int, ...]:
        """Ordinary text of `length` tokens; each number begins elsewhere."""
        start = (number * 61) % len(self._corpus)
        rounds = 1 + (start + length) // len(self._corpus)
        return (self._corpus * rounds)[start : start + length]

    def loop(self, number: int) -> tuple[int, ...]:
        """Text that repeats itself, so that there is something to draft."""
        return (self.passage(number, 9 + number % 4) * 5)[:40]

    def prompt(self, number: int) -> tuple[int, ...]:
        """One of many prompts, every other one of them repetitive."""
        return self.loop(number) if number % 2 else self.passage(number, 20 + number % 23)

    def body(self, prompt: Sequence[int], **fields: Any) -> Json:
        """A completion; greedy, and of 24 tokens, unless the fields say otherwise."""
        sent = list(prompt) if self._takes_ids else self.tokenizer.decode(prompt)
        defaults = {"max_tokens": 24, "temperature": 0}
        return {"model": self.model, "prompt": sent, **defaults, **self.fields, **fields}

    # -- asking --------------------------------------------------------------------------------------------------------

    def ask(self, body: Json, *, streamed: bool = False) -> Attempt:
        """Send one request."""
        attempt = self.server.stream(body) if streamed else self.server.post(body)
        self.keep(attempt)
        return attempt

    def ask_all(self, bodies: Sequence[Json], at_once: int = AT_ONCE) -> list[Attempt]:
        """Send several, `at_once` at a time."""
        attempts = self.server.post_all(bodies, at_once)
        for one in attempts:
            self.keep(one)
        return attempts

    def keep(self, attempt: Attempt) -> None:
        """Keep an exchange for the referee, if it is an answer."""
        if not attempt.ok:
            return
        self.answers.append(attempt)
        now = time.time()
        self._kept.append(
            Exchange(
                path=attempt.path,
                request=json.dumps(attempt.body).encode(),
                reply=attempt.content,
                streamed=bool(attempt.body.get("stream")),
                began_at=now - attempt.seconds,
                ended_at=now,
                dialect=self.dialect,
            )
        )

    def take_kept(self) -> list[Exchange]:
        """Return the exchanges since the last call."""
        kept, self._kept = self._kept, []
        return kept


def ids_of(attempt: Attempt) -> tuple[int, ...]:
    """The emitted tokens; () = none, or they are not reported."""
    return tuple(attempt.reply.first.token_ids or ())


def values_of(attempt: Attempt) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """The served logprobs, nats; NaN where one is missing."""
    return np.array([np.nan if one is None else one for one in attempt.reply.first.logprobs or ()], float)


def parting(desk: Desk, first: Attempt, second: Attempt) -> str:
    """Return where two greedy answers part although rounding does not decide there; "" = they agree, or need not."""
    one, other = ids_of(first), ids_of(second)
    place = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if place is None:
        same = len(one) == len(other)
        return "" if same else f"one answer has {len(one)} tokens, the other {len(other)}"
    candidates = first.reply.first.candidates()
    if candidates is None or len(candidates) <= place or len(candidates[place]) < 2:  # they are not reported
        return ""
    likeliest, second_one = sorted((one.logprob for one in candidates[place]), reverse=True)[:2]
    margin = likeliest - second_one
    if margin <= desk.edge_nats:
        return ""
    return f"they part at token {place} ({one[place]}, {other[place]}), where the top two are {margin:.2f} nats apart"
