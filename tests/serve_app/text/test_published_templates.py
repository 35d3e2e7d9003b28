"""Chat templates as models publish them, shortened: rendered as by `transformers`, and known by their marks."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from serve_app.text.tokenizer import SHIPPED_TEMPLATES, Tokenizer
from speculative.errors import ConfigError, InvalidRequest
from tests.support.tokenizer_layouts import layouts, write_layout

LAYOUTS = layouts()


@dataclass(frozen=True)
class Published:
    """A template; the special tokens of its model; how an answer ends; and whether its marks show it elsewhere."""

    source: str
    tokens: tuple[str, ...]
    end: str
    marked: bool = True
    bos: str = ""


CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PUBLISHED = {
    "chatml": Published(CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "<|im_end|>"),
    "llama 3.1": Published(
        "{{- bos_token }}\n{%- if not date_string is defined %}\n{%- if strftime_now is defined %}\n"
        '{%- set date_string = strftime_now("%d %b %Y") %}\n{%- else %}\n{%- set date_string = "26 Jul 2024" %}\n'
        "{%- endif %}\n{%- endif %}\n{%- if messages[0]['role'] == 'system' %}\n"
        "{%- set system_message = messages[0]['content']|trim %}\n{%- set messages = messages[1:] %}\n{%- else %}\n"
        '{%- set system_message = "" %}\n{%- endif %}\n'
        '{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}\n{%- if tools is not none %}\n'
        '{{- "Environment: ipython\\n" }}\n{%- endif %}\n{{- "Today Date: " + date_string + "\\n\\n" }}\n'
        "{%- if tools is not none %}\n{%- for t in tools %}\n{{- t | tojson(indent=4) }}\n"
        '{{- "\\n\\n" }}\n{%- endfor %}\n'
        '{%- endif %}\n{{- system_message }}\n{{- "<|eot_id|>" }}\n{%- for message in messages %}\n'
        "{%- if 'tool_calls' in message %}\n{%- if not message.tool_calls|length == 1 %}\n"
        '{{- raise_exception("This model only supports single tool-calls at once!") }}\n{%- endif %}\n'
        "{%- set tool_call = message.tool_calls[0].function %}\n"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
        '{{- \'{"name": "\' + tool_call.name + \'", "parameters": \' + tool_call.arguments|tojson + "}" }}\n'
        '{{- "<|eot_id|>" }}\n{%- elif message.role == "tool" or message.role == "ipython" %}\n'
        '{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}\n{%- else %}\n'
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + "
        "'<|eot_id|>' }}\n{%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
        "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "gemma": Published(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
        "{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] "
        "| trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{'<start_of_turn>model\n'}}{% endif %}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        bos="<bos>",
    ),
    "deepseek r1": Published(
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
        "{% set ns = namespace(is_first=false, system_prompt='') %}{%- for message in messages %}"
        "{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}"
        "{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}"
        "{{'<｜User｜>' + message['content']}}{%- endif %}"
        "{%- if message['role'] == 'assistant' and message['content'] is "
        "not none %}{% set content = message['content'] %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor -%}"
        "{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}",
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        "<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
    ),
    "smollm 3": Published(
        "{%- if enable_thinking is not defined -%}\n{%- set enable_thinking = true -%}\n{%- endif -%}\n"
        '{{- "<|im_start|>system\\n" -}}\n{%- set today = strftime_now("%d %B %Y") -%}\n'
        '{{- "Today Date: " ~ today ~ "\\n<|im_end|>\\n" -}}\n{%- for message in messages -%}\n'
        '{%- if message.role == "system" -%}{%- continue -%}{%- endif -%}\n'
        '{%- set content = message.content if message.content is string else "" -%}\n'
        '{%- if message.role == "user" -%}\n{{ "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}\n'
        '{%- elif message.role == "assistant" -%}\n{% generation %}\n'
        '{{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}\n{% endgeneration %}\n'
        '{%- elif message.role == "tool" -%}\n{{ "<|im_start|>user\\n" + content + "<|im_end|>\\n" }}\n{%- endif -%}\n'
        "{%- endfor -%}\n{%- if add_generation_prompt -%}\n{%- if not enable_thinking -%}\n"
        '{{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" }}\n{%- else -%}\n{{ "<|im_start|>assistant\\n" }}\n'
        "{%- endif -%}\n{%- endif -%}\n",
        ("<|im_start|>", "<|im_end|>"),
        "<|im_end|>",
    ),
    "zephyr": Published(
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + "
        "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
        "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
        ("</s>",),
        "</s>",
    ),
    "llama 2": Published(
        "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + "
        "message['content'].strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + "
        "message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>"),
        "</s>",
        marked=False,
        bos="<s>",
    ),
}
TOOL = {"type": "function", "function": {"name": "clock", "description": "Zeit für alle <b>", "parameters": {"a": [1]}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": {"zone": "ü"}}}
USER, SYSTEM = {"role": "user", "content": " Hi 🙂 "}, {"role": "system", "content": "Be brief."}
SAID = {"role": "assistant", "content": "<think>hm</think>\nSo be it"}
CHATS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    ([USER], []),
    ([SYSTEM, USER], []),
    ([USER, SAID, USER], []),
    ([SYSTEM, USER, SAID, USER, SAID], []),
    ([USER], [TOOL]),
    ([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "noon"}], [TOOL]),
)
ENDINGS: tuple[dict[str, Any], ...] = (
    {},
    {"add_generation_prompt": False},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"enable_thinking": False},
)
PLACES = ("tokenizer_config.json", "named", "chat_template.jinja", "chat_template.json", "additional_chat_templates")


def folder_of(path: Path, published: Published, *, eos: str | None = None, **config: Any) -> Path:
    """A model with a byte-level tokenizer that has the template's tokens; its files name `eos`."""
    content = json.loads(json.dumps(LAYOUTS["gpt2"]))
    vocab, flags = content["model"]["vocab"], dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    new = [text for text in published.tokens if text not in vocab]
    ids = {text: vocab[text] for text in published.tokens if text in vocab}
    ids |= {text: len(vocab) + place for place, text in enumerate(new)}
    content["added_tokens"] = [{"id": ids[text], "content": text, "special": True, **flags} for text in ids]
    named = {"eos_token": eos or published.end} | ({"bos_token": published.bos} if published.bos else {})
    write_layout(path, content, {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config})
    return path


