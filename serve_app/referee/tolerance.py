"""How far rounding moves what two engines compute from the same weights: the one place that says what is no fault.

A tolerance belongs to a *pair*: the engine that answered, and the one that computes the answer again.

| pair | who | a logit may move by |
|---|---|---|
| the same engine in the same precision | the service's own replays | `EDGE_NATS` of the precision |
| another engine in float32 | `transformers` beside a service, `watch`, `audit server`, `verify` | twice that |
| the same arithmetic in float32 twice | any of them | `EDGE_NATS["float32"]` |

Each engine rounds by itself: two that round independently are up to twice as far apart as one is from the exact value,
while two of the same arithmetic mostly make the same error and differ where shapes differ. In float32 both errors are
far below the bound, so that it is not doubled.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.config.app_config import EngineSection, ReplaySection
from serve_app.referee.evidence import CalibrationTest
from speculative.errors import ConfigError

FORMAT = "truespec-tolerance-1"

EDGE_NATS = {"float32": 1e-3, "bfloat16": 0.25, "fp8": 2.0}
"""What rounding may shift a logit by, by what an engine computes in."""

_MAX_TME = {"float32": 1.01, "bfloat16": 1.1, "fp8": 1.2}
_DISTRIBUTION = {"float32": 0.01, "bfloat16": 0.01, "fp8": 0.03}
_JUMP_NATS = {"float32": 0.1, "bfloat16": 1.0, "fp8": 2.0}
_NUMBERS = ("max_tme", "edge_nats", "distribution", "jump_nats")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What is no fault between two engines.

    max_tme: the largest mean of exp|g - t| over the logprobs. edge_nats: what rounding may shift a logit by, and with
    it a filter's edge or the likeliest token. distribution: what it may add to the means of the calibration test's
    terms. jump_nats: logprobs of more than one token in a thousand are no further off. processed: whether the server's
    logprobs are those after temperature and filters. source: where these figures come from. measured: what the
    calibration found.
    """

    max_tme: float
    edge_nats: float
    distribution: float
    jump_nats: float
    processed: bool = False
    source: str = ""
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def between_equals(cls, precision: str) -> "Tolerance":
        """For an answer that is computed again by an engine of the same kind, in the same precision."""
        return cls._of(precision, 1, f"for equal engines in {precision}")

    @classmethod
    def against_float32(cls, precision: str) -> "Tolerance":
        """For an answer of a server in this precision that another engine computes again in float32."""
        return cls._of(precision, 1 if precision == "float32" else 2, f"for {precision}")

    @classmethod
    def _of(cls, precision: str, edges: int, source: str) -> "Tolerance":
        edge = edges * EDGE_NATS[precision]
        return cls(_MAX_TME[precision], edge, _DISTRIBUTION[precision], _JUMP_NATS[precision], source=source)

    def calibration_test(self, delta: float) -> CalibrationTest:
        """A test of the tokens' distribution with this tolerance; delta: probability of a false alarm."""
        return CalibrationTest(tolerance=self.distribution, edge_nats=self.edge_nats, delta=delta)

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


def tolerances_of(replay: ReplaySection, engine: EngineSection) -> tuple[Tolerance, Tolerance]:
    """A service's: for replays by its own engine, and for those by `transformers` in float32."""
    precision = "fp8" if engine.quantization == "fp8" else engine.dtype
    equals, apart = (
        dataclasses.replace(one, max_tme=replay.max_tme, distribution=replay.distribution_tolerance)
        for one in (Tolerance.between_equals(precision), Tolerance.against_float32(precision))
    )
    if replay.edge_nats is None:
        return equals, apart
    doubled = replay.edge_nats * apart.edge_nats / equals.edge_nats
    return dataclasses.replace(equals, edge_nats=replay.edge_nats), dataclasses.replace(apart, edge_nats=doubled)
