"""OpenAI's Agents SDK over chat completions and over responses."""

import asyncio
from typing import Literal

import agents
import openai
import pytest
from agents import Agent, Model, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from pydantic import BaseModel

QUESTION = "What is the capital of France?"
agents.set_tracing_disabled(True)


class Answer(BaseModel):
    city: Literal["Paris", "London"]


@function_tool
def temperature(city: Literal["Oslo", "Paris"]) -> str:
    """The temperature of a city."""
    return f"It is 17 degrees in {city}."


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])
def chat(request: pytest.FixtureRequest, api: str, model: str) -> Model:
    return request.param(model, openai.AsyncOpenAI(base_url=api, api_key="unused", max_retries=0))


SETTINGS = ModelSettings(temperature=0, max_tokens=60)


async def _streamed(agent: Agent) -> tuple[str, str]:
    result = Runner.run_streamed(agent, QUESTION)
    deltas = [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert len(deltas) > 1
    return "".join(deltas), result.final_output


def test_run_and_stream_agree(chat: Model) -> None:
    """over chat completions and over responses: `Runner.run` and `run_streamed`"""
    agent = Agent(name="plain", model=chat, model_settings=SETTINGS)

    async def both() -> None:
        whole = await Runner.run(agent, QUESTION)
        text, final = await _streamed(agent)
        assert "Paris" in text
        assert text == final == whole.final_output
        usage = whole.context_wrapper.usage
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0

    asyncio.run(both())


def test_output_type(chat: Model) -> None:
    """an `output_type`"""
    agent = Agent(name="typed", model=chat, model_settings=SETTINGS, output_type=Answer)
    result = asyncio.run(Runner.run(agent, QUESTION))
    assert isinstance(result.final_output, Answer)


def test_tool_loop(chat: Model) -> None:
    """a loop of calls: the first is forced, then the model answers"""
    settings = ModelSettings(temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False)
    agent = Agent(name="loop", model=chat, model_settings=settings, tools=[temperature])
    result = asyncio.run(Runner.run(agent, "How warm is it in Oslo?", max_turns=4))
    assert [item.type for item in result.new_items][:2] == ["tool_call_item", "tool_call_output_item"]
    assert result.new_items[-1].type == "message_output_item"
    assert result.final_output
