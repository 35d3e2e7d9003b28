"""Faults between a client's request and the engine: a front end that has one is asked, and what it sends is read as it
goes over the wire."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from serve_app.backends.torch_backend import TorchBackend
from serve_app.http.routes import build_ingress
from serve_app.openai.frontend import FrontEnd
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.verdicts import Checked
from serve_app.referee.records.own_reader import OwnReader
from serve_app.referee.records.records import Record, Records
from serve_app.referee.records.replay_selection import Checks
from serve_app.referee.wire.exchange import CHAT, COMPLETIONS, GENERATE, RESPONSES
from serve_app.streams.observed import ObservedSource, SourceLimits
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import Metrics, Sink
from serve_app.text.tokenizer import Tokenizer
from tools.faults.mutants import Mutant
from tools.faults.served import TINY
from tools.faults.tiny import write_tiny_pair
from tools.faults.watch import Watch

_SHOWS_TOOLS = "{{ tools | tojson }}{% for one in messages %}{{ one.content }}{% endfor %}"


def _tool(name: str, argument: str, schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {"properties": {argument: schema}, "required": [argument], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_TOOLS = [_tool("light", "on", {"type": "boolean"}), _tool("heat", "to", {"enum": [1, 2, 3]})]
_NAMED = {"type": "function", "function": {"name": "light"}}
_KINDS: tuple[dict[str, Any], ...] = (
    {"stop": ["e", "t", "a"]},
    {"bad_words": ["e", "t"]},
    {"n": 2, "logprobs": 2, "return_token_ids": True},
    {"echo": True, "logprobs": 1, "stream": True, "stream_options": {"include_usage": True}},
    {"logit_bias": {"5": 3.0, "6": -3.0}, "top_p": 0.8},
    {"input": "Say it.", "top_logprobs": 2, "max_output_tokens": 9},
    {"sampling_params": {"max_tokens": 9, "logprobs": 1}},
    {"structured_outputs": {"choice": ["one", "two"]}},
    {"structured_outputs": {"regex": "[a-d]{3,6}"}},
    {"structured_outputs": {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}}},
    {"min_tokens": 8, "stop": ["e", "t", "a"], "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(0, 500, 5)), "max_tokens": 9},
    {"tools": _TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80},
    {"tools": _TOOLS, "tool_choice": _NAMED, "max_tokens": 80},
    {"tools": _TOOLS, "tool_choice": "required", "max_tokens": 130, "logit_bias": {"63": -9.0}},  # several calls
)


def watch_front_end(mutant: Mutant, until: Callable[[Watch, int], bool]) -> Watch:
    """Ask a front end with a fault until told to stop, given what was found and the requests that were answered."""
    with TemporaryDirectory() as scratch:
        folder, _ = write_tiny_pair(Path(scratch))
        return asyncio.run(_watch(mutant, folder, until))


async def _watch(mutant: Mutant, folder: Path, until: Callable[[Watch, int], bool]) -> Watch:
    watch = Watch()
    backend = TorchBackend(str(folder), "audited", TINY)
    info = await backend.start()
    template = folder / "tools.jinja"
    template.write_text(_SHOWS_TOOLS, encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder, str(template))
    count = 0

    def submit(answer: Answer, reply_bytes: str) -> None:
        watch.note(["wire"] if answer.broken_limit else [], count)

    async def check(answer: Answer) -> Checked:
        raise AssertionError("nobody asks for a verdict")

    reader = OwnReader(info, tokenizer)
    checks = Checks(lambda _: True, lambda _: True, reader.answers, submit, check, timeout_s=0.0)

    def ended(record: Record, checked: bool) -> None:
        checks.ended(record)

    try:
        metrics = Metrics(Sink(), model_name="audited", pool="monolith")
        source = ObservedSource(
            PooledTokenSource(backend, metrics, None),
            metrics,
            Records("engine", info.max_model_len, eos_token_ids=info.eos_token_ids),
            select=checks.select,
            ended=ended,
            limits=SourceLimits(8, 60.0),
        )
        front_end = FrontEnd(source, tokenizer, info, checks=checks)
        mutant.install(front_end)
        transport = httpx.ASGITransport(app=build_ingress(front_end))
        async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=120) as client:
            for path, body in _requests():
                count += 1
                (await client.post(path, json=body)).raise_for_status()
                await checks.settled()
                watch.total.merge(backend.take_stats())
                if until(watch, count):
                    return watch
    finally:
        await backend.stop()
    raise AssertionError("requests do not end")


def _requests() -> Iterator[tuple[str, dict[str, Any]]]:
    for number in itertools.count():
        kind = _KINDS[number % len(_KINDS)]
        body = {"model": "audited", "seed": number, "max_tokens": 24, **kind}
        prompt = [3 + (7 * number + 5 * place) % 400 for place in range(12)]
        if "tools" in kind:
            yield CHAT, {"messages": [{"role": "user", "content": f"Call {number}."}], **body}
        elif "input" in kind:
            yield RESPONSES, {"model": "audited", "seed": number, **kind}
        elif "sampling_params" in kind:
            yield GENERATE, {"token_ids": prompt, **kind}
        else:
            yield COMPLETIONS, {"prompt": prompt, **body}
