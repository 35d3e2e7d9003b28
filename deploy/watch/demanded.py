"""Checks of the choices of a watched reply against its request, as far as the reply shows them."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

from deploy.exchange.answers import Choice, Json, Reply
from serve_app.referee.client_demands import DEMANDING, ClientDemands, Delivered, Parsed, is_made_of, vllm_spellings
from serve_app.referee.request_limits import broken_limit
from serve_app.text.tokenizer import Tokenizer

_LEFT_OUT = (
    "max_tokens", "max_completion_tokens", "min_tokens", "stop_token_ids", "ignore_eos",  # vendors differ in them
    "max_output_tokens", "text",  # of the Responses API, which is not read
)  # fmt: skip
_CHANGES_CHOICES = ("echo", "suffix", "best_of", "use_beam_search")
"""Fields with which the choices are not what was generated for each."""
_MOST_TEXTS, _MOST_CHARACTERS = 50, 2_000
"""Stop strings, or bad words, of a request, and characters of them all; no front end has limited those of others."""
_SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "$defs", "$schema"}
_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"}, "array": {"items", "minItems", "maxItems"},
    "string": set[str](), "integer": set[str](), "number": set[str](), "boolean": set[str](), "null": set[str](),
}  # fmt: skip
"""Keywords that the libraries of vLLM read as JSON Schema has it, by the one type beside which they stand. They pass
over many others, or read them as wider ones, by their version."""
_NEAR = "#/$defs/"
"""Prefix of references once schemas of several tools are put into one."""


def broken_demands(body: Json, reply: Reply, tokenizer: Tokenizer, *, keeps_all: bool) -> dict[int, str]:
    """Return what choices break, in words, by their index; those that keep to everything are not there.

    Args:
        body: the client's request.
        reply: whole.
        tokenizer: the model's.
        keeps_all: as `Vendor` has it.
    """
    try:
        return _found(body, reply, tokenizer, keeps_all)
    except Exception:  # a body that nobody has checked may hold anything; its answers are judged all the same
        return {}


def _found(body: Json, reply: Reply, tokenizer: Tokenizer, keeps_all: bool) -> dict[int, str]:
    if any(body.get(name) for name in _CHANGES_CHOICES):
        return {}
    read = {name: body[name] for name in DEMANDING if name not in _LEFT_OUT and body.get(name) is not None}
    if body.get("min_tokens"):  # how much of a text they keep from being searched, only its server knows
        read.pop("stop", None)
    for name in ("stop", "bad_words"):
        if not _is_small(read.get(name) or []):
            read.pop(name)
    demands = ClientDemands.of(read, partial(tokenizer.encode, special=False), bad_words=vllm_spellings)
    demands = replace(demands, ascii_classes=False)
    if not keeps_all:
        demands = replace(demands, max_calls=None)
        if _is_lenient(body) or _is_loose(demands):
            demands = replace(demands, functions={}, structure=None)
    found = {}
    for index, choice in reply.choices.items():
        asked, by_text, made = demands, isinstance(choice.stopped_by, str), ""
        if by_text or choice.called or body.get("tools"):
            asked = replace(asked, structure=None)
        if asked.functions:
            made = "" if by_text else tokenizer.decode(choice.token_ids or ())
            if not is_made_of(made, [*choice.calls.values()]):  # out of other text, which nothing forced
                asked = replace(asked, functions={})
        if why := _broken(asked, body, choice, made):
            found[index] = why
    wanted = demands.num_choices * _num_prompts(body)
    if len(reply.choices) != wanted:
        found[min(reply.choices)] = f"{len(reply.choices)} choices came, and the request demands {wanted}"
    return found


def _is_small(texts: str | list[str]) -> bool:
    several = [texts] if isinstance(texts, str) else texts
    return len(several) <= _MOST_TEXTS and sum(map(len, several)) <= _MOST_CHARACTERS


def _is_loose(demands: ClientDemands) -> bool:
    """Return whether a JSON schema of them may be read as a wider one."""
    texts = [*demands.functions.values()]
    if demands.structure is not None and demands.structure[0] == "json_schema":
        texts.append(demands.structure[1])
    return not all(_is_read_alike(json.loads(text)) for text in texts)


def _is_read_alike(schema: Any) -> bool:
    """Return whether all of a JSON schema is of the kind that every library reads alike."""
    if not isinstance(schema, dict) or not all(map(_is_read_alike, (schema.get("$defs") or {}).values())):
        return False
    own = schema.keys() - _SAYS_NOTHING
    if own == {"$ref"}:
        return str(schema["$ref"]).startswith(_NEAR)
    if own == {"anyOf"}:
        return all(map(_is_read_alike, schema["anyOf"]))
    if own == {"enum"} or (own == {"enum", "type"} and schema["type"] == "string"):
        return all(isinstance(one, str) for one in schema["enum"])
    if not isinstance(schema.get("type"), str) or not own - {"type"} <= _KEYWORDS.get(schema["type"], set()):
        return False
    known = schema.get("properties", {})
    parts = [*known.values(), *([schema["items"]] if "items" in schema else ())]
    named = all(one in known for one in schema.get("required", ()))
    return named and isinstance(schema.get("additionalProperties", False), bool) and all(map(_is_read_alike, parts))


def _broken(demands: ClientDemands, body: Json, choice: Choice, made: str) -> str:
    """Say what one choice breaks, in words; "" = nothing. made: the text of which calls were made that had to be
    made."""
    reason = "stop" if choice.finish_reason == "tool_calls" else choice.finish_reason or ""
    said = Delivered(
        choice.text, choice.token_ids or (), reason, parsed=Parsed(choice.text, calls=tuple(choice.calls.values()))
    )
    # of several that came at once, vLLM's versions differ in which one ends the text
    only = choice.stopped_by if isinstance(choice.stopped_by, str) and len(demands.stops) > 1 else None
    if why := broken_limit(demands.limits, said.token_ids) or demands.broken_end(said, only):
        return why
    by_token = body.get("stop_token_ids") or isinstance(choice.stopped_by, int)
    if by_token and not demands.keeps_stop:  # which may have come before the structure's own end
        said = replace(said, finish_reason="length")
    return demands.broken_form(replace(said, text=made) if demands.functions else said)


def _is_lenient(body: Json) -> bool:
    """Return whether a JSON schema of it is a wish, or parameters of a tool need not be an object."""
    functions: list[Any] = [tool.get("function") or {} for tool in body.get("tools") or ()]
    schemas = [(body.get("response_format") or {}).get("json_schema") or {}, *functions]
    return any(schema.get("strict") is False for schema in schemas) or any(
        "type" not in (one.get("parameters") or {}) for one in functions
    )


def _num_prompts(body: Json) -> int:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)
    return len(prompt or ()) if several else 1