def reference(published: Published, chat: Any, tools: Any, ending: dict[str, Any]) -> str | None:
    """What transformers makes of the template; None where it refuses."""
    named = {"eos_token": published.end} | ({"bos_token": published.bos} if published.bos else {})
    try:
        return render_jinja_template(
            [chat],
            tools=tools or None,
            chat_template=published.source,
            **{"add_generation_prompt": True, "documents": None, **named, **ending},
        )[0][0]
    except Exception:
        return None


def placed(folder: Path, published: Published, kind: str) -> Path:
    """A model whose template lies where its kind says."""
    source = published.source
    if kind == "tokenizer_config.json":
        return folder_of(folder, published, chat_template=source)
    if kind == "named":
        named = [{"name": "default", "template": source}, {"name": "tool_use", "template": source}]
        return folder_of(folder, published, chat_template=named)
    folder_of(folder, published, **({"chat_template": "another"} if kind == "chat_template.jinja" else {}))
    if kind == "chat_template.json":
        (folder / kind).write_text(json.dumps({"chat_template": source}))
        return folder
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    if kind == "additional_chat_templates":
        (folder / kind).mkdir()
        (folder / kind / "tool_use.jinja").write_text(source, encoding="utf-8")
    return folder


def test_prompts_are_those_that_transformers_makes_wherever_the_template_lies(tmp_path: Path) -> None:
    refused = 0
    for name, published in PUBLISHED.items():
        for kind in PLACES:
            tokenizer = Tokenizer.from_folder(placed(tmp_path / name / kind, published, kind))
            for (chat, tools), ending in itertools.product(CHATS, ENDINGS):
                wanted = reference(published, chat, tools, ending)
                if wanted is None:
                    refused += 1
                    with pytest.raises(InvalidRequest, match="chat template refuses these messages"):
                        tokenizer.render_chat(chat, tools=tools, variables=ending)
                else:
                    assert tokenizer.render_chat(chat, tools=tools, variables=ending) == wanted, (name, kind)
                    ids = tokenizer.encode_chat(chat, tools=tools, variables=ending)
                    assert tokenizer.decode(ids, skip_special=False) == wanted
    assert 0 < refused < len(PLACES) * len(PUBLISHED) * len(CHATS) * len(ENDINGS) / 4


