"""The status page without Ray: a made-up status behind the real routes, in a real browser."""

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from serve_app.guard.rehearsal import Rehearsal
from serve_app.http.access.access import Access
from serve_app.http.access.request_gate import Gate
from serve_app.http.page.feed import StatusFeed
from serve_app.http.page.status import StatusBook
from serve_app.telemetry.metrics import BufferSink, Metrics, PrometheusSink
from speculative.stats import CHECKS, INVARIANTS
from tests.support.browser import SCHEMES, WIDTHS, Visit, chromium, needs_chromium
from tests.support.clock import Clock
from tests.support.fake_operator import FakeKeys
from tests.support.fake_serving import Served, ServeFake
from tests.support.made_up_app import ABOUT, STARTED_AT, app_at_work

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)>"


class Referee:
    """A made-up app's books; a test may let time pass, change what they say, or have them say nothing."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.app = app_at_work(900)
        self.silent = False
        self.turns_away = False  # new streams
        self.changes: dict[str, Any] = {}

    def show_nothing(self) -> None:
        """As a controller does that has heard of no replica."""
        clock = Clock(STARTED_AT + 1000)
        self.app.book = StatusBook(ABOUT | {"verifies": False}, PrometheusSink(clock=clock), clock)
        self.changes = self.app.book.render({"replicas": [], "latest": [], "incidents": []})

    async def status(self) -> dict[str, Any]:
        if self.silent:
            raise ConnectionError("no referee")
        return self.app.status() | self.changes

    async def history(self) -> dict[str, Any]:
        return self.app.book.history()


@pytest.fixture(scope="module")
def referee() -> Referee:
    return Referee()


class Feed(StatusFeed):
    """Turns streams away when the fake referee says so."""

    def __init__(self, referee: Referee) -> None:
        self._referee = referee
        self.forget()

    def forget(self) -> None:
        """What another test's app said a moment ago is not for this one."""
        super().__init__(self._referee.status, self._referee.history)

    @property
    def full(self) -> bool:
        return self._referee.turns_away


@pytest.fixture(scope="module")
def feed(referee: Referee) -> Feed:
    return Feed(referee)


@pytest.fixture(scope="module")
def page_server(serve_fake: ServeFake, feed: Feed) -> Served:
    return serve_fake(page=feed)


@pytest.fixture
def served(page_server: Served, referee: Referee, feed: Feed) -> Served:
    referee.reset()
    feed.forget()
    page_server.script.clear()
    return page_server


@pytest.fixture(scope="module")
def keyed_server(serve_fake: ServeFake, referee: Referee) -> Served:
    return serve_fake(page=Feed(referee), gate=Gate(Access(FakeKeys().find)))


@pytest.fixture(scope="module")
def running_browser(page_server: Served, keyed_server: Served) -> Iterator[Browser]:
    del page_server, keyed_server  # started before a browser's event loop runs in this thread
    with chromium() as running:
        yield running


@pytest.fixture
def browser(running_browser: Browser) -> Iterator[Browser]:
    """The browser, whose pages are closed after the test: they would go on drawing themselves each second."""
    yield running_browser
    for context in running_browser.contexts:
        context.close()


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


