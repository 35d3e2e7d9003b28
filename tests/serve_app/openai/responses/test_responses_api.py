"""The Responses API over a fake engine: whole responses, their events, and what is kept."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from serve_app.backends.base import Parsers
from serve_app.errors import UnknownResponse, UnsupportedParameter
from serve_app.openai.asked import Limits
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.parsing import parse
from serve_app.openai.responses.kept_responses import KeptResponses, ResponseStore
from serve_app.openai.responses.response_requests import ResponsesRequest
from serve_app.openai.responses.responses_adapter import ResponsesAdapter
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import EngineFault, InvalidRequest
from speculative.request import Structure
from tests.serve_app.openai.tools.test_tools import FakeParsers
from tests.support.fake_serving import BackendSource, make_backend

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
WEATHER: dict[str, Any] = {
    **{"type": "function", "name": "weather", "description": "Returns the weather.", "strict": True},
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALLS = '[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "weather", "arguments": {"city": "Oslo"}}]'
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
OWNER = "key-1"


class Service:
    def __init__(
        self, tokenizer: Tokenizer, parsers: Parsers | None, memory: KeptResponses | None, run_length: int
    ) -> None:
        backend, self.script = make_backend(tokenizer, run_length=run_length, max_model_len=2048)
        backend._started = True
        self.source = BackendSource(backend)
        self.front_end = FrontEnd(self.source, tokenizer, backend.info, Limits(), parsers=parsers)
        self.adapter = ResponsesAdapter(self.front_end, memory)
        self._tokenizer = tokenizer

    async def ask(self, owner: str = OWNER, **fields: Any) -> dict[str, Any]:
        """A whole response, checked to be one of the `openai` library's."""
        reply = await self.front_end.collect(await self._prepare(owner, fields))
        Response.model_validate(reply)
        return reply

    async def events(self, owner: str = OWNER, **fields: Any) -> list[dict[str, Any]]:
        """The events of a response, each checked to be one of the `openai` library's."""
        job = await self._prepare(owner, fields | {"stream": True})
        raw = b"".join([part async for part in self.front_end.events(job)]).decode()
        events = []
        for number, block in enumerate(raw.removesuffix("\n\n").split("\n\n")):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            EVENT.validate_python(event)
            assert name == f"event: {event['type']}"
            assert event["sequence_number"] == number
            events.append(event)
        return events

    def prompt(self) -> str:
        return self._tokenizer.decode(self.source.requests[-1].prompt_token_ids, skip_special=False)

    async def _prepare(self, owner: str, fields: dict[str, Any]) -> Any:
        body = {"model": "fake", "input": "hi", **fields}
        return await self.adapter.prepare(parse(json.dumps(body).encode(), ResponsesRequest), owner)


Serve = Callable[..., Service]


@pytest.fixture
def serve(tooled: Tokenizer) -> Serve:
    def make(parsers: Parsers | None = None, memory: KeptResponses | None = None, run_length: int = 3) -> Service:
        return Service(tooled, parsers, memory, run_length)

    return make


def plain(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what is another each time: names and times."""
    drop = ("id", "created_at", "completed_at", "call_id")
    output = [{name: value for name, value in item.items() if name not in drop} for item in response["output"]]
    return {name: value for name, value in response.items() if name not in drop} | {"output": output}


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events build up, by the deltas alone."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "response.content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind.endswith(".delta"):
            item = items[event["output_index"]]
            assert event["item_id"] == item["id"]
            if item["type"] == "function_call":
                item["arguments"] += event["delta"]
                continue
            part = item["content"][event["content_index"]]
            part["text"] += event["delta"]
            part.get("logprobs", []).extend(event.get("logprobs", []))
    return items


def names_of(events: list[dict[str, Any]]) -> list[str]:
    """What the events are, several deltas of one item as one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for name, after in zip(names, [*names[1:], ""], strict=True) if name != after]


async def test_a_whole_response(serve: Serve, tooled: Tokenizer) -> None:
    service = serve()
    service.script.say("one two three")
    asked = {"instructions": "Count.", "metadata": {"a": "b"}, "temperature": 0.5, "max_output_tokens": 50}
    response = await service.ask(**asked, user="u", store=True, seed=7)
    assert response["reproducible"] is True
    assert response["id"].startswith("resp_")
    assert (response["status"], response["error"], response["incomplete_details"]) == ("completed", None, None)
    (message,) = response["output"]
    assert message["id"].startswith("msg_")
    assert message["content"] == [{"type": "output_text", "text": "one two three", "annotations": [], "logprobs": []}]
    assert {name: response[name] for name in asked} == asked
    assert (response["user"], response["top_p"], response["store"]) == ("u", 1.0, False)
    usage = response["usage"]
    assert usage["input_tokens"] == len(service.source.requests[0].prompt_token_ids)
    assert usage["output_tokens"] == len(tooled.encode("one two three")) + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0
    prompt = service.prompt()
    assert "system\nCount." in prompt and "user\nhi" in prompt


