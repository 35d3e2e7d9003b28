"""Calls that an answer must hold: the form that forces them.

An answer to `tool_choice: required` is a JSON list of calls, one to a named function its arguments, as vLLM has it. The
form is a grammar of llguidance's (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md), in which each
function's JSON schema is a document of its own, so that `$defs` and references stay as they are. Both engines keep to
it, and no parser of a model's own way to call is needed.
"""

import json
from collections.abc import Sequence
from typing import Any

from serve_app.backends.base import ChatPrompt
from serve_app.errors import UnsupportedParameter
from serve_app.text.schemas import held
from speculative.request import Structure

# A replay by the torch engine must allow exactly what vLLM's guidance allowed, in another version of the library.
# JSON is laid out as `json.dumps` does, which is how models saw it: under unbounded white space a small one may write
# blanks until its tokens run out. `whitespace_pattern` is not known to the version beside vLLM.
_HEADER = '%llguidance {"no_forcing": true}'  # as in `structured`: no tokenisation is preferred
_START = "start: answer"
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE_TEXT = "/(?s:.*)/"
_BLANKS = r"/[ \t\n\r]{0,8}/"  # those of JSON


def forces_calls(chat: ChatPrompt) -> bool:
    """Return whether the answer must call a tool."""
    return chat.use in ("required", "named")


def call_form(chat: ChatPrompt) -> Structure:
    """The form of an answer that must call a tool."""
    functions = [tool["function"] for tool in chat.tools]
    schemas = {one["name"]: {**one.get("parameters", {}), "type": "object"} for one in functions}
    if chat.use == "named":
        return _grammar([_START, f"answer: {_json(schemas[chat.function])}"])
    rules = []
    for number, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
        rules += [f'call{number}: {head} arguments{number} "}}"', f"arguments{number}: {_json(schema)}"]
    more = ' (", " call)*' if chat.parallel else ""
    calls = " | ".join(f"call{number}" for number in range(len(schemas)))
    return _grammar([_START, f'answer: "[" call{more} "]"', f"call: {calls}", *rules])


def behind_thought(form: Structure, end: str, end_id: int | None, eos_token_ids: Sequence[int]) -> Structure:
    """A form that begins behind the model's reasoning, which is free.

    Args:
        form: of what comes then.
        end: the text that ends the reasoning.
        end_id: the token that was added for this text, of which the reasoning is then free to the token; None = there
            is none, and the reasoning is text without special tokens.
        eos_token_ids: with which an answer does not end before it has begun.

    Raises:
        UnsupportedParameter: the form cannot begin behind anything.
    """
    if end_id is None:
        thought = f"thought[suffix={json.dumps(end)}]: {_FREE_TEXT}"
    else:
        thought = f"thought: <[^{','.join(map(str, (end_id, *eos_token_ids)))}]>* <[{end_id}]>"
    return _grammar(["start: thought BLANKS answer", thought, f"BLANKS: {_BLANKS}", _answer(form)])


def _grammar(rules: Sequence[str]) -> Structure:
    return Structure("grammar", "\n".join((_HEADER, *rules)))


def _answer(form: Structure) -> str:
    """The rules of what is to come, by the name of `answer`."""
    own = f"{_HEADER}\n{_START}\n"
    if form.kind == "grammar" and form.text.startswith(own):
        return form.text.removeprefix(own)
    if form.kind == "json_schema":
        return f"answer: {_json(json.loads(form.text))}"
    if form.kind == "json_object":
        return f"answer: {_json({'type': 'object'})}"
    if form.kind == "choice":
        return f"answer: {' | '.join(map(json.dumps, json.loads(form.text)))}"
    field = f"structured_outputs.{form.kind}"
    raise UnsupportedParameter(
        field, f"{field} cannot start after the model's reasoning; use json or choice, or ask for no reasoning."
    )


def _json(schema: dict[str, Any]) -> str:
    """JSON of a schema, as a rule's right-hand side."""
    made = held(schema)
    return "%json " + json.dumps({"x-guidance": _LAYOUT | made.pop("x-guidance", {}), **made})
