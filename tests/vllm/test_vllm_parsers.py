"""vLLM's own parsers of tool calls and reasoning behind our front end. The engine is a fake."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from serve_app.backends.base import ChatPrompt
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.tools.forced_calls import behind_thought, call_form
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError
from speculative.request import FinishReason, Request, SamplingParams, Structure, TokenDelta
from tests.support.front_ends import DeltaSource, chat, chunks_of, info, reply_to
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = NEEDS_VLLM
EOS = "<|im_end|>"
TEMPLATE = (
    "{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ opening }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with the tokens that mark reasoning and calls, as Qwen3 has them."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=[EOS], show_progress=False)
    raw.train_from_iterator(["the weather in the city is what it is"] * 9, trainer)
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    raw.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in marks])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=EOS)
    wrapped.chat_template = TEMPLATE
    made = tmp_path_factory.mktemp("tokenizer")
    wrapped.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def cut(tokenizer: Tokenizer, text: str, cuts: Sequence[int]) -> DeltaSource:
    """The tokens of a text and the end token, cut into deltas as the test asks."""
    ids = (*tokenizer.encode(text), tokenizer.eos_token_ids[0])
    borders = [0, *sorted({cut % len(ids) for cut in cuts} - {0}), len(ids)]
    *deltas, last = [TokenDelta("", ids[begin:end]) for begin, end in itertools.pairwise(borders)]
    return DeltaSource(*deltas, last._replace(finish_reason=FinishReason.STOP, stop_token_id=ids[-1]))


def parsers(folder: Path, tool_parser: str | None = None, reasoning_parser: str | None = None) -> Any:
    from serve_app.backends.vllm_parts.parsers import VllmParsers

    return VllmParsers(tool_parser, reasoning_parser, str(folder))


class Answered:
    """What a whole reply says, and what a stream of the same tokens does."""

    def __init__(self, tokenizer: Tokenizer, made: Any, text: str, cuts: Sequence[int] = (), **fields: Any) -> None:
        front = FrontEnd(cut(tokenizer, text, cuts), tokenizer, info(tokenizer, 5000), parsers=made)
        self.whole = whole(asyncio.run(reply_to(front, chat(**fields))))
        self.streamed = streamed(asyncio.run(chunks_of(front, chat(**fields, stream=True))))


def whole(reply: dict[str, Any]) -> dict[str, Any]:
    (choice,) = ChatCompletion.model_validate(reply).choices
    message = reply["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return said(message["content"], message.get("reasoning"), calls, choice.finish_reason)


def streamed(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    content = reasoning = reason = ""
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
        reason = chunk["choices"][0]["finish_reason"] or reason
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(calls) and part["type"] == "function"
                calls.append({"name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return said(content, reasoning, calls, reason)


def said(content: str | None, reasoning: str | None, calls: list[dict[str, str]], reason: str) -> dict[str, Any]:
    reported = [(call["name"], json.loads(call["arguments"])) for call in calls]
    # vLLM keeps the white space around calls in streams, and not in whole answers.
    return {"content": (content or "").strip(), "reasoning": reasoning or "", "calls": reported, "reason": reason}


def hermes(calls: Sequence[tuple[str, Any]]) -> str:
    """Calls as Hermes and Qwen write them."""
    reported = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in reported)


# A call as Qwen3-Coder writes it.
QWEN_CODER = "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="<>|\x00", exclude_categories=["Cs", "Cc"]), max_size=12
)
ARGUMENTS = st.fixed_dictionaries({"city": WORDS.map(str.strip).filter(lambda text: not text.isnumeric())})
CALLS = st.lists(st.tuples(st.sampled_from(["weather", "clock"]), ARGUMENTS), max_size=3)
EVERY_WAY = settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("reasoning_parser", [None, "deepseek_r1", "qwen3"])
def test_streams_say_what_whole_answers_say(folder: Path, tokenizer: Tokenizer, reasoning_parser: str | None) -> None:
    made = parsers(folder, "hermes", reasoning_parser)

    @EVERY_WAY
    @given(WORDS, WORDS.map(str.strip), CALLS, st.lists(st.integers(1, 500), max_size=40))
    def check(thought: str, content: str, calls: list[tuple[str, Any]], cuts: list[int]) -> None:
        begin = f"<think>{thought}</think>" if reasoning_parser else ""
        text = begin + content + hermes(calls)
        answered = Answered(tokenizer, made, text, cuts, tools=[TOOL, CLOCK])
        expected = {
            "content": content,
            "reasoning": thought if reasoning_parser else "",
            "calls": calls,
            "reason": "tool_calls" if calls else "stop",
        }
        assert answered.whole == expected
        assert answered.streamed == expected

    check()


CODED = "Well.\n" + "\n".join(map(QWEN_CODER.format, ("Rome & so", "Oslo")))
CODED_CALLS = [("weather", {"city": "Rome & so"}), ("weather", {"city": "Oslo"})]
FORCED = '<think>\nso\n</think>\n\n[{"name": "weather", "arguments": {"city": "Oslo"}}]'
R1 = ("hermes", "deepseek_r1")
TOOLS: dict[str, Any] = {"tools": [TOOL, CLOCK]}
THOUGHT, OPENED = ({"chat_template_kwargs": one} for one in ({"enable_thinking": False}, {"opening": "<think>"}))


@pytest.mark.parametrize(
    ("names", "fields", "text", "right"),
    [
        (("qwen3_coder", None), TOOLS, CODED, ("", "Well.", CODED_CALLS)),
        (("qwen3_xml", None), TOOLS, CODED, ("", "Well.", CODED_CALLS)),
        (R1, TOOLS, 'a</think>no <tool_ call> {"n": 1}', ("a", 'no <tool_ call> {"n": 1}', [])),
        (R1, THOUGHT, "Rome.", ("", "Rome.", [])),
        (R1, OPENED, "so</think>Rome.", ("so", "Rome.", [])),
        (("hermes", "qwen3"), TOOLS | {"tool_choice": "required"}, FORCED, ("\nso\n", "", CODED_CALLS[1:])),
    ],
    ids=["qwen3_coder", "qwen3_xml", "no call", "reasoning ends in the prompt", "begins in it", "forced calls"],
)
def test_each_answer_is_read_as_its_format_says(
    folder: Path, tokenizer: Tokenizer, names: Any, fields: dict[str, Any], text: str, right: tuple[str, str, Any]
) -> None:
    made = parsers(folder, *names)
    reasoning, content, calls = right
    reason = "tool_calls" if calls else "stop"
    expected = {"content": content, "reasoning": reasoning, "calls": calls, "reason": reason}
    for cuts in ((), range(0, 400, 3), range(500)):
        answered = Answered(tokenizer, made, text, cuts, **fields)
        assert answered.whole == answered.streamed == expected


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("hermess", None), "vllm.tool_parser is hermess.*hermes, "),
        ((None, "r1"), "vllm.reasoning_parser is r1.*deepseek_r1, "),
        (("openai", None), "vllm.tool_parser is openai"),
        (("mistral", None), "cannot be used with this model's tokenizer"),
    ],
)
def test_a_parser_that_cannot_be_used_is_refused_at_start(folder: Path, names: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parsers(folder, *names)


def test_forms_of_ours_are_kept_by_vllms_guidance(folder: Path, tokenizer: Tokenizer) -> None:
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer
    from vllm.tokenizers import get_tokenizer
    from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar
    from vllm.v1.structured_output.request import get_structured_output_key

    from serve_app.backends.vllm_parts.params import to_vllm

    vocabulary = from_tokenizer(get_tokenizer(str(folder)), tokenizer.vocab_size)
    calls = '[{"name": "weather", "arguments": {"city": "x"}}, {"name": "clock", "arguments": {}}]'
    form = call_form(ChatPrompt((), (TOOL, CLOCK), "required"))
    thinking = behind_thought(form, "</think>", tokenizer.added_id("</think>"), tokenizer.eos_token_ids)
    spelled = behind_thought(Structure("json_object"), "|end|", None, tokenizer.eos_token_ids)
    schema = '{"properties": {"a": {"type": "integer"}, "b": {"properties": {"a": {}}}}}'
    keyed = Structure("json_schema", schema)
    for structure, text, right in (
        (form, calls, True),
        (form, calls.replace("clock", "cloak"), False),
        (form, calls.replace('"city": ', '"city":   '), False),
        (form, "It rains.", False),
        (thinking, f"<think>hm</think>\n{calls}", True),
        (thinking, f"<think>hm {calls}", False),
        (spelled, 'so |end|{"a": 1}', True),
        (spelled, 'so |end {"a": 1}', False),
        (keyed, '{"\\u0061":"x"}', False),
        (keyed, '{"a":1,"b":{"\\u0061":2}}', False),
        (keyed, '{"a":1,"b \\"":[{"a\\n":2}]}', True),
    ):
        request = Request("r", (5,), SamplingParams(structure=structure))
        params = to_vllm(request, room=100, transfer={}, ends=tokenizer.eos_token_ids)
        grammar = serialize_guidance_grammar(*get_structured_output_key(params.structured_outputs))
        matcher = LLMatcher(vocabulary, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text)
        assert (matcher.consume_tokens(ids) and matcher.is_accepting()) == right, text


def test_a_front_end_without_parsers_pays_no_import() -> None:
    code = "import sys, serve_app.deployments.pools; print('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
