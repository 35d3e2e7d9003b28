"""Demands of a client's request on the choices of its reply, read off the JSON that it sent, and whether a choice keeps
to them.

This shares no code with what serves: not the parsing of requests, the matching of stop strings or the grammar. What is
found says nothing of a client's own words.
"""

import json
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from serve_app.referee.wire.reply import Choice, Json, Reply
from serve_app.referee.wire.structure import CheckBudget, breaks_structure
from serve_app.referee.wire.vendors import Vendor
from serve_app.text.tokenizer import Tokenizer
from speculative.request import FinishReason, SamplingParams

CHANGES_CHOICES = ("echo", "suffix", "best_of", "use_beam_search")
"""Fields with which the choices are not what was generated for each."""
_NO_LIMIT = 2**31 - 1
_LIMITS = ("max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict", "max_output_tokens")
_OUTPUTS = {"json": "json_schema", "regex": "regex", "choice": "choice"}
_OLD_OUTPUTS = {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice"}
_MOST_TEXTS, _MOST_CHARACTERS = 50, 2_000
"""Stop strings, or bad words, of a request, and characters of them all; no front end has limited those of others."""
_LOST = "\ufffd"  # servers differ in how often they write it for bytes that form no character

_SAYS_NOTHING = {"title", "description", "default", "examples", "deprecated", "$defs", "$schema"}
_KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"}, "array": {"items", "minItems", "maxItems"},
    "string": set[str](), "integer": set[str](), "number": set[str](), "boolean": set[str](), "null": set[str](),
}  # fmt: skip
"""Keywords that the libraries of vLLM read as JSON Schema has it, by the one type beside which they stand. They pass
over many others, or read them as wider ones, by their version."""
_NEAR = "#/$defs/"
"""Prefix of references once schemas of several tools are put into one."""

Encode = Callable[[str], Sequence[int]]
"""The tokens of a text that goes on after others."""


@dataclass(frozen=True, slots=True)
class Made:
    """What is known of a choice beside what its reply says."""

    token_ids: Sequence[int] = ()  # generated, those that ended it included; () = they are not known
    end_token_ids: Collection[int] = ()  # with which the model ends an answer
    loses_text: bool = False  # whether a parser may have left out some of the text
    mark: str = ""  # what ends the reasoning with which it begins; "" = it begins with none, or that is not known