FREE = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("one two three, four 🙂 five", LOGPROBS, ["message"]),
    ("", {}, ["message"]),
    ("one two three, four", {"max_output_tokens": 2} | LOGPROBS, ["message"]),
    ("one two STOP three", {"stop": "STOP"} | LOGPROBS, ["message"]),
    (CALLS, {"tools": [WEATHER], "tool_choice": "required"}, ["function_call", "function_call"]),
    (CALLS, {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 40}, ["function_call"]),
    ('{"city": "Rome"}', {"tools": [WEATHER], "tool_choice": WEATHER | {"type": "function"}}, ["function_call"]),
    ("hm hm|well", {"parsers": True}, ["reasoning", "message"]),
    ("hm hm|well", {"parsers": True, "max_output_tokens": 3}, ["reasoning"]),
    ('hm|well @weather{"city": "Rome"};@weather{"city": "Oslo"};', {"parsers": True, "tools": [WEATHER]},
     ["reasoning", "message", "function_call", "function_call"]),
    ('|@weather{"city": "Rome"};', {"parsers": True, "tools": [WEATHER]}, ["function_call"]),
    (f"{FREE}\nSo one two.", {"tools": [WEATHER]} | LOGPROBS, ["function_call", "message"]),
    (f"Well, {FREE}\nso {FREE}.", {"tools": [WEATHER]} | LOGPROBS,
     ["message", "function_call", "message", "function_call", "message"]),
]  # fmt: skip


@pytest.mark.parametrize("run_length", [1, 4, 500])
@pytest.mark.parametrize(("text", "fields", "kinds"), CASES)
async def test_a_stream_says_what_the_whole_response_does(
    serve: Serve, text: str, fields: dict[str, Any], kinds: list[str], run_length: int
) -> None:
    fields = dict(fields)
    parsers = FakeParsers(reasoning=True) if fields.pop("parsers", False) else None
    if isinstance(choice := fields.get("tool_choice"), dict):
        fields["tool_choice"] = {"type": "function", "name": choice["name"]}
    service = serve(parsers, ResponseStore(10**6, 60.0), run_length)
    service.script.say(text)
    whole = await service.ask(**fields)
    assert [item["type"] for item in whole["output"]] == kinds
    events = await service.events(**fields)
    final = events[-1]["response"]
    assert plain(final) == plain(whole)
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["response"]["status"] for event in events[:2]] == ["in_progress"] * 2
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    for grown, item in zip(put_together(events), done, strict=True):
        assert grown | {"status": item["status"]} == item
    for part in (
        item["content"][0] for item in done if item["type"] == "message" and {"include", "tools"} <= {*fields}
    ):
        assert "".join(entry["token"] for entry in part["logprobs"]).count(part["text"]) == 1
    more = {"role": "user", "content": "more"}
    await service.ask(input=[more], previous_response_id=whole["id"], tools=[WEATHER])
    await service.ask(input=[{"role": "user", "content": "hi"}, *final["output"], more], tools=[WEATHER])
    assert len({one.prompt_token_ids for one in service.source.requests[-2:]}) == 1


async def test_the_events_of_reasoning_a_text_and_a_call_come_in_order(serve: Serve) -> None:
    service = serve(FakeParsers(reasoning=True), run_length=500)
    service.script.say('hm|one two@weather{"city": "Rome"};')
    assert names_of(await service.events(tools=[WEATHER])) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]


async def test_reasoning_tokens_are_counted_and_what_is_cut_off_is_incomplete(serve: Serve, tooled: Tokenizer) -> None:
    service = serve(FakeParsers(reasoning=True))
    service.script.say("hello hello|well")
    response = await service.ask(max_output_tokens=len(tooled.encode_continuation("hello hello|we")))
    details = response["usage"]["output_tokens_details"]
    assert details["reasoning_tokens"] == len(tooled.encode_continuation("hello hello")) > 0
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]][-1] == "incomplete"


async def test_a_failure_amid_a_stream_is_its_last_event(serve: Serve) -> None:
    service = serve()
    service.script.say("one two three four five")
    service.script.fail_at = 4
    *_, failed = await service.events()
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert "secret-host" not in json.dumps(failed)
    service.script.fail_at = 0
    with pytest.raises(EngineFault):
        await service.events()


