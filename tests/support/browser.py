"""Test helper: the status page in a real Chromium."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (400, 1400)
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
_PATIENCE_MS = 60_000
_LAYOUT = (Path(__file__).parent / "layout_faults.js").read_text(encoding="utf-8")

expect.set_options(timeout=_PATIENCE_MS)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install --no-install-recommends chromium fonts-dejavu-core"
)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser. Within it the thread has a running event loop: a test that is a coroutine must not use it."""
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        try:
            yield browser
        finally:
            browser.close()


class Visit:
    """One page, and what the browser had to say about it."""

    def __init__(self, browser: Browser, url: str, width: int = 1000) -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900})
        self.page.set_default_timeout(_PATIENCE_MS)
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.goto(url)

    def _on_console(self, message: object) -> None:
        if message.type in ("error", "warning"):  # type: ignore[attr-defined]
            self.complaints.append(message.text)  # type: ignore[attr-defined]

    def look(self, width: int, scheme: Literal["light", "dark"]) -> None:
        """See the page at this width and in these colours."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.page.evaluate("() => new Promise(requestAnimationFrame)")  # a resized page draws itself again

    def faults_of_layout(self) -> list[str]:
        """What of the page is cut, broken, overlaid, or hard to read."""
        faults: list[str] = self.page.evaluate(_LAYOUT)
        return faults

    @property
    def hosts(self) -> set[str]:
        """Where requests went."""
        return {urlsplit(url).netloc for url in self.requested}