def test_another_models_template_is_refused_by_its_marks(tmp_path: Path) -> None:
    llama = write_layout(tmp_path / "llama", LAYOUTS["llama 2"], {"eos_token": "</s>", "bos_token": "<s>"})
    for name, published in PUBLISHED.items():
        path = tmp_path / f"{name}.jinja"
        path.write_text(published.source, encoding="utf-8")
        own = folder_of(tmp_path / name, published)
        if name != "zephyr":  # whose marks are plain text
            Tokenizer.from_folder(own, str(path))
        Tokenizer.from_folder(folder_of(tmp_path / name, published, chat_template=published.source), str(path))
        if not published.marked:
            Tokenizer.from_folder(llama, str(path))
            continue
        with pytest.raises(ConfigError, match=r"model\.chat_template: .* no template of its own: give one") as error:
            Tokenizer.from_folder(llama, str(path))
        assert any(mark in str(error.value) for mark in ("<|", "<｜", "<start_of_turn>"))
    (llama / "chat_template.jinja").write_text(PUBLISHED["llama 2"].source)
    for shipped in ("smollm2-tools", "chatml-tools"):
        with pytest.raises(ConfigError, match=r"<\|im_start\|>, <\|im_end\|>, .* remove the setting to use the temp"):
            Tokenizer.from_folder(llama, shipped)


def test_a_models_own_template_is_reported_and_never_refused(tmp_path: Path) -> None:
    for name, published in PUBLISHED.items():
        folder = folder_of(tmp_path / name, published, chat_template=published.source)
        found = Tokenizer.from_folder(folder).remarks()
        if name == "zephyr":
            assert "writes <|user|>, <|assistant|>, <|system|>, which the tokenizer reads" in "".join(found)
        else:
            assert found == (), (name, found)


def test_a_shipped_template_in_place_of_a_models_own_is_reported_where_it_says_something_else(tmp_path: Path) -> None:
    chatml = folder_of(tmp_path / "chatml", PUBLISHED["chatml"], chat_template=CHATML)
    assert Tokenizer.from_folder(chatml, "chatml-tools").remarks() == ()
    (found,) = Tokenizer.from_folder(chatml, "smollm2-tools").remarks()
    assert "model.chat_template: smollm2-tools replaces" in found and "Remove the setting" in found
    smollm = tmp_path / "smollm"
    source = (SHIPPED_TEMPLATES / "smollm2-tools.jinja").read_text(encoding="utf-8")
    folder_of(smollm, PUBLISHED["chatml"], chat_template=source)
    assert Tokenizer.from_folder(smollm, "smollm2-tools").remarks() == ()
    bare = folder_of(tmp_path / "bare", PUBLISHED["chatml"])
    assert Tokenizer.from_folder(bare, "smollm2-tools").remarks() == ()


def test_an_end_of_turn_that_no_file_names_is_reported(tmp_path: Path) -> None:
    for name, published in PUBLISHED.items():
        ended = "eos_token" not in published.source  # else whatever is named ends the turns, too
        folder = folder_of(tmp_path / name, published, eos="He", chat_template=published.source)
        found = [one for one in Tokenizer.from_folder(folder).remarks() if "ends an answer with" in one]
        said = f"ends an answer with {published.end} (token "
        assert (len(found) == 1 and said in found[0]) if ended else not found, (name, found)
        token = Tokenizer.from_folder(folder).added_id(published.end)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [token]}))
        assert not [one for one in Tokenizer.from_folder(folder).remarks() if "ends an answer with" in one]


def test_named_templates_without_a_default_are_refused_with_the_messages(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": CHATML}, {"name": "rag", "template": CHATML}]
    tokenizer = Tokenizer.from_folder(folder_of(tmp_path, PUBLISHED["chatml"], chat_template=named))
    assert tokenizer.render_chat([USER], tools=[TOOL]) and tokenizer.chat_template(with_tools=True).source == CHATML
    assert tokenizer.chat_template().source == ""
    with pytest.raises(InvalidRequest, match="multiple chat templates with no default"):
        tokenizer.render_chat([USER])


def test_a_damaged_template_is_reported_and_one_that_is_no_text_refused(tmp_path: Path) -> None:
    damaged = "{% for m in messages %}{{ m.content }}{% endfo %}"
    for template in (damaged, [{"name": "default", "template": "hi"}, {"name": "tool_use", "template": damaged}]):
        folder = folder_of(tmp_path, PUBLISHED["chatml"], chat_template=template)
        (remark,) = Tokenizer.from_folder(folder).remarks()
        assert "The chat template is damaged, and conversations are refused (" in remark and "endfo" in remark
    for template in (5, {"default": 5}):
        folder = folder_of(tmp_path, PUBLISHED["chatml"], chat_template=template)
        with pytest.raises(ConfigError, match="`chat_template` is "):
            Tokenizer.from_folder(folder)
