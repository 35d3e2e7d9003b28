"""Tolerances: how far rounding moves what two engines compute from the same weights. This is the one place that says
what is no fault, by the figures that `FORMATS` has of each precision.

A tolerance belongs to a *pair*: the engine that answered, and the one that computes the answer again. It goes by the
coarser precision of the two: the replicas report it (`Numerics`), and `KnownNumerics` holds them to their configuration
and checkpoint. Where one has the weights in another form than the other, that counts as bfloat16 at least:
the plain weights beside four-bit ones are those, rounded to bfloat16.

| pair | who | a logit may move by |
|---|---|---|
| the same engine, if it rounds a row alike in any batch | our CPU kernels' own replays | that of the precision |
| any other | replays on a GPU, by torch or vLLM; `transformers`; `watch`, `verify` | twice that |
| two in float32 | any of them | that of float32 |

Each engine rounds by itself: two that round independently are up to twice as far apart as one is from the exact value,
and so is an answer that was decoded a few rows at a time from its replay in one piece, where products round by the size
of the batch. Our CPU kernels make the same error each time; FP8 was measured between batches of other sizes. In float32
both errors are far below the bound, so that it is not doubled. What is said of logits holds of the mean of their moves
and of TME's excess, too.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from serve_app.backends.base import UNKNOWN_NUMERICS, Numerics, precision_of
from serve_app.config.app_config import AppConfig
from serve_app.referee.judge.evidence import CalibrationTest
from serve_app.referee.judge.shift import ShiftTest
from speculative.errors import ConfigError
from speculative.request import SURPRISAL_CLIP_NATS
from speculative.weight_formats import PRECISIONS, ROUNDINGS

FORMAT = "truespec-tolerance-1"

_COLD = 0.1  # of what rounding moves logits by
_NUMBERS = ("max_tme", "edge_nats", "distribution", "jump_nats", "shift_nats")


def reach_of(precision: str) -> float:
    """Return how far from an edge of the filters a token may be found on its other side, nats, where the engine that
    answered is of this precision; "" = it is not known."""
    plain = ROUNDINGS["bfloat16"]
    return 2 * max(plain.edge_nats, ROUNDINGS.get(precision, plain).edge_nats)  # whoever replays it


class Tolerances(Protocol):
    """The tolerance of each pair of engines."""

    def between(self, served: Numerics, replayed: Numerics) -> "Tolerance":
        """Return the tolerance for answers of an engine of these numerics that another computes again."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The differences between two engines that are no fault."""

    max_tme: float  # the largest mean of exp|g - t| over the logprobs
    edge_nats: float  # largest shift of a logit by rounding, and with it of a filter's edge or the likeliest token
    distribution: float  # the most that rounding adds to the means of the calibration test's terms
    jump_nats: float  # logprobs of more than one token in a thousand are no further off
    shift_nats: float  # largest shift of the mean of the logprobs' log odds by rounding
    assumed: bool = False  # nobody measured them on this kind of device: what breaks them trips no breaker
    processed: bool = False  # whether the server's logprobs are those after temperature and filters
    source: str = ""  # of these figures, in words
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)  # results of the calibration

    @classmethod
    def between_equals(cls, precision: str) -> "Tolerance":
        """For an answer that is computed again by an engine of the same kind, in the same precision."""
        return cls._of(precision, False, f"for equal engines in {precision}")

    @classmethod
    def against_float32(cls, precision: str) -> "Tolerance":
        """For an answer of a server in this precision that another engine computes again in float32."""
        return cls._of(precision, True, f"for {precision}")

    @classmethod
    def _of(cls, precision: str, apart: bool, source: str) -> "Tolerance":
        times, rounding = 2 if apart and precision != "float32" else 1, ROUNDINGS[precision]
        return cls(
            max_tme=rounding.max_tme[apart],
            edge_nats=times * rounding.edge_nats,
            distribution=rounding.distribution,
            jump_nats=rounding.jump_nats,
            shift_nats=times * rounding.shift_nats,
            source=source,
        )

    @property
    def cold(self) -> float:
        """A temperature below which rounding decides which token is sampled: the likeliest is as good as certain."""
        return _COLD * self.edge_nats

    def between(self, served: Numerics, replayed: Numerics) -> "Tolerance":
        """This one, whatever the pair: for referees that know of one only."""
        return self

    def calibration_test(self, delta: float) -> CalibrationTest:
        """A test of the tokens' distribution with this tolerance; delta: probability of a false alarm."""
        return CalibrationTest(tolerance=self.distribution, edge_nats=self.edge_nats, delta=delta)

    def shift_test(self, delta: float) -> ShiftTest:
        """A test of the mean of the logprobs with this tolerance; delta: probability of a false alarm."""
        return ShiftTest(self.edge_nats, self.shift_nats, delta)

    @classmethod
    def read(cls, path: Path, setting: str) -> "Tolerance":
        """Return what `truespec watch calibrate` wrote; `setting` names the file. Raises ConfigError: it cannot be
        read, or holds something else."""
        try:
            wire = json.loads(path.read_text(encoding="utf-8"))
            if wire["format"] != FORMAT:
                raise ValueError(f"its format is {wire['format']!r}")
            numbers: dict[str, Any] = {name: float(wire[name]) for name in _NUMBERS}
            if not (numbers["max_tme"] >= 1 > numbers["distribution"] and all(one >= 0 for one in numbers.values())):
                raise ValueError("a figure is out of range")
            return cls(
                **numbers,
                processed=wire["processed"] is True,
                source=str(wire["source"]),
                measured=dict(wire["measured"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{setting} {path} holds no tolerance ({error}); `truespec watch calibrate` writes one."
            raise ConfigError(why) from error

    def facts(self) -> dict[str, str]:
        """Return what is no fault, by name, in words."""
        return {
            "for": self.source,
            "TME": f"at most {self.max_tme:.4g}",
            "logits": f"moved by at most {self.edge_nats:.3g} nats",
            "means": f"of p(y) shifted by at most {self.distribution:.3g} by rounding, of surprisals by "
            f"{self.distribution * SURPRISAL_CLIP_NATS:.3g} nats",
            "log odds": f"shifted by at most {self.shift_nats:.3g} nats on average",
            "logprobs": f"{'after' if self.processed else 'before'} temperature and filters; one in a thousand may be "
            f"off by more than {self.jump_nats:.3g} nats",
            **{f"measured {name}": str(value) for name, value in self.measured.items()},
        }

    def to_wire(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"format": FORMAT, **dataclasses.asdict(self)}


class ServiceTolerances:
    """A service's: by the pair's precisions, as its replicas report them, and by what its configuration sets.

    On a GPU the figures of precisions that round are assumed, until they are set or measured.

    Raises:
        ConfigError: `replay.tolerance` cannot be read.
    """

    def __init__(self, config: AppConfig) -> None:
        self._replay = replay = config.replay
        self._configured = precision_of(config.engine.dtype, config.engine.quantization)
        self._measured = (
            None if replay.tolerance is None else Tolerance.read(Path(replay.tolerance), "replay.tolerance:")
        )
        unset = self._measured is None and replay.max_tme is None and replay.edge_nats is None
        self._assumes = unset and bool(config.pools_on("cuda"))
        self._known: dict[tuple[Numerics, Numerics], Tolerance] = {}

    @property
    def configured(self) -> Tolerance:
        """Between replicas that compute as the configuration says."""
        return self.between(UNKNOWN_NUMERICS, UNKNOWN_NUMERICS)

    def between(self, served: Numerics, replayed: Numerics) -> Tolerance:
        """Return the tolerance of a pair; an engine that does not say how it computes does so as configured."""
        pair = served, replayed
        if (known := self._known.get(pair)) is not None:
            return known
        served, replayed = (
            one if one.precision else dataclasses.replace(one, precision=self._configured) for one in (served, replayed)
        )
        precisions = [served.precision, replayed.precision]
        if served.weights != replayed.weights and served.weights and replayed.weights:
            precisions.append("bfloat16")
        coarser = max(precisions, key=PRECISIONS.index)
        own = Tolerance.between_equals(coarser)
        alike = served == replayed and (served.repeats or ROUNDINGS[coarser].between_batches)
        found = own if alike else Tolerance.against_float32(coarser)
        repeated = alike and served.repeats
        if self._measured is not None and not repeated and coarser != "float32":
            return self._known.setdefault(pair, self._measured)
        replay = self._replay
        times = 1.0 if replay.edge_nats is None else replay.edge_nats / own.edge_nats
        self._known[pair] = dataclasses.replace(
            found,
            assumed=self._assumes and coarser != "float32",
            max_tme=replay.max_tme or found.max_tme,
            distribution=found.distribution if replay.distribution_tolerance is None else replay.distribution_tolerance,
            edge_nats=times * found.edge_nats,
            shift_nats=times * found.shift_nats,
        )
        return self._known[pair]
