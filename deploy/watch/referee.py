"""Judges what a watched server answers: by replays, with the service's detectors and trainers' measures."""

import asyncio
import dataclasses
import logging
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deploy.run.replayers import Replayer
from deploy.watch.measures import Measures, Windows
from serve_app.backends.base import ModelInfo, Replayed
from serve_app.guard.referee_counts import RefereeCounts, count_controls
from serve_app.http.page.history import by_label
from serve_app.referee.book.controls import Controls
from serve_app.referee.book.replay_checker import ReplayChecker
from serve_app.referee.book.replica_book import Case, ReplicaBook
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.detectors import Alarm, by_stratum
from serve_app.referee.judge.drift import Side, TokenDrift
from serve_app.referee.judge.judgement import Judge, Judgement, as_processed
from serve_app.referee.judge.strata import WATCHED_STRATA
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.referee.wire.exchange import Exchange, ExchangeBatch
from serve_app.referee.wire.reader import ExchangeReader
from serve_app.referee.wire.reply import Unreadable
from serve_app.telemetry.metric_names import WATCHED_RESULTS
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from serve_app.text.tokenizer import Tokenizer
from speculative.request import SURPRISAL_CLIP_NATS, Request, SamplingParams

_logger = logging.getLogger("truespec.watch")
_KEPT_FINDINGS = 200  # different ones
_KEPT_SUSPECT = 100
_KEPT_WORST = 3
_FORBIDDEN_NATS = 1e9  # JSON has no infinity
_KEPT_REASONS = 100
_NOTE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class RefereeOptions:
    """The way in which answers are judged.

    tolerance: for the rounding of this server.
    """

    served: str = "watched"  # the model's name in metrics
    tolerance: Tolerance = field(default_factory=lambda: Tolerance.against_float32("bfloat16"))
    processed: bool = False  # true if the server's logprobs are those after temperature and filters
    dialect: str = "auto"  # the server's vendor
    defaults: Mapping[str, float] = field(default_factory=dict)  # sampling parameters of requests that do not set them
    max_queue: int = 256  # most answers that wait
    keep_prompts: bool = False  # true if findings show prompts and answers


@dataclass(slots=True)
class WatchFinding:
    """The first finding of a detector."""

    alarm: str
    stratum: str
    replica: str
    at: float  # unix seconds
    evidence_since: float
    answers: int  # judged until then
    tokens: int  # of the stratum, judged until then
    tokens_in_all: int
    example: dict[str, Any]
    side: Side  # to which the mean is shifted; "" = to both, or to none
    last_at: float  # when it was found last
    num: int = 1  # times that it was found since

    @property
    def found(self) -> str:
        """In a few words."""
        return f"{self.alarm} ({self.stratum})"

    def again(self, at: float, side: Side) -> None:
        """Note that the same fault goes on."""
        self.num += 1
        self.last_at = max(self.last_at, at)
        self.side = side if side == self.side else ""


