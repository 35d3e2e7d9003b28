"""`/` and what it loads, files of ours from this server and nowhere else; the status, its stream, and the last hour."""

import html
import re
from functools import cache
from importlib import resources

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from serve_app.http.event_stream import EventStream
from serve_app.http.page.feed import StatusFeed

_KINDS = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "dom.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "answers.js": "text/javascript; charset=utf-8",
    "wire.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "runbooks.html": "text/html; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_BUSY_RETRY_S = "5"


def add_page(app: FastAPI, feed: StatusFeed) -> None:
    """Serve the page at the app's root."""

    @app.get("/")
    async def show_page(request: Request) -> Response:
        base = html.escape(str(request.scope.get("root_path", "")).rstrip("/") + "/")
        page = _static("index.html").replace(b"{base}", base.encode())
        return Response(page, headers=_HEADERS | {"content-type": "text/html; charset=utf-8"})

    @app.get("/page/{name}")
    async def show_file(name: str) -> Response:
        if name not in _KINDS:
            return Response(status_code=404, headers=_HEADERS)
        return Response(_static(name), headers=_HEADERS | {"content-type": _KINDS[name]})

    @app.get("/status")
    async def show_status() -> Response:
        return JSONResponse(await feed.status(), headers={"cache-control": "no-store"})

    @app.get("/status/history")
    async def show_history() -> Response:
        return JSONResponse(await feed.history(), headers={"cache-control": "no-store"})

    @app.get("/status/events")
    async def follow_status() -> Response:
        if feed.full:
            return Response("Too many status pages are open.", 503, {"retry-after": _BUSY_RETRY_S})
        events = feed.events()
        return EventStream(await anext(events), events)


@cache
def _static(name: str) -> bytes:
    files = resources.files("serve_app.http.page") / "static"
    content = (files / name).read_bytes()
    if name != "runbooks.html":
        return content
    markdown = (files / "runbooks.md").read_text(encoding="utf-8")  # that of the docs, of this version
    blocks = re.findall(r"^```.*?^```$|^\S.*?(?=\n\n|\Z)", markdown, re.M | re.S)
    return content.replace(b"{body}", "\n".join(map(_block, blocks)).encode())


def _block(text: str) -> str:
    """A block of Markdown, of the few kinds that the runbooks have, as HTML."""
    if text.startswith("<!--"):
        return ""
    if text.startswith("```"):
        return f"<pre>{html.escape(text.partition(chr(10))[2].removesuffix('```').rstrip())}</pre>"
    marks, _, title = text.partition(" ")
    if marks in ("#", "##"):
        return f'<h{len(marks)} id="{html.escape(title.lower())}">{html.escape(title)}</h{len(marks)}>'
    bold = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html.escape(text))
    inline = re.sub("`([^`]+)`", r"<code>\1</code>", bold)
    return f"<p>{inline}</p>"
