"""The shape of replies where nothing was added to the request, and how a reply is made to look like that again."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from deploy.exchange.asking import BROUGHT
from deploy.exchange.json_spans import Edit, cuts, edited, items, members, past_blanks

_ABSENT = ""
_OWN = "own"  # the server reports it unasked: it stays
_MESSAGES = ("delta", "message")
# What an event may hold that has nothing for its reader.
_NOTHING_NEW = frozenset({"index", "delta", "text", "finish_reason", "stop_reason"}) | BROUGHT
_NO_DELTAS: tuple[dict[str, str], ...] = ({}, {"content": ""})
_CARRY_TOKENS = {"logprobs", "token_ids"}
_UNRELATED = 1_000_000
_MOST_PLANS = 4096
_value_end = json.JSONDecoder().raw_decode

Role = tuple[frozenset[str], ...]
"""Kind of an object: its keys beside those that may be asked for, and the keys of its message."""

Keys = tuple[tuple[str, ...], ...]
"""Keys, in order, of an object and of its choices with their messages."""


class _Object(NamedTuple):
    role: Role
    fields: Mapping[str, Any]


class _Step(NamedTuple):
    """The fate of a member: it is cut out (""), keeps its value (None), or gets another."""

    key: str
    value: str | None


class _Plan(NamedTuple):
    """All members in question in the order of the text, and whether some are the first of their objects."""

    steps: tuple[_Step, ...]
    unknown: bool
    firsts: bool


@dataclass(frozen=True, slots=True)
class Plain:
    """A reply or event as the client is to get it; None = it would not have come.

    unknown: no such shape was seen.
    """

    text: str | None
    unknown: bool


@dataclass
class PlainShape:
    """The shape of the replies to requests of one form, learned from those to which nothing was added.

    silent: whether the server sends no event without text where neither token ids nor logprobs are asked for.
    """

    silent: bool = False
    _values: dict[tuple[Role, str], str] = field(default_factory=dict)
    _empty_events: bool = False
    _mixed: bool = False
    _plans: dict[tuple[frozenset[str], Keys], _Plan] = field(default_factory=dict)

    @property
    def learned(self) -> bool:
        """Return whether a reply with choices was seen."""
        return any(len(role) == 2 for role, _ in self._values)  # a choice's; a reply's has three sets

    @property
    def usable(self) -> bool:
        """Return whether plain replies are alike enough to make others look like them."""
        return not self._mixed and not self._empty_events

    def learn(self, text: str, streamed: bool) -> None:
        """Look at a plain reply, or at an event of one.

        Raises:
            ValueError: it is not a JSON object.
        """
        found = _objects(_decoded(text))
        self._empty_events |= streamed and _says_nothing(found, silent=False)
        self._plans.clear()  # they hold guesses, which this reply may settle
        for role, fields in found:
            for key in BROUGHT:
                value = _kind(fields[key]) if key in fields else _ABSENT
                before = self._values.setdefault((role, key), value)
                if before != value:
                    # A key that comes and goes: to leave it in or out would be a guess, and the client might notice.
                    self._mixed |= _ABSENT in (before, value)
                    self._values[role, key] = _OWN if _OWN in (before, value) else before

    def plain(self, text: str, keys: frozenset[str], streamed: bool) -> Plain:
        """A reply, or an event of one, with `keys` as plain replies have them.

        Raises:
            ValueError: it is not a JSON object.
        """
        reply = _decoded(text)
        shape = (keys, _keys(reply))
        plan = self._plans.get(shape)
        if plan is None:
            plan = self._plan(_objects(reply), reply, keys)
            if len(self._plans) < _MOST_PLANS:  # the keys are the server's: it could name others in each reply
                self._plans[shape] = plan
        # A server that is silent without tokens to report would not have sent this event; where the client itself asked
        # for one of the two, it would.
        silent = self.silent and keys >= _CARRY_TOKENS
        if streamed and _may_say_nothing(reply) and _says_nothing(_objects(reply), silent):
            return Plain(None, unknown=False)
        # A search for the keys is quick, but finds no first member, and cannot tell in which object it is. Where it
        # does not find just the members of the plan, such a key stands elsewhere too, and cutting it would spoil that.
        edits = None if plan.firsts else _quick_edits(text, keys, plan.steps)
        if edits is None:
            edits = _careful_edits(text, keys, plan.steps)
        return Plain(edited(text, edits), plan.unknown)

    def _plan(self, found: list[_Object], reply: Mapping[str, Any], keys: frozenset[str]) -> _Plan:
        steps: list[_Step] = []
        guesses: list[bool] = []
        top, *choices = found

        def look(one: _Object, key: str) -> None:
            value, guessed = self._value(one.role, key)
            steps.append(_Step(key, None if value == _OWN else value))
            guesses.append(guessed)

        for key in reply:
            if key in keys:
                look(top, key)
            elif key == "choices":
                for choice in choices:
                    for name in choice.fields:
                        if name in keys:
                            look(choice, name)
        firsts = any(next(iter(fields), None) in keys for _, fields in found)
        return _Plan(tuple(steps), any(guesses), firsts)

    def _value(self, role: Role, key: str) -> tuple[str, bool]:
        """Return what a plain reply has there, and whether that is a guess from the object most like it."""
        known = self._values.get((role, key))
        if known is not None:
            return known, False
        alike = [(_unlike(role, other), value) for (other, of), value in self._values.items() if of == key]
        near = [pair for pair in alike if pair[0] < _UNRELATED]
        return (min(near)[1] if near else _ABSENT), True


def _decoded(text: str) -> dict[str, Any]:
    reply = json.loads(text)
    if not isinstance(reply, dict):
        raise ValueError("The reply is not a JSON object.")
    return reply


def _kind(value: Any) -> str:
    """A value that says nothing as JSON, and one word for all others."""
    # Only null, [] and {} can be written into another reply; any other value belongs to its own.
    return json.dumps(value) if value is None or value in ([], {}) else _OWN


def _choices(reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = reply.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _message(choice: Mapping[str, Any]) -> dict[str, Any]:
    for name in _MESSAGES:
        if isinstance(message := choice.get(name), dict):
            return message
    return {}


def _keys(reply: Mapping[str, Any]) -> Keys:
    keys = [tuple(reply)]
    for choice in _choices(reply):
        keys += [tuple(choice), tuple(_message(choice))]
    return tuple(keys)


def _objects(reply: Mapping[str, Any]) -> list[_Object]:
    """The reply itself, and its choices."""
    found = _choices(reply)
    # Keys that may be asked for are no part of a role: it is to be the same with and without them.
    choices = [_Object((frozenset(one) - BROUGHT, frozenset(_message(one))), one) for one in found]
    first = choices[0].role[1] if choices else frozenset[str]()
    # The third set keeps this role apart from a choice's, and events with choices apart from those without.
    role = (frozenset(reply) - BROUGHT, first, frozenset({"choices"} if choices else ()))
    return [_Object(role, reply), *choices]


def _unlike(one: Role, other: Role) -> int:
    if len(one) != len(other):
        return _UNRELATED
    return sum(len(mine ^ yours) for mine, yours in zip(one, other, strict=True))


def _may_say_nothing(reply: Mapping[str, Any]) -> bool:
    return any(choice.get("delta") in _NO_DELTAS or choice.get("text") == "" for choice in _choices(reply))


def _says_nothing(found: list[_Object], silent: bool) -> bool:
    """Return whether it is an event that some servers send only to carry token ids: nothing is added, and nothing
    ends."""
    choices = [fields for _, fields in found[1:]]
    return bool(choices) and all(_is_empty(fields, silent) for fields in choices)


def _is_empty(choice: Mapping[str, Any], silent: bool) -> bool:
    if not choice.keys() <= _NOTHING_NEW or choice.get("finish_reason") is not None:
        return False
    if silent:
        return choice.get("text", "") == "" and choice.get("delta", {}) in _NO_DELTAS
    return choice.get("delta") == {}


@cache
def _pattern(keys: frozenset[str]) -> re.Pattern[str]:
    """A member that is not its object's first; it cannot match within a string, where quotes are escaped."""
    return re.compile(rf'\s*,\s*"({"|".join(sorted(keys))})"\s*:\s*')


