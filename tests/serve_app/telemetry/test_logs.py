"""Log lines: their form, whom they belong to, and that nothing gets into them that looks like another line."""

import asyncio
import io
import json
import logging
import logging.handlers
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider

from serve_app.http.routes import build_ingress
from serve_app.openai.frontend import FrontEnd
from serve_app.telemetry import logs
from serve_app.telemetry.tracing import Carried, Tracing, adopt
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import EngineFault
from tests.support.fake_serving import BackendSource, make_backend

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
NAMES = ("", "ray.serve", "truespec", "serve_app", "speculative")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """Where Ray Serve's handlers write in this test; all loggers are as before afterwards."""
    loggers = [logging.getLogger(name) for name in NAMES]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    stream = io.StringIO()
    serve = logging.getLogger("ray.serve")
    # As Ray Serve has it: a handler that keeps lines back, before the one that writes; nothing goes further up.
    serve.handlers[:] = [logging.handlers.MemoryHandler(1, target=logging.StreamHandler(stream))]
    serve.propagate = False
    yield stream
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def lines(written: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written.getvalue().splitlines()]


def test_a_json_line_has_time_level_logger_and_message(written: io.StringIO) -> None:
    logs.configure("json", "info", "app#DecodeServer#a1")
    record = logging.LogRecord("truespec.engine", logging.WARNING, "", 0, "block %d is lost", (7,), None)
    record.created = 1700000000.25
    logging.getLogger("truespec.engine").handle(record)
    assert lines(written) == [
        {
            "time": "2023-11-14T22:13:20.250000Z", "level": "warning", "logger": "truespec.engine",
            "message": "block 7 is lost", "replica": "app#DecodeServer#a1",
        }
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["truespec.x", "serve_app.http.routes", "speculative.kernels.bindings", "ray.serve"])
def test_the_level_is_that_of_our_lines_and_of_ray_serves(written: io.StringIO, name: str) -> None:
    for level, expected in (("debug", ["d", "i", "e"]), ("info", ["i", "e"]), ("error", ["e"])):
        written.seek(0)
        written.truncate()
        logs.configure("json", level)  # type: ignore[arg-type]
        logger = logging.getLogger(name)
        logger.debug("d")
        logger.info("i")
        logger.error("e")
        assert [line["message"] for line in lines(written)] == expected


def test_other_libraries_say_what_is_wrong_in_the_same_form(written: io.StringIO) -> None:
    logs.configure("json", "debug")
    logging.getLogger("somebody").info("chatter")
    logging.getLogger("somebody").warning("trouble")
    assert [line["message"] for line in lines(written)] == ["trouble"]


