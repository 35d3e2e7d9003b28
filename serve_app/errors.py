"""Errors as clients get them: one table from exception to HTTP error in OpenAI's form."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from speculative.errors import (
    EngineFault,
    EngineOverloaded,
    HandoffRefused,
    InvalidRequest,
    RequestTimeout,
    TruespecError,
)
from speculative.request import SamplingParams


class ModelNotFound(InvalidRequest):
    """This server has no model of that name."""


class UnknownParameter(InvalidRequest):
    """A field that neither the OpenAI API nor this server knows."""


class UnsupportedParameter(InvalidRequest):
    """A field or value of the OpenAI API that is not served here; the message says what is possible instead."""


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output together are longer than the model's context."""


class MalformedBody(InvalidRequest):
    """The body is not a JSON object in UTF-8. The field is empty: no field is at fault."""


class BodyTooLarge(InvalidRequest):
    """The body is longer than the server takes."""


class PreviousResponseNotFound(InvalidRequest):
    """The response that a request goes on from is not kept here."""


class AccessDenied(TruespecError):
    """The caller is unknown: no key, or an invalid one."""


class Forbidden(TruespecError):
    """The caller is known, but may not do this."""


class NoRoom(EngineOverloaded):
    """Refused at once, as it would not be served in time. `reason` is the metric's label value."""

    def __init__(self, reason: str, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.reason = reason


class RateLimited(NoRoom):
    """The key has as many requests under way as it may."""


class BodyTimeout(TruespecError):
    """The body did not come in time."""


class UnknownVerdict(TruespecError):
    """Nothing is known about an answer of that id: it never existed, is still being made, or is too old."""


class UnknownResponse(TruespecError):
    """No response of that id is kept."""


class UnknownReplica(TruespecError):
    """There is no replica of that name."""


class UpdateRefused(TruespecError):
    """New weights are not served, or not everywhere; the message says why."""


class RequestAborted(TruespecError):
    """The engine dropped a request that its client still waits for (on a shutdown, say)."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An HTTP error in OpenAI's form."""

    status: int
    kind: str  # OpenAI's `type`
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class _Rule:
    status: int
    kind: str
    code: str
    reported_instead: str | None = None  # what the client sees if the exception's own message is internal


_INTERNAL = "The server failed while it worked on this request; nothing of it was made up. Send it again."

_RULES: dict[type[BaseException], _Rule] = {
    ModelNotFound: _Rule(404, "invalid_request_error", "model_not_found"),
    UnknownParameter: _Rule(400, "invalid_request_error", "unknown_parameter"),
    UnsupportedParameter: _Rule(400, "invalid_request_error", "unsupported_parameter"),
    ContextLengthExceeded: _Rule(400, "invalid_request_error", "context_length_exceeded"),
    MalformedBody: _Rule(400, "invalid_request_error", "malformed_body"),
    BodyTooLarge: _Rule(413, "invalid_request_error", "body_too_large"),
    PreviousResponseNotFound: _Rule(400, "invalid_request_error", "previous_response_not_found"),
    InvalidRequest: _Rule(400, "invalid_request_error", "invalid_value"),
    AccessDenied: _Rule(401, "authentication_error", "invalid_api_key"),
    Forbidden: _Rule(403, "permission_error", "forbidden"),
    RateLimited: _Rule(429, "rate_limit_error", "rate_limit_exceeded"),
    BodyTimeout: _Rule(408, "invalid_request_error", "body_timeout"),
    UnknownVerdict: _Rule(404, "invalid_request_error", "verdict_not_found"),
    UnknownResponse: _Rule(404, "invalid_request_error", "response_not_found"),
    UnknownReplica: _Rule(404, "invalid_request_error", "replica_not_found"),
    UpdateRefused: _Rule(409, "invalid_request_error", "update_refused"),
    EngineOverloaded: _Rule(429, "rate_limit_error", "engine_overloaded"),
    RequestTimeout: _Rule(504, "server_error", "request_timeout"),
    RequestAborted: _Rule(503, "server_error", "request_aborted", "The server let go of this request. Send it again."),
    HandoffRefused: _Rule(500, "server_error", "handoff_refused", _INTERNAL),
    EngineFault: _Rule(500, "server_error", "engine_fault", _INTERNAL),
    BaseException: _Rule(500, "server_error", "internal_error", _INTERNAL),
}


def reply_for(error: BaseException) -> ErrorReply:
    """The HTTP error for an exception: the rule of its nearest listed ancestor.

    Exceptions that are the server's fault get a general message; their own message belongs in the log.
    """
    rule = next(_RULES[ancestor] for ancestor in type(error).__mro__ if ancestor in _RULES)
    param = (error.field or None) if isinstance(error, InvalidRequest) else None
    message = rule.reported_instead or (error.message if isinstance(error, InvalidRequest) else str(error))
    return ErrorReply(rule.status, rule.kind, rule.code, message, param, _headers(error))


def dead_end(params: SamplingParams) -> InvalidRequest:
    """The refusal of parameters that together leave no token to choose, whether at once or on the way."""
    asked = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "response_format": params.structure is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": params.min_tokens > 0,
    }
    first, *others = [name for name, is_asked in asked.items() if is_asked] or ["request"]
    if not others:
        return InvalidRequest(first, f"{first} leaves no token to choose; change it.")
    names = f"{', '.join((first, *others[:-1]))} and {others[-1]}"
    return InvalidRequest(first, f"{names} together leave no token to choose; change one of them.")


def route_error(status: int, message: str) -> ErrorReply:
    """The error for a path or method that is not served."""
    codes = {404: "not_found", 405: "method_not_allowed"}
    return ErrorReply(status, "invalid_request_error", codes.get(status, "invalid_request"), message)


def _headers(error: BaseException) -> dict[str, str]:
    if isinstance(error, EngineOverloaded):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, AccessDenied):
        return {"www-authenticate": "Bearer"}
    if isinstance(error, RequestAborted):
        return {"retry-after": "1"}
    return {}
