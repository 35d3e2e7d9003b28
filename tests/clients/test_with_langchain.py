"""LangChain's `ChatOpenAI`, and an agent's tools."""

from functools import reduce
from operator import add
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

QUESTION = "What is the capital of France?"


class City(BaseModel):
    """Facts about a city."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Paris", "London"]
    millions: int = Field(ge=0, le=99)


@tool
def temperature(city: Literal["Oslo", "Paris"]) -> str:
    """The temperature of a city."""
    return f"It is 17 degrees in {city}."


@pytest.fixture(scope="module")
def chat(api: str, model: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=api, api_key="unused", model=model, temperature=0, max_tokens=60, max_retries=0)


def test_invoke_stream_and_batch_agree(chat: ChatOpenAI) -> None:
    """`invoke`, `stream` and `batch`"""
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.content
    parts = list(chat.stream(QUESTION, stream_usage=True))
    assert len(parts) > 2
    joined = reduce(add, parts)
    assert joined.content == whole.content
    for usage in (whole.usage_metadata, joined.usage_metadata):
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert joined.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    batched = chat.batch([QUESTION, "What is the capital of Italy?", QUESTION])
    assert batched[0].content == batched[2].content == whole.content
    assert batched[1].content == chat.invoke("What is the capital of Italy?").content != whole.content


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, method: str) -> None:
    """`with_structured_output` by `json_schema` and `function_calling`"""
    found = chat.with_structured_output(City, method=method).invoke("Describe Paris.")
    assert isinstance(found, City)


def test_json_mode(chat: ChatOpenAI) -> None:
    """`with_structured_output` by `json_mode`"""
    asked = 'Repeat this JSON: {"city": "Paris"}'
    found: Any = chat.with_structured_output(method="json_mode").invoke(asked)
    assert found == {"city": "Paris"}


def test_forced_tool(chat: ChatOpenAI) -> None:
    """`bind_tools` with a forced choice, whole and streamed, and the tool's result"""
    forced = chat.bind_tools([temperature], tool_choice="any", parallel_tool_calls=False)
    asked = HumanMessage("How warm is it in Oslo?")
    reply = forced.invoke([asked])
    (call,) = reply.tool_calls
    assert call["name"] == "temperature" and call["args"]["city"] in ("Oslo", "Paris")
    streamed = reduce(add, forced.stream([asked]))
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [(call["name"], call["args"])]
    result = temperature.invoke(call)
    assert isinstance(reply, AIMessage) and isinstance(result, ToolMessage)
    answer = chat.bind_tools([temperature], tool_choice="none").invoke([asked, reply, result])
    assert "17" in answer.content


def test_free_tool_choice(chat: ChatOpenAI) -> None:
    """`bind_tools` that leaves the choice to the model, whole and streamed"""
    free = chat.bind_tools([temperature])
    reply = free.invoke("How warm is it in Oslo?")
    assert reply.content or reply.tool_calls
    streamed = reduce(add, free.stream("How warm is it in Oslo?"))
    assert streamed.content == reply.content
    assert [one["args"] for one in streamed.tool_calls] == [one["args"] for one in reply.tool_calls]


def test_responses(api: str, model: str, chat: ChatOpenAI) -> None:
    """`use_responses_api`: whole, streamed, structured and with tools"""
    responding = ChatOpenAI(
        base_url=api, api_key="unused", model=model, temperature=0, max_tokens=60, use_responses_api=True
    )
    whole = responding.invoke(QUESTION)
    assert whole.text == chat.invoke(QUESTION).content
    assert "".join(part.text for part in responding.stream(QUESTION)) == whole.text
    assert isinstance(responding.with_structured_output(City).invoke("Describe Paris."), City)
    forced = responding.bind_tools([temperature], tool_choice="temperature")
    (call,) = forced.invoke("How warm is it in Oslo?").tool_calls
    assert call["name"] == "temperature"


def test_completion_model(api: str, model: str) -> None:
    """the completion model `OpenAI`"""
    llm = OpenAI(base_url=api, api_key="unused", model=model, temperature=0, max_tokens=8)
    assert "".join(llm.stream("Water is")) == llm.invoke("Water is")


def test_logprobs(chat: ChatOpenAI) -> None:
    """logprobs in `response_metadata`"""
    reply = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = reply.response_metadata["logprobs"]["content"]
    assert len(content) == reply.usage_metadata["output_tokens"]
