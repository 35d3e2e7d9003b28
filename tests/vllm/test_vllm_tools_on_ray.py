"""SmolLM2 on Ray with tools, on either engine: calls that must be made are calls, and what it makes freely is read."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.config.files import load_config
from tests.support.services import Service, deployed
from tests.support.vllm_installed import NEEDS_VLLM
from tests.vllm.test_vllm_on_ray import MODEL, SOURCE, has_model

CONFIGS = Path(__file__).parents[2] / "deploy" / "configs"
pytestmark = [
    *NEEDS_VLLM,
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_model(), reason=f"{SOURCE} is not fetched; `truespec model get {SOURCE}`"),
]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: Any = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Returns the time.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Paris in celsius?"}],
    "tools": [WEATHER, TIME],
    "max_tokens": 128,
    "temperature": 0,
}


@pytest.fixture(scope="module", params=["vllm", "torch", "vllm-router"])
def service(ray_port: int, request: pytest.FixtureRequest) -> Iterator[Service]:
    args: dict[str, Any] = load_config(CONFIGS / "vllm.yaml").application.args.model_dump(
        mode="json", exclude_unset=True
    )
    args["model"]["chat_template"] = "chatml-tools"
    kind, _, router = request.param.partition("-")
    args["engine"] |= {"kind": kind, "max_model_len": 768, "kv_cache_tokens": 4096}
    if router:
        args["recovery"] = {"resume": True}  # a stream router makes the text
    if kind == "torch":
        del args["vllm"]
    else:
        args["vllm"] |= {"tool_parser": "hermes"}
    with deployed(ray_port, f"tools-{request.param}", args) as running:
        yield running


def calls_of(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def check_weather(arguments: dict[str, Any]) -> None:
    assert set(arguments) == {"city", "unit"}
    assert isinstance(arguments["city"], str) and arguments["unit"] in ("celsius", "fahrenheit")


def test_required_calls_are_made(service: Service) -> None:
    body = ASKED | {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": {"verify": True}}
    reply = service.openai.chat.completions.create(**body)
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    ((name, arguments),) = calls_of(choice.message)
    if name == "get_weather":
        check_weather(arguments)
    else:
        assert (name, arguments) == ("get_time", {})
    with service.http() as http:
        assert reply.model_dump()["verdict"] in ("verified", "logprobs_only"), http.get(f"/v1/verdicts/{reply.id}").text
    with service.openai.chat.completions.stream(**ASKED, tool_choice="required", parallel_tool_calls=False) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert calls_of(streamed.message) == [(name, arguments)] and streamed.finish_reason == "tool_calls"


def test_answers_with_a_form_are_replayed_and_found_right(service: Service) -> None:
    """Their logprobs are the model's own, not those that the form has left."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": WEATHER["function"]["parameters"]}}
    body = {name: value for name, value in ASKED.items() if name != "tools"} | {"logprobs": True, "verify": True}
    with service.http() as http:
        reply = http.post("/v1/chat/completions", json=body | {"response_format": form}).json()
        # vLLM's masks are not ours, so that tokens of its forms are compared with no distribution.
        expected = "verified" if service.name.endswith("torch") else "logprobs_only"
        assert reply["verdict"] == expected, http.get(f"/v1/verdicts/{reply['id']}").text
    (choice,) = reply["choices"]
    check_weather(json.loads(choice["message"]["content"]))
    assert min(entry["logprob"] for entry in choice["logprobs"]["content"]) < -1.0


def test_a_named_function_is_called_and_its_result_goes_on(service: Service) -> None:
    body = ASKED | {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}, "temperature": 1.0}
    (choice,) = service.openai.chat.completions.create(**body, seed=5).choices
    ((name, arguments),) = calls_of(choice.message)
    assert name == "get_weather" and choice.finish_reason == "stop"
    check_weather(arguments)
    call = choice.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains in Paris, 12 degrees."}
    messages = [*ASKED["messages"], choice.message.model_dump(), result]
    reply = service.openai.chat.completions.create(**ASKED | {"messages": messages, "tool_choice": "none"})
    assert reply.choices[0].message.content and not reply.choices[0].message.tool_calls
