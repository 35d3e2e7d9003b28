"""The judgement of one answer by its replay: how far its logprobs are from the replay's, and whether its tokens follow
the replay's distributions."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serve_app.backends.base import Replayed
from serve_app.referee.judge.alternatives import ComparedAlternatives
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.detectors import SeenToken, distribution_alarm, once, rows_of, why_drifted
from serve_app.referee.judge.draws import DrawResult, DrawTolerance, draws_of, wrong_draw, wrong_place
from serve_app.referee.judge.drift import NoiseFloor, TokenDrift, tme_of
from serve_app.referee.judge.shift import KnownContexts, Move, contexts_before, contexts_of, moves_of
from serve_app.referee.judge.tolerance import Tolerance, Tolerances
from serve_app.referee.judge.verdicts import Checked, CheckResult, Distribution, folded
from speculative.request import SURPRISAL_CLIP_NATS, Request

_PROMPT = ("prompt",)
_SEEDS_KEPT = 65_536  # of the requests replayed last
_UNCERTAIN_NATS = -0.1  # a logprob below which log odds move nearly as logits do
_LEAST_PROCESSED = 0.5  # temperature; below it rounding moves a processed logprob too far


@dataclass(frozen=True, slots=True)
class Judgement:
    """Judgement of one answer.

    tokens: the same as evidence for the detectors of the replicas that made them: without what a client may choose, a
        seed or a context that comes again.
    """

    checked: Checked  # the verdict, and what it rests on
    compared: tuple[SeenToken, ...]  # each compared token, the prompt's first
    tokens: tuple[SeenToken, ...]
    drift_tolerance: float  # the mean of exp|g - t| - 1 above which something is wrong
    draws: tuple[tuple[str, DrawResult], ...] = ()  # what was checked of each draw that was made again, and its result


Judging = Callable[[Answer, Replayed], Judgement]
"""`Judge.judge`, or what counts and keeps more of each judgement."""


class _Noise:
    """Between the engines of one pair: what is tolerated, and what was learnt of it."""

    def __init__(self, tolerance: Tolerance) -> None:
        self.tolerance = tolerance
        self._floors: dict[str, NoiseFloor] = {}  # by the replica that answered
        # Logprobs of likely tokens say little of how far rounding moves a near-tie, so it is always the pair's.
        self.of_placement = DrawTolerance(tolerance.edge_nats)
        self.of_draws = DrawTolerance(tolerance.edge_nats)

    @property
    def drift_tolerance(self) -> float:
        """As of `NoiseFloor`, by the quietest replica: one that is at fault must not widen it."""
        floors = [floor for floor in self._floors.values() if floor.is_known] or [NoiseFloor()]
        return min(floor.tolerance(self.tolerance.max_tme) for floor in floors)

    def learn(
        self,
        replica: str,
        drifts: Sequence[TokenDrift | None],
        moves: Sequence[Move | None],
        replayed: Sequence[float],
    ) -> None:
        """Take in the tokens of an answer of a replica for which nothing was drafted, and their replayed logprobs.
        Those of certain tokens say nothing of how far logits move."""
        self._floors.setdefault(replica, NoiseFloor()).add([drift for drift in drifts if drift is not None])
        uncertain = (move for move, logprob in zip(moves, replayed, strict=True) if logprob < _UNCERTAIN_NATS)
        self.of_draws.add(move.log_odds for move in uncertain if move is not None)


@dataclass(slots=True)
class Judge:
    """Compares answers with their replays. It learns the noise from answers without drafts, and remembers seeds, and
    contexts.
    """

    tolerances: Tolerances  # between the engines that answer and those that replay; `max_tme` is above the noise floor
    _noise: dict[Tolerance, _Noise] = field(default_factory=dict)
    _contexts: KnownContexts = field(default_factory=KnownContexts)
    _seeds: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def judge(self, answer: Answer, replayed: Replayed) -> Judgement:
        """Compare an answer with its replay. Raises ValueError: the replay has not one logprob for each of the answer's
        tokens."""
        if answer.untested:
            replayed = dataclasses.replace(replayed, replayed=None)
        params, num_tokens, num_prompt = answer.request.params, len(answer.token_ids), len(answer.prompt_logprobs)
        tolerance = self.tolerances.between(answer.numerics, replayed.numerics)
        likeliest = params.temperature < tolerance.cold  # are all that is drawn; greedy ones anyway
        if tolerance not in self._noise:
            self._noise[tolerance] = _Noise(tolerance)
        noise = self._noise[tolerance]
        drift_tolerance = noise.drift_tolerance

        # Each way to compare has its module and gives a result; what it knows of each token is in a `SeenToken`.
        served = (*answer.prompt_logprobs, *(answer.logprobs or [None] * num_tokens))
        of_each = [
            None if logprob is None else TokenDrift.between(logprob, again)
            for logprob, again in zip(served, replayed.logprobs, strict=True)
        ]
        drifts, of_output = [drift for drift in of_each if drift is not None], of_each[num_prompt:]
        tme = tme_of(drifts)
        tokens = answer.request.prompt_token_ids + answer.token_ids
        draws, results = draws_of(noise.of_draws, answer, replayed, of_output)
        drawn = CheckResult("draws", draws.num_checked, wrong_draw(draws, answer.kinds))
        misplaced = wrong_place(noise.of_placement, answer, replayed, of_output)
        others = ComparedAlternatives.of(answer, replayed)
        wrong_others = others.wrong(noise.of_placement, drift_tolerance, tolerance.jump_nats)
        beside = CheckResult("alternatives", others.found.num_compared, wrong_others)
        other_drifts = others.drift_at(len(tokens) - len(of_each), len(tokens))
        moves, contexts = moves_of(tokens, served, replayed.logprobs), contexts_before(tokens, len(of_each))
        known = self._contexts.add(contexts_of(tokens, len(of_each)))
        nothing = [None] * num_prompt
        seen = [
            SeenToken(*one)
            for one in zip(
                [*[_PROMPT] * num_prompt, *answer.strata],
                of_each,
                [*nothing, *(replayed.replayed or [None] * num_tokens)],
                [*[answer.prompt_scored_by] * num_prompt, *answer.made_by],
                [*nothing, *(draws.results or [None] * num_tokens)],
                other_drifts,
                moves,
                contexts,
                strict=True,
            )
        ]

        output = seen[num_prompt:]
        distribution = self._distribution(answer.request, output, likeliest)
        if distribution is Distribution.CHOSEN_SEED:
            seen = [dataclasses.replace(token, drawn=False) for token in seen]
        # A context that comes again within the answer counts once; those of other answers are no part of its verdict.
        each_once = once(seen, KnownContexts(), tolerance)
        alarm = distribution_alarm(*rows_of(each_once), likeliest, tolerance)
        num_rows = sum(token.row is not None for token in output)
        num_drawn = num_rows if distribution is Distribution.TESTED else 0
        compared = (
            CheckResult("logprobs", len(answer.logprobs), why_drifted(each_once, drift_tolerance, tolerance)),
            CheckResult("likeliest" if likeliest else "support", num_rows, misplaced),
            CheckResult("distribution", num_drawn, f"distribution: {alarm}" if alarm else ""),
            drawn,
            beside,
        )
        verdict, reason, checks = folded((*compared, CheckResult("wire", int(answer.wire == "agrees"))))
        checked = Checked(
            verdict=verdict,
            reason=reason,
            num_tokens=len(seen) if any(one.num_compared for one in compared) else len(drifts),
            tme=tme,
            max_drift_nats=max((drift.nats for drift in drifts), default=None),
            replayed_by=replayed.replica,
            checks=checks,
            distribution=distribution,
            draws=draws,
            alternatives=others.found,
        )

        if answer.num_drafted == 0:  # learnt last: no answer widens the tolerance that it is judged by
            noise.learn(answer.replica, of_output, moves[num_prompt:], replayed.logprobs[num_prompt:])
        evidence = _evidence(seen, known, distribution, drawn=params.greedy or not likeliest)
        return Judgement(checked, tuple(seen), evidence, drift_tolerance, results)

    def _distribution(self, request: Request, output: Sequence[SeenToken], likeliest: bool) -> Distribution:
        """Return what its replayed tokens can show about their distribution; likeliest: or only whether they are
        that."""
        if all(token.row is None for token in output):
            return Distribution.UNTESTED
        if likeliest:
            return Distribution.GREEDY
        if request.canary:  # whose seeds are its replica's own
            return Distribution.TESTED
        is_new = request.seed not in self._seeds  # with the same seed come the same random numbers
        self._seeds[request.seed] = None
        if len(self._seeds) > _SEEDS_KEPT:
            self._seeds.popitem(last=False)
        return Distribution.TESTED if is_new and not request.chosen_seed else Distribution.CHOSEN_SEED


def _evidence(
    seen: Sequence[SeenToken], known: Sequence[int | None], distribution: Distribution, *, drawn: bool
) -> tuple[SeenToken, ...]:
    """The tokens as evidence against their replicas. known: of each token's context, None = it is new; drawn: not by
    how rounding turned out."""
    # What rounds a known context is the same as before.
    evidence = [
        token if one is None else dataclasses.replace(token, move=None) for token, one in zip(seen, known, strict=True)
    ]
    if not drawn:
        return tuple(dataclasses.replace(token, row=None, draw=None) for token in evidence)
    if distribution is Distribution.CHOSEN_SEED:
        # The same random numbers come near an edge again: that is no further evidence.
        follows = DrawResult.FOLLOWS
        evidence = [
            dataclasses.replace(token, draw=follows) if token.draw is DrawResult.NEAR else token for token in evidence
        ]
    return tuple(evidence)


def processed_logprobs(replayed: Replayed) -> tuple[float, ...]:
    """The logprob of each token after temperature and filters, nats; no further below 0 than surprisals are clipped."""
    rows = replayed.replayed
    return replayed.logprobs if rows is None else tuple(-row.surprisal for row in rows)


def as_processed(answer: Answer, replayed: Replayed) -> tuple[Answer, Replayed]:
    """Both with logprobs after temperature and filters, for a server that reports these; without those of tokens so
    unlikely that they are clipped, and of temperatures that magnify rounding."""
    far = [row.surprisal >= SURPRISAL_CLIP_NATS for row in replayed.replayed or ()]
    comparable = far and answer.logprobs and not 0 < answer.request.params.temperature < _LEAST_PROCESSED
    logprobs = tuple(None if one else own for one, own in zip(far, answer.logprobs, strict=True)) if comparable else ()
    left_out = answer.num_left_out + sum(len(one.pairs) for one in answer.alternatives)
    as_served = dataclasses.replace(
        answer, logprobs=logprobs, prompt_logprobs=(), alternatives=(), num_left_out=left_out
    )
    of_output = processed_logprobs(replayed)[-len(answer.token_ids) :]
    return as_served, dataclasses.replace(replayed, logprobs=of_output, entries=())