class Referee:
    """Reads exchanges, has their answers computed again, and keeps what that shows.

    Args:
        options: how it judges.
        model: that replays.
        replayer: started.
    """

    def __init__(self, options: RefereeOptions, model: ModelInfo, replayer: Replayer) -> None:
        self._options = options
        self._replayer = replayer
        self.sink = PrometheusSink(source="referee")
        self._metrics = metrics = Metrics(self.sink, model_name=options.served, pool="watched")
        self._reader = ExchangeReader(
            model,
            Tokenizer.from_folder(model.folder),
            options.dialect,
            options.defaults,
            options.tolerance.cold,
            options.processed,
        )
        self._judge = Judge(options.tolerance)
        self.judged = Judged()
        self._counts = counts = RefereeCounts(metrics, WATCHED_STRATA)
        self._book = ReplicaBook(options.tolerance, alarmed=self._on_alarm)
        self._controls = Controls(self._replay, self._compared, ended=count_controls(metrics))
        self._checker = ReplayChecker(
            self._replay,
            counts.counting(self._judgement),
            self._book,
            max_queue=options.max_queue,
            max_running=replayer.at_once,
            ended=counts.ended,
            verified=self._controls.offer,
        )
        self.findings: OrderedDict[tuple[str, str, str], WatchFinding] = OrderedDict()
        self.unread = Reasons()
        self._began_at = time.time()
        metrics.begin("truespec_watched_requests_total", "truespec_watched_answers_total")

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._checker.run())
            tasks.create_task(self._controls.run())
            tasks.create_task(self._note_forever())

    async def _note_forever(self) -> None:
        while True:
            self._counts.set_gauges(self._checker)
            await asyncio.sleep(_NOTE_EVERY_S)

    def take(self, batch: ExchangeBatch) -> None:
        """Take in what a proxy sent; what there is no room for is skipped and counted."""
        for result, num in batch.counts.items():
            if result not in WATCHED_RESULTS:
                continue  # of another version
            self._metrics.count("truespec_watched_requests_total", num, result=result)
        for exchange in batch.exchanges:
            for answer in self._read(exchange):
                self._checker.submit(answer)

    async def judge(self, exchange: Exchange) -> list[Checked]:
        """Judge the answers of one exchange, and return what was found, in the order of its choices."""
        return list(await asyncio.gather(*map(self._checker.check, self._read(exchange))))

    def _read(self, exchange: Exchange) -> list[Answer]:
        try:
            answers = self._reader.answers(exchange)
        except Unreadable as error:
            self.leave_out(str(error))
            return []
        except Exception as error:  # a server may say anything, and the referee goes on
            _logger.warning("an answer could not be read: %s", type(error).__name__)
            self.leave_out(f"it is not in OpenAI's format ({type(error).__name__})")
            return []
        self._metrics.count("truespec_watched_answers_total", len(answers), result="read")
        return answers

    def leave_out(self, reason: str) -> None:
        """Count an answer that cannot be judged."""
        self.unread.count(reason)
        self._metrics.count("truespec_watched_answers_total", result="unreadable")

    def _judgement(self, answer: Answer, replayed: Replayed) -> Judgement:
        judgement = self._compared(answer, replayed)
        self.judged.add(answer, replayed, judgement)
        return judgement

    def _compared(self, answer: Answer, replayed: Replayed) -> Judgement:
        """An answer beside its replay, as far as its request lets one compare them."""
        if self._options.processed:
            answer, replayed = as_processed(answer, replayed)
        return self._judge.judge(answer, replayed)

    async def _replay(self, request: Request, avoid: Collection[str]) -> Replayed:
        return await self._replayer.replay(request)

    def _on_alarm(self, alarm: Alarm, replica: str, case: Case) -> None:
        self._counts.alarmed(alarm, replica, case)
        key = alarm.name, alarm.stratum, replica
        if key in self.findings:
            self.findings[key].again(case.answer.began_at, alarm.side)
        elif len(self.findings) < _KEPT_FINDINGS:
            tokens = self.judged.by_stratum[alarm.stratum].num_tokens
            example = self.show(case)
            answers = self.judged.num_answers
            _logger.warning("%s is wrong: %s in stratum %s", replica, alarm.name, alarm.stratum)
            at = case.answer.began_at
            self.findings[key] = WatchFinding(
                *key, at, alarm.evidence_since, answers, tokens, self.num_tokens, example, alarm.side, at
            )

    def show(self, case: Case) -> dict[str, Any]:
        """An answer in the report: its parameters; prompt and tokens only where they are to be kept."""
        answer, checked = case.answer, case.checked
        params, plain = answer.request.params, SamplingParams()
        values = {name: getattr(params, name) for name in _SHOWN}
        shown = {
            "id": answer.request.request_id,
            "replica": answer.replica,
            "at": answer.began_at,
            "reason": checked.reason,
            "tokens": len(answer.token_ids),
            "prompt_tokens": len(answer.request.prompt_token_ids),
            "params": {name: value for name, value in values.items() if value != getattr(plain, name)},
            "worst": _worst(answer, case.replayed),
        }
        if self._options.keep_prompts:
            shown |= {"prompt_token_ids": answer.request.prompt_token_ids, "token_ids": answer.token_ids}
        return shown

    @property
    def num_tokens(self) -> int:
        """Judged so far."""
        return self.judged.by_stratum["all"].num_tokens

    @property
    def first_finding(self) -> WatchFinding | None:
        """Return what was found first; None = nothing."""
        return next(iter(self.findings.values()), None)

    # -- what is known ------------------------------------------------------------------------------------------------

    def verdict(self, reply_id: str) -> dict[str, Any] | None:
        """Return what is known of a reply, as `GET /v1/verdicts/ID` returns it; None = nothing."""
        return self._book.verdicts.reply(reply_id)

    def report(self) -> dict[str, Any]:
        """Return all findings, as JSON."""
        samples = self.sink.samples()
        judged = self.judged
        return {
            "model": self._options.served,
            "began_at": self._began_at,
            "at": time.time(),
            "tolerance": self._options.tolerance.to_wire(),
            "requests": by_label(samples, "truespec_watched_requests_total", "result"),
            "answers": {
                **by_label(samples, "truespec_watched_answers_total", "result"),
                "judged": judged.num_answers,
                "replays": by_label(samples, "truespec_replays_total", "result"),
                "verdicts": by_label(samples, "truespec_verdicts_total", "verdict"),
                "distributions": by_label(samples, "truespec_replay_distributions_total", "distribution"),
            },
            "findings": [dataclasses.asdict(one) for one in self.findings.values()],
            "suspect": list(map(self.show, judged.suspect)),
            "all": judged.by_stratum["all"].figures(),
            "strata": {name: judged.by_stratum[name].figures() for name in WATCHED_STRATA if name in judged.by_stratum},
            "replicas": {name: one.figures() for name, one in sorted(judged.by_replica.items())},
            "windows": judged.windows.figures(),
            "unreadable": self.unread.most_common(),
            "untested": judged.untested.most_common(),
        }