@dataclass(frozen=True, slots=True)
class Demands:
    """The demands on all choices of one request, as far as the vendor is known to keep to them.

    functions: JSON schemas of the arguments of those of which one must be called; none = no call must be made.
    """

    body: Json  # in the words of a completion or a chat
    tokenizer: Tokenizer
    vendor: Vendor
    is_chat: bool
    limits: SamplingParams  # those that concern token ids
    added: Collection[str] = ()  # as `Exchange` has it
    stops: tuple[str, ...] = ()
    structure: tuple[str, str] | None = None  # its kind and its text
    functions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, body: Json, tokenizer: Tokenizer, vendor: Vendor, *, is_chat: bool, added: Collection[str] = ()
    ) -> "Demands":
        """Read them off a request; the arguments are its fields. Raises InvalidRequest, KeyError, TypeError,
        ValueError, AttributeError: a field is not what the API takes."""
        strict = vendor.keeps == "all"
        limits = SamplingParams(max_tokens=_limit(body, is_chat=is_chat))
        if vendor.keeps == "nothing":
            return cls(body, tokenizer, vendor, is_chat, limits)
        stop, words = body.get("stop") or (), tuple(body.get("bad_words") or ())
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if type(body.get("n") or 1) is not int or not all(isinstance(one, str) for one in (*stops, *words)):
            raise TypeError("n is a whole number, and stop strings and bad words are texts")
        structure, functions = _structure(body), _functions(body)
        if not strict:
            stops, words = (
                texts if len(texts) <= _MOST_TEXTS and sum(map(len, texts)) <= _MOST_CHARACTERS else ()
                for texts in (stops, words)
            )
            schemas = [*functions.values(), *(structure[1:] if structure and structure[0] == "json_schema" else ())]
            tools = [tool.get("function") or {} for tool in body.get("tools") or ()]
            asked = [(body.get("response_format") or {}).get("json_schema") or {}, *tools]
            # A schema that is a wish, or parameters that need not be an object.
            is_wish = any(one.get("strict") is False for one in asked) or any(
                "type" not in (one.get("parameters") or {}) for one in tools
            )
            if is_wish or not all(map(_is_read_alike, [json.loads(schema) for schema in schemas])):
                structure, functions = None, {}
        limits = replace(limits, bad_words=_bad_words(words, tokenizer, strict=strict))
        return cls(body, tokenizer, vendor, is_chat, limits, added, stops, structure, functions)

    @property
    def is_strict(self) -> bool:
        """Return whether the vendor is known to keep to all of them."""
        return self.vendor.keeps == "all"

    @property
    def max_calls(self) -> int | None:
        """Return how many calls an answer may make; None = any number."""
        choice = self.body.get("tool_choice")
        if choice == "none" or not self.body.get("tools"):
            return 0
        return 1 if isinstance(choice, dict) or self.body.get("parallel_tool_calls") is False else None

    @property
    def _keeps_stop(self) -> bool:
        """Return whether the text holds the stop string that ended it."""
        return bool(self.body.get("include_stop_str_in_output"))

    def broken_whole(self, reply: Reply) -> str:
        """Say what is wrong with the number of choices, or of all tokens together, in words; "" = nothing."""
        if self.vendor.keeps == "nothing":
            return ""
        prompt, num = self.body.get("prompt"), len(reply.choices)
        several = isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)
        wanted = (len(prompt or ()) if several else 1) * (self.body.get("n") or 1)
        if wanted != num:
            return f"{num} choices came, and the request demands {wanted}"
        ids = [choice.token_ids for choice in reply.choices.values()]
        num_tokens = sum(map(len, filter(None, ids)))
        if reply.num_tokens in (None, num_tokens) or None in ids or not counts_all(reply, self.vendor):
            return ""
        return f"its usage counts {reply.num_tokens} tokens, and it has {num_tokens}"

    def broken(self, choice: Choice, made: Made) -> str:
        """The demand that a choice breaks, as far as its reply shows, in words; "" = none."""
        limit = broken_limit(self.limits, made.token_ids)
        if limit or self.vendor.keeps == "nothing":
            return limit
        said = _Said(self, choice, made)
        why = self._holds_stop(said) or self._broken_end(said) or self._broken_text(said)
        return why or self.broken_form(choice, made) or self._missing(choice)

    def broken_form(self, choice: Choice, made: Made) -> str:
        """Return which structure or call differs from the request, in words; "" = none, or it is unknown."""
        said, num_calls = _Said(self, choice, made), len(choice.calls)
        if self.is_strict and self.max_calls is not None and num_calls > self.max_calls:
            return f"{num_calls} calls were made, and the request allows {self.max_calls}"
        has_end_text = self._keeps_stop and said.ended and said.stop is None  # of its last token
        if has_end_text or (self.structure is None and not self.functions):
            return ""
        last = said.ids[-1] if said.ids else choice.stopped_by
        by_token = last in (self.body.get("stop_token_ids") or ())
        by_token |= isinstance(choice.stopped_by, int) and not self.is_strict
        whole = said.ended and said.stop is None and not by_token
        if self.structure is None:
            return self._broken_calls(said, whole)
        kind, text = self.structure
        if choice.calls or (not self.is_strict and (self.body.get("tools") or choice.called)):
            return ""
        form: str | None = choice.text
        if choice.reasoning or said.made.mark:
            form = said.behind_reasoning()
            if form is None or form != choice.text.strip():  # a parser split it elsewhere
                return ""
            if not form and whole:
                return "it ended before its reasoning did"
            text = json.dumps([one.strip() for one in json.loads(text)]) if kind == "choice" else text
        elif said.made.loses_text and choice.text.strip() not in said.spelt(said.spelling):
            return ""
        return breaks_structure(kind, text, form or "", whole=whole)

    def _holds_stop(self, said: "_Said") -> str:
        least = self.body.get("min_tokens") or 0  # before whose end no stop string counts
        if not self.stops or (least and not said.ids):
            return ""
        start = len(said.spelt(said.ids[:least]))
        for number, stop in enumerate(self.stops):
            at = said.text.find(stop, start)
            is_end = self._keeps_stop and said.ended and at + len(stop) == len(said.text)
            # of several that came at once, vLLM's versions differ in which one ends the text
            if at >= 0 and not is_end and said.stop in (None, stop):
                return f"its text goes on behind stop string {number}, or holds it"
        return ""

    def _broken_end(self, said: "_Said") -> str:
        """Say what is wrong with its end, in words; "" = nothing."""
        choice, ids = said.choice, said.ids
        if said.stop is not None:
            if ids and not choice.calls and not said.is_cut_by(said.stop, keeps_stop=self._keeps_stop):
                return "its text ends elsewhere than at the stop string that is said to have ended it"
        elif choice.finish_reason == "stop" and ids:
            ends = (*said.made.end_token_ids, self.tokenizer.eos_token_id, *(self.body.get("stop_token_ids") or ()))
            if ids[-1] not in (*ends, choice.stopped_by):
                return "it is said to have ended by itself, and its last token ends no answer"
        return ""

    def _broken_text(self, said: "_Said") -> str:
        """Return whether its text is another than that of its tokens, in words, where no parser has read it."""
        if self.is_chat or not (said.ids and said.choice.has_text) or said.stop is not None:
            return ""
        is_shown = any(_shown(said.text).strip() == one.strip() for one in said.forms(said.spelling))
        return "" if is_shown else "its text is not that of its tokens"

    def _missing(self, choice: Choice) -> str:
        """Return what was asked for and is not there, in words; "" = nothing."""
        body, logprobs = self.body, self.body.get("logprobs")
        num_top: Any = (body.get("top_logprobs") or 0) if self.is_chat else logprobs
        if logprobs is None or logprobs is False:
            num_top = 0 if "logprobs" in self.added else None
        elif type(num_top) is not int:
            num_top = 0
        if choice.token_ids is None or choice.called:  # vLLM's parsers leave some out
            asked = body.get("return_token_ids") or "return_token_ids" in self.added
            return "it has no token ids, which were asked for" if asked and not choice.called else ""
        num, given = len(choice.token_ids), [one for one in choice.logprobs or () if one is not None]
        if num_top is not None and not len(given) == len(choice.logprobs or ()) == num:
            return f"it has {num} tokens and {len(given)} of the logprobs that were asked for"
        if num_top and (short := _shortest(choice.top_logprobs, num)) < num_top:
            return f"a place has {short} of the {num_top} likeliest tokens that were asked for"
        scored = set(body.get("logprob_token_ids") or ())
        if scored and num and any(scored - one.keys() for one in choice.scored(scored) or [{}]):
            return "the logprobs of some ids that were asked for are not there"
        if body.get("prompt_logprobs") is not None and choice.index == 0 and not choice.prompt_logprobs:
            return "it has no logprobs of its prompt, which were asked for"
        return ""

    def _broken_calls(self, said: "_Said", whole: bool) -> str:
        """Say what is wrong with calls that had to be made; of an answer that was cut off, the last may be, too."""
        calls, thinks = [*said.choice.calls.values()], bool(said.choice.reasoning or said.made.mark)
        form = said.behind_reasoning() if thinks else said.spelt(said.spelling)
        if form is None or not said.ids:
            return ""
        try:
            as_made = is_made_of(form, calls)
            lost = said.made.loses_text and (not whole or _value(form) is not _NO_JSON)
            if not as_made and (lost or not self.is_strict):
                return ""
        except RecursionError:
            return ""
        if whole and not as_made:
            return "it says something else than the calls that the request demands"
        budget = CheckBudget()
        for number, (name, arguments) in enumerate(calls):
            if name not in self.functions:
                return f"call {number} is of a function that the request does not have called"
            is_whole = whole or number < len(calls) - 1
            if why := breaks_structure("json_schema", self.functions[name], arguments, whole=is_whole, budget=budget):
                return f"the arguments of call {number}: {why}"
        return ""


