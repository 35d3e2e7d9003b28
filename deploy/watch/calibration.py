"""Measures what rounding does to a server: the next token's distribution after many prompts, against float32.

Each request asks for one token, so nothing is drafted: what differs is arithmetic and the form of the weights, not
speculation. With s the server's probabilities of its k likeliest tokens and p those of `transformers` in float32, per
prompt:

    drift         |log s - log p| of a token, weighted by s, as if it had been drawn
    edge          |(log s - log s_1) - (log p - log p_1)|, what a logit moved against the likeliest token's
    log odds      mean of log odds(p) - log odds(s), weighted by s: what rounding adds to the mean of their moves
    probability   sum (s - p) p            what rounding adds to the mean of p(y) - sum p^2
    surprisal     sum (s - p)(-log p)      what it adds to the mean of the surprisal minus the entropy

Drift and edge count twice, since prompts, lengths and batches that were not measured round otherwise.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deploy.exchange.client import Attempt, Client, ServiceError
from deploy.exchange.prompts import KINDS, read_texts
from deploy.reports.progress import View
from serve_app.referee.book.transformers_model import TransformersModel
from serve_app.referee.judge.shift import move_of_log_odds
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.wire.reply import Candidate
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError
from speculative.request import SURPRISAL_CLIP_NATS

_SEED = 20_261
_LONGEST = 512  # tokens of a prompt
_TOP = 20
_LIKELY = 1e-3  # tokens that a sampled answer holds
_FEWEST = 8  # prompts that have to be answered
_MODE_PROMPTS = 12
_HALF = 0.5  # temperature at which logprobs before and after it differ
_SPREAD = 4.0  # standard errors that the mean shift may be off by
_ROOM = 2.0  # times what was measured
_LEAST = replace(Tolerance.against_float32("float32"), distribution=0.005)
_KEPT_SHARE = 0.999
_OTHER_TME = 1.5  # beyond which logprobs are not these weights', rounded: 8 bits have 1.2 at most
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class _Compared:
    """One prompt: of the server's likeliest tokens log s and log p, nats, the likeliest first."""

    served: Floats
    exact: Floats

    @property
    def weights(self) -> Floats:
        """Return how often each is drawn; tokens that are not known count as the less likely half of those that are."""
        weights: Floats = np.exp(self.served)
        less_likely = np.arange(len(weights)) >= len(weights) // 2
        weights[less_likely] += max(0.0, 1 - weights.sum()) / less_likely.sum()
        return weights

    @property
    def edges(self) -> Floats:
        """Return how far logits moved against that of the likeliest token, of tokens that are drawn now and then."""
        moved: Floats = np.abs((self.served - self.served[0]) - (self.exact - self.exact[0]))
        likely: Floats = moved[np.exp(self.served) >= _LIKELY]
        return likely

    @property
    def move(self) -> float:
        """Return how far log odds moved, on average over what is drawn."""
        moves = [move_of_log_odds(*one) for one in zip(self.served.tolist(), self.exact.tolist(), strict=True)]
        return float(np.average(moves, weights=self.weights))

    @property
    def nats(self) -> float:
        """Return how far logprobs moved, on average over what is drawn."""
        return float(np.average(self.exact - self.served, weights=self.weights))

    @property
    def shifts(self) -> tuple[float, float]:
        """Return what rounding adds to the two terms, as far as the likeliest tokens show."""
        s, p = np.exp(self.served), np.exp(self.exact)
        surprisals = np.minimum(-self.exact, SURPRISAL_CLIP_NATS)
        rest = (1 - s.sum()) - (1 - p.sum())  # of the other tokens, which are all unlikely
        far = float(surprisals.max())
        return float(((s - p) * p).sum()), float(((s - p) * surprisals).sum() + rest * far) / SURPRISAL_CLIP_NATS


