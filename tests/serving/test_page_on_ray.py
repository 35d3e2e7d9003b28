"""The status page of the running app, in a real browser: what it shows is what the service does."""

import pytest
from playwright.sync_api import expect

from tests.support.browser import Visit, chromium, needs_chromium
from tests.support.services import LOOPING, Service
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200), needs_chromium]


def test_the_page_answers_and_shows_what_became_of_it(disaggregated: Service) -> None:
    for seed in range(3):  # drafted, drawn, and replayed: something for every chart
        disaggregated.completion(prompt=LOOPING, max_tokens=40, temperature=1.0, seed=1000 + seed, ignore_eos=True)
    wait_for(lambda: disaggregated.metrics()["replayed_tokens"] > 0, "a replay")
    with disaggregated.http() as http:
        wait_for(lambda: any(http.get("/status/history").json()["points"]["requests_per_s"]), "a point of the history")
    with chromium() as browser:
        visit = Visit(browser, f"{disaggregated.base_url}/")
        page = visit.page
        expect(page.locator("#about")).to_contain_text("disaggregated")
        expect(page.locator("#replicas tbody tr")).to_have_count(2)
        for shape in ("#requests polyline", "#acceptance polyline.first", "#checks rect.bar"):
            expect(page.locator(shape).first).to_be_attached()
        for row in ("#strata tbody tr", "#latest tbody tr"):
            expect(page.locator(row).first).to_be_visible()
        page.fill("#prompt", LOOPING)
        page.fill("#max-tokens", "24")
        page.get_by_role("button", name="Send").click()
        checked = "logprobs, support, draws, alternatives, wire"
        expect(page.locator(".answer .pill")).to_have_text(f"verified: {checked}")
        count = page.locator(".answer .tok").count()
        assert 0 < count <= 24
        assert page.locator(".answer .kind-first").count() == 1
        expect(page.locator(".answer .figures")).to_contain_text(f"{count} tokens")
        assert visit.complaints == []
        assert visit.hosts == {disaggregated.base_url.split("/")[2]}
