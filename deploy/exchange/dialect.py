"""Which fields a server accepts and how it replies, found by trying, so that probes need not know its vendor."""

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.exchange.server import Exchange, Server
from speculative.errors import TruespecError
from speculative.request import SamplingParams

_PARAMS = {
    one.name: one.default for one in dataclasses.fields(SamplingParams) if one.name not in ("structure", "speculate")
}
_ALWAYS = ("max_tokens", "temperature")
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Always sent, since some servers filter by default."""

_EXTENSIONS = ("return_token_ids", "return_tokens_as_token_ids")
_NONSENSE = "is_this_field_known"
_MASKED = -9000.0  # OpenAI writes -9999 for a token that cannot occur


class AuditFailed(TruespecError):
    """The server could not be audited at all; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, independent of the server's dialect.

    prompt: token ids, or a text. extra: additional fields of the body.
    """

    prompt: tuple[int, ...] | str
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of a reply; None where the server did not report a value.

    token_ids: emitted. logprobs: of the emitted tokens, nats. top: per token, the highest logprobs in descending order,
    possibly including the emitted token's. scored: per token, those of logprob_token_ids. prompt_logprobs: of the
    prompt's tokens from the second on.
    """

    text: str
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float | None, ...] | None
    top: tuple[tuple[float, ...], ...] | None
    scored: tuple[dict[int, float], ...] | None
    prompt_logprobs: tuple[float | None, ...] | None
    finish_reason: str | None
    num_tokens: int | None  # of the whole reply, from its usage


@dataclass(frozen=True, slots=True)
class Can:
    """Capabilities found."""

    token_prompts: bool = False
    token_ids: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    switches_speculation: bool = False  # accepts speculate = false
    reproducible: bool = False  # accepts reproducible = false: a seed alone then does not select the verifier
    strict: bool = False  # rejects unknown fields
    metrics: str | None = None  # prefix of its metrics' names

    def reported(self) -> dict[str, Any]:
        """As a dict, for a report."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How to talk to one server: model name, maximum sequence length, accepted fields."""

    model: str
    max_model_len: int | None
    fields: dict[str, Any]
    can: Can

    def body(self, ask: Ask) -> dict[str, Any]:
        """The body of POST /v1/completions."""
        params = {name: getattr(ask.params, name) for name in _PARAMS}
        sent = {
            name: value for name, value in params.items() if name in _ALWAYS or value not in (_PARAMS[name], None, ())
        }
        sent.pop("bad_words", None)  # token ids, for the reference; sent as texts in `extra`
        if "logit_bias" in sent:
            sent["logit_bias"] = {str(token): value for token, value in ask.params.logit_bias}
        sent = {name: list(value) if isinstance(value, tuple) else value for name, value in sent.items()}
        prompt = ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
        seed = {} if ask.seed is None else {"seed": ask.seed}
        return {"model": self.model, "prompt": prompt, **self.fields, **sent, **seed, **ask.extra}

    def read(self, exchange: Exchange) -> list[Answer]:
        """The choices of a reply."""
        usage = exchange.reply.get("usage") or {}
        scored = exchange.body.get("logprob_token_ids") or ()
        choices = exchange.reply.get("choices") or ()
        prompt = exchange.body.get("prompt")
        return [_answer(choice, scored, usage.get("completion_tokens"), prompt) for choice in choices]


def read_stream(events: Sequence[dict[str, Any]]) -> Answer:
    """The single choice of a stream, assembled."""
    parts = [_answer(choice, ()) for event in events for choice in event.get("choices") or ()]
    ids = [token for part in parts for token in part.token_ids or ()]
    values = [value for part in parts for value in part.logprobs or ()]
    reasons = [part.finish_reason for part in parts if part.finish_reason is not None]
    text = "".join(part.text for part in parts)
    return Answer(text, tuple(ids), tuple(values), None, None, None, reasons[-1] if reasons else None, None)


def _answer(
    choice: dict[str, Any], scored_ids: Sequence[int], num_tokens: int | None = None, prompt: Any = None
) -> Answer:
    reported = choice.get("logprobs") or {}
    values, tops = reported.get("token_logprobs"), reported.get("top_logprobs")
    scored = reported.get("scored_logprobs")
    if scored_ids and scored is None and tops:
        wanted = {f"token_id:{token}": token for token in scored_ids}
        scored = [{wanted[key]: value for key, value in (top or {}).items() if key in wanted} for top in tops]
    return Answer(
        text=choice.get("text") or "",
        token_ids=_token_ids(choice, reported),
        logprobs=None if values is None else tuple(_number(value) for value in values),
        top=None if tops is None else tuple(_ranked(top or {}) for top in tops),
        scored=None if scored is None else tuple({int(key): float(v) for key, v in one.items()} for one in scored),
        prompt_logprobs=_prompt_logprobs(choice, prompt),
        finish_reason=choice.get("finish_reason"),
        num_tokens=num_tokens,
    )