def test_without_ray_lines_go_to_standard_error(written: io.StringIO, capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("ray.serve").handlers.clear()
    logs.configure("text", "info")
    logging.getLogger("truespec.engine").info("hello")
    assert capsys.readouterr().err.endswith(" INFO truespec.engine: hello\n")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_line_can_be_forged(written: io.StringIO, log_format: logs.LogFormat) -> None:
    logs.configure(log_format, "info")
    hostile = "\r\n\x85\u20282026-01-01T00:00:00Z ERROR truespec: forged"
    logging.getLogger("truespec").info("path %s", hostile, extra={"fields": {"path": hostile}})
    assert len(written.getvalue().splitlines()) == 1


def test_no_text_moves_the_readers_cursor(written: io.StringIO) -> None:
    logs.configure("text", "info")
    hostile = "é\x1b[2J\x1b]0;title\x07\x08\x9b31m\u202e\t\ud800"
    try:
        raise ValueError(hostile)
    except ValueError:
        logging.getLogger("truespec").exception("path %s", hostile, extra={"fields": {"path": hostile}})
    reported = written.getvalue()
    assert all(line.isprintable() for line in reported.split("\n"))
    assert "Traceback" in reported and "ValueError: é" in reported
    assert reported.count("é\\x1b[2J\\x1b]0;title\\x07\\x08\\x9b31m\\u202e\\t\\ud800") == 3


async def test_a_path_is_logged_up_to_a_length(written: io.StringIO, tokenizer: Tokenizer) -> None:
    logs.configure("json", "info")
    backend, _ = make_backend(tokenizer)
    transport = httpx.ASGITransport(app=build_ingress(FrontEnd(BackendSource(backend), tokenizer, backend.info)))
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        await client.get("/v1/" + "x" * 5000)
    (line,) = [line for line in lines(written) if line["logger"] == "serve_app.http.request_ids"]
    path = "/v1/" + "x" * 196
    assert (line["path"], line["message"]) == (path, f"GET {path} 404")


async def test_a_line_reports_the_request_and_the_trace_of_its_task(written: io.StringIO) -> None:
    logs.configure("json", "info")
    logger = logging.getLogger("truespec")

    async def serve(number: int) -> None:
        trace = f"00-{number:032x}-b7ad6b7169203331-01"
        adopt(Carried(f"r-{number}", (("traceparent", trace),)))
        await asyncio.sleep(0)  # the others come between
        logger.info("%d", number)

    await asyncio.gather(*(asyncio.create_task(serve(number)) for number in range(1, 4)))
    logger.info("nobody's")
    *reported, last = lines(written)
    assert [(line["request_id"], line["trace_id"]) for line in reported] == [
        (f"r-{line['message']}", f"{int(line['message']):032x}") for line in reported
    ]
    assert "request_id" not in last and "trace_id" not in last


def test_ray_serves_own_lines_keep_the_id_that_it_gave_them(written: io.StringIO) -> None:
    logs.configure("json", "info")
    logging.getLogger("ray.serve").info("GET /", extra={"request_id": "r-9"})
    assert lines(written)[0]["request_id"] == "r-9"


@pytest.mark.parametrize("provider", [None, TracerProvider()], ids=["no tracing", "tracing"])
async def test_every_line_of_a_request_has_its_id(
    written: io.StringIO, tokenizer: Tokenizer, provider: TracerProvider | None
) -> None:
    logs.configure("json", "debug")
    backend, script = make_backend(tokenizer)
    script.fail_at = 5

    class Source:
        """Fake: says what it does."""

        async def stream(self, requests: Any) -> Any:
            async for delta in backend.generate(requests[0]):
                logging.getLogger("truespec.source").info("a delta")
                yield delta

        async def abort(self, request_id: str) -> None:
            backend.abort(request_id)

    app = build_ingress(FrontEnd(Source(), tokenizer, backend.info), tracing=Tracing(provider))
    transport = httpx.ASGITransport(app=app)
    body = {"model": "fake", "prompt": "hello", "max_tokens": 20, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        await client.get("/healthz", headers={"x-request-id": "r-0"})
        headers = {"x-request-id": "r-1", "traceparent": TRACEPARENT}
        reply = await client.post("/v1/completions", json=body, headers=headers)
    assert "error" in reply.text
    reported = [line for line in lines(written) if line["logger"].startswith(("serve_app", "truespec"))]
    healthz = [line for line in reported if line.get("request_id") == "r-0"]
    assert [(line["level"], line["message"]) for line in healthz] == [("debug", "GET /healthz 200")]
    ours = [line for line in reported if line not in healthz]
    assert {(line["request_id"], line["trace_id"]) for line in ours} == {("r-1", TRACE)}
    assert {line["logger"] for line in ours} == {
        "truespec.source", "serve_app.http.request_ids", "serve_app.http.routes", "serve_app.openai.frontend",
    }  # fmt: skip
    (failed,) = [line for line in ours if "exception" in line]
    assert "Traceback" in failed["exception"] and EngineFault.__name__ in failed["exception"]
    last = ours[-1]
    assert (last["method"], last["path"], last["status"]) == ("POST", "/v1/completions", 200)
    assert last["duration_s"] > 0
