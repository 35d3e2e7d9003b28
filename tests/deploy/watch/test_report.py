"""Reports of a real referee whose engine is a table of known probabilities, on the terminal and as a page."""

import asyncio
import json
import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy.reports.html_pages import page as html_page
from deploy.reports.model import Shown
from deploy.reports.terminal import print_document
from deploy.watch.referee import Referee, RefereeOptions
from deploy.watch.report import MEASURES, document
from deploy.watch.sentences import headline, notes, plain, shortcomings
from serve_app.backends.base import ModelInfo, Replayed
from serve_app.referee.judge.detectors import meaning_of
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.wire.exchange import COMPLETIONS, Exchange, ExchangeBatch
from speculative.request import ReplayedToken, Request

P = {10: 0.9, 11: 0.1}
BEGAN_AT = 1_700_000_000.0
MARKUP = "<b>[red]&'\"\x1b[31m"


class Table:
    """A replayer to which every token is drawn from P."""

    at_once = 1

    def __init__(self, raises: Exception | None = None) -> None:
        self._raises = raises

    async def start(self) -> ModelInfo:
        raise NotImplementedError

    async def replay(self, request: Request) -> Replayed:
        if self._raises is not None:
            raise self._raises
        assert request.score_from is not None
        probabilities = [P[token] for token in request.prompt_token_ids[request.score_from :]]
        squares, entropy = sum(p * p for p in P.values()), sum(-p * math.log(p) for p in P.values())
        rows = tuple(ReplayedToken(p, squares, -math.log(p), entropy, math.log(0.9 / p), 0.0) for p in probabilities)
        return Replayed(tuple(map(math.log, probabilities)), rows)

    async def stop(self) -> None:
        pass


@pytest.fixture(scope="session")
def model(folder: Path) -> ModelInfo:
    return ModelInfo("tiny", 512, 512, "", str(folder), (2,))


def exchange(tokens: Sequence[int], name: str = "cmpl", at: float = 0.0, **fields: Any) -> Exchange:
    """An answer of these tokens at temperature 1, served with the logprobs of P."""
    logprobs = {"token_logprobs": [math.log(P[token]) for token in tokens]}
    choice = {"index": 0, "finish_reason": "length", "token_ids": list(tokens), "logprobs": logprobs}
    request = {"prompt": list(name.encode()), "temperature": 1.0, "max_tokens": len(tokens)} | fields.pop("request", {})
    reply, began_at = {"id": name, "choices": [choice | fields.pop("choice", {})]}, BEGAN_AT + at
    bodies = json.dumps(request).encode(), json.dumps(reply).encode()
    return Exchange(COMPLETIONS, *bodies, streamed=False, began_at=began_at, ended_at=began_at + 1, **fields)


def answers(num: int, probability: float, **fields: Any) -> list[Exchange]:
    """Answers of 50 tokens that are the likelier one with this probability, one a second."""
    drawn = random.Random(7)
    tokens = [[10 if drawn.random() < probability else 11 for _ in range(50)] for _ in range(num)]
    return [exchange(each, f"cmpl-{index}", index, **fields) for index, each in enumerate(tokens)]


