"""The test for shifted logprobs: their mean move against what rounding may bring, in log odds and in nats.

Rounding moves logits. A logprob near 0 hardly moves with them, so that moves are compared as those of its log odds, g -
log(1 - e^g), which are of one size for likely and unlikely tokens: 0.04 less on each logprob are 1.5 nats of log odds
where p is 0.999, and 0.08 where it is 0.5. Log odds have the error of the likeliest tokens, where logprobs have hardly
any digits. In nats a token moves by 1 - p times as much, and the mean has a quarter of the error, or less: so 0.04 nats
show where no token is likely, too. What is all but excluded is moved further, and counts less (`counted_nats`).

What rounds a context once rounds it again in the same way. So a context counts once: in one answer, which may repeat
itself, and among all answers, since clients may ask the same thing time and again. That holds for every test of
rounding, not of the mean alone.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from serve_app.referee.judge.drift import counted_nats
from speculative.selfcheck.eprocess import EProcess

_CONTEXT = 4  # tokens by which a context is known, the last of which is the one that is compared
_BEFORE = 16  # tokens by which one is known where that one is left out, since it was drawn
_CONTEXTS_KEPT = 16_384
_LEAST_OTHERS = 0.01  # probability of all other tokens below which log odds do not grow: logprobs have an error, too
_CLIP_NATS = 10.0
_IN_NATS = 0.25  # of what is tolerated in log odds


class Move(NamedTuple):
    """How far a replayed logprob is above the served one: its log odds, and the nats that count; within +-10."""

    log_odds: float
    nats: float


def move_of_log_odds(served: float, replayed: float) -> float:
    """Return how far the log odds of a replayed logprob are above those of the served one, nats, within +-10. What is
    no number has moved without bound."""
    move = _log_odds(replayed) - _log_odds(served)
    return _CLIP_NATS if math.isnan(move) else max(-_CLIP_NATS, min(_CLIP_NATS, move))


def _log_odds(logprob: float) -> float:
    return logprob - math.log(_LEAST_OTHERS - math.expm1(min(logprob, 0.0)))


def contexts_of(tokens: Sequence[int], count: int) -> list[int]:
    """Names of the contexts of the last `count` tokens."""
    return [
        hash(tuple(tokens[max(0, end - _CONTEXT) : end])) for end in range(len(tokens) - count + 1, len(tokens) + 1)
    ]


def moves_of(tokens: Sequence[int], served: Sequence[float | None], replayed: Sequence[float]) -> list[Move | None]:
    """Return how far each logprob moved; None where there is none, or a context comes again.

    Args:
        tokens: prompt and answer, or the end of both.
        served, replayed: logprobs of the last of these tokens, nats; as many as the shorter has.
    """
    seen: set[int] = set()
    moves: list[Move | None] = []
    pairs = list(zip(served, replayed, strict=False))
    for context, (own, again) in zip(contexts_of(tokens, len(pairs)), pairs, strict=True):
        if own is None or context in seen:
            moves.append(None)
        else:
            moves.append(Move(move_of_log_odds(own, again), counted_nats(own, again)))
        seen.add(context)
    return moves


def contexts_before(tokens: Sequence[int], count: int) -> list[int]:
    """Names of the contexts in which the last `count` tokens were drawn: of what stands before them."""
    ends = range(len(tokens) - count, len(tokens))
    return [hash(tuple(tokens[max(0, end - _BEFORE) : end])) for end in ends]


class KnownContexts:
    """The contexts of the answers that were compared last, and the most that each has shown."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, int] = OrderedDict()

    def add(self, contexts: Iterable[int], shown: Iterable[int] = itertools.repeat(0)) -> list[int | None]:
        """Return the most that each had shown before, None = it was unknown. shown: by each now, at least 0."""
        before = []
        for context, own in zip(contexts, shown, strict=False):
            before.append(known := self._known.get(context))
            self._known[context] = own if known is None else max(own, known)
        while len(self._known) > _CONTEXTS_KEPT:
            self._known.popitem(last=False)
        return before


class ShiftTest:
    """A latched alarm where the mean move of log odds is beyond `shift_nats`, or that of logprobs beyond a quarter of
    it, in either direction.

    Moves count at most `edge_nats`, or a quarter, so that none speaks for others. Where the mean of a move, given those
    before it, is within that, a false alarm has probability delta at most, whatever the moves' distribution and however
    often one looks.

    Args:
        edge_nats: what rounding may shift a logit by.
        shift_nats: what it may shift the mean by.
        delta: probability of a false alarm.
    """

    def __init__(self, edge_nats: float, shift_nats: float, delta: float) -> None:
        self._units = edge_nats, edge_nats * _IN_NATS  # of log odds, and of nats
        self._processes = [EProcess(delta / 2, min(1.0, shift_nats / edge_nats)) for _ in self._units]

    def add(self, moves: Iterable[Move], at: float = 0.0) -> None:
        """Take in moves of that time."""
        columns = np.array(list(moves), float).reshape(-1, 2).T
        for unit, values, process in zip(self._units, columns, self._processes, strict=True):
            if len(values):
                process.add(np.clip(values / unit, -1.0, 1.0), at)

    @property
    def evidence_since(self) -> float:
        """Return it as `FreshStarts` does."""
        return min(process.evidence_since for process in self._processes if process.alarm)

    @property
    def alarm(self) -> bool:
        """Return whether they are shifted."""
        return any(process.alarm for process in self._processes)
