"""Faults between a client's request and the engine: a front end that has one is asked, and what it sends is compared
with what was asked for."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from serve_app.backends.torch_backend import TorchBackend
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.frontend import FrontEnd
from serve_app.referee.records import Record, Records
from serve_app.referee.replay_selection import Selection
from serve_app.streams.observed import ObservedSource, SourceLimits
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import Metrics
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
    {"n": 2},
    {"structured_outputs": {"choice": ["one", "two"]}},
    {"structured_outputs": {"regex": "[a-d]{3,6}"}},
    {"structured_outputs": {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}}},
    {"min_tokens": 8, "stop": ["e", "t", "a"], "include_stop_str_in_output": True},
    {"stop_token_ids": list(range(0, 500, 5)), "max_tokens": 9},
    {"tools": _TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 80},
    {"tools": _TOOLS, "tool_choice": _NAMED, "max_tokens": 80},
)


def watch_front_end(mutant: Mutant, until: Callable[[Watch, int], bool]) -> Watch:
    """Ask a front end with a fault until told to stop, given what was found and the requests that were answered."""
    with TemporaryDirectory() as scratch:
        folder, _ = write_tiny_pair(Path(scratch))
        return asyncio.run(_watch(mutant, folder, until))


async def _watch(mutant: Mutant, folder: Path, until: Callable[[Watch, int], bool]) -> Watch:
    watch, count = Watch(), 0
    backend = TorchBackend(str(folder), "audited", TINY)
    info = await backend.start()

    def ended(record: Record, checked: bool) -> None:
        watch.note(["request limit"] if record.broken_limit else [], count)

    try:
        metrics = Metrics([], model_name="audited", pool="monolith")
        source = ObservedSource(
            PooledTokenSource(backend, metrics, None),
            metrics,
            Records("engine", info.max_model_len, eos_token_ids=info.eos_token_ids),
            select=lambda _: Selection.NOT_CHECKED,
            ended=ended,
            limits=SourceLimits(8, 60.0),
        )
        template = folder / "tools.jinja"
        template.write_text(_SHOWS_TOOLS, encoding="utf-8")
        front_end = FrontEnd(source, Tokenizer.from_folder(folder, str(template)), info)
        front_end.report_broken_to(source.broken)
        mutant.install(front_end)
        for request in _requests():
            count += 1
            await front_end.collect(await front_end.prepare(request))
            watch.total.merge(backend.take_stats())
            if until(watch, count):
                return watch
    finally:
        await backend.stop()
    raise AssertionError("requests do not end")


def _requests() -> Iterator[CompletionRequest | ChatCompletionRequest]:
    for number in itertools.count():
        body = {"model": "audited", "seed": number, "max_tokens": 24, **_KINDS[number % len(_KINDS)]}
        if "tools" in body:
            said = {"role": "user", "content": f"Call {number}."}
            yield ChatCompletionRequest.model_validate({"messages": [said], **body})
        else:
            prompt = [3 + (7 * number + 5 * place) % 400 for place in range(12)]
            yield CompletionRequest.model_validate({"prompt": prompt, **body})
