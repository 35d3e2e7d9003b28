"""Log lines: one format for everything a replica logs, with the request and trace that each line belongs to.

Ray Serve gives each replica a log file and writes to the process' standard error; our loggers write to the same places,
in the same format.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Literal

from serve_app.telemetry import tracing

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_OURS = ("truespec", "serve_app", "speculative")
_SERVE = "ray.serve"


class Formatter(logging.Formatter):
    """Says which replica logs, and for which request, in one of the formats.

    `json`: an object per line: time (UTC), level, logger, message, and any further fields. `text`, for people: the
    same, with further fields in brackets; several lines where there is an exception.
    """

    def __init__(self, log_format: LogFormat, replica: str) -> None:
        super().__init__()
        self._log_format = log_format
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its line end."""
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        at = f"{whole}.{int(record.created % 1 * 1e6):06d}Z"
        trouble = self.formatException(record.exc_info) if record.exc_info else ""
        known = {
            "replica": self._replica,
            "request_id": tracing.request_id() or getattr(record, "request_id", ""),  # Ray Serve's own lines have it
            "trace_id": tracing.trace_id(),
        }
        facts = {name: value for name, value in known.items() if value} | getattr(record, "fields", {})
        if self._log_format == "json":
            said = {"time": at, "level": record.levelname.lower(), "logger": record.name}
            said |= {"message": record.getMessage(), **facts} | ({"exception": trouble} if trouble else {})
            return json.dumps(said, default=str)
        line = f"{at} {record.levelname} {record.name}: {record.getMessage()}"
        listed = " ".join(f"{name}={value}" for name, value in facts.items())
        lines = [f"{line} [{listed}]" if listed else line, *(trouble.split("\n") if trouble else ())]
        return "\n".join(map(printable, lines))


def configure(log_format: LogFormat, level: LogLevel, replica: str = "") -> None:
    """Log this process' lines in one format; those of other libraries from `warning` up.

    Args:
        level: of our own lines, and of Ray Serve's.
        replica: the one in this process; "" = none.
    """
    formatter = Formatter(log_format, replica)
    handlers = logging.getLogger(_SERVE).handlers or [logging.StreamHandler()]
    for handler in handlers:
        getattr(handler, "target", handler).setFormatter(formatter)  # Serve's file is behind a MemoryHandler
    logging.getLogger().handlers[:] = handlers
    for name in (*_OURS, _SERVE):
        logging.getLogger(name).setLevel(level.upper())


@contextlib.contextmanager
def passing_on(logger: logging.Logger, receive: Callable[[str], None]) -> Iterator[None]:
    """Have the messages that a logger gets within the block received by this function, too."""
    handler = logging.Handler()
    handler.emit = lambda record: receive(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def printable(line: str) -> str:
    """The line, with whatever could move a reader's cursor or end the line written as an escape."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)
