"""Log lines: one format for everything a replica logs, with the request and trace that each line belongs to.

Ray Serve gives each replica a log file and writes to the process' standard error; our loggers write to the same places,
in the same format.
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
    """Shared by both formats: which replica logs, and for which request."""

    def __init__(self, replica: str = "") -> None:
        super().__init__()
        self._replica = replica

    def _facts(self, record: logging.LogRecord) -> dict[str, Any]:
        """Replica, request and trace, as far as known, and the line's own fields.

        Ray Serve's own lines already include their request id.
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
    """One JSON object per line: time (UTC), level, logger, message, and any further fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its line end."""
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
    """For people: time (UTC), level, logger, message, and any further fields in brackets."""

    def format(self, record: logging.LogRecord) -> str:
        """The line; several if it includes an exception."""
        facts = " ".join(f"{name}={value}" for name, value in self._facts(record).items())
        line = f"{_utc(record.created)} {record.levelname} {record.name}: {record.getMessage()}"
        trouble = self._trouble(record)
        lines = [f"{line} [{facts}]" if facts else line, *(trouble.split("\n") if trouble else ())]
        return "\n".join(map(_printable, lines))


def configure(log_format: LogFormat, level: LogLevel, replica: str = "") -> None:
    """Log this process' lines in one format; those of other libraries from `warning` up.

    Args:
        level: of our own lines, and of Ray Serve's.
        replica: the one in this process; "" = none.
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