def _quick_edits(text: str, keys: frozenset[str], steps: tuple[_Step, ...]) -> list[Edit] | None:
    """Find the members by their keys alone; None where such keys are in other places too."""
    search = _pattern(keys).search
    edits: list[Edit] = []
    at = 0
    for step in steps:
        found = search(text, at)
        if found is None or found[1] != step.key:
            return None
        _, at = _value_end(text, found.end())  # past the value: what it holds may have keys of the same names
        if step.value is not None:
            edits.append(Edit(found.end() if step.value else found.start(), at, step.value))
    return edits if search(text, at) is None else None


def _careful_edits(text: str, keys: frozenset[str], steps: tuple[_Step, ...]) -> list[Edit]:
    """Find the members by walking through the text."""
    of_each = iter(steps)
    edits: list[Edit] = []

    def walk(at: int, *, top: bool) -> None:
        inside, gone = members(text, at), set()
        for member in inside:
            if member.key in keys:
                step = next(of_each, None)
                if step is None:
                    raise ValueError(f"{member.key} is in the reply more than once.")
                if step.value == _ABSENT:
                    gone.add(member.key)
                elif step.value is not None:
                    edits.append(Edit(member.value, member.end, step.value))
            elif top and member.key == "choices":
                for start in items(text, member.value):
                    if text[start] == "{":
                        walk(start, top=False)
        edits.extend(cuts(inside, gone) if gone else ())

    walk(past_blanks(text, 0), top=True)
    return edits
