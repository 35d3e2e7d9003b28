"""Fields that are added to a client's request: for token ids and logprobs, in the server's dialect."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_app.referee.wire.exchange import WATCHED_PATHS
from serve_app.referee.wire.vendors import Extras

# What a field of the request brings into the reply; `response_token_ids` is SGLang's, `token_logprobs` truespec's.
_IDS = ("token_ids", "prompt_token_ids", "response_token_ids", "token_logprobs")
_BRINGS = {"logprobs": ("logprobs", "token_logprobs"), "top_logprobs": (), "return_token_ids": _IDS}
# These change what a request's other fields do, or are refused without logprobs: with ours the answer would differ.
_TOUCHY = ("echo", "use_beam_search", "top_logprobs", "logprob_token_ids", "prompt_logprobs", "n_probs")
_LONGEST_FORM = 10_000  # characters


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A client's request, read."""

    body: bytes
    fields: Mapping[str, Any]
    form: str  # which requests a server takes, or refuses, alike
    streamed: bool

    def wants(self, field: str) -> bool:
        """Return whether the client asks for it itself."""
        value = self.fields.get("logprobs" if field == "top_logprobs" else field)
        return value is not None and value is not False


def read_request(path: str, body: bytes) -> ReadRequest | None:
    """Read a request; None where it cannot be watched without changing its answer."""
    if path not in WATCHED_PATHS:
        return None
    try:
        fields = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    touchy = [name for name in _TOUCHY if fields.get(name)]
    if touchy and (fields.get("echo") or fields.get("use_beam_search") or not fields.get("logprobs")):
        return None
    streamed = bool(fields.get("stream"))
    form = repr((path, streamed, sorted(fields)))
    return ReadRequest(body, fields, form, streamed) if len(form) <= _LONGEST_FORM else None


def instrumented(asked: ReadRequest, extras: Extras) -> tuple[bytes, tuple[str, ...]]:
    """The request with the extras that its client does not ask for itself, and the names of these."""
    missing = {name: value for name, value in extras.items() if not asked.wants(name)}
    if not missing:
        return asked.body, ()
    return json.dumps({**asked.fields, **missing}, separators=(",", ":")).encode(), tuple(missing)


def keys_of(added: Iterable[str]) -> frozenset[str]:
    """The reply's keys that these fields bring."""
    return frozenset(key for name in added for key in _BRINGS[name])
