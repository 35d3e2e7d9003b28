"""Demands of a client's request on its answers, read off the JSON that it sent, and whether an answer keeps to them.

This shares no code with what serves: not the parsing of requests, the matching of stop strings or the grammar. What is
found says nothing of a client's own words.
"""

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from serve_app.referee.wire.reply import Choice, Json, Reply
from serve_app.referee.wire.structure import CheckBudget, breaks_structure
from serve_app.text.tokenizer import Tokenizer
from speculative.request import FinishReason, SamplingParams

DEMANDING = (
    "max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "stop_token_ids", "ignore_eos",
    "bad_words", "n", "stop", "include_stop_str_in_output", "response_format", "text", "structured_outputs",
    "guided_json", "guided_regex", "guided_choice", "tools", "tool_choice", "parallel_tool_calls",
)  # fmt: skip
"""The fields that are read."""
_NO_LIMIT = 2**31 - 1
_OUTPUTS = {"json": "json_schema", "regex": "regex", "choice": "choice"}
_OLD_OUTPUTS = {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice"}

Encode = Callable[[str], Sequence[int]]
"""The tokens of a text that goes on after others."""
BadWords = Callable[[str, Encode], list[tuple[int, ...]]]
"""The token sequences of a bad word."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """The fields that a client got of a text.

    calls: the function of each, and its arguments.
    loses_text: whether the parser may leave out some of the text.
    thought_end: what ends the reasoning behind which a form begins; "" = there is no reasoning, None = the text does
        not show its end.
    thought_end_id: the token that was added for that end; None = there is none.
    """

    content: str
    calls: tuple[tuple[str, str], ...] = ()
    loses_text: bool = False
    thought_end: str | None = ""
    thought_end_id: int | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """One choice as a client got it.

    text: generated, as it was sent.
    token_ids: of it, those that ended it included.
    finish_reason: in OpenAI's words.
    stop_reason: the stop string that is said to have ended it.
    unsearched: characters at its beginning that `min_tokens` keeps from being searched for stop strings.
    parsed: what became of the text; None = all is content.
    """

    text: str
    token_ids: Sequence[int]
    finish_reason: str
    stop_reason: str | None = None
    unsearched: int = 0
    parsed: Parsed | None = None


@dataclass(frozen=True, slots=True)
class ClientDemands:
    """The demands on all choices of one request.

    limits: those that concern token ids.
    structure: its kind and its text.
    functions: JSON schemas of the arguments of those of which one must be called; none = no call must be made.
    max_calls: None = any number.
    ascii_classes: whether the server reads `\\w`, `\\d`, `\\s` and `\\b` as ASCII; not known = False.
    """

    limits: SamplingParams
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    structure: tuple[str, str] | None = None
    functions: Mapping[str, str] = field(default_factory=dict)
    max_calls: int | None = None
    ascii_classes: bool = True

    @classmethod
    def of(cls, body: Mapping[str, Any], encode: Encode, *, bad_words: BadWords | None = None) -> "ClientDemands":
        """Read them off the body of a request.

        Args:
            body: as its client sent it.
            encode: by the model's tokenizer.
            bad_words: the token sequences that a bad word stands for; None = those of this service.

        Raises:
            InvalidRequest, KeyError, TypeError, ValueError: a field is not what the API takes.
        """
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        most = next((body[name] for name in names if body.get(name)), _NO_LIMIT)
        stop, num_choices = body.get("stop") or (), body.get("n") or 1
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if type(num_choices) is not int or not all(isinstance(one, str) for one in stops):
            raise TypeError("n is a whole number, and stop strings are texts")
        words = [ids for word in body.get("bad_words") or () for ids in (bad_words or spellings)(word, encode)]
        return cls(
            limits=SamplingParams(
                max_tokens=most,
                min_tokens=min(body.get("min_tokens") or 0, most),
                stop_token_ids=tuple(body.get("stop_token_ids") or ()),
                ignore_eos=bool(body.get("ignore_eos")),
                bad_words=tuple(words),
            ),
            num_choices=num_choices,
            stops=stops,
            keeps_stop=bool(body.get("include_stop_str_in_output")),
            structure=_structure(body),
            functions=_functions(body),
            max_calls=_max_calls(body),
        )

    def broken(self, said: Delivered, end_token_ids: Collection[int], room: int | None = None) -> str:
        """The demand that a choice breaks, in words; "" = none.

        Args:
            said: the choice.
            end_token_ids: with which the model ends an answer.
            room: tokens that fit behind the prompt; None = not known.
        """
        is_limited = said.finish_reason == "length" and self.limits.max_tokens < _NO_LIMIT
        reason = FinishReason.LENGTH if is_limited else None
        limit = broken_limit(self.limits, said.token_ids, end_token_ids, finish_reason=reason, room=room)
        return limit or self.broken_end(said) or self.broken_form(said)

    def broken_end(self, said: Delivered, only: str | None = None) -> str:
        """Say what is wrong with its end, in words; "" = nothing. only: of the stop strings; None = all."""
        text, ended = said.text[said.unsearched :], said.finish_reason == "stop"
        for number, stop in enumerate(self.stops):
            if only not in (None, stop):
                continue
            at = text.find(stop)
            if at >= 0 and not (self.keeps_stop and ended and at + len(stop) == len(text)):
                return f"its text goes on behind stop string {number}, or holds it"
        if said.stop_reason is not None and said.stop_reason not in self.stops:
            return "a stop string ended it that the request does not name"
        if ended and 0 < len(said.token_ids) <= self.limits.min_tokens:
            return f"it ended with {len(said.token_ids)} tokens, and min_tokens is {self.limits.min_tokens}"
        return ""

    def broken_form(self, said: Delivered) -> str:
        """Return how the structure or the calls differ from the request, in words; "" = they do not, or it is
        unknown."""
        parsed, ended = said.parsed or Parsed(said.text), said.finish_reason == "stop"
        if self.max_calls is not None and len(parsed.calls) > self.max_calls:
            return f"{len(parsed.calls)} calls were made, and the request allows {self.max_calls}"
        ends_in_token = self.keeps_stop and ended and said.stop_reason is None  # which may have a text
        if ends_in_token or (self.structure is None and not self.functions):
            return ""
        whole = ended and not self._may_stop(said)
        if whole and _is_all_thought(said, parsed):
            return "it ended before its reasoning did"
        form = _form(said, parsed)
        if form is None:
            return ""
        budget = CheckBudget(ascii_classes=self.ascii_classes)
        if self.structure is None:
            return self._broken_calls(form, parsed, whole, budget)
        kind, text = self.structure
        if parsed.content.strip() != form.strip():  # a parser split it elsewhere, or left out some of it
            return ""
        if parsed.thought_end and kind == "choice":
            text = json.dumps([one.strip() for one in json.loads(text)])
        return breaks_structure(kind, text, form, whole=whole, budget=budget)

    def _broken_calls(self, form: str, parsed: Parsed, whole: bool, budget: CheckBudget) -> str:
        """Say what is wrong with calls that had to be made; of an answer that was cut off, the last may be, too."""
        try:
            as_made = is_made_of(form, parsed.calls)
            if parsed.loses_text and not as_made and (not whole or _value(form) is not _NO_JSON):
                return ""
        except RecursionError:
            return ""
        if whole and not as_made:
            return "it says something else than the calls that the request demands"
        for number, (name, arguments) in enumerate(parsed.calls):
            if name not in self.functions:
                return f"call {number} is of a function that the request does not have called"
            is_whole = whole or number < len(parsed.calls) - 1
            if why := breaks_structure("json_schema", self.functions[name], arguments, whole=is_whole, budget=budget):
                return f"the arguments of call {number}: {why}"
        return ""

    def _may_stop(self, said: Delivered) -> bool:
        """Return whether something else than the structure's own end may have ended it."""
        by_token = bool(said.token_ids) and said.token_ids[-1] in self.limits.stop_token_ids
        return by_token or bool(self.stops and said.stop_reason is not None)


def spellings(word: str, encode: Encode) -> list[tuple[int, ...]]:
    """The token sequences that a bad word stands for here: as it begins a text, and as it follows a space."""
    bare = word.lstrip()
    return [tuple(encode(bare)), tuple(encode(" " + bare))] if bare else [tuple(encode(word))]


def vllm_spellings(word: str, encode: Encode) -> list[tuple[int, ...]]:
    """Return its spellings in vLLM: behind a space only if that takes as many tokens, the first of them another."""
    first, *others = spellings(word, encode)
    return [first, *(one for one in others if len(one) == len(first) and one[0] != first[0])]


def _structure(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """The structure that a body asks for, whichever field names it."""
    outputs = body.get("structured_outputs") or {}
    named = [(kind, outputs.get(name)) for name, kind in _OUTPUTS.items()]
    named += [(kind, body.get(name)) for name, kind in _OLD_OUTPUTS.items()]
    for kind, value in named:
        if kind == "choice" and value is not None and not all(isinstance(one, str) for one in value):
            raise TypeError("choices are texts")
        if value is not None:
            return kind, value if isinstance(value, str) and kind != "choice" else json.dumps(value)
    form = body.get("response_format") or (body.get("text") or {}).get("format") or {}
    if form.get("type") == "json_schema":
        schema = (form.get("json_schema") or form)["schema"]
        return "json_schema", schema if isinstance(schema, str) else json.dumps(schema)
    return ("json_object", "") if form.get("type") == "json_object" else None


def _functions(body: Mapping[str, Any]) -> dict[str, str]:
    """JSON schemas of the arguments of the functions of which one must be called, by name; none = none must."""
    choice = body.get("tool_choice")
    if choice != "required" and not isinstance(choice, dict):
        return {}
    listed = [tool.get("function") or tool for tool in body["tools"]]  # the Responses API does without `function`
    known = {one["name"]: json.dumps({"type": "object", **(one.get("parameters") or {})}) for one in listed}
    if choice == "required":
        return known
    name = (choice.get("function") or choice)["name"]
    return {name: known[name]}


def _max_calls(body: Mapping[str, Any]) -> int | None:
    """Return how many calls an answer may make; None = any number."""
    choice = body.get("tool_choice")
    if choice == "none" or not body.get("tools"):
        return 0
    return 1 if isinstance(choice, dict) or body.get("parallel_tool_calls") is False else None


_NO_JSON = object()


def _value(text: str) -> Any:
    """Return what JSON says, with numbers as they are written."""
    try:
        return json.loads(text, parse_int=str, parse_float=str)
    except ValueError:
        return _NO_JSON


def is_made_of(text: str, calls: Sequence[tuple[str, str]]) -> bool:
    """Return whether a text is these calls and nothing else, as servers force it: a JSON list of them, or the arguments
    of the only one.

    Raises:
        RecursionError: it is nested too deeply.
    """
    made, sent = _value(text), [(name, _value(arguments)) for name, arguments in calls]
    lists = [[{"name": name, key: value} for name, value in sent] for key in ("arguments", "parameters")]
    return bool(sent) and made is not _NO_JSON and (made in lists or (len(sent) == 1 and made == sent[0][1]))


def _is_all_thought(said: Delivered, parsed: Parsed) -> bool:
    """Return whether what ends its reasoning is not there."""
    if parsed.thought_end_id is not None:
        return parsed.thought_end_id not in said.token_ids
    return parsed.thought_end is not None and parsed.thought_end not in said.text


def _form(said: Delivered, parsed: Parsed) -> str | None:
    """The text that has to have a form; None = nobody can say where it begins."""
    if parsed.thought_end == "":
        return said.text
    if parsed.thought_end is None or _is_all_thought(said, parsed):
        return None
    if said.text.count(parsed.thought_end) != 1:  # or the model spelt it
        return None
    return said.text.partition(parsed.thought_end)[2].strip()  # blanks may stand behind it


def broken_limit(
    params: SamplingParams,
    token_ids: Sequence[int],
    end_token_ids: Collection[int] = (),
    *,
    finish_reason: FinishReason | None = None,
    room: int | None = None,
) -> str:
    """The limit that an answer breaks, in words; "" = none.

    Args:
        params: of the request.
        token_ids: all that were generated for it.
        end_token_ids: those with which the model ends an answer.
        finish_reason: why the answer ended; None = it did not, or that is not known.
        room: tokens that fit behind the prompt; None = not known.
    """
    num_tokens, most = len(token_ids), params.max_tokens
    if num_tokens > most:
        return f"it has {num_tokens} tokens, and max_tokens is {most}"
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)}
    places = [index for index, token in enumerate(token_ids) if token in ends] if ends else []
    if places and places[0] < num_tokens - 1:
        return f"token {places[0]} ends the answer, and others follow"
    if places and places[0] < params.min_tokens:
        return f"token {places[0]} ends the answer, and min_tokens is {params.min_tokens}"
    if (place := _bad_word(params.bad_words, token_ids)) is not None:
        return f"a bad word ends with token {place}"
    most = most if room is None else min(most, room)
    if finish_reason is FinishReason.LENGTH and num_tokens < most:
        return f"it ended for its length with {num_tokens} tokens, and there was room for {most}"
    return ""


def _bad_word(words: Sequence[Sequence[int]], token_ids: Sequence[int]) -> int | None:
    """The last token of the first word in an answer; None = it holds none."""
    if not words:
        return None
    answer = _as_text(token_ids)  # which Python searches in linear time
    ends = (at + len(word) - 1 for word in words if (at := answer.find(_as_text(word))) >= 0)
    return min(ends, default=None)


def _as_text(token_ids: Sequence[int]) -> str:
    return "".join(chr(min(max(token, 0), sys.maxunicode)) for token in token_ids)


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