def calibrate(
    url: str, folder: Path, served: str | None, num_prompts: int, api_key: str | None = None, view: View | None = None
) -> Tolerance:
    """Ask a server, and return the tolerance that its arithmetic needs. Raises ConfigError: the server reports no
    logprobs of its likeliest tokens, or they are not those of these weights."""
    view = view or View()
    tokenizer = Tokenizer.from_folder(folder)
    with Client(url, api_key) as server:
        desk = _Desk(server, served, tokenizer)
        view.stage("loading the model")
        model = TransformersModel(folder)
        prompts = list(_prompts(tokenizer, num_prompts, model.max_model_len - 1))
        processed = desk.is_processed(prompts[:_MODE_PROMPTS], model)
        view.stage("comparing next tokens")
        compared = []
        for number, prompt in enumerate(prompts, start=1):
            compared.append(desk.compare(prompt, model))
            view.count(number, len(prompts), "prompts")
    return _tolerance([one for one in compared if one is not None], processed, desk)


def _prompts(tokenizer: Tokenizer, number: int, longest: int) -> Iterator[tuple[int, ...]]:
    """Beginnings of conversations, or of texts where the model has no chat template, of 8 to 512 tokens."""
    known = read_texts()
    texts = [text for kind in KINDS for text in known[kind]]
    is_chat = bool(tokenizer.chat_template().source)
    draw = random.Random(_SEED)
    for _ in range(number):
        ids: list[int] = []
        for text in draw.sample(texts, 4):
            turn = [{"role": "user", "content": text}]
            encode = tokenizer.encode_continuation if ids else tokenizer.encode
            ids += tokenizer.encode_chat(turn) if is_chat else encode(text)
        yield tuple(ids[: draw.randint(8, min(_LONGEST, longest, len(ids)))])


class _Desk:
    """Asks one server for the distribution of one token."""

    def __init__(self, server: Client, served: str | None, tokenizer: Tokenizer) -> None:
        self._server = server
        self._tokenizer = tokenizer
        self.takes_ids = True
        self._extra: dict[str, Any] = {"return_tokens_as_token_ids": True, **_NEUTRAL}
        try:
            self.model = served or next(iter(server.models()))
        except ServiceError as error:
            raise ConfigError(f"{error}: start the server, or say with --served which model to ask.") from error
        self._settle()

    def _settle(self) -> None:
        """Find out which of the fields the server takes."""
        for takes_ids in (True, False):
            self.takes_ids = takes_ids
            while True:
                reply = self._ask((3, 4, 5, 6) if takes_ids else self._text((3, 4, 5, 6)), 1.0)
                refused = next((name for name in self._extra if name in reply.error), None)
                if reply.ok or refused is None:
                    break
                del self._extra[refused]
            if reply.ok:
                break
        if not reply.ok:
            raise ConfigError(f"{self._server.url} does not answer a completion with logprobs: {reply.reported()}")
        if not _top(reply):
            raise ConfigError(
                f"{self._server.url} reports no logprobs of its likeliest tokens, so that its rounding cannot be "
                "measured; give the referee --precision."
            )

    def _ask(self, prompt: Sequence[int] | str, temperature: float) -> Attempt:
        asked = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": self.model, "prompt": asked, "max_tokens": 1, "temperature": temperature, "logprobs": _TOP}
        return self._server.post(body | self._extra)

    def _text(self, prompt: Sequence[int]) -> str:
        """A text that begins like these ids; its own ids may be others at the end."""
        own = self._tokenizer.prefix_ids  # the server adds them itself
        return self._tokenizer.decode(
            prompt[len(own) :] if tuple(prompt[: len(own)]) == own else prompt, skip_special=False
        )

    def _row(self, prompt: tuple[int, ...], temperature: float) -> tuple[tuple[int, ...], dict[int, float]]:
        """The prompt as the server took it; logprobs of the likeliest tokens by id, {} where it gave none."""
        sent = prompt if self.takes_ids else self._text(prompt)
        prompt = sent if not isinstance(sent, str) else tuple(self._tokenizer.encode(sent))
        reply = self._ask(sent, temperature)
        counted = reply.reply.num_prompt
        top = _top(reply) if counted in (None, len(prompt)) else []
        by_text = self._tokenizer.ids_by_text
        known = [(by_text.get(one.text) if one.token_id is None else one.token_id, one.logprob) for one in top]
        found = {token: value for token, value in known if token is not None and math.isfinite(value)}
        return prompt, dict(sorted(found.items(), key=lambda one: -one[1])[:_TOP])

    def is_processed(self, prompts: Sequence[tuple[int, ...]], model: TransformersModel) -> bool:
        """Return whether the server's logprobs are those after the temperature."""
        off = {1.0: 0.0, _HALF: 0.0}
        for prompt in prompts:
            taken, row = self._row(prompt, _HALF)
            logits = _logits(model, taken)
            for temperature in off:
                exact = _logprobs(logits / temperature)
                off[temperature] += float(sum(abs(value - exact[token]) for token, value in row.items()))
        return off[_HALF] < off[1.0]

    def compare(self, prompt: tuple[int, ...], model: TransformersModel) -> _Compared | None:
        """The server's likeliest tokens after a prompt, and what float32 gives them."""
        taken, row = self._row(prompt, 1.0)
        if not row:
            return None
        exact = _logprobs(_logits(model, taken))
        return _Compared(np.array(list(row.values())), exact[list(row)])


