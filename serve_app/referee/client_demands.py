"""What a client's request demands of its answers, read off the JSON that it sent, and whether an answer keeps to it.

This shares no code with what serves: not the parsing of requests, the matching of stop strings or the grammar. What is
found says nothing of a client's own words.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.referee.request_limits import broken_limit
from serve_app.referee.structure_checks import breaks_structure
from speculative.request import FinishReason, SamplingParams

DEMANDING = (
    "max_tokens", "max_completion_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "bad_words", "n", "stop",
    "include_stop_str_in_output", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice",
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
class Delivered:
    """What a client got as one choice.

    text: generated, as it was sent. token_ids: of it, those that ended it included. finish_reason: in OpenAI's words.
    stop_reason: the stop string that is said to have ended it. unsearched: characters at its beginning that
    `min_tokens` keeps from being searched for stop strings. shown_whole: whether the text is all that was generated; a
    parser of reasoning or calls leaves some of it out.
    """

    text: str
    token_ids: Sequence[int]
    finish_reason: str
    stop_reason: str | None = None
    unsearched: int = 0
    shown_whole: bool = True


@dataclass(frozen=True, slots=True)
class ClientDemands:
    """Of all choices of one request. limits: those that concern token ids; structure: its kind and its text.
    ascii_classes: whether the server reads `\\w`, `\\d`, `\\s` and `\\b` in it as ASCII; not known = False."""

    limits: SamplingParams
    num_choices: int = 1
    stops: tuple[str, ...] = ()
    keeps_stop: bool = False
    structure: tuple[str, str] | None = None
    ascii_classes: bool = True

    @classmethod
    def of(cls, body: Mapping[str, Any], encode: Encode, *, bad_words: BadWords | None = None) -> "ClientDemands":
        """Read them off the body of a request.

        Args:
            body: as its client sent it.
            encode: by the model's tokenizer.
            bad_words: the token sequences that a bad word stands for; None = those of this service.

        Raises:
            InvalidRequest, TypeError, ValueError: a field is not what the API takes.
        """
        most = body.get("max_completion_tokens") or body.get("max_tokens") or _NO_LIMIT
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
        return limit or self.broken_end(said) or self.broken_structure(said)

    def broken_end(self, said: Delivered, only: str | None = None) -> str:
        """What is wrong with its end, in words; "" = nothing. only: of the stop strings; None = all."""
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

    def broken_structure(self, said: Delivered) -> str:
        """Why it does not keep to its structure, in words; "" = it does, or nobody can say."""
        ended = said.finish_reason == "stop"
        ends_in_token = self.keeps_stop and ended and said.stop_reason is None  # which may have a text
        if self.structure is None or not said.shown_whole or ends_in_token:
            return ""
        whole = ended and not self._may_stop(said)
        return breaks_structure(*self.structure, said.text, whole=whole, ascii_classes=self.ascii_classes)

    def _may_stop(self, said: Delivered) -> bool:
        """Whether something else than the structure's own end may have ended it."""
        by_token = bool(said.token_ids) and said.token_ids[-1] in self.limits.stop_token_ids
        return by_token or bool(self.stops and said.stop_reason is not None)


def spellings(word: str, encode: Encode) -> list[tuple[int, ...]]:
    """The token sequences that a bad word stands for here: as it begins a text, and as it follows a space."""
    bare = word.lstrip()
    return [tuple(encode(bare)), tuple(encode(" " + bare))] if bare else [tuple(encode(word))]


def vllm_spellings(word: str, encode: Encode) -> list[tuple[int, ...]]:
    """Those that it stands for in vLLM: behind a space only if that takes as many tokens, the first of them another."""
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
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema":
        schema = form["json_schema"]["schema"]
        return "json_schema", schema if isinstance(schema, str) else json.dumps(schema)
    return ("json_object", "") if form.get("type") == "json_object" else None
