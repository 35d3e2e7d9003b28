"""The referee over HTTP: what proxies send comes in; verdicts, the report as a page, and metrics go out."""

import base64
import hashlib
from importlib import resources

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from deploy.reports.html_pages import page
from deploy.run.replayers import ReplayerOptions
from deploy.watch.referee import Referee, RefereeOptions
from deploy.watch.report import document
from deploy.watch.run import running_referee
from serve_app.errors import UnknownVerdict, reply_for
from serve_app.referee.wire.exchange import ExchangeBatch

_MOST_BYTES = 256 * 2**20  # of a batch
_LIVE = (resources.files("deploy.watch") / "live.js").read_text(encoding="utf-8")
_LIVE_PAGE = (
    '<p id="stale" role="alert" hidden>The referee does not answer; what is shown is its last report.</p>'
    '<footer><a href="report">this report as a file</a> <a href="report.json">as JSON</a> '
    f'<a href="metrics">metrics</a></footer><script>{_LIVE}</script></body>'
)
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    f"script-src 'sha256-{base64.b64encode(hashlib.sha256(_LIVE.encode()).digest()).decode()}'"
)


def referee_app(referee: Referee) -> FastAPI:
    """The routes of one referee."""
    app = FastAPI(title="truespec watch", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def show_health() -> Response:
        return Response("ok\n", media_type="text/plain")

    @app.get("/metrics")
    async def show_metrics() -> Response:
        content, media_type = referee.sink.exposition()
        return Response(content, headers={"content-type": media_type})

    @app.get("/")
    async def show_page() -> Response:
        live = page(document(referee.report())).replace("</body>", _LIVE_PAGE)
        return HTMLResponse(live, headers={"cache-control": "no-store", "content-security-policy": _POLICY})

    @app.get("/report")
    async def show_report() -> Response:
        return HTMLResponse(page(document(referee.report())), headers={"cache-control": "no-store"})

    @app.get("/report.json")
    async def show_figures() -> Response:
        return JSONResponse(referee.report(), headers={"cache-control": "no-store"})

    @app.get("/v1/verdicts/{reply_id:path}")
    async def show_verdict(reply_id: str) -> Response:
        known = referee.verdict(reply_id)
        if known is None:
            error = UnknownVerdict(
                f"Nothing is known of '{reply_id[:100]}': it was not watched, is not judged yet, or was long ago."
            )
            reply = reply_for(error)
            return JSONResponse(reply.body(), reply.status)
        return JSONResponse(known)

    @app.post("/v1/exchanges")
    async def take(request: Request) -> Response:
        if int(request.headers.get("content-length") or 0) > _MOST_BYTES:
            return Response(f"A batch may have {_MOST_BYTES} bytes.\n", 413, media_type="text/plain")
        try:
            batch = ExchangeBatch.from_wire(await request.body())
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            return Response(f"This is not a batch of exchanges: {error}.\n", 400, media_type="text/plain")
        referee.take(batch)
        return Response(status_code=204)

    return app


async def serve_referee(options: RefereeOptions, replayer: ReplayerOptions, host: str, port: int) -> None:
    """Serve until interrupted."""
    async with running_referee(options, replayer) as referee:
        config = uvicorn.Config(referee_app(referee), host=host, port=port, log_level="warning", access_log=False)
        await uvicorn.Server(config).serve()
