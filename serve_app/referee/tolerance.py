"""How far rounding moves what a server computes from the same weights in float32."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.config.app_config import EDGE_NATS
from serve_app.referee.detectors import Rounding
from speculative.errors import ConfigError

FORMAT = "truespec-tolerance-1"

_MAX_TME = {"float32": 1.01, "bfloat16": 1.1, "fp8": 1.2}
_DISTRIBUTION = {"float32": 0.01, "bfloat16": 0.01, "fp8": 0.03}
_NUMBERS = ("max_tme", "edge_nats", "distribution", "jump_nats")
_JUMP_NATS = {"float32": 0.1, "bfloat16": 1.0, "fp8": 2.0}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What is no fault.

    max_tme: the largest mean of exp|g - t| over the logprobs. edge_nats: what rounding may shift a logit by.
    distribution: what it may add to the means of the calibration test's terms. jump_nats: logprobs of more than one
    token in a thousand are no further off. processed: whether the server's logprobs are those after temperature and
    filters. source: where these figures come from. measured: what the calibration found.
    """

    max_tme: float = _MAX_TME["bfloat16"]
    edge_nats: float = 2 * EDGE_NATS["bfloat16"]
    distribution: float = _DISTRIBUTION["bfloat16"]
    jump_nats: float = 1.0
    processed: bool = False
    source: str = "for bfloat16"
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def rounding(self) -> Rounding:
        """As the detectors take it."""
        return Rounding(self.distribution, self.edge_nats, self.jump_nats)

    @classmethod
    def for_precision(cls, precision: str) -> "Tolerance":
        """That of a server which computes in a precision of `EDGE_NATS`, where nothing was measured."""
        edge = EDGE_NATS[precision] * (1 if precision == "float32" else 2)  # the referee rounds otherwise
        return cls(
            _MAX_TME[precision], edge, _DISTRIBUTION[precision], _JUMP_NATS[precision], source=f"for {precision}"
        )

    @classmethod
    def read(cls, path: Path) -> "Tolerance":
        """What `truespec watch calibrate` wrote.

        Raises:
            ConfigError: the file cannot be read, or holds something else.
        """
        try:
            wire = json.loads(path.read_text(encoding="utf-8"))
            if wire["format"] != FORMAT:
                raise ValueError(f"its format is {wire['format']!r}")
            numbers = {name: float(wire[name]) for name in _NUMBERS}
            if not (numbers["max_tme"] >= 1 > numbers["distribution"] and all(one >= 0 for one in numbers.values())):
                raise ValueError("a figure is out of range")
            return cls(
                **numbers,
                processed=wire["processed"] is True,
                source=str(wire["source"]),
                measured=dict(wire["measured"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--tolerance {path}: holds no tolerance ({error}); `truespec watch calibrate` writes one."
            ) from error

    def in_words(self) -> list[str]:
        """As `truespec watch calibrate` prints it."""
        return [
            f"TME at most            {self.max_tme:.4f}",
            f"logits may move by     {self.edge_nats:.3g} nats",
            f"means may shift by     {self.distribution:.4f}",
            f"logprobs may jump by   {self.jump_nats:.3g} nats, in one token of a thousand",
            f"logprobs are           {'after' if self.processed else 'before'} temperature and filters",
            *(f"measured: {name} = {value}" for name, value in self.measured.items()),
        ]

    def to_wire(self) -> dict[str, Any]:
        """As JSON."""
        return {"format": FORMAT, **dataclasses.asdict(self)}