def test_status_and_history_are_json_and_events_begin_with_the_status(served: Served, referee: Referee) -> None:
    status = httpx.get(f"{served.url}/status").json()
    assert status["about"]["model"] == "fake"
    assert len(json.dumps(status)) < 20_000  # it is sent each second, so the hour is not in it
    history = httpx.get(f"{served.url}/status/history").json()
    points = history["points"]
    assert {len(values) for values in points.values()} == {90}
    assert points["at"][-1] == referee.app.clock()
    assert points.keys() == status["now"].keys()
    assert history["started_at"] == status["started_at"]
    with httpx.stream("GET", f"{served.url}/status/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        line = next(line for line in response.iter_lines() if line.startswith("data: "))
    assert json.loads(line.removeprefix("data: "))["now"]["requests_per_s"] > 1
    assert httpx.head(f"{served.url}/status/events").status_code == 200, "it waits for no event"


def test_the_book_adds_up_replicas_but_never_strata() -> None:
    clock = Clock(5.0)
    sink = PrometheusSink(clock=clock)
    book = StatusBook({"model": "m"}, sink, clock)
    for name in ("r1", "r2"):
        buffer = BufferSink(name)
        metrics = Metrics(buffer, model_name="m", pool="decode")
        metrics.count("truespec_emitted_tokens_total", 10)
        metrics.count("truespec_draft_tokens_per_position_total", 8, position="0")
        metrics.count("truespec_accepted_tokens_per_position_total", 6, position="0")
        metrics.count("truespec_requests_total", 2, outcome="stop")
        metrics.gauge("truespec_requests_running", 3)
        metrics.gauge("truespec_held_out_acceptance_ratio", 0.5, sampling="greedy", position="0")
        for stratum, excess in (("all", 0.5), ("first", 0.25)):
            metrics.count("truespec_replay_tokens_total", 10, stratum=stratum)
            metrics.count("truespec_replay_tme_excess_total", excess, stratum=stratum)
        sink.apply(buffer.drain())
    replica = {"replica": "r1", "pool": "decode", "checks": []}
    clock.now += 10
    book.note()
    status = book.render({"replicas": [replica], "latest": [], "incidents": []})
    assert (status["totals"]["emitted"], status["totals"]["replayed"], status["totals"]["excess"]) == (20, 20, 1.0)
    assert (status["now"]["tokens_per_s"], status["now"]["running"]) == (2.0, 6)
    assert book.history()["points"]["tokens_per_s"] == [2.0]
    assert status["replicas"] == [replica | {"running": 3}] and status["troubles"] == []
    assert status["positions"] == [{"drafted": 16, "accepted": 12}]
    assert status["held_out"] == {"greedy": [0.5]}
    assert status["requests"] == {"stop": 4}
    assert [(one["stratum"], one["tokens"], one["tme"]) for one in status["strata"]] == [
        ("all", 20, 1.05),
        ("first", 20, 1.025),
    ]


async def test_the_referee_is_asked_once_a_second_and_only_so_many_streams_are_taken_on() -> None:
    now, asked = 0.0, 0

    async def ask() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        return {}

    feed = StatusFeed(ask, ask, lambda: now)
    await asyncio.gather(*(feed.status() for _ in range(5)))
    assert asked == 1
    await asyncio.gather(*(feed.history() for _ in range(5)))
    assert asked == 2
    now = 1.0
    await feed.status()
    assert asked == 3
    streams = []
    while not feed.full:
        streams.append(feed.events())
        await anext(streams[-1])
        assert len(streams) < 1000
    for stream in streams:
        await stream.aclose()
    assert not feed.full


def healthy(browser: Browser, served: Served) -> Visit:
    """A visit that has heard of a healthy service."""
    visit = Visit(browser, served.url)
    expect(visit.page.locator("#health")).to_have_text("healthy")
    return visit


@needs_chromium
def test_charts_tables_and_an_answer_in_a_browser(served: Served, browser: Browser) -> None:
    served.script.say("the quick brown fox jumps over the lazy dog")
    visit = healthy(browser, served)
    page = visit.page
    lines = {"requests": 1, "first-token": 2, "per-token": 2, "errors": 2, "load": 2, "kv": 1, "acceptance": 3}
    for chart, num in lines.items():
        expect(page.locator(f"#{chart} polyline")).to_have_count(num)
    for marks in ("rect.bar", "line.trained", "line.trained-greedy"):
        assert page.locator(f"#positions {marks}").count() == 3
    assert page.locator("#checks line.alarm").count() == len(CHECKS)
    assert page.locator("#replicas tbody tr").count() == 3
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer .text")).to_contain_text("the quick brown fox jumps over the lazy dog")
    expect(page.locator(".answer .pill")).to_have_text("done")
    assert page.locator(".answer .kind-first").count() == 1
    assert page.locator(".answer .kind-accepted").count() > 1
    assert visit.complaints == []
    assert visit.hosts == {f"127.0.0.1:{served.port}"}
    page.fill("#max-tokens", "2048")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer .error")).to_contain_text("context")


@needs_chromium
def test_every_token_can_be_seen_and_pointed_at(served: Served, browser: Browser) -> None:
    served.script.say("€\n\u200bok")  # parts of characters, a line's end, and a character without width
    visit = healthy(browser, served)
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


@needs_chromium
def test_what_comes_from_outside_is_text(served: Served, referee: Referee, browser: Browser) -> None:
    served.script.say(HOSTILE)
    status = referee.app.status()
    referee.app.trip("app#DecodeServer#a1b2")
    referee.changes = {
        "about": status["about"] | {"model": "fake", "drafter": HOSTILE},
        "latest": [status["latest"][0] | {"reason": HOSTILE}],
        "replicas": [
            status["replicas"][0] | {"replica": HOSTILE, "rehearsal": asdict(Rehearsal(1.0, "found", HOSTILE))}
        ],
        "incidents": [referee.app.status()["incidents"][0] | {"name": HOSTILE}],
    }
    visit = Visit(browser, served.url)
    for place in ("about", "latest", "replicas", "incidents", "rehearsals"):
        expect(visit.page.locator(f"#{place}")).to_contain_text(HOSTILE)
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
def test_a_page_without_news_says_why(served: Served, referee: Referee, browser: Browser) -> None:
    referee.turns_away = True
    visit = Visit(browser, served.url)
    connection, health = (visit.page.locator(place) for place in ("#connection", "#health"))
    expect(connection).to_contain_text("Connecting…")
    expect(connection).not_to_contain_text("lost")
    expect(health).to_have_text("connecting…")
    referee.turns_away = False
    expect(connection).to_be_hidden()
    expect(health).to_have_text("healthy")
    referee.silent = True
    expect(connection).to_contain_text("referee does not answer")
    expect(health).to_have_text("no new figures")
    referee.silent = False
    expect(connection).to_be_hidden()
    referee.turns_away = True
    visit.page.clock.install()
    visit.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # it asks for a new stream
    visit.page.clock.fast_forward(10_000)
    expect(connection).to_contain_text("connection is lost")
    expect(health).to_have_text("connection lost")
    referee.turns_away = False
    expect(connection).to_be_hidden()


@needs_chromium
def test_a_trip_says_what_when_where_what_it_means_and_what_to_do(
    served: Served, referee: Referee, browser: Browser
) -> None:
    referee.app.trip("app#DecodeServer#c3d4", check="lag_g")
    visit = Visit(browser, served.url)
    page = visit.page
    expect(page.locator("#health")).to_have_text("breaker open on 1 of 3")
    expect(page.locator("#breakers")).to_contain_text("decode replica c3d4")
    clock = page.evaluate("at => new Date(1000 * at).toLocaleTimeString([], { hourCycle: 'h23' })", referee.app.clock())
    (fault,) = page.locator("#incident-list li").all()  # a trip and the alarm that led to it are one
    alerts = ("TruespecBreakerOpen", "TruespecSelfCheckAlarm")
    words = ("Breaker open", "selfcheck", "decode replica c3d4", "Self check alarm", "keep the dump")
    of_answers = ("looks at 25% of the steps: wrong answers may have been sent", "and are not verified may be wrong")
    for text in (*words, *of_answers, "sampling noise, next round", clock, *alerts):
        expect(fault).to_contain_text(text)
    for link, alert in zip(fault.get_by_role("link").all(), alerts, strict=True):
        expect(link).to_have_attribute("href", f"page/runbooks.html#{alert.lower()}")
    assert page.locator("#incidents").bounding_box()["y"] < page.locator("#tiles").bounding_box()["y"]  # type: ignore[index]
    assert page.locator("#acceptance line.mark").count() == 2
    assert page.locator("#checks rect.over").count() >= 1
    referee.app.clock.now += 7200  # the replicas are silent, and the trip is long ago
    referee.changes = {"replicas": []}
    expect(page.locator("#health")).to_have_text("healthy")
    expect(page.locator("#incident-list")).to_contain_text("2 h ago")


@needs_chromium
def test_the_hour_is_there_at_once_and_goes_on(served: Served, referee: Referee, browser: Browser) -> None:
    page = healthy(browser, served).page
    line = page.locator("#requests polyline")
    expect(line).to_have_count(1)
    assert len((line.get_attribute("points") or "").split()) >= 90
    start = page.evaluate("at => new Date(1000 * at).toLocaleTimeString([], { hourCycle: 'h23' })", STARTED_AT)[:5]
    expect(page.locator("#span")).to_have_text(f"since {start}, when the controller started")
    expect(page.locator("#errors .legend")).to_contain_text("429s0")
    kept = ["#replicas td", "#requests svg", "#tiles b", "#checks rect.bar", "#latest .pill", "#counts dd"]
    page.evaluate("names => { window.kept = names.map(name => document.querySelector(name)) }", kept)
    referee.app.refuse(30)
    referee.app.fail(2)
    referee.app.pass_time(10)
    expect(page.locator("#errors .legend")).to_contain_text("429s30")
    expect(page.locator("#tiles")).to_contain_text("30 and 2")
    assert page.evaluate("window.kept.every(node => node.isConnected)"), "what does not change is left alone"
    referee.app.pass_time(4000)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # it asks for a new stream
    expect(page.locator("#span")).to_have_text("the last hour")
    expect(line).to_have_count(1)  # until the hour is there, the line has gaps: time passed faster than the stream
    assert len((line.get_attribute("points") or "").split()) >= 355


@needs_chromium
def test_what_is_wrong_has_figures_and_the_words_of_its_alert(
    served: Served, referee: Referee, browser: Browser
) -> None:
    referee.app.fail_prefills(2)
    referee.app.pass_time(20)
    visit = Visit(browser, served.url)
    page = visit.page
    expect(page.locator("#health")).to_have_text("Handoffs fail")
    trouble = page.locator("#trouble-list li")
    expect(trouble).to_contain_text("Handoffs failed: 2, prefills timeout: 4, in the last 15 minutes")
    trouble.get_by_role("link", name="TruespecHandoffsFail").click()
    expect(page.locator(":target")).to_contain_text("TruespecHandoffsFail")
    expect(page.locator("main")).to_contain_text("and prompts are computed again")
    visit.look(400, "dark")
    assert "the page is wider than the window" not in visit.faults_of_layout()
    page.go_back()
    referee.app.pass_time(1000)
    expect(page.locator("#health")).to_have_text("healthy")
    expect(page.locator("#troubles")).to_be_hidden()


@needs_chromium
def test_a_replica_says_how_it_serves_and_what_it_runs(served: Served, referee: Referee, browser: Browser) -> None:
    about = referee.app.status()["about"] | {"grafana": "https://grafana.example/"}
    referee.changes = {"about": about, "routers": [{"replica": "app#StreamRouter#z9", "first_token_p50_s": 0.5}]}
    page = healthy(browser, served).page
    expect(page.locator("#replicas tbody tr")).to_have_count(4)
    rows = {row.locator("td").nth(1).inner_text(): row for row in page.locator("#replicas tbody tr").all()}
    assert " ms / " in rows["a1b2"].inner_text()
    expect(rows["z9"]).to_contain_text("500 ms")
    for text in ("0.1.0", "15 min", "node-a", "AMD EPYC 9654 96-Core Processor"):
        expect(page.locator("#builds tbody tr").first).to_contain_text(text)
    expect(page.locator("#tiles")).to_contain_text("2.00drafts save about 25 % of decoding time")
    grafana = page.get_by_role("link", name="Grafana")
    expect(grafana).to_have_attribute("href", "https://grafana.example/d/truespec-overview")


@needs_chromium
def test_checks_are_called_by_names_and_never_by_letters(served: Served, referee: Referee, browser: Browser) -> None:
    for check in CHECKS:
        referee.app.trip("app#DecodeServer#c3d4", check=check)
        referee.app.clock.now += 1
    for kind in INVARIANTS:
        referee.app.metrics("app#DecodeServer#a1b2").count("truespec_selfcheck_violations_total", 1, kind=kind)
    referee.app.report("app#DecodeServer#a1b2")
    visit = Visit(browser, served.url)
    expect(visit.page.locator("#incident-list li").first).to_be_visible()
    shown = visit.page.locator("main").inner_text() + " ".join(visit.page.locator("svg text").all_text_contents())
    assert "draft acceptance, seeded" in shown
    letters = {*CHECKS, "p", "q", "a prime", "lag b", "lag g", "coupled a prime", "coupled c"} - {"a"}
    assert not {name for name in letters if re.search(rf"(?<![\w/]){name}(?!\w)", shown)}
    assert "a" not in visit.page.locator("main code, #checks text").all_text_contents()


@needs_chromium
def test_on_and_off_are_compared_with_the_same_seed_and_colours_are_kept(served: Served, browser: Browser) -> None:
    served.source.requests.clear()
    page = healthy(browser, served).page
    served.script.say("one two three STOP four")
    page.get_by_text("compare", exact=True).click()
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#compared")).to_contain_text("The same text, token for token.")
    on, off = served.source.requests
    assert (on.params.speculate, off.params.speculate) == (True, False)
    assert on.seed == off.seed
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    for _ in range(2):
        page.locator("#theme").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark


@needs_chromium
def test_a_key_is_asked_for_and_kept_in_the_tab(keyed_server: Served, browser: Browser) -> None:
    keyed_server.script.say("the quick brown fox")
    page = Visit(browser, keyed_server.url).page
    expect(page.locator("#connection")).to_contain_text("need an API key")
    page.locator("#key").fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#unlock")).to_be_visible()
    expect(page.locator("#connection")).to_contain_text("need an API key")
    page.locator("#key").fill("key-1")
    page.get_by_role("button", name="Open").click()
    expect(page.locator("#health")).to_have_text("healthy")
    expect(page.locator("#unlock")).to_be_hidden()
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer .text")).to_contain_text("the quick brown fox")
    page.reload()
    expect(page.locator("#health")).to_have_text("healthy")
    assert page.evaluate("[document.cookie, Object.values(localStorage).join()].join()") == ","
    page.get_by_role("button", name="forget key").click()
    expect(page.locator("#connection")).to_contain_text("need an API key")
    assert page.evaluate("sessionStorage.length") == 0


@needs_chromium
@pytest.mark.parametrize("state", ["tripped", "empty"])
def test_nothing_is_cut_broken_or_hard_to_read(served: Served, referee: Referee, browser: Browser, state: str) -> None:
    if state == "tripped":
        referee.app.trip("app#DecodeServer#c3d4", check="coupled_a_prime")
        referee.app.refuse(40_000)
        referee.app.fail_prefills(4)
        referee.app.pass_time(120)
        slow = {"kernels_off": "no C++ compiler on PATH: install g++ where the replica runs", "breaker": "canary"}
        replicas = referee.app.status()["replicas"]
        referee.changes = {"replicas": [replicas[0] | slow, *replicas[1:]]}
    else:
        referee.show_nothing()
    visit = Visit(browser, served.url)
    expect(visit.page.locator("#health")).not_to_have_text("connecting…")
    if state == "empty":
        expect(visit.page.locator("#health")).to_have_text("nothing checked yet")
        for place in ("requests", "first-token", "acceptance", "positions", "checks", "kv", "replicas", "latest"):
            assert len(visit.page.locator(f"#{place} .empty").inner_text()) > 10, "it says what is missing"
    for details in visit.page.locator("summary").all():
        if details.is_visible():
            details.click()
    for width in (*WIDTHS, 800):
        for scheme in SCHEMES:
            visit.look(width, scheme)
            assert visit.faults_of_layout() == [], (width, scheme)
    assert visit.complaints == []
