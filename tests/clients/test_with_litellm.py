"""LiteLLM with the providers `openai/` and `hosted_vllm/`."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # before the import, which otherwise fetches a list

import litellm

SECURITY = Path(__file__).parents[2] / "docs" / "security.md"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Paris"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@pytest.fixture(params=["openai", "hosted_vllm"])
def asked(request: pytest.FixtureRequest, api: str, model: str) -> dict[str, Any]:
    """The arguments of each request; `hosted_vllm` needs no key."""
    key = {"api_key": "unused"} if request.param == "openai" else {}
    return {"model": f"{request.param}/{model}", "api_base": api, "temperature": 0, "max_tokens": 40, **key}


def test_stream_equals_whole_answer(asked: dict[str, Any]) -> None:
    """chat, whole and streamed"""
    whole = litellm.completion(**asked, messages=QUESTION)
    chunks = list(litellm.completion(**asked, messages=QUESTION, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_vllm_parameters(asked: dict[str, Any]) -> None:
    """`top_k`, `min_p` and `seed`, which OpenAI does not have all"""
    sampled = {**asked, "temperature": 5, "messages": QUESTION}
    greedy = litellm.completion(**asked, messages=QUESTION).choices[0].message.content
    assert litellm.completion(**sampled, top_k=1).choices[0].message.content == greedy
    assert litellm.completion(**sampled, min_p=1.0).choices[0].message.content == greedy
    assert litellm.completion(**sampled, seed=7).choices[0].message.content != greedy


def test_forced_tool(asked: dict[str, Any]) -> None:
    """forced tool calls, whole and streamed"""
    forced = {**asked, "messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = litellm.completion(**forced).choices[0].message.tool_calls
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**forced, stream=True)))
    (streamed,) = rebuilt.choices[0].message.tool_calls
    assert call.function.name == streamed.function.name == "temperature"
    assert json.loads(call.function.arguments) == json.loads(streamed.function.arguments)


def test_text_completion(api: str, model: str) -> None:
    """`text_completion`"""
    for provider in ("text-completion-openai", "hosted_vllm"):
        made = litellm.text_completion(
            model=f"{provider}/{model}", prompt="Water is", api_base=api, api_key="unused", max_tokens=6, temperature=0
        )
        assert made.usage.completion_tokens == 6 and made.choices[0].text.strip()


def test_responses(asked: dict[str, Any]) -> None:
    """`responses`, whole and streamed"""
    prompt = {**asked, "input": QUESTION[0]["content"], "max_output_tokens": asked["max_tokens"]}
    del prompt["max_tokens"]
    whole = litellm.responses(**prompt)
    text = "".join(part.text for item in whole.output if item.type == "message" for part in item.content)
    events = list(litellm.responses(**prompt, stream=True))
    assert "Paris" in text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


@pytest.mark.parametrize(("limit", "served"), [({"rpm": 2}, 2), ({"tpm": 1}, 1)])
def test_limits(api: str, model: str, limit: dict[str, int], served: int) -> None:
    """the proxy's configuration of [security](security.md#quotas): its limits of requests and tokens a minute"""
    (block,) = re.findall(r"```yaml\n(model_list:.*?)```", SECURITY.read_text(), re.DOTALL)
    proxy = yaml.safe_load(block)
    (entry,) = proxy["model_list"]
    parameters = entry["litellm_params"]
    assert parameters["model"].partition("/")[0] == "hosted_vllm" and parameters["api_base"].endswith("/v1")
    assert {"rpm", "tpm"} <= parameters.keys()
    own = {"model": f"hosted_vllm/{model}", "api_base": api, "api_key": "unused", "rpm": 1000, "tpm": 10**6, **limit}
    router = litellm.Router([entry | {"litellm_params": parameters | own}], num_retries=0, **proxy["router_settings"])

    async def asked() -> int:
        try:
            await router.acompletion(model=entry["model_name"], messages=QUESTION, max_tokens=4)
        except litellm.RateLimitError as error:
            return int(error.status_code)
        await asyncio.sleep(0.5)  # usage is counted after the answer
        return 200

    async def one_after_the_other() -> list[int]:
        return [await asked() for _ in range(served + 1)]

    assert asyncio.run(one_after_the_other()) == [200] * served + [429]


def test_errors(asked: dict[str, Any]) -> None:
    """errors as LiteLLM's classes"""
    with pytest.raises(litellm.BadRequestError, match="temperature must be between"):
        litellm.completion(**{**asked, "temperature": -1}, messages=QUESTION)
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion(**{**asked, "model": asked["model"].split("/")[0] + "/another"}, messages=QUESTION)
