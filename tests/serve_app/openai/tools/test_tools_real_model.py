"""SmolLM2 on our own engine, with its template: the calls that it makes as it likes are calls, and results go back."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from serve_app.backends.torch_backend import TorchBackend
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.parsing import parse
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig, EngineConfig
from speculative.model.catalogue import FetchFailed, fetch_model
from tests.support.fake_serving import BackendSource

pytestmark = pytest.mark.slow
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def called(number: int, city: str) -> list[dict[str, Any]]:
    """A question, and the call that answers it: so small a model learns it from the conversation."""
    function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    question = {"role": "user", "content": f"What is the weather in {city}?"}
    return [question, {"role": "assistant", "content": None, "tool_calls": [call]}]


CONVERSATION = [
    *called(1, "Rome"),
    *called(2, "Oslo"),
    *called(3, "Madrid"),
    {"role": "user", "content": "What is the weather in Paris?"},
]
ASKED: dict[str, Any] = {"model": "m", "tools": [WEATHER], "temperature": 0, "max_tokens": 60}


@pytest.fixture
async def front_end() -> AsyncIterator[FrontEnd]:
    try:
        folder = fetch_model("smollm2-135m")
    except FetchFailed as error:
        pytest.skip(f"no model here: {error}")
    config = EngineConfig(
        dtype="bfloat16", device="cpu", kv_cache_tokens=4096, max_num_seqs=2, drafter=DrafterConfig(ngram_min=1)
    )
    backend = TorchBackend(str(folder), "m", config)
    info = await backend.start()
    yield FrontEnd(BackendSource(backend), Tokenizer.from_folder(folder, "smollm2-tools"), info)  # type: ignore[arg-type]
    await backend.stop()


async def test_smollm2_calls_a_tool_and_goes_on_with_its_result(front_end: FrontEnd) -> None:
    async def prepare(**fields: Any) -> Any:
        return await front_end.prepare(parse(json.dumps(ASKED | fields).encode(), ChatCompletionRequest))

    reply = ChatCompletion.model_validate(await front_end.collect(await prepare(messages=CONVERSATION)))
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})

    raw = b"".join([one async for one in front_end.events(await prepare(messages=CONVERSATION, stream=True))])
    chunks = [json.loads(event.removeprefix("data: ")) for event in raw.decode().split("\n\n")[:-2]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    named = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(part["function"]["arguments"] for part in named) == call.function.arguments
    assert not any(delta.get("content") for delta in deltas)

    result = {"role": "tool", "tool_call_id": call.id, "content": "snow, -2 degrees"}
    said = [*CONVERSATION, choice.message.model_dump(exclude_none=True), result]
    reply = ChatCompletion.model_validate(await front_end.collect(await prepare(messages=said)))
    assert reply.choices[0].finish_reason == "stop" and "-2" in (reply.choices[0].message.content or "")