_SHOWN = (
    "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "ignore_eos",
)  # fmt: skip
"""Parameters that a report shows: numbers, nothing of a client's text."""


class Reasons:
    """Counts by reason; of many different ones the first are kept, the others counted together."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        """Count one."""
        known = reason in self._counts or len(self._counts) < _KEPT_REASONS
        self._counts[reason if known else "other reasons"] += 1

    def most_common(self) -> dict[str, int]:
        """The counts, the largest first."""
        return dict(self._counts.most_common())


class Judged:
    """Trainers' measures of all answers that were judged, and the latest that are suspect by themselves."""

    def __init__(self) -> None:
        self.by_stratum: defaultdict[str, Measures] = defaultdict(Measures)
        self.by_replica: defaultdict[str, Measures] = defaultdict(Measures)
        self.windows = Windows()
        self.untested = Reasons()
        self.num_answers = 0
        self.suspect: deque[Case] = deque(maxlen=_KEPT_SUSPECT)

    def add(self, answer: Answer, replayed: Replayed, judgement: Judgement) -> None:
        """Take in an answer, its replay as it was compared, and what came of it."""
        self.num_answers += 1
        if answer.untested:
            self.untested.count(answer.untested)
        for stratum, tokens in by_stratum(judgement.tokens).items():
            self.by_stratum[stratum].add(tokens)
        self.by_replica[answer.replica].add(judgement.tokens)
        self.windows.add(answer.began_at, judgement.tokens)
        if judgement.checked.verdict is Verdict.SUSPECT:
            self.suspect.append(Case(answer, replayed, judgement.checked))


def _worst(answer: Answer, replayed: Replayed | None) -> list[dict[str, Any]]:
    """The tokens of an answer that are the furthest from what they should be."""
    if replayed is None:
        return []
    found: list[dict[str, Any]] = []
    tested = () if answer.untested else replayed.replayed
    rows: Sequence[Any] = tested or [None] * len(answer.token_ids)
    given = answer.logprobs or (None,) * len(answer.token_ids)
    for index, (served, again, row) in enumerate(zip(given, replayed.logprobs[-len(rows) :], rows, strict=True)):
        found.append(
            {
                "index": index,
                "token_id": answer.token_ids[index],
                "drift_nats": None if served is None else TokenDrift.between(served, again).nats,
                "surprisal_nats": None if row is None else row.surprisal,
                "below_likeliest_nats": None if row is None else min(row.gap, _FORBIDDEN_NATS),
            }
        )
    found.sort(key=lambda one: -(one["drift_nats"] or 0.0) - (one["surprisal_nats"] or 0.0) / SURPRISAL_CLIP_NATS)
    return found[:_KEPT_WORST]
