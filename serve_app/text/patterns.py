r"""Regular expressions in the dialect of the grammar: that of Rust's regex crate.

Patterns of JSON Schema are ECMA-262's: there `\d` and `\w` are ASCII, and `\s` and `.` have their own sets. What is
listed here means the same in both dialects, or is replaced by what does; everything else is refused.
"""

import re

_SPACES = r"\t\n\v\f\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_ECMA = _ASCII | {r"\s": f"[{_SPACES}]", r"\S": f"[^{_SPACES}]"}
_RUST = _ASCII | {r"\s": r"[\t\n\v\f\r ]", r"\S": r"[^\t\n\v\f\r ]"}
_ESCAPE = r"""\\(?:[dDwWsSnrtfv]|[^\w\s<>]|_|\ |x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,6}\}|[pP]\{[\w=]+\})"""
_KEPT = re.compile(
    rf"""
    {_ESCAPE}                                              # a class, or a character by letter, sign or number
  | \[ (?!\^?\]) \^? (?: (?!&&|--|~~) (?:{_ESCAPE}|[^\\\[\]]) )+ \]  # a set, without Rust's operations on sets
  | \((?!\?) | \(\?: | \(\?P?<[A-Za-z_]\w*>                # groups
  | (?:[*+?]|\{{\d+(?:,\d*)?\}}) \?? (?![*+?{{])           # one quantifier
  | [^\\\[({{*+?]                                          # a character, an anchor, or the end of a group
    """,
    re.VERBOSE | re.DOTALL,
)


class PatternRefused(ValueError):
    """The expression cannot be enforced; the message says what in it."""


def from_ecma(pattern: str) -> str:
    """A pattern of JSON Schema in the grammar's dialect. Raises PatternRefused: it holds what does not mean the same
    there, such as a look-around."""
    found: list[str] = []
    place = 0
    while place < len(pattern):
        kept = _KEPT.match(pattern, place)
        if kept is None:
            raise PatternRefused(f"{pattern[place : place + 4]!r} at {place} is not supported")
        found.append(r"[^\n\r\u{2028}\u{2029}]" if kept[0] == "." else _replaced(kept[0], _ECMA))
        place = kept.end()
    return "".join(found)


_ITEM = rf"(?:{_ESCAPE}|\[\^?(?:{_ESCAPE}|[^\\\[\]^])+\]|[^\\\[\](){{}}*+?.|^$])"  # one character
_LOOKAHEAD = re.compile(
    rf"""
    \(\?(?: = (?P<must> (?:{_ITEM}|[.*+?|]|\{{[\d,]+\}})+ \$? )
      | ! (?: (?P<words> {_ITEM}+\$? (?:\|{_ITEM}+\$?)* ) | (?P<all>{_ITEM})(?P<some>[*+])\$
        | \.\*(?P<once>{_ITEM})(?P<twice>(?P=once)|\{{2\}})? ) )\)
    """,
    re.VERBOSE,
)
_LINE_ENDS = r"\n\r\u{2028}\u{2029}"


def split_lookaheads(pattern: str) -> tuple[list[str], str]:
    """Look-aheads at the beginning of a pattern of JSON Schema as patterns without any, and the rest of it.

    A text has to match them all. What must come is any simple expression. What must not come is a word, a text of
    nothing but one character, or one or two of it in the line, as in zod's addresses. Others are left in the rest.
    """
    rest, found = pattern.removeprefix("^"), list[str]()
    bare = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "", rest)
    while bare != (bare := re.sub(r"\([^()]*\)", "", bare)):
        pass
    while rest != pattern and "|" not in bare and (ahead := _LOOKAHEAD.match(rest)):
        without = [f"^(?:{ahead['must']})"] if ahead["must"] else _without(ahead)
        if not without:
            break
        found += without
        rest = rest[ahead.end() :]
    return found, f"^{rest}" if found else pattern


def _without(ahead: re.Match[str]) -> list[str]:
    """Patterns of the texts that a negative look-ahead lets through; none = there are none that are simple."""
    if ahead["words"]:
        return [_other_than(word) for word in re.split(r"(?<!\\)\|(?![^\[]*\])", ahead["words"])]
    if ahead["all"]:
        return [("^$|" if ahead["some"] == "+" else "") + _other(ahead["all"])]
    one = ahead["once"]
    if one.startswith("[^") or re.search(r"\\[sSWDnrupP]", one):  # which may be an end of the line, that `.` is not
        return []
    other = _other(one, _LINE_ENDS)
    line = f"(?:{other}|{one}{other})*{one}?" if ahead["twice"] else f"{other}*"
    return [f"^{line}(?:$|[{_LINE_ENDS}])"]


def _other_than(word: str) -> str:
    """A pattern of the texts that do not begin with a word, or are another where it ends with `$`."""
    rest = r"[\s\S]" if word.endswith("$") else ""
    for one in reversed(re.findall(_ITEM, word)):
        rest = f"(?:$|{_other(one)}{f'|{one}{rest}' if rest else ''})"
    return f"^{rest}"


def _other(one: str, others: str = "") -> str:
    """A set of the characters other than one, or those of a set, and than others."""
    inner = re.sub(r"^\[\^?|\]$", "", one)
    return f"[{inner}]" if one.startswith("[^") else f"[^{inner}{others}]"


def with_ascii_classes(expression: str) -> str:
    r"""An expression of the grammar's own dialect, in which `\d`, `\w` and `\s` mean ASCII, as in vLLM's default.

    Other classes have names there: `\p{Nd}`, `[[:alpha:]]`.
    """
    return _replaced(expression, _RUST)


def _replaced(expression: str, classes: dict[str, str]) -> str:
    return re.sub(r"\\.", lambda found: classes.get(found[0], found[0]), expression, flags=re.DOTALL)
