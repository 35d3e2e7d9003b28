r"""Regular expressions of JSON Schema and of requests, in the dialect of the grammar: that of Rust's regex crate.

JSON Schema's patterns are ECMA-262's: `\d` and `\w` are ASCII, `\s` and `.` have their own sets, `[a&&b]` holds an
ampersand. What the two dialects say differently is translated; what Rust's has not (look-around, references to groups)
and what is no expression of ECMA-262 is refused. Of what only some take, what means the same to all of these is taken:
brackets and braces that open nothing, `\_`, `(?P<name>…)`.
"""

import re

_SPACES = r"\t\n\v\f\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_ASCII_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\v\f\r "}
_CONTROLS = {"n": r"\n", "r": r"\r", "t": r"\t", "f": r"\f", "v": r"\v"}
_SPECIAL = frozenset("\\.+*?()|[]{}^$#&-~")
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_NUMBERED = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\u\{([0-9a-fA-F]{1,6})\}")
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_]\w*>)")  # with P as Python and Rust name groups


class PatternRefused(ValueError):
    """The expression cannot be enforced; the message says why."""


def from_ecma(pattern: str) -> str:
    """A pattern of JSON Schema in the grammar's dialect.

    Raises:
        PatternRefused: it has no equal there.
    """
    return _Translation(pattern).run()


def with_ascii_classes(expression: str) -> str:
    r"""An expression in the grammar's own dialect, in which `\d`, `\w` and `\s` mean ASCII, as in vLLM's default.

    Other classes have names there: `\p{Nd}`, `[[:alpha:]]`.
    """
    found: list[str] = []
    inside, place = False, 0
    while place < len(expression):
        character = expression[place]
        if character == "\\" and place + 1 < len(expression):
            found.append(_ascii_class(expression[place + 1], inside))
            place += 2
            continue
        inside = character == "[" or (inside and character != "]")
        found.append(character)
        place += 1
    return "".join(found)


def _ascii_class(letter: str, inside: bool) -> str:
    members = _ASCII_CLASSES.get(letter.lower())
    if members is None:
        return f"\\{letter}"
    if letter.isupper():
        return f"[^{members}]"
    return members if inside else f"[{members}]"


class _Translation:
    """Reads one pattern from its beginning to its end."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._place = 0
        self._found: list[str] = []

    def run(self) -> str:
        """The translated pattern."""
        while self._place < len(self._text):
            self._found.append(self._next())
        return "".join(self._found)

    def _next(self) -> str:
        text, place = self._text, self._place
        character = text[place]
        if character == "\\":
            return self._escape(inside=False)
        if character == "[":
            return self._set()
        if character == "(":
            return self._group()
        quantifier = _QUANTIFIER.match(text, place)
        if quantifier is not None:
            return self._quantifier(quantifier[0])
        self._place += 1
        if character == ".":
            return r"[^\n\r\u{2028}\u{2029}]"
        if character == "{" and text[place + 1 : place + 2] in (*"0123456789,",):
            raise PatternRefused(f"the {character} at {place} is not escaped")
        return f"\\{character}" if character in "#&-~{}]" else character

    def _quantifier(self, quantifier: str) -> str:
        self._place += len(quantifier)
        if self._text.startswith("?", self._place):
            self._place += 1  # which match is found first makes no difference to what matches
        if _QUANTIFIER.match(self._text, self._place):
            raise PatternRefused(f"a quantifier follows another at {self._place}")
        return quantifier

    def _group(self) -> str:
        if not self._text.startswith("(?", self._place):
            self._place += 1
            return "("
        known = _GROUP.match(self._text, self._place)
        if known is None:
            kind = self._text[self._place : self._place + 4]
            raise PatternRefused(f"{kind} at {self._place} is a look-around or a flag, which the grammar cannot hold")
        self._place = known.end()
        return "(?:"

    def _escape(self, *, inside: bool) -> str:
        text, place = self._text, self._place
        letter = text[place + 1 : place + 2]
        self._place += 2
        if letter.lower() in _CLASSES and letter:
            members = _CLASSES[letter.lower()]
            return f"[^{members}]" if letter.isupper() else members if inside else f"[{members}]"
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter == "0" and not text[place + 2 : place + 3].isdigit():
            return r"\x00"
        if letter == "b" and inside:
            return r"\x08"
        if letter in ("x", "u", "c"):
            return self._numbered(place)
        if letter in ("p", "P"):
            return self._property(place)
        if letter and not letter.isalnum():
            return f"\\{letter}" if letter in _SPECIAL else letter
        what = f"\\{letter} at {place}"
        if letter.isdigit() or letter == "k":
            raise PatternRefused(f"{what} refers to a group, which the grammar cannot hold")
        if letter in ("b", "B"):
            raise PatternRefused(f"{what} looks around, which the grammar cannot hold")
        raise PatternRefused(f"{what} is not an escape of ECMA-262")

    def _numbered(self, place: int) -> str:
        """A character by its number, or by a letter if it is a control character; two surrogates are one character."""
        control = re.compile(r"\\c([A-Za-z])").match(self._text, place)
        if control is not None:
            self._place = control.end()
            return f"\\x{ord(control[1]) % 32:02x}"
        code = _NUMBERED.match(self._text, place)
        if code is None:
            raise PatternRefused(f"{self._text[place : place + 2]} at {place} lacks its digits")
        self._place = code.end()
        number = int(code[1] or code[2] or code[3], 16)
        low = _LOW_HALF.match(self._text, self._place)
        if 0xD800 <= number < 0xDC00 and low is not None:
            self._place = low.end()
            number = 0x10000 + ((number - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
            raise PatternRefused(f"{code[0]} at {place} is not a character")
        return f"\\u{{{number:x}}}"

    def _property(self, place: int) -> str:
        named = re.compile(r"\\[pP]\{[\w=]+\}").match(self._text, place)
        if named is None:
            raise PatternRefused(f"{self._text[place : place + 2]} at {place} lacks the name of its property")
        self._place = named.end()
        return named[0]

    def _set(self) -> str:
        begin = self._place
        negated = self._text.startswith("[^", begin)
        self._place += 2 if negated else 1
        members: list[str] = []
        while not self._text.startswith("]", self._place):
            if self._place >= len(self._text):
                raise PatternRefused(f"the [ at {begin} is not closed")
            members.append(self._member())
        self._place += 1
        if not members:
            if negated:
                return r"[\s\S]"
            raise PatternRefused(f"the [] at {begin} matches nothing")
        return f"[{'^' if negated else ''}{''.join(members)}]"

    def _member(self) -> str:
        """A member of a set: a character, a range, or a class."""
        first = self._one()
        if not (self._text.startswith("-", self._place) and not self._text.startswith("-]", self._place)):
            return first
        self._place += 1
        last = self._one()
        of_characters = _is_character(first) and _is_character(last)
        return f"{first}-{last}" if of_characters else f"{first}\\-{last}"  # beside a class, - stands for itself

    def _one(self) -> str:
        character = self._text[self._place : self._place + 1]
        if character == "\\":
            return self._escape(inside=True)
        self._place += 1
        return f"\\{character}" if character in _SPECIAL else character


def _is_character(member: str) -> bool:
    """Return whether a translated member of a set is one character."""
    return re.fullmatch(r"[^\\\[]|\\[^pPu]|\\x..|\\u\{\w+\}", member, re.DOTALL) is not None
