"""The fields that a server accepts, and its replies, found by trying, so that probes need not know its vendor."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from deploy.exchange.client import Client
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


class AuditFailed(TruespecError):
    """The server could not be audited at all; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, independent of the server's dialect.

    prompt: token ids, or a text.
    extra: additional fields of the body.
    """

    prompt: tuple[int, ...] | str
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


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
        """Return a dict, for a report."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The dialect of one server: model name, maximum sequence length, accepted fields."""

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


# -- finding out what a server can do ---------------------------------------------------------------------------------


def find_dialect(server: Client, model: str | None = None) -> Dialect:
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
    answer = server.post(plain | fields | {"logprobs": 1}).reply.first
    whole = answer.pieces is None  # llama.cpp's tokens come in pieces of text, and some without an id or a logprob
    can["logprobs"] = whole and bool(answer.logprobs)
    can["token_ids"] = whole and answer.token_ids is not None
    scored = server.post(plain | fields | {"prompt_logprobs": 0}).reply.first
    can["prompt_logprobs"] = bool(scored.logprobs_of_prompt(plain["prompt"]))
    for capability, switch in (("switches_speculation", "speculate"), ("reproducible", "reproducible")):
        can[capability] = can["strict"] and server.post(plain | {switch: False}).ok
    metrics = server.get("/metrics") or ""
    prefix = next((prefix for prefix in ("truespec_", "vllm:") if f"\n{prefix}" in metrics), None)
    return Dialect(name, longest, fields, Can(**can, metrics=prefix))


def _model(server: Client, wanted: str | None) -> tuple[str, int | None]:
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
