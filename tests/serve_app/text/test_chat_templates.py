"""The chat templates that come with the package: what a model sees without tools is what its own template shows."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.text.tokenizer import SHIPPED_TEMPLATES, Tokenizer, shipped_templates
from speculative.errors import ConfigError

# As SmolLM2-135M-Instruct has it.
OF_SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
TOOL = {"type": "function", "function": {"name": "clock", "description": "Tells the time."}}
CALL = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": {"zone": "ü"}}}


@pytest.fixture(scope="module")
def own(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("template") / "own.jinja"
    path.write_text(OF_SMOLLM2, encoding="utf-8")
    return Tokenizer.from_folder(tokenizer_folder, str(path))


@pytest.fixture(scope="module")
def tooled_smollm(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(tokenizer_folder, "smollm2-tools")


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.text(alphabet="a ü\n\t{%}<|>'\"\\-🙂", max_size=12),
        }
    ),
    min_size=1,
    max_size=6,
)


def test_smollm2_with_tools_shows_conversations_without_them_as_its_own_template(
    own: Tokenizer, tooled_smollm: Tokenizer
) -> None:
    @settings(max_examples=200, derandomize=True, database=None, deadline=None)
    @given(MESSAGES)
    def check(messages: list[dict[str, Any]]) -> None:
        assert tooled_smollm.render_chat(messages) == own.render_chat(messages)

    check()


@pytest.mark.parametrize("name", ["smollm2-tools", "chatml-tools"])
def test_tools_calls_and_results_are_shown(tokenizer_folder: Path, name: str) -> None:
    tokenizer = Tokenizer.from_folder(tokenizer_folder, name)
    said = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
        {"role": "tool", "content": "one"},
    ]
    text = tokenizer.render_chat(said, tools=[TOOL])
    assert '<tools>\n{"type": "function", "function": {"name": "clock", "description": "Tells the time."}}\n</t' in text
    assert text.endswith(
        "<|im_start|>user\nWhat time is it?<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "clock", "arguments": {"zone": "ü"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert text.startswith(SYSTEM if name == "smollm2-tools" else "<|im_start|>system\n# Tools")
    own_words = tokenizer.render_chat([{"role": "system", "content": "Be brief."}, *said], tools=[TOOL])
    assert own_words.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n") and own_words.count("system") == 1


def test_a_template_is_given_by_its_name_or_as_a_file(tokenizer_folder: Path, tmp_path: Path) -> None:
    assert shipped_templates() == ["chatml-tools", "smollm2-tools"]
    for name in shipped_templates():
        path = SHIPPED_TEMPLATES / f"{name}.jinja"
        by_name, by_path = (Tokenizer.from_folder(tokenizer_folder, given) for given in (name, str(path)))
        assert by_name.chat_template().source == by_path.chat_template().source == path.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"model\.chat_template: chatml-tool .*chatml-tools and smollm2-tools"):
        Tokenizer.from_folder(tokenizer_folder, "chatml-tool")
    (tmp_path / "damaged.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        Tokenizer.from_folder(tokenizer_folder, str(tmp_path / "damaged.jinja"))