def _token_ids(choice: dict[str, Any], reported: dict[str, Any]) -> tuple[int, ...] | None:
    if choice.get("token_ids") is not None:
        return tuple(choice["token_ids"])
    found = [re.fullmatch(r"token_id:(\d+)", str(token)) for token in reported.get("tokens") or ()]
    return tuple(int(one[1]) for one in found if one) if found and all(found) else None


def _ranked(top: dict[str, Any]) -> tuple[float, ...]:
    values = [float(value) for value in top.values() if value is not None]
    return tuple(sorted((value for value in values if not value < _MASKED), reverse=True))


def _prompt_logprobs(choice: dict[str, Any], prompt: Any) -> tuple[float | None, ...] | None:
    """Of each prompt token but the first. For a text prompt, the token itself is the first key of its object."""
    reported = choice.get("prompt_logprobs")
    if reported is None:
        return None
    ids = [str(token) for token in prompt[1:]] if isinstance(prompt, list) else [None] * (len(reported) - 1)
    if len(ids) != len(reported) - 1:
        return tuple(None for _ in ids)
    entries: list[dict[str, Any]] = [
        (entry or {}).get(token) or next(iter((entry or {}).values()), {})
        for token, entry in zip(ids, reported[1:], strict=True)
    ]
    return tuple(_number(entry.get("logprob")) for entry in entries)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


# -- finding out what a server can do ---------------------------------------------------------------------------------


def find_dialect(server: Server, model: str | None = None) -> Dialect:
    """Ask a server for its model, and try which fields it accepts.

    Raises:
        AuditFailed: no server answers, or even a plain completion fails.
    """
    name, longest = _model(server, model)
    plain = {"model": name, "max_tokens": 1, "temperature": 0}
    can = {"token_prompts": server.post(plain | {"prompt": [3, 4, 5]}).ok}
    plain |= {"prompt": [3, 4, 5]} if can["token_prompts"] else {"prompt": "The"}
    first = server.post(plain)
    if not first.ok:
        raise AuditFailed(f"{server.url} does not answer a plain completion: {first.reported()}")
    fields = {name: value for name, value in _NEUTRAL.items() if server.post(plain | {name: value}).ok}
    can["strict"] = not server.post(plain | {_NONSENSE: 1}).ok
    for extension in _EXTENSIONS:
        if server.post(plain | {extension: True}).ok:
            fields[extension] = True
    draft = Dialect(name, longest, fields, Can())
    tried = server.post(plain | fields | {"logprobs": 1})
    answers = draft.read(tried) if tried.ok else []
    can["logprobs"] = bool(answers and answers[0].logprobs)
    can["token_ids"] = bool(answers and answers[0].token_ids is not None)
    tried = server.post(plain | fields | {"prompt_logprobs": 0})
    can["prompt_logprobs"] = bool(tried.ok and draft.read(tried)[0].prompt_logprobs)
    for capability, switch in (("switches_speculation", "speculate"), ("reproducible", "reproducible")):
        can[capability] = can["strict"] and server.post(plain | {switch: False}).ok
    return dataclasses.replace(draft, can=Can(**can, metrics=_metrics_prefix(server)))


def _model(server: Server, wanted: str | None) -> tuple[str, int | None]:
    text = server.get("/v1/models")
    if text is None:
        raise AuditFailed(
            f"{server.url}/v1/models returned no list of models; check the URL and that a server is running there."
        )
    try:
        cards = {card["id"]: card for card in json.loads(text)["data"]}
    except (ValueError, KeyError, TypeError) as error:
        raise AuditFailed(f"{server.url}/v1/models returned no list of models: {text[:100]}") from error
    if not cards or (wanted is not None and wanted not in cards):
        raise AuditFailed(
            f"{server.url} serves {', '.join(cards) or 'no model'}, not {wanted}; choose a served model with --served."
        )
    name = wanted or next(iter(cards))
    return name, cards[name].get("max_model_len")


def _metrics_prefix(server: Server) -> str | None:
    text = server.get("/metrics") or ""
    return next((prefix for prefix in ("truespec_", "vllm:") if f"\n{prefix}" in text), None)
