"""Files for a post-mortem, bounded in number and size.

They hold token ids, seeds and logprobs of requests, prompts included, and what the server was set to: nothing that
authenticates anybody, and no text. Nothing is written unless a folder is configured.
"""

import json
import logging
import math
import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_logger = logging.getLogger("truespec.dumps")
_PREFIX = "truespec-"


@dataclass(slots=True)
class DumpFolder:
    """Writes dumps into a folder, and removes its own oldest ones where they become too many or too large."""

    folder: Path | None  # is made when first needed; None = nothing is written
    max_files: int  # dumps kept
    max_bytes: int  # of all dumps together; one that is larger by itself is not written
    _number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def enabled(self) -> bool:
        """Return whether anything is ever written."""
        return self.folder is not None

    def write(self, reason: str, content: dict[str, Any]) -> Path | None:
        """Write one dump; None where there is no folder, no room or no way. Blocks on the disk."""
        if self.folder is None:
            return None
        text = json.dumps(_plain(content), separators=(",", ":"), default=str, allow_nan=False)
        if len(text) > self.max_bytes:
            _logger.warning("a dump of %d bytes (%s) exceeds the limit for all dumps", len(text), reason)
            return None
        try:
            with self._lock:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                dumps = sorted(self.folder.glob(f"{_PREFIX}*.json"))
                sizes = [path.stat().st_size for path in dumps]
                while dumps and (len(dumps) >= self.max_files or sum(sizes) + len(text) > self.max_bytes):
                    dumps.pop(0).unlink()
                    sizes.pop(0)
                self._number += 1
                stamp, why = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()), re.sub("[^a-z0-9_]+", "-", reason.lower())
                path = self.folder / f"{_PREFIX}{stamp}-{self._number:06d}-{why[:60]}.json"
                part = path.with_suffix(".part")  # nobody reads half a dump
                try:
                    part.touch(mode=0o600)
                    part.write_text(text, encoding="ascii")
                    os.replace(part, path)
                finally:
                    part.unlink(missing_ok=True)
        except OSError as error:
            _logger.warning("a dump (%s) could not be written: %s", reason, error)
            return None
        _logger.warning("wrote %s", path)
        return path


def _plain(value: Any) -> Any:
    """The value as JSON can hold it: numbers that are none become text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