def _logits(model: TransformersModel, prompt: Sequence[int]) -> Floats:
    row: Floats = model.logits((*prompt, 0), len(prompt))[0].double().numpy()
    return row


def _logprobs(logits: Floats) -> Floats:
    above: Floats = logits - logits.max()
    values: Floats = above - np.log(np.exp(above).sum())
    return values


def _top(attempt: Attempt) -> Sequence[Candidate]:
    """The likeliest tokens in the place of a reply's first one."""
    return next(iter(attempt.reply.first.candidates() or ()), ())


def _tolerance(compared: Sequence[_Compared], processed: bool, desk: _Desk) -> Tolerance:
    """The tolerance for what was measured, with room for what was not."""
    if len(compared) < _FEWEST:
        raise ConfigError(
            f"{desk.model} answered {len(compared)} prompts as was asked, too few to measure its rounding: it refuses "
            "them, or its tokenizer is not that of --model."
        )
    weights = np.concatenate([one.weights for one in compared])
    moved = np.concatenate([one.exact - one.served for one in compared])
    drifts = np.abs(moved)
    edges = np.concatenate([one.edges for one in compared])
    tme = float((weights * np.exp(np.minimum(drifts, 10.0))).sum() / weights.sum())
    largest = _quantile(drifts, weights, _KEPT_SHARE)
    shifts = np.array([one.shifts for one in compared])
    means, errors = shifts.mean(0), shifts.std(0, ddof=1) / math.sqrt(len(shifts))
    moves = np.array([one.move for one in compared])
    apart = np.clip(moved, -10.0, 10.0)
    k3 = np.expm1(apart) - apart  # of each token, p / s - log(p / s) - 1
    if tme > _OTHER_TME or largest > SURPRISAL_CLIP_NATS / 2:
        raise ConfigError(
            f"The logprobs of {desk.model} are not those of --model, rounded: their TME is {tme:.3g}, and one in a "
            f"thousand is {largest:.2g} nats off. It serves other weights, or reports something else."
        )
    return Tolerance(
        max_tme=max(_LEAST.max_tme, 1 + _ROOM * (tme - 1)),
        edge_nats=max(_LEAST.edge_nats, _ROOM * float(np.quantile(edges, _KEPT_SHARE))),
        distribution=max(_LEAST.distribution, float((np.abs(means) + _SPREAD * errors).max())),
        jump_nats=max(_LEAST.jump_nats, _ROOM * largest),
        shift_nats=max(
            _LEAST.shift_nats,
            abs(float(moves.mean())) + _ROOM * float(moves.std(ddof=1)),
            4 * _ROOM * abs(float(np.mean([one.nats for one in compared]))),  # of which a test allows a quarter
        ),
        processed=processed,
        source=f"measured by {len(compared)} prompts",
        measured={
            "model": desk.model,
            "prompts": len(compared),
            "prompts_as": "token ids" if desk.takes_ids else "text",
            "tme": tme,
            "gen_kl": float((weights * k3).sum() / weights.sum()),
            "drift_nats_median": _quantile(drifts, weights, 0.5),
            "drift_nats_999": largest,
            "edge_nats_999": float(np.quantile(edges, _KEPT_SHARE)),
            "probability_shift": float(means[0]),
            "surprisal_shift": float(means[1]),
            "log_odds_shift": float(moves.mean()),
            "standard_errors": [float(error) for error in errors],
        },
    )


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(int(np.searchsorted(reached, share)), len(values) - 1)])
