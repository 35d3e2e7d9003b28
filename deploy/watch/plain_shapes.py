"""What replies look like where nothing was added to the request, and how a reply is made to look like that again."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from deploy.watch.asking import BROUGHT
from deploy.watch.json_spans import Edit, Member, cuts, edited, items, members, past_blanks

_ABSENT = ""
_OWN = "own"  # the server reports it unasked: it stays
_EMPTY_VALUES = ("null", "[]", "{}")
_MESSAGES = ("delta", "message")
# What an event may hold that has nothing for its reader.
_NOTHING_NEW = frozenset({"index", "delta", "finish_reason"}) | BROUGHT

Role = tuple[frozenset[str], ...]
"""Which object it is: the keys that it has beside those that were asked for, and those of its message."""


class _Object(NamedTuple):
    role: Role
    found: list[Member]


@dataclass(frozen=True, slots=True)
class Plain:
    """A reply or event as the client is to get it; None = it would not have come. unknown: no such shape was seen."""

    text: str | None
    unknown: bool


@dataclass
class PlainShape:
    """The shape of the replies to requests of one form, learned from those to which nothing was added."""

    _values: dict[tuple[Role, str], str] = field(default_factory=dict)
    _empty_events: bool = False
    _mixed: bool = False

    @property
    def learned(self) -> bool:
        """Whether a reply with choices was seen."""
        return any(len(role) > 1 for role, _ in self._values)

    @property
    def usable(self) -> bool:
        """Whether plain replies are alike enough to make others look like them."""
        return not self._mixed and not self._empty_events

    def learn(self, text: str, streamed: bool) -> None:
        """Look at a plain reply, or at an event of one.

        Raises:
            ValueError: it is no JSON object.
        """
        found = _objects(text)
        self._empty_events |= streamed and _says_nothing(text, found)
        for role, inside in found:
            values = {member.key: text[member.value : member.end] for member in inside}
            for key in BROUGHT:
                value = values.get(key, _ABSENT)
                self._note((role, key), value if value in (_ABSENT, *_EMPTY_VALUES) else _OWN)

    def _note(self, place: tuple[Role, str], value: str) -> None:
        before = self._values.setdefault(place, value)
        if before != value:
            self._mixed |= _ABSENT in (before, value)
            self._values[place] = _OWN if _OWN in (before, value) else before

    def _value(self, role: Role, key: str) -> tuple[str, bool]:
        """What a plain reply has there, and whether that is a guess from the object most like it."""
        known = self._values.get((role, key))
        if known is not None:
            return known, False
        alike = [(_unlike(role, other), value) for (other, of), value in self._values.items() if of == key]
        near = [pair for pair in alike if pair[0] < _UNRELATED]
        return (min(near)[1] if near else _ABSENT), True

    def plain(self, text: str, keys: frozenset[str], streamed: bool) -> Plain:
        """A reply, or an event of one, with `keys` as plain replies have them.

        Raises:
            ValueError: it is no JSON object.
        """
        found = _objects(text)
        if streamed and _says_nothing(text, found):
            return Plain(None, unknown=False)
        edits: list[Edit] = []
        unknown = False
        for role, inside in found:
            gone = set()
            for member in inside:
                if member.key not in keys:
                    continue
                value, guessed = self._value(role, member.key)
                unknown |= guessed
                if value == _ABSENT:
                    gone.add(member.key)
                elif value != _OWN:
                    edits.append(Edit(member.value, member.end, value))
            edits += cuts(inside, gone) if gone else []
        return Plain(edited(text, edits), unknown)


_UNRELATED = 1_000_000


def _unlike(one: Role, other: Role) -> int:
    if len(one) != len(other):
        return _UNRELATED
    return sum(len(mine ^ yours) for mine, yours in zip(one, other, strict=True))


def _objects(text: str) -> list[_Object]:
    """The reply itself, and its choices."""
    top = members(text, past_blanks(text, 0))
    choices = [choice for member in top if member.key == "choices" for choice in _choices(text, member.value)]
    first = choices[0].role if choices else (frozenset(), frozenset())
    keys = frozenset(member.key for member in top) - BROUGHT
    # A frozenset of one keeps this role apart from a choice's, and tells events with choices from those without.
    return [_Object((keys, first[1], frozenset({"choices"} if choices else ()), frozenset()), top), *choices]


def _choices(text: str, at: int) -> Iterator[_Object]:
    for start in items(text, at):
        if text[start] != "{":
            continue
        inside = members(text, start)
        message = frozenset(
            f"{member.key}.{part.key}"
            for member in inside
            if member.key in _MESSAGES and text[member.value] == "{"
            for part in members(text, member.value)
        )
        yield _Object((frozenset(member.key for member in inside) - BROUGHT, message), inside)


def _says_nothing(text: str, found: list[_Object]) -> bool:
    """Whether it is an event that some servers send only to carry token ids: its deltas are empty, and nothing ends."""
    choices = found[1:]
    for _, inside in choices:
        values = {member.key: text[member.value : member.end] for member in inside}
        if not values.keys() <= _NOTHING_NEW or values.get("finish_reason", "null") != "null":
            return False
        if "".join(values.get("delta", "x").split()) != "{}":
            return False
    return bool(choices)