class _Said:
    """One choice, as it is compared.

    text: all that its reply says, reasoning first.
    ended: whether it came to an end of its own.
    stop: the stop string that is said to have ended it.
    spelling: the ids whose text went out.
    """

    def __init__(self, demands: Demands, choice: Choice, made: Made) -> None:
        self.choice, self.made, self.ids = choice, made, made.token_ids
        self.text = choice.reasoning + choice.text
        self.ended = choice.finish_reason in ("stop", "tool_calls")
        self.stop = choice.stopped_by if isinstance(choice.stopped_by, str) else None
        by_token = self.ended and self.stop is None and not demands.body.get("include_stop_str_in_output")
        self.spelling = self.ids[:-1] if by_token else self.ids
        self._tokenizer = demands.tokenizer

    def spelt(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of some of its tokens."""
        return self._tokenizer.decode(ids, skip_special=skip_special, continuation=True)

    def forms(self, ids: Sequence[int]) -> list[str]:
        """The texts of some of its tokens that a server may show."""
        return [_shown(self.spelt(ids, skip_special=skip)) for skip in (True, False)]

    def is_cut_by(self, stop: str, *, keeps_stop: bool) -> bool:
        """Return whether its tokens spell this stop string where its text ends."""
        until = _shown(self.choice.text if keeps_stop else self.choice.text + stop)
        there = any(until in one if self.choice.reasoning else one.startswith(until) for one in self.forms(self.ids))
        return there and until.endswith(_shown(stop))

    def behind_reasoning(self) -> str | None:
        """The text behind what ends the reasoning, "" = that did not come; None = nobody can say where it is."""
        mark, spelt = self.made.mark, self.spelt(self.spelling, skip_special=False)
        if not mark:
            return None
        if mark not in spelt:
            return ""
        is_spelt = self._tokenizer.added_id(mark) not in (None, *self.ids)  # by the model, where it ends nothing
        return None if is_spelt or spelt.count(mark) != 1 else spelt.partition(mark)[2].strip()


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
    if params.bad_words:
        answer = _as_text(token_ids)  # which Python searches in linear time
        found = [at + len(word) - 1 for word in params.bad_words if (at := answer.find(_as_text(word))) >= 0]
        if found:
            return f"a bad word ends with token {min(found)}"
    most = most if room is None else min(most, room)
    if finish_reason is FinishReason.LENGTH and num_tokens < most:
        return f"it ended for its length with {num_tokens} tokens, and there was room for {most}"
    return ""


def _as_text(token_ids: Sequence[int]) -> str:
    return "".join(chr(min(max(token, 0), sys.maxunicode)) for token in token_ids)


def _bad_words(words: Iterable[str], tokenizer: Tokenizer, *, strict: bool) -> tuple[tuple[int, ...], ...]:
    if strict:
        return tuple(ids for word in words for ids in spellings(word, tokenizer.encode_continuation))
    return tuple(ids for word in words for ids in vllm_spellings(word, partial(tokenizer.encode, special=False)))


def spellings(word: str, encode: Encode) -> list[tuple[int, ...]]:
    """The token sequences that a bad word stands for here: as it begins a text, and as it follows a space."""
    bare = word.lstrip()
    return [tuple(encode(bare)), tuple(encode(" " + bare))] if bare else [tuple(encode(word))]


def vllm_spellings(word: str, encode: Encode) -> list[tuple[int, ...]]:
    """Return its spellings in vLLM: behind a space only if that takes as many tokens, the first of them another."""
    first, *others = spellings(word, encode)
    return [first, *(one for one in others if len(one) == len(first) and one[0] != first[0])]


def is_made_of(text: str, calls: Sequence[tuple[str, str]]) -> bool:
    """Return whether a text is these calls and nothing else, as servers force it: a JSON list of them, or the arguments
    of the only one. Raises RecursionError: it is nested too deeply."""
    made, sent = _value(text), [(name, _value(arguments)) for name, arguments in calls]
    lists = [[{"name": name, key: value} for name, value in sent] for key in ("arguments", "parameters")]
    return bool(sent) and made is not _NO_JSON and (made in lists or (len(sent) == 1 and made == sent[0][1]))


_NO_JSON = object()


def _value(text: str) -> Any:
    """Return what JSON says, with numbers as they are written."""
    try:
        return json.loads(text, parse_int=str, parse_float=str)
    except ValueError:
        return _NO_JSON


def _shown(text: str) -> str:
    """A text as it is compared with another reading of the same tokens."""
    return text.replace(_LOST, "")


def _limit(body: Json, *, is_chat: bool) -> int:
    """The tokens that an answer may have, as far as all vendors read the request alike: -1 is no limit to some, of two
    fields another one counts here and there, and an echo holds the prompt."""
    given = {body[name] for name in _LIMITS if body.get(name) is not None}
    names = ("max_completion_tokens", "max_tokens") if is_chat else ("max_tokens",)
    asked = next((body[name] for name in names if body.get(name) is not None), None)
    if type(asked) is not int or asked < 1:
        return _NO_LIMIT
    return asked if given == {asked} and not body.get("echo") else _NO_LIMIT


def counts_all(reply: Reply, vendor: Vendor) -> bool:
    """Return whether the ids in a reply are all that its usage counts."""
    parsed = any(choice.called for choice in reply.choices.values())  # vLLM streams no ids of what says nothing
    return vendor.keeps == "all" or (vendor.keeps == "most" and not parsed)


def _shortest(places: list[Any] | None, num_tokens: int) -> int:
    """The fewest entries of a place; where they go by texts, two tokens may have one, and any number is enough."""
    if len(places or ()) != num_tokens:
        return 0
    by_id = [
        place or ()
        for place in places or ()
        if not isinstance(place, dict) or all(key.startswith("token_id:") for key in place)
    ]
    return min(map(len, by_id), default=_NO_LIMIT)


def _structure(body: Json) -> tuple[str, str] | None:
    """The structure that a body asks for, whichever field names it."""
    outputs = body.get("structured_outputs") or {}
    named = [(kind, outputs.get(name)) for name, kind in _OUTPUTS.items()]
    named += [(kind, body.get(name)) for name, kind in _OLD_OUTPUTS.items()]
    for kind, value in named:
        if kind == "choice" and value is not None and not all(isinstance(one, str) for one in value):
            raise TypeError("choices are texts")
        if value is not None:
            return kind, value if isinstance(value, str) and kind != "choice" else json.dumps(value)
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema":
        schema = (form.get("json_schema") or form)["schema"]
        return "json_schema", schema if isinstance(schema, str) else json.dumps(schema)
    return ("json_object", "") if form.get("type") == "json_object" else None


def _functions(body: Json) -> dict[str, str]:
    """JSON schemas of the arguments of the functions of which one must be called, by name; none = none must."""
    choice = body.get("tool_choice")
    if choice != "required" and not isinstance(choice, dict):
        return {}
    listed = [tool["function"] for tool in body["tools"]]
    known = {one["name"]: json.dumps({"type": "object", **(one.get("parameters") or {})}) for one in listed}
    if choice == "required":
        return known
    name = choice["function"]["name"]
    return {name: known[name]}


def _is_read_alike(schema: Any) -> bool:
    """Return whether all of a JSON schema is of the kind that every library of vLLM reads alike."""
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
