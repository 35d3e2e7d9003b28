"""Log lines: one format for everything a replica says, with the request and the trace that each line belongs to.

Ray Serve gives each replica a log file and writes to the process' standard error; what our loggers say goes where its
own lines go, in the same form.
"""

import json
import logging
import time
from typing import Any, Literal

from serve_app.telemetry import tracing

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_OURS = ("truespec", "serve_app", "speculative")
_SERVE = "ray.serve"


class _Formatter(logging.Formatter):
    """What both forms share: which replica speaks, and for which request."""

    def __init__(self, replica: str = "") -> None:
        super().__init__()
        self._replica = replica

    def _facts(self, record: logging.LogRecord) -> dict[str, Any]:
        """Replica, request and trace, those that are known, and the fields that the line was given.

        Ray Serve's own lines carry the id of their request themselves.
        """
        known = {
            "replica": self._replica,
            "request_id": tracing.request_id() or getattr(record, "request_id", ""),
            "trace_id": tracing.trace_id(),
        }
        return {name: value for name, value in known.items() if value} | getattr(record, "fields", {})

    def _trouble(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info else ""


class JsonFormatter(_Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and what else is known."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        reported: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._facts(record),
        }
        if trouble := self._trouble(record):
            reported["exception"] = trouble
        return json.dumps(reported, default=str)


class TextFormatter(_Formatter):
    """For a reader: time (UTC), level, logger, message, and in brackets what else is known."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; further ones where an exception is told."""
        facts = " ".join(f"{name}={value}" for name, value in self._facts(record).items())
        line = f"{_utc(record.created)} {record.levelname} {record.name}: {record.getMessage()}"
        trouble = self._trouble(record)
        lines = [f"{line} [{facts}]" if facts else line, *(trouble.split("\n") if trouble else ())]
        return "\n".join(map(_printable, lines))


def configure(log_format: LogFormat, level: LogLevel, replica: str = "") -> None:
    """Have this process' log lines come in one form; what other libraries say from `warning` up.

    Args:
        level: of our own lines, and of Ray Serve's.
        replica: that runs in this process; "" = none.
    """
    formatter = JsonFormatter(replica) if log_format == "json" else TextFormatter(replica)
    handlers = logging.getLogger(_SERVE).handlers or [logging.StreamHandler()]
    for handler in handlers:
        getattr(handler, "target", handler).setFormatter(formatter)  # Serve's file is behind a MemoryHandler
    logging.getLogger().handlers[:] = handlers
    for name in (*_OURS, _SERVE):
        logging.getLogger(name).setLevel(level.upper())


def _printable(line: str) -> str:
    """The line, with whatever could move a reader's cursor or end the line written as an escape."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1e6):06d}Z"