def report_on(
    model: ModelInfo,
    exchanges: Iterable[Exchange],
    counts: Mapping[str, int] | None = None,
    table: Table | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What the referee reports, once by JSON as `truespec watch` writes it."""

    async def judge() -> dict[str, Any]:
        referee = Referee(RefereeOptions(**options), model, table or Table())
        referee.take(ExchangeBatch((), dict(counts or {})))
        running = asyncio.create_task(referee.run())
        for one in exchanges:
            await referee.judge(one)
        running.cancel()
        return referee.report()

    return dict(json.loads(json.dumps(asyncio.run(judge()))))


def printed(report: Mapping[str, Any]) -> str:
    out = StringIO()
    print_document(document(report), Console(file=out, width=160, color_system=None))
    return out.getvalue()


class Reader(HTMLParser):
    """The text of a page, its elements, and whether each is closed in the place where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def read_page(report: Mapping[str, Any]) -> Reader:
    reader = Reader()
    page = html_page(document(report))
    reader.feed(page)
    assert not reader.open
    assert not re.search(r"<script|https?://|@import|url\(", page), "a report loads nothing"
    return reader


@pytest.fixture(scope="module")
def wrong(model: ModelInfo) -> dict[str, Any]:
    """Of a server that draws the likelier token in 6 of 10 times, and reports logprobs as if it were 9 of 10."""
    return report_on(model, answers(60, 0.6, replica="gpu-3", request={"top_p": 0.95}), {"captured": 60, "passed": 540})


def test_an_alarm_is_the_headline(wrong: dict[str, Any]) -> None:
    found = headline(wrong)
    assert found.kind == "bad"
    first = next(one for one in wrong["findings"] if one["stratum"] == "all")
    assert first["alarm"] in ("probability", "surprisal")
    assert {one["side"] for one in wrong["findings"]} == {"hotter"}
    said = f"An alarm: {meaning_of(first['alarm'], 'hotter')} ({first['alarm']}), after {first['tokens']:,} tokens"
    assert found.text.startswith(said)
    assert printed(wrong).startswith(f"{found.text}.\n")
    assert found.text in read_page(wrong).text
    assert shortcomings(wrong)["alarm"] == found.text
    assert not shortcomings(wrong).keys() & {"untested", "unread", "dropped"}


@pytest.mark.parametrize("choice", [{}, {"logprobs": None}], ids=["with logprobs", "without"])
def test_no_alarm_is_said_with_what_was_looked_at(model: ModelInfo, choice: dict[str, Any]) -> None:
    report = report_on(model, answers(60, 0.9, choice=choice), {"captured": 60})
    assert headline(report).kind == "ok"
    assert headline(report).text == "No alarm in 3,000 tokens of 60 answers"
    assert notes(report) == (["No logprob was compared: the answers came without"] if choice else [])
    assert "Findings" not in read_page(report).text
    assert shortcomings(report) == {}
    assert not choice or ("–" in printed(report) and "–" in read_page(report).text)


def test_a_finding_is_shown_with_its_stratum_replica_and_request(wrong: dict[str, Any]) -> None:
    page, terminal = read_page(wrong).text, printed(wrong)
    assert wrong["findings"]
    for finding in wrong["findings"]:
        for said in (page, terminal):
            assert meaning_of(finding["alarm"], "hotter") in said and finding["stratum"] in said
    assert wrong["findings"][0]["example"]["id"] in page and wrong["findings"][0]["example"]["id"] in terminal
    for said in (page, terminal):
        assert "gpu-3" in said
        assert "top_p 0.95" in said and "max_tokens 50" in said
        assert "2023-11-14 22:13" in said
        assert re.search(r"token \d+ \(id 11\): drift 0 nats, surprisal 2\.3 nats", said)
        for result, num in (("passed", 540), ("captured", 60), ("read", 60), ("judged", 60), ("ok", 60)):
            assert re.search(rf"{result}\W+{num}\W", said), result
        for name, _, theirs in MEASURES.values():
            assert name in said and theirs in said, "the names that trainers use"
        assert "1.0000" in said, "the logprobs are right"
        assert f"{wrong['all']['surprisal']:.3g}" in said and f"{wrong['all']['surprisal_z']:.1f}" in said
        assert f"± {0.1 + 4 * wrong['all']['surprisal_error']:.2g}" in said, "1 % of the clipped 10 nats, and chance"
    html = html_page(document(wrong))
    drawn = re.findall(r'<polyline class="line" points="([^"]+)"', html)
    assert [len(line.split()) for line in drawn] == [len(wrong["windows"])] * 2 == [6, 6], "TME and surprisal"
    assert html.count('class="dot outside"') == 6 and html.count('class="dot"') == 6, "surprisals are out of their band"


@pytest.mark.parametrize("likelier", [0.9, 0.999])
def test_means_of_a_sound_server_lie_within_their_band(
    model: ModelInfo, likelier: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(P, 10, likelier)
    monkeypatch.setitem(P, 11, 1 - likelier)
    sound = answers(99, likelier)
    report = report_on(model, [replace(one, began_at=BEGAN_AT + 7 * at) for at, one in enumerate(sound)])
    html = html_page(document(report))
    assert "No alarm" in html and 'class="dot outside"' not in html
    assert html.count('class="dot"') == 2 * len(report["windows"]) > 60
    assert max(abs(one["surprisal"]) for one in report["windows"]) > 0.01, "beyond what rounding alone explains of p(y)"


def test_one_fault_is_one_card_with_advice_for_the_test_that_fired(model: ModelInfo) -> None:
    """Wrong draws with right logprobs, on two replicas; later logprobs of a third that are 0.2 nats too low."""
    hot = [replace(one, replica=f"r{1 + at % 2}") for at, one in enumerate(answers(120, 0.6))]
    tokens = [*[10] * 9, 11] * 2
    low = {"logprobs": {"token_logprobs": [math.log(P[token]) - 0.2 for token in tokens]}}
    late = [exchange(tokens, f"late-{at}", 9000 + at, replica="r3", choice=low) for at in range(40)]
    report = report_on(model, [*hot, *late])
    (first, second) = next(one.blocks for one in document(report).sections if one.title == "Findings")
    assert isinstance(first, Shown) and isinstance(second, Shown)
    assert "hotter" in first.title and first.facts["replica"] == "r1, r2"
    assert "low" in second.title and second.facts["replica"] == "r3"
    advice = [str(one.facts["what to do"]) for one in (first, second)]
    assert "--default" in advice[0] and "calibrate" in advice[1]


def test_what_cannot_be_read_or_tested_is_listed_with_its_reason(model: ModelInfo) -> None:
    bare = {"token_ids": None, "logprobs": None}
    shaped = {"mirostat": 2}
    report = report_on(model, [exchange([10], choice=bare), *answers(2, 0.9, request=shaped)])
    for said in (read_page(report).text, printed(report)):
        assert "the reply has no token ids" in said
        assert "mirostat: what it does to the distribution is not known here" in said
        assert "The distribution of no answer was tested" in said
        assert "1 answer could not be read" in said
    assert list(shortcomings(report)) == ["untested"]


@pytest.mark.parametrize(
    ("exchanges", "table", "reason"),
    [
        ([], None, "no answer reached the referee (requests: 7 unreachable)"),
        ([exchange([10], choice={"token_ids": None})], None, "of 1 answer none could be read (the reply has no token"),
        ([exchange([10, 11])], Table(RuntimeError("out of memory")), "of 1 answer none has been replayed (1 failed)"),
        (
            [exchange([10, 11], choice={"logprobs": None}, request={"guided_regex": "a"})],
            None,
            "1 answer had no logprobs and no distribution to test (guided_regex: what it does",
        ),
    ],
)
def test_nothing_compared_says_why(
    model: ModelInfo, exchanges: list[Exchange], table: Table | None, reason: str
) -> None:
    report = report_on(model, exchanges, {"unreachable": 7}, table)
    found = headline(report)
    assert found.kind == "unclear" and found.text.startswith(f"Nothing could be compared: {reason}")
    assert found.text in printed(report) and found.text in read_page(report).text
    assert reason in shortcomings(report)["unread"]
    assert not shortcomings(report).keys() & {"alarm", "suspect", "dropped"}


class NearTie(Table):
    """The likelier of two tokens whose logits lie that many nats apart."""

    def __init__(self, nats: float) -> None:
        super().__init__()
        self._nats = nats

    async def replay(self, request: Request) -> Replayed:
        apart = self._nats / (request.params.temperature or 1.0)
        gaps = [0.0 if token == 10 else apart for token in request.prompt_token_ids[request.score_from :]]
        rows = tuple(ReplayedToken(math.exp(-gap), 1.0, min(gap, 10.0), 0.0, gap, 0.0) for gap in gaps)
        return Replayed((math.log(0.5),) * len(gaps), rows)


def test_what_rounding_decides_at_a_low_temperature_is_no_fault(model: ModelInfo) -> None:
    """In bfloat16 logits move by more than 0.02 nats, which at temperature 0.001 is a factor of e^20."""
    cold = answers(60, 0.97, request={"temperature": 0.001}, choice={"logprobs": None})
    for nats, found in ((0.02, set()), (3.0, {"greedy"})):
        report = report_on(model, cold, table=NearTie(nats))
        assert {one["alarm"] for one in report["findings"]} == found
        assert report["answers"]["distributions"]["greedy"] == 60


def test_processed_logprobs_of_a_low_temperature_are_not_compared(model: ModelInfo) -> None:
    """There rounding counts many times what was measured."""
    for temperature, compared in ((1.0, 50), (0.1, 0)):
        report = report_on(model, answers(1, 0.9, request={"temperature": temperature}), processed=True)
        assert report["all"]["compared"] == compared


def test_an_answer_that_is_suspect_by_itself_is_shown(model: ModelInfo) -> None:
    off = exchange([10] * 10, "cmpl-off", choice={"logprobs": {"token_logprobs": [-9.0] * 10}})
    report = report_on(model, [*answers(3, 0.9), off])
    kept = report_on(model, [off], keep_prompts=True)
    prompt = str(list(b"cmpl-off"))
    assert prompt in printed(kept) and prompt in read_page(kept).text
    assert prompt not in printed(report) + read_page(report).text, "prompts are shown where they are kept"
    assert [one["id"] for one in report["suspect"]] == ["cmpl-off-0"]
    for said in (read_page(report).text, printed(report)):
        assert "suspect by themselves" in said and "cmpl-off-0" in said and "drift 8.89 nats" in said
    assert shortcomings(report).keys() & {"suspect", "untested"} == {"suspect"}


def test_exchanges_left_out_or_mostly_unreadable_fail_a_check(model: ModelInfo) -> None:
    report = report_on(model, answers(2, 0.9), {"captured": 2, "dropped": 3})
    report["answers"]["replays"]["skipped"] = 1.0
    bad = exchange([10], choice={"token_ids": None})
    said = "Left out, because the referee lagged behind: 3 exchanges and 1 answer"
    assert shortcomings(report)["dropped"] == said
    assert said in printed(report) and said in read_page(report).text
    assert headline(report).kind == "ok"
    assert "unread" not in shortcomings(report_on(model, [bad, bad, *answers(2, 0.9)]))
    mostly = shortcomings(report_on(model, [bad, bad, bad, *answers(2, 0.9)]))
    assert mostly["unread"] == "3 answers could not be read, and only 2 could"


def test_what_a_server_says_is_shown_and_not_obeyed(model: ModelInfo) -> None:
    off = {"logprobs": {"token_logprobs": [-9.0] * 10}}
    wrong = exchange([10] * 10, MARKUP, choice=off, replica=MARKUP)
    unread = exchange([10], request={"prompt": MARKUP}, choice={"token_ids": None})
    untested = exchange([10], request={MARKUP: 1})
    tolerance = replace(Tolerance.against_float32("bfloat16"), source=MARKUP, measured={MARKUP: 1})
    report = report_on(model, [wrong, unread, untested], {}, served=MARKUP, tolerance=tolerance)
    assert report["suspect"] and report["findings"] and report["untested"]
    reader = read_page(report)
    assert reader.seen.count("b") == 1, "ours only"
    shown = plain(MARKUP)
    assert "\x1b" not in shown and "\\x1b[31m" in shown
    for said in (reader.text, printed(report)):
        assert "\x1b" not in said
        assert said.count(shown) >= 2, "model and tolerance"
        assert "a field: what it does to the distribution" in said
        assert re.search(rf"By replica.*{re.escape(shown)}", said, re.DOTALL)


def test_a_narrow_terminal_loses_no_figures(wrong: dict[str, Any]) -> None:
    out = StringIO()
    print_document(document(wrong), Console(file=out, width=80, color_system=None))
    tables = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert tables and "…" not in out.getvalue() and max(map(len, tables)) <= 80
    page = read_page(wrong).text
    for name, figures in wrong["strata"].items():
        (row,) = (line for line in tables if line.split()[1] == name)
        for shown in (f"{figures['tokens']:,}", f"{figures['surprisal_z']:.1f}"):
            assert shown in row and shown in page
