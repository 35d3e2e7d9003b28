"""The test for shifted logprobs: the mean move of their log odds against what rounding may bring.

Rounding moves logits. A logprob near 0 hardly moves with them, so that moves are compared as those of its log odds, g -
log(1 - e^g), which are of one size for likely and unlikely tokens: 0.04 less on each logprob are 1.5 nats of log odds
where p is 0.999, and 0.08 where it is 0.5.

What rounds a context once rounds it again in the same way. So a context counts once: in one answer, which may repeat
itself, and among all answers, since clients may ask the same thing time and again.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from speculative.selfcheck.eprocess import EProcess

_CONTEXT = 4  # tokens by which a context is known, the last of which is the one that is compared
_CONTEXTS_KEPT = 65_536
_LEAST_OTHERS = 0.01  # probability of all other tokens below which log odds do not grow: logprobs have an error, too
_CLIP_NATS = 10.0


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


def moves_of(tokens: Sequence[int], served: Sequence[float | None], replayed: Sequence[float]) -> list[float | None]:
    """Return how far the log odds of each logprob moved; None where there is none, or a context comes again.

    Args:
        tokens: prompt and answer, or the end of both.
        served, replayed: logprobs of the last of these tokens, nats; as many as the shorter has.
    """
    seen: set[int] = set()
    moves: list[float | None] = []
    pairs = list(zip(served, replayed, strict=False))
    for context, (own, again) in zip(contexts_of(tokens, len(pairs)), pairs, strict=True):
        moves.append(None if own is None or context in seen else move_of_log_odds(own, again))
        seen.add(context)
    return moves


class KnownContexts:
    """The contexts of the answers that were compared last."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()

    def add(self, contexts: Iterable[int]) -> list[bool]:
        """Return whether each was unknown before these; they are known now."""
        contexts = list(contexts)
        unknown = [context not in self._known for context in contexts]
        self._known.update(dict.fromkeys(contexts))
        while len(self._known) > _CONTEXTS_KEPT:
            self._known.popitem(last=False)
        return unknown


class ShiftTest:
    """A latched alarm where the mean move of log odds is beyond `shift_nats`, in either direction.

    Moves count at most `edge_nats`, so that none speaks for others. Where the mean of a move, given those before it, is
    within `shift_nats`, a false alarm has probability delta at most, whatever the moves' distribution and however often
    one looks.

    Args:
        edge_nats: what rounding may shift a logit by.
        shift_nats: what it may shift the mean by.
        delta: probability of a false alarm.
    """

    def __init__(self, edge_nats: float, shift_nats: float, delta: float) -> None:
        self._edge_nats = edge_nats
        self._process = EProcess(delta, min(1.0, shift_nats / edge_nats))

    def add(self, moves: Iterable[float], at: float = 0.0) -> None:
        """Take in moves of that time, nats."""
        values = np.array(list(moves), float)
        if len(values):
            self._process.add(np.clip(values / self._edge_nats, -1.0, 1.0), at)

    @property
    def evidence_since(self) -> float:
        """Return it as `FreshStarts` does."""
        return self._process.evidence_since

    @property
    def alarm(self) -> bool:
        """Return whether they are shifted."""
        return self._process.alarm
