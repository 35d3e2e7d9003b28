"""From samples to figures: medians and their spread, paired ratios with confidence intervals, acceptance."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Any

import numpy as np

from tools.bench.plan import BenchCase, Measure
from tools.bench.rounds import BenchResult, BenchSample

ALL_KINDS = "all"

_RESAMPLES = 10_000
_SEED = 5
_TAIL = 2.5  # per cent on either side: an interval of 95 %


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of one engine in one case: median, lowest and highest."""

    median: float
    low: float
    high: float
    num_samples: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """One engine's speed over that of another in the same rounds: median, and its 95 % confidence interval."""

    against: str
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MeasuredAcceptance:
    """Acceptance of drafts."""

    length: float  # mean tokens of a round that had drafts, the one after them included
    per_position: tuple[float, ...]  # share of the drafts at each position that were accepted


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """All figures of one engine in one case, or over all kinds of prompts.

    agreement: median share of a greedy answer that is, from its begin, the same as that of the first engine.
    """

    engine: str
    case: BenchCase
    speed: Speed
    ratio: Ratio | None
    first_token_s: float
    acceptance: MeasuredAcceptance | None
    agreement: float | None


def rows(found: BenchResult) -> list[SpeedRow]:
    """Case by case the engines in the plan's order; after the kinds of prompts, all of them together."""
    cases = list(dict.fromkeys(sample.case for sample in found.samples))
    kinds = {case.kind for case in cases}
    if len(kinds) > 1:
        cases += dict.fromkeys(BenchCase(ALL_KINDS, case.streams, case.temperature) for case in cases)
    cases.sort(key=lambda case: (case.temperature, case.streams))
    return [row for case in cases for row in _case_rows(found, case)]


def memory(found: BenchResult) -> dict[str, tuple[float, float]]:
    """Per engine: resident memory after its last answer and at its peak, MiB."""
    return {
        sample.engine: (sample.reported["memory"]["resident_mib"], sample.reported["memory"]["peak_mib"])
        for sample in found.samples
    }


def paired_ratio(against: str, pairs: Sequence[tuple[float, float]]) -> Ratio:
    """The median of the pairs' ratios, with a percentile bootstrap over the pairs.

    Source: Efron, "Bootstrap Methods: Another Look at the Jackknife" (1979).
    """
    ratios = np.array([mine / theirs for mine, theirs in pairs])
    drawn = np.random.default_rng(_SEED).integers(len(ratios), size=(_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[drawn], axis=1), (_TAIL, 100 - _TAIL))
    return Ratio(against, float(np.median(ratios)), float(low), float(high))


def acceptance(samples: Sequence[BenchSample]) -> MeasuredAcceptance | None:
    """Over all rounds of the samples; None where nothing was drafted or the engine does not tell."""
    drafted = _added(samples, "drafted_per_position")
    accepted = _added(samples, "accepted_per_position")
    if not drafted:
        return None
    num_rounds = sum(sample.reported["rounds_with_drafts"] for sample in samples)
    shares = tuple(part / whole for part, whole in zip(accepted, drafted, strict=True))
    return MeasuredAcceptance(1 + sum(accepted) / num_rounds, shares)


def _case_rows(found: BenchResult, case: BenchCase) -> list[SpeedRow]:
    measure = found.plan.measure
    by_engine: dict[str, list[BenchSample]] = {name.text: [] for name in found.plan.engines}
    for sample in found.samples:
        same = (sample.case.streams, sample.case.temperature) == (case.streams, case.temperature)
        if same and case.kind in (sample.case.kind, ALL_KINDS):
            by_engine[sample.engine].append(sample)
    by_engine = {engine: samples for engine, samples in by_engine.items() if samples}
    best = max(
        (engine for engine in found.plan.against if engine in by_engine),
        key=lambda engine: median(_speed(sample, measure) for sample in by_engine[engine]),
        default=None,
    )
    first = next(iter(by_engine.values()))
    return [
        SpeedRow(
            engine,
            case,
            _speeds(samples, measure),
            None if best in (None, engine) else _ratio(best, samples, by_engine[best], measure),
            median(value for sample in samples for value in sample.reported["first_token_s"]),
            acceptance(samples),
            None if samples is first or case.temperature else _agreement(samples, first),
        )
        for engine, samples in by_engine.items()
    ]


def _speed(sample: BenchSample, measure: Measure) -> float:
    speeds = {"decode": sample.decode_speed, "whole": sample.whole_speed}
    return speeds.get(measure, sample.prompt_speed)


def _speeds(samples: Sequence[BenchSample], measure: Measure) -> Speed:
    values = [_speed(sample, measure) for sample in samples]
    return Speed(median(values), min(values), max(values), len(values))


def _ratio(
    against: str, samples: Sequence[BenchSample], others: Sequence[BenchSample], measure: Measure
) -> Ratio | None:
    theirs = {(sample.case, sample.round): _speed(sample, measure) for sample in others}
    mine = {(sample.case, sample.round): _speed(sample, measure) for sample in samples}
    pairs = [(speed, theirs[key]) for key, speed in mine.items() if key in theirs]
    return paired_ratio(against, pairs) if pairs else None


def _agreement(samples: Sequence[BenchSample], first: Sequence[BenchSample]) -> float | None:
    expected = {(sample.case, sample.round): sample.reported["token_ids"] for sample in first}
    shares = [
        _common(mine, theirs) / len(mine)
        for sample in samples
        for mine, theirs in zip(
            sample.reported["token_ids"], expected.get((sample.case, sample.round), ()), strict=False
        )
    ]
    return median(shares) if shares else None


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def _added(samples: Sequence[BenchSample], name: str) -> list[Any]:
    """Sums position by position."""
    lists = [sample.reported[name] for sample in samples if name in sample.reported]
    return [sum(column) for column in zip_longest(*lists, fillvalue=0)]
