"""The status page without Ray: a made-up status behind the real routes, in a real browser."""

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from serve_app.access.access import Access, Caller, Scope
from serve_app.access.request_gate import Gate
from serve_app.page.feed import StatusFeed
from serve_app.page.status import StatusBook
from serve_app.telemetry.metrics import BufferSink, Metrics, PrometheusSink
from speculative.stats import CHECKS
from tests.support.browser import Visit, chromium, needs_chromium
from tests.support.fake_serving import Served, ServeFake

HOSTILE = "<img src=x onerror=alert(1)>"
STARTED_AT = time.time() - 300


class Referee:
    """Fake: returns a status that a test may change, or nothing."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.silent = False
        self.turns_away = False  # new streams
        self.changes: dict[str, Any] = {}

    async def status(self) -> dict[str, Any]:
        if self.silent:
            raise ConnectionError("no referee")
        return made_up(time.time()) | self.changes


def made_up(now: float) -> dict[str, Any]:
    """What a referee says of a service that has been at work for five minutes."""
    points = []
    for ago in range(300, 0, -1):
        second = now - ago - STARTED_AT
        work = second * 40 + 300 * math.sin(second / 25)
        points.append(
            {
                "at": now - ago,
                "emitted": 1000 + work,
                "drafts": 500 + work / 3,
                "drafted": 1500 + work,
                "accepted": 900 + 0.61 * work,
                "expected": 903 + 0.612 * work,
                "achievable": 950 + 0.66 * work,
                "replayed": 12.0 * second,
                "excess": 1e-3 * second,
                "running": 3.0,
                "waiting": 0.0,
            }
        )
    checks = [
        {"check": check, "num": 900, "mean": 0, "z": 0.4, "log_e": index - 6.0, "log_threshold": 14.3, "num_alarms": 0}
        for index, check in enumerate(CHECKS)
    ]
    replicas = [
        {"replica": f"app#DecodeServer#{name}", "pool": pool, "breaker": "closed", "mode": "auto", "since": now - 300}
        | {"reason": "", "running": 2.0, "waiting": 0.0, "kv_usage": 0.31, "speculating": 1.0, "checks": checks}
        | {"replaying": 1.0, "kernels": "cpu", "kernels_off": ""}
        for name, pool in (("a1b2", "decode"), ("c3d4", "decode"), ("e5f6", "prefill"))
    ]
    replayed = {"at": now - 20, "replica": "app#DecodeServer#a1b2", "replayed_by": "app#PrefillServer#e5f6"}
    replayed |= {"verdict": "verified", "reason": "replayed", "num_tokens": 80, "tme": 1.0001, "max_drift_nats": 2e-4}
    replayed |= {"checked": ["logprobs", "support", "distribution"], "distribution": "tested"}
    strata = [
        {"stratum": name, "meaning": name, "tokens": 3600 / rank, "tme": 1 + 1e-4 * rank, "alarms": 0}
        for rank, name in enumerate(("all", "speculative", "handoff_0", "first", "accepted", "recovered"), start=1)
    ]
    about = {"model": "fake", "topology": "disaggregated", "drafter": "eagle3", "replay_share": 0.1, "max_tme": 1.05}
    return {
        "about": about | {"verifies": False},
        "started_at": STARTED_AT,
        "at": now,
        "replicas": replicas,
        "running": 6.0,
        "waiting": 0.0,
        "replaying": 3.0,
        "latest": [replayed] * 4,
        "positions": [{"drafted": 4000 / 2**index, "accepted": 3000 / 2.3**index} for index in range(4)],
        "strata": strata,
        "check_meanings": CHECKS,
        "requests": {"stop": 140, "length": 12},
        "replays": {"ok": 30},
        "verdicts": {"verified": 30},
        "distributions": {"tested": 20, "greedy": 10},
        "handoffs": {"ok": 152},
        "trips": {},
        "canaries": {},
        "replay_alarms": {},
        "check_alarms": {},
        "logprob_violations": {},
        "invariant_violations": {},
        "history": points,
    }


@pytest.fixture(scope="module")
def referee() -> Referee:
    return Referee()


class Feed(StatusFeed):
    """Turns streams away when the fake referee says so."""

    def __init__(self, referee: Referee) -> None:
        super().__init__(referee.status)
        self._referee = referee

    @property
    def full(self) -> bool:
        return self._referee.turns_away


@pytest.fixture(scope="module")
def page_server(serve_fake: ServeFake, referee: Referee) -> Served:
    return serve_fake(page=Feed(referee))


@pytest.fixture
def served(page_server: Served, referee: Referee) -> Iterator[Served]:
    referee.reset()
    page_server.script.clear()
    yield page_server
    referee.reset()


class OneKey:
    """A file of keys with one of them, "the key"."""

    def find(self, key: str) -> Caller | None:
        return Caller("somebody", frozenset({Scope.USER})) if key == "the key" else None


@pytest.fixture(scope="module")
def keyed_server(serve_fake: ServeFake, referee: Referee) -> Served:
    return serve_fake(page=Feed(referee), gate=Gate(Access(OneKey())))


@pytest.fixture(scope="module")
def browser(page_server: Served, keyed_server: Served) -> Iterator[Browser]:
    del page_server, keyed_server  # started before a browser's event loop runs in this thread
    with chromium() as running:
        yield running


def test_the_page_comes_with_a_policy_that_lets_nothing_in_from_elsewhere(served: Served) -> None:
    page = httpx.get(f"{served.url}/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert '<base href="/">' in page.text
    own = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert own and not [url for url in own if "//" in url]
    for url in {url for url in own if url.startswith("page/")}:
        assert httpx.get(f"{served.url}/{url}").headers["content-security-policy"] == policy
    assert httpx.get(f"{served.url}/page/..%2froutes.py").status_code == 404
    assert httpx.get(f"{served.url}/page/index.html").status_code == 404


def test_status_is_one_json(served: Served) -> None:
    status = httpx.get(f"{served.url}/status").json()
    assert status["about"]["model"] == "fake"
    assert len(status["history"]) == 300


def test_events_go_on_where_the_last_one_ended(served: Served) -> None:
    first, again = events_of(served, {}), events_of(served, {"last-event-id": f"{time.time() - 10:.3f}"})
    assert len(first["history"]) == 300
    assert 8 <= len(again["history"]) <= 12


def events_of(served: Served, headers: dict[str, str]) -> dict[str, Any]:
    """The first status of a stream."""
    with httpx.stream("GET", f"{served.url}/status/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                reported: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return reported
    raise AssertionError("the stream ended")


def test_the_book_adds_up_replicas_but_never_strata() -> None:
    sink = PrometheusSink(clock=lambda: 0.0)
    for name in ("r1", "r2"):
        buffer = BufferSink(name)
        metrics = Metrics([buffer], model_name="m", pool="decode")
        metrics.count("truespec_emitted_tokens_total", 10)
        metrics.count("truespec_draft_tokens_per_position_total", 8, position="0")
        metrics.count("truespec_accepted_tokens_per_position_total", 6, position="0")
        metrics.count("truespec_requests_total", 2, outcome="stop")
        metrics.gauge("truespec_requests_running", 3)
        for stratum, excess in (("all", 0.5), ("first", 0.25)):
            metrics.count("truespec_replay_tokens_total", 10, stratum=stratum)
            metrics.count("truespec_replay_tme_excess_total", excess, stratum=stratum)
        sink.apply(buffer.drain())
    book = StatusBook({"model": "m"}, lambda: 5.0)
    book.note(sink.samples())
    replica = {"replica": "r1", "pool": "decode", "checks": []}
    status = book.render(sink.samples(), {"replicas": [replica], "latest": []})
    (point,) = status["history"]
    assert (point["at"], point["emitted"], point["replayed"], point["excess"]) == (5.0, 20, 20, 1.0)
    assert point["running"] == 6
    assert status["replicas"] == [replica | {"running": 3}]
    assert status["positions"] == [{"drafted": 16, "accepted": 12}]
    assert status["requests"] == {"stop": 4}
    assert [(one["stratum"], one["tokens"], one["tme"]) for one in status["strata"]] == [
        ("all", 20, 1.05),
        ("first", 20, 1.025),
    ]


async def test_the_referee_is_asked_once_a_second_however_many_watch() -> None:
    now, asked = 0.0, 0

    async def ask() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {"history": []}

    feed = StatusFeed(ask, lambda: now)
    await asyncio.gather(*(feed.status() for _ in range(5)))
    assert asked == 1
    now = 1.0
    await feed.status()
    assert asked == 2


async def test_only_so_many_streams_are_taken_on_and_they_end() -> None:
    async def ask() -> dict[str, Any]:
        return {"history": []}

    feed = StatusFeed(ask)
    streams = []
    while not feed.full:
        streams.append(feed.events())
        await anext(streams[-1])
        assert len(streams) < 1000
    for stream in streams:
        await stream.aclose()
    assert not feed.full


@needs_chromium
def test_charts_tables_and_an_answer_in_a_browser(served: Served, browser: Browser) -> None:
    served.script.say("the quick brown fox jumps over the lazy dog")
    visit = Visit(browser, served.url)
    page = visit.page
    expect(page.locator("#health")).to_have_text("healthy")
    for chart, shapes in (("speed", "polyline"), ("course", "polyline"), ("positions", "rect"), ("checks", "rect.bar")):
        assert page.locator(f"#{chart} {shapes}").count() >= 1, chart
    assert page.locator("#course polyline").count() == 3
    assert page.locator("#checks line.alarm").count() == len(CHECKS)
    assert page.locator("#replicas tbody tr").count() == 3
    page.get_by_role("button", name="Send").click()
    text = page.locator(".answer .text")
    expect(text).to_contain_text("the quick brown fox jumps over the lazy dog")
    expect(page.locator(".answer .pill")).to_have_text("done")
    assert page.locator(".answer .kind-first").count() == 1
    assert page.locator(".answer .kind-accepted").count() > 1
    page.locator(".answer .tok").nth(1).hover()
    expect(page.locator("#token")).to_contain_text("logprob")
    visit.shoot("made-up")
    assert visit.complaints == []
    assert visit.hosts == {f"127.0.0.1:{served.port}"}


@needs_chromium
def test_every_token_can_be_seen_and_pointed_at(served: Served, browser: Browser) -> None:
    served.script.say("€\n\u200bok")  # parts of characters, a line's end, and a character without width
    visit = Visit(browser, served.url)
    expect(visit.page.locator("#health")).to_have_text("healthy")
    visit.page.get_by_role("button", name="Send").click()
    expect(visit.page.locator(".answer .pill")).to_have_text("done")
    assert visit.page.locator(".answer .text").text_content() == "€\n\u200bok<|im_end|>"
    tokens = visit.page.locator(".answer .tok")
    marks = [tokens.nth(index).get_attribute("data-mark") for index in range(tokens.count())]
    assert marks[:4] == ["e2", "82", None, "↵"]
    for index, mark in enumerate(marks):
        tokens.nth(index).hover()
        expect(visit.page.locator("#token")).to_contain_text("logprob")
        if mark in ("e2", "82"):
            expect(visit.page.locator("#token code").first).to_have_text(mark)
    assert visit.complaints == []


@needs_chromium
def test_what_comes_from_outside_is_text(served: Served, referee: Referee, browser: Browser) -> None:
    served.script.say(HOSTILE)
    status = made_up(time.time())
    referee.changes = {
        "about": status["about"] | {"model": "fake", "drafter": HOSTILE},
        "latest": [status["latest"][0] | {"reason": HOSTILE}],
        "replicas": [status["replicas"][0] | {"replica": HOSTILE}],
    }
    visit = Visit(browser, served.url)
    expect(visit.page.locator("#about")).to_contain_text(HOSTILE)
    expect(visit.page.locator("#latest")).to_contain_text(HOSTILE)
    visit.page.get_by_role("button", name="Send").click()
    expect(visit.page.locator(".answer .text")).to_contain_text(HOSTILE)
    assert visit.page.locator("img[src=x]").count() == 0
    assert visit.complaints == []


def test_a_status_that_cannot_be_had_is_an_error_in_the_usual_form(served: Served, referee: Referee) -> None:
    referee.silent = True
    for _ in range(100):  # the last status is kept for a second
        reply = httpx.get(served.url + "/status")
        if reply.status_code != 200:
            break
        time.sleep(0.05)
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error" and "no referee" not in reply.text


@needs_chromium
def test_trouble_is_shown_as_such(served: Served, referee: Referee, browser: Browser) -> None:
    status = made_up(time.time())
    broken = status["replicas"][0] | {"breaker": "open", "reason": "selfcheck"}
    referee.changes = {"replicas": [broken, *status["replicas"][1:]], "check_alarms": {"a": 1.0}}
    visit = Visit(browser, served.url)
    expect(visit.page.locator("#health")).to_have_text("breaker open on 1 of 3")
    expect(visit.page.locator("#replicas tbody tr").first).to_contain_text("selfcheck")
    referee.silent = True
    expect(visit.page.locator("#connection")).to_contain_text("referee does not answer")
    referee.silent = False
    expect(visit.page.locator("#connection")).to_be_hidden()


@needs_chromium
def test_a_lost_connection_is_said_and_fixed(served: Served, referee: Referee, browser: Browser) -> None:
    visit = Visit(browser, served.url)
    expect(visit.page.locator("#health")).to_have_text("healthy")
    referee.turns_away = True
    visit.page.clock.install()
    visit.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # it asks for a new stream
    visit.page.clock.fast_forward(10_000)
    expect(visit.page.locator("#connection")).to_contain_text("connection is lost")
    referee.turns_away = False
    expect(visit.page.locator("#connection")).to_be_hidden()


@needs_chromium
def test_empty_states_say_what_is_missing(served: Served, referee: Referee, browser: Browser) -> None:
    about = made_up(0)["about"]
    empty = StatusBook(about, time.time)
    empty.note([])
    referee.changes = empty.render([], {"replicas": [], "latest": []})
    visit = Visit(browser, served.url)
    expect(visit.page.locator("#health")).to_have_text("nothing checked yet")
    for place in ("speed", "course", "positions", "checks", "replicas", "strata", "latest"):
        assert len(visit.page.locator(f"#{place} .empty").inner_text()) > 10
    visit.shoot("empty")
    assert visit.complaints == []


@needs_chromium
def test_on_and_off_are_compared_with_the_same_seed(served: Served, browser: Browser) -> None:
    served.source.requests.clear()
    visit = Visit(browser, served.url)
    expect(visit.page.locator("#health")).to_have_text("healthy")
    served.script.say("one two three STOP four")
    visit.page.get_by_text("compare").click()
    visit.page.get_by_role("button", name="Send").click()
    expect(visit.page.locator("#compared")).to_contain_text("The same text, token for token.")
    on, off = served.source.requests
    assert (on.params.speculate, off.params.speculate) == (True, False)
    assert on.seed == off.seed
    visit.shoot("compared")
    assert visit.complaints == []


@needs_chromium
def test_a_refused_prompt_says_why(served: Served, browser: Browser) -> None:
    visit = Visit(browser, served.url)
    expect(visit.page.locator("#health")).to_have_text("healthy")
    visit.page.fill("#max-tokens", "2048")
    visit.page.get_by_role("button", name="Send").click()
    expect(visit.page.locator(".answer .error")).to_contain_text("context")


@needs_chromium
def test_colours_are_chosen_and_kept(served: Served, browser: Browser) -> None:
    visit = Visit(browser, served.url)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = visit.page.evaluate(ground)
    for _ in range(2):
        visit.page.locator("#theme").click()
    dark = visit.page.evaluate(ground)
    assert dark != light
    visit.page.reload()
    assert visit.page.evaluate(ground) == dark


@needs_chromium
def test_a_key_is_asked_for_and_kept_in_the_tab(keyed_server: Served, browser: Browser) -> None:
    keyed_server.script.say("the quick brown fox")
    visit = Visit(browser, keyed_server.url)
    page = visit.page
    expect(page.locator("#connection")).to_contain_text("need an API key")
    expect(page.locator("#health")).to_have_text("connecting")
    for key in ("wrong", "the key"):
        page.locator("#key").fill(key)
        page.get_by_role("button", name="Open").click()
        if key == "wrong":
            expect(page.locator("#unlock")).to_be_visible()
            expect(page.locator("#connection")).to_contain_text("need an API key")
    expect(page.locator("#health")).to_have_text("healthy")
    expect(page.locator("#unlock")).to_be_hidden()
    expect(page.locator("#connection")).to_be_hidden()
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer .text")).to_contain_text("the quick brown fox")
    visit.shoot("keyed")
    page.reload()
    expect(page.locator("#health")).to_have_text("healthy")
    assert page.evaluate("[document.cookie, Object.values(localStorage).join()].join()") == ","
    page.get_by_role("button", name="forget key").click()
    expect(page.locator("#connection")).to_contain_text("need an API key")
    assert page.evaluate("sessionStorage.length") == 0
    refused = [complaint for complaint in visit.complaints if "401" not in complaint]
    assert refused == []
