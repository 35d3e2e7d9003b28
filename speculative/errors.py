"""Everything the engine may raise: `TruespecError` and those that derive from it."""

import copyreg
from typing import Any


class TruespecError(Exception):
    """The root: catch this to catch whatever truespec raises on purpose. It crosses processes with its fields."""

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(TruespecError):
    """A setting is wrong; the message names the field and the fix."""


class UnsupportedModel(ConfigError):
    """The checkpoint asks for something this engine does not do; the message says what to use instead."""


class InvalidRequest(TruespecError):
    """A request that cannot be served as it is.

    `field` is the request's field at fault, in the words of the OpenAI API.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


class SequenceTooLong(InvalidRequest):
    """More tokens than the engine that was asked takes in a sequence."""


class EngineOverloaded(TruespecError):
    """No room now. `retry_after_s` is an honest guess of when there will be."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeout(TruespecError):
    """The request took longer than it may; what it held is freed."""


class HandoffRefused(TruespecError):
    """A handoff that this engine will not take in. `reason` is one word for the metric's label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class EngineFault(TruespecError):
    """An internal rule was broken (a NaN row, a lost block): the request fails loudly."""