async def test_a_form_is_enforced_and_reported(serve: Serve) -> None:
    service = serve()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "s", "schema": schema, "strict": True}
    response = await service.ask(text={"format": form})
    assert service.source.requests[-1].params.structure == Structure("json_schema", json.dumps(schema))
    assert response["text"]["format"] == form | {"description": None}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": "a " * 3000}, "input"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"tools": [WEATHER, WEATHER], "tool_choice": "required"}, "tools.1.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "min_tokens": 3}, "text.format"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"temperature": -1}, "temperature"),
        ({"verify": True}, "verify"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
    ],
)
async def test_what_cannot_be_served_is_named_in_the_words_of_this_api(
    serve: Serve, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await serve().ask(**fields)
    assert caught.value.field == field
    assert not {"messages", "max_completion_tokens", "response_format"} & set(caught.value.message.split())


# ---- responses that are kept


async def test_nothing_is_kept_unless_it_is_set_so(serve: Serve) -> None:
    service = serve()
    with pytest.raises(UnsupportedParameter, match="max_mib"):
        await service.ask(previous_response_id="resp_1")
    with pytest.raises(UnknownResponse, match="max_mib"):
        await service.adapter.show("resp_1", OWNER)
    with pytest.raises(UnknownResponse, match="max_mib"):
        await service.adapter.delete("resp_1", OWNER)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_conversation_goes_on_from_a_response(serve: Serve, streams: bool) -> None:
    service = serve(memory=ResponseStore(10**6, 60.0))
    service.script.say("first answer")
    if streams:
        *_, completed = await service.events(instructions="Be brief.")
        first = completed["response"]
    else:
        first = await service.ask(instructions="Be brief.")
    assert first["store"] is True
    assert await service.adapter.show(first["id"], OWNER) == first
    service.script.say("second answer")
    second = await service.ask(input="and then?", previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    prompt = service.prompt()
    assert prompt.index("hi") < prompt.index("first answer") < prompt.index("and then?")
    assert "Be brief." not in prompt  # instructions are of their request alone, as OpenAI has it
    deleted = {"id": first["id"], "object": "response", "deleted": True}
    assert await service.adapter.delete(first["id"], OWNER) == deleted
    await service.ask(input="and now?", previous_response_id=second["id"])
    prompt = service.prompt()
    assert prompt.index("first answer") < prompt.index("second answer") < prompt.index("and now?")


async def test_a_call_is_answered_by_its_output_alone(serve: Serve) -> None:
    service = serve(memory=ResponseStore(10**6, 60.0))
    service.script.say(CALLS)
    first = await service.ask(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    await service.ask(input=[result], previous_response_id=first["id"], tools=[WEATHER], tool_choice="none")
    prompt = service.prompt()
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt
    assert prompt.index("Rome") < prompt.index("rain")


async def test_an_item_is_referred_to_by_its_name(serve: Serve) -> None:
    service = serve(memory=ResponseStore(10**6, 60.0))
    service.script.say("first answer")
    (message,) = (await service.ask())["output"]
    items = [{"role": "user", "content": "hi"}, {"id": message["id"]}, {"role": "user", "content": "more"}]
    await service.ask(input=items)
    assert "assistant\nfirst answer" in service.prompt()
    for owner, wrong in ((OWNER, message["id"][:-1] + "7"), (OWNER, "msg_"), (OWNER, "x"), ("key-2", message["id"])):
        with pytest.raises(InvalidRequest, match="no item") as caught:
            await service.ask(owner, input=[*items[:1], {"type": "item_reference", "id": wrong}])
        assert caught.value.field == "input.1"


async def test_what_is_not_to_be_kept_or_is_too_large_says_so(serve: Serve) -> None:
    service = serve(memory=ResponseStore(2500, 60.0))
    service.script.say("short")
    kept, not_asked = await service.ask(), await service.ask(store=False)
    too_large = await service.ask(input="long " * 300, max_output_tokens=2)
    assert [one["store"] for one in (kept, not_asked, too_large)] == [True, False, False]
    for one in (not_asked, too_large):
        with pytest.raises(UnknownResponse):
            await service.adapter.show(one["id"], OWNER)


async def test_kept_logprobs_do_not_travel_along(serve: Serve) -> None:
    memory = ResponseStore(10**6, 60.0)
    service = serve(memory=memory)
    service.script.say("one two three")
    first = await service.ask(**LOGPROBS)
    second = await service.ask(previous_response_id=first["id"])
    record = json.loads(await memory.get(second["id"], OWNER) or b"")
    assert "logprobs" not in json.dumps(record["items"])


async def test_the_oldest_go_first_when_there_is_too_much() -> None:
    store = ResponseStore(100, 60.0)
    for number in range(3):
        assert await store.put(f"r{number}", "a", b"x" * 40)
    assert [await store.get(f"r{number}", "a") is not None for number in range(3)] == [False, True, True]
    assert await store.put("r1", "a", b"y" * 60)
    assert [len(await store.get(f"r{number}", "a") or b"") for number in range(3)] == [0, 60, 40]
    assert not await store.put("r3", "a", b"x" * 101)
    assert await store.get("r2", "a") is not None
    assert not await store.delete("r2", "b")
    assert await store.delete("r2", "a")
    assert not await store.delete("r2", "a")
    assert await store.put("r4", "a", b"x" * 40)
    assert await store.get("r1", "a") is not None


async def test_what_is_old_is_forgotten() -> None:
    now = 0.0
    store = ResponseStore(100, 60.0, lambda: now)
    await store.put("r1", "a", b"x" * 50)
    now = 30.0
    await store.put("r2", "a", b"x" * 50)
    now = 60.0
    assert await store.get("r1", "a") is None
    assert await store.get("r2", "a") is not None
    now = 90.0
    assert not await store.delete("r2", "a")
    assert await store.put("r3", "a", b"x" * 60)
    assert await store.get("r3", "a") is not None
    now = 150.0
    assert await store.put("r4", "a", b"x" * 40)
    assert store._num_bytes == 40, "a text is not held longer because nobody asks for one"
