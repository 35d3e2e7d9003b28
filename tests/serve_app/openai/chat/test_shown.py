"""What a client sends is in the prompt, or refused by its field: over small versions of published chat templates."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from serve_app.errors import UnsupportedParameter
from serve_app.openai.chat.shown import prompt_text
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.parsing import parse
from serve_app.openai.responses.response_requests import ResponsesRequest
from serve_app.openai.responses.responses_adapter import ResponsesAdapter
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest
from tests.serve_app.text.test_published_templates import PUBLISHED as PUBLISHED_WHOLE
from tests.support.fake_serving import BackendSource, make_backend
from tests.support.front_ends import chat

# DeepSeek-R1-Distill: calls only where there is no content, their arguments as text; the last system message.
DEEPSEEK = """
{%- set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}
{%- set ns.system = m['content'] %}{% endif %}{% endfor %}{{ ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}{% for tool in m['tool_calls'] %}
{{- '<|Call|>' + tool['function']['name'] + '\\n' + tool['function']['arguments'] }}{% endfor %}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is not none %}
{{- '<|Assistant|>' + m['content'].split('</think>')[-1] }}{% endif %}
{%- if m['role'] == 'tool' %}{{ '<|Output|>' + m['content'] }}{% endif %}{% endfor %}"""
# One call in a message, and no text beside it; `trim` writes None for no content.
LLAMA = PUBLISHED_WHOLE["llama 3.1"].source
# Qwen3: reasoning of earlier turns is dropped; text and calls are concatenated.
QWEN = """
{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}
{%- if m.content is string %}{% set content = m.content %}{% else %}{% set content = '' %}{% endif %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '<|' + m.role + '|>' + content }}
{%- for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ '' }}
{%- if c.function.arguments is string %}{{ c.function.arguments }}{% else %}
{{- c.function.arguments | tojson }}{% endif %}
{{- '}' }}</tool_call>{% endfor %}{% endfor %}"""
# Mistral: ids of nine characters, which results repeat; no system message but the first.
MISTRAL = """
{%- for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS]{% for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('IDs should be strings with length 9!') }}{% endif %}
{{- c.function | tojson }}{{ c.id }}{% endfor %}{% elif m.role == 'tool' %}[RESULT]{{ m.content }}{{ m.tool_call_id }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
# Hermes: whatever the content is, it is written; no result is of interest without its role.
HERMES = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}"""
# Takes messages in parts only.
PARTS = "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
PUBLISHED = {"deepseek": DEEPSEEK, "llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL, "hermes": HERMES}

USER = {"role": "user", "content": "Rain?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def called(content: Any, *texts: str) -> dict[str, Any]:
    calls = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": "weather", "arguments": text}}
        for number, text in enumerate(texts)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"call{number:05}"}


class Shower:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tokenizer(self, template: str) -> Tokenizer:
        """With the template as the folder's own, whose marks need be no tokens of the model's."""
        (self._folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        return Tokenizer.from_folder(self._folder)

    def __call__(self, template: str, messages: list[dict[str, Any]], **fields: Any) -> str:
        prompt = chat(messages=messages, **fields).chat_prompt()
        return prompt_text(self.tokenizer(template), prompt, {"add_generation_prompt": True})


@pytest.fixture
def show(tokenizer_folder: Path, tmp_path: Path) -> Shower:
    return Shower(Path(shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")))


def test_calls_are_in_the_prompt_of_every_template_whatever_content_they_come_with(show: Shower) -> None:
    for name, template in PUBLISHED.items():
        for content in (None, ""):
            said = [USER, called(content, '{"city": "Rome"}'), result("sunny")]
            text = show(template, said, tools=[TOOL], tool_choice="none")
            assert "weather" in text and '"Rome"' in text and "sunny" in text, (name, content)
            assert "None" not in text and "'Rome'" not in text, (name, content)


def test_no_content_stays_none_for_templates_that_tell_it_from_an_empty_one(show: Shower) -> None:
    template = "{% for m in messages %}{{ 'nothing' if m.content is none else '<' + m.content + '>' }}"
    template += "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
    assert "<Rain?>nothing{" in show(template, [USER, called(None, "{}")])
    assert "<Rain?><>{" in show(template, [USER, called("", "{}")])


def test_a_call_that_the_template_drops_beside_text_is_refused_with_the_fix(show: Shower) -> None:
    with pytest.raises(UnsupportedParameter, match="without content") as caught:
        show(DEEPSEEK, [USER, called("Let me see.", "{}"), result("sunny")])
    assert caught.value.field == "messages.1.tool_calls"


def test_what_a_template_leaves_out_is_refused_by_its_field(show: Shower) -> None:
    only_name = HERMES.replace("c.function | tojson", "c.function.name")
    only_first = HERMES.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    no_results = HERMES.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
    no_system = HERMES.replace("{{ m.content }}", "{{ m.content if m.role != 'system' }}")
    for template, messages, field in (
        (only_name, [USER, called(None, '{"city": "Rome"}')], "messages.1.tool_calls.function.arguments"),
        (only_first, [USER, called(None, "{}", "{}")], "messages.1.tool_calls.1"),
        (HERMES.replace("m.tool_calls or []", "[]"), [USER, called("x", "{}")], "messages.1.tool_calls"),
        (no_results, [USER, called(None, "{}"), result("sunny")], "messages.2.content"),
        (no_system, [{"role": "system", "content": "a"}, USER], "messages.0.content"),
        (no_system, [USER, {"role": "developer", "content": [{"type": "text", "text": "a"}]}], "messages.1.content"),
        (DEEPSEEK, [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}], "messages.0.content"),
    ):
        with pytest.raises(UnsupportedParameter, match="does not show it") as caught:
            show(template, messages)
        assert caught.value.field == field


def test_tools_are_shown_whole_or_refused(show: Shower) -> None:
    whole = "{{ messages[-1].content }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    assert '"Tells it."' in show(whole, [USER], tools=[TOOL])
    for written, field in (
        ("t.function.name", "tools.0.function.description"),
        ("t.function.name + t.function.description", "tools.0.function.parameters"),
        ("(t.function.description + (t.function.parameters | tojson))", "tools.0.function.name"),
    ):
        template = whole.replace("t | tojson", written)
        with pytest.raises(UnsupportedParameter) as caught:
            show(template, [USER], tools=[TOOL])
        assert caught.value.field == field
        show(template, [USER], tools=[TOOL], tool_choice="none")


def test_reasoning_and_names_are_given_to_the_template_which_may_leave_them_out(show: Shower) -> None:
    thought = {"role": "assistant", "content": "Yes.", "reasoning_content": "I see clouds."}
    said = [{**USER, "name": "ann"}, thought, USER]
    assert "Yes." in show(QWEN, said)
    template = "{% for m in messages %}{{ m.name or '' }}:{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}"
    assert show(template, said) == "ann:Rain?:I see clouds.Yes.:Rain?"


def test_results_without_ids_come_in_the_order_of_their_calls(show: Shower) -> None:
    said = [USER, called(None, "{}", '{"city": "Rome"}'), result("rome", 1), result("here", 0)]
    assert "rome" in show(MISTRAL, said)  # which names the calls
    with pytest.raises(UnsupportedParameter, match="order") as caught:
        show(HERMES, said)
    assert caught.value.field == "messages.3.tool_call_id"
    assert "rome" in show(HERMES, [*said[:2], result("here", 0), result("rome", 1)])


def test_templates_that_take_parts_get_parts(show: Shower) -> None:
    assert show(PARTS, [{"role": "system", "content": "Be brief."}, USER]) == "<|system|>Be brief.<|user|>Rain?"


def test_a_template_that_breaks_on_a_message_is_a_refusal(show: Shower) -> None:
    for broken in ("{{ 1 // 0 }}", "{{ messages[9].content }}", "{{ messages.nothing() }}", "{{ {}.pop('a') }}"):
        with pytest.raises(InvalidRequest, match="refuses these messages"):
            show(broken, [USER])


async def test_the_responses_api_names_its_own_items(show: Shower) -> None:
    tokenizer = show.tokenizer(HERMES.replace("m.tool_calls or []", "[]"))
    backend, _ = make_backend(tokenizer)
    adapter = ResponsesAdapter(FrontEnd(BackendSource(backend), tokenizer, backend.info))
    items = [
        {"role": "user", "content": "a"},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": "b"},
    ]
    wire = parse(json.dumps({"model": "fake", "input": items}).encode(), ResponsesRequest)
    with pytest.raises(UnsupportedParameter, match=r"^input\.1: ") as caught:
        await adapter.prepare(wire, "")
    assert caught.value.field == "input.1"


def test_many_numbers_and_messages_take_time_in_proportion(show: Shower) -> None:
    """Each number used to be a search through the whole prompt, and so was each message."""
    tokenizer = show.tokenizer(QWEN)

    def seconds(count: int) -> float:
        said = [USER, called("", '{"a": [' + ", ".join(["1.5"] * count) + "]}"), result("x"), *([USER] * count)]
        prompt = chat(messages=said).chat_prompt()
        began = time.process_time()
        text = prompt_text(tokenizer, prompt, {"add_generation_prompt": True})
        assert text.count("1.5") == count
        return time.process_time() - began

    seconds(10)
    assert seconds(8_000) < 24 * seconds(1_000)
