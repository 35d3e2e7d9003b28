"""JSON schemas that the grammar holds exactly, in the form that it takes.

llguidance compiles a schema, and its documentation lists where it departs from the standard. What it would hold only
roughly is refused here by its path: keywords that it does not know, numbers that its floats change, and counts of keys
that a repeated key would meet. What it takes another way is rewritten: patterns are ECMA-262's, formats that nobody
defines are annotations, and names of keys become the properties or the pattern that they are.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import unquote

from serve_app.text.as_written import RepeatedKey, WrittenNumber, clean_key, load_json
from serve_app.text.patterns import PatternRefused, from_ecma

MAX_FORM_BYTES = 1 << 16  # of a form's text
SPELT_BY_OPTION = tuple(map(int, version("llguidance").split(".")[:2])) >= (1, 8)
"""True if the library has the option that keeps keys from being spelt by their characters' numbers; vLLM 0.32 wants an
older one."""

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Formats that are enforced."""
_OTHER_FORMATS = frozenset(  # of JSON Schema's, which nothing here can enforce
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)

# Keywords that the grammar cannot hold, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "if": (),
    "contains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
_OF_OTHERS = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}  # nothing without them
_ONE, _LIST, _MAP = (
    ("items", "additionalItems", "additionalProperties"),
    ("allOf", "anyOf", "oneOf", "prefixItems", "items"),
    ("properties", "patternProperties"),
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAX_EXACT = 2**53 - 1
_ANNOTATIONS = ("title", "description", "default", "examples", "deprecated", "$comment", "$defs", "definitions")
_MAX_LENGTH = 1000  # of a key's name, as a pattern counts it
_LENIENT = ("lenient", "coerce_one_of")
_ANY_KEY = r"^[^\\]*$"  # of the characters themselves: what the library escapes, such as quotes, it still escapes
_UNNAMED_CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")


class SchemaRefused(ValueError):
    """A schema cannot be held. The message begins with the path of the keyword in it."""


def held(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema in the form that the grammar takes.

    Args:
        schema: as `load_json` reads it, so that its numbers have their own text.

    Raises:
        SchemaRefused: it says what the grammar cannot hold.
    """
    options = schema.get("x-guidance")
    for name in _LENIENT if isinstance(options, Mapping) else ():
        if options.get(name):  # type: ignore[union-attr]
            raise SchemaRefused(f"x-guidance.{name}: every keyword of a schema is enforced; leave it out.")
    rewriting = _Rewriting(schema)
    return rewriting.run()


def held_text(text: str) -> str:
    """The same of a schema's text; what is not a JSON object, or nested too deeply, is left to the compiler to refuse.

    Raises:
        SchemaRefused: it says what the grammar cannot hold.
    """
    try:
        schema = load_json(text)
        return json.dumps(held(schema)) if isinstance(schema, dict) else text
    except SchemaRefused:
        raise
    except RepeatedKey as error:
        raise SchemaRefused(f"{error}.") from error
    except (ValueError, RecursionError):
        return text


def held_grammar(grammar: str, options: Mapping[str, Any]) -> str:
    """A grammar whose JSON schemas (`%json {…}`) have the form that it takes, with further options of theirs.

    Raises:
        SchemaRefused: one of them says what the grammar cannot hold.
    """
    pieces, done = [], 0
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        if found.start() < done:
            continue
        try:
            _, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError):  # the compiler says what is wrong with it
            continue
        schema = json.loads(held_text(grammar[found.end() : end]))
        given = schema.get("x-guidance")
        schema["x-guidance"] = {**options, **(given if isinstance(given, dict) else {})}
        pieces += [grammar[done : found.end()], json.dumps(schema)]
        done = end
    return "".join((*pieces, grammar[done:]))


class _Rewriting:
    """One schema while it is read; what no reference leads to is left as it is."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root: dict[str, Any] = _copied(root)
        self._waiting: list[tuple[str, Any]] = [("", self._root)]
        self._read_from: dict[int, tuple[str, dict[str, Any]]] = {}
        self._same_value: dict[int, int] = {}  # of schemas that one value must keep to: another of them

    def run(self) -> dict[str, Any]:
        while self._waiting:
            path, schema = self._waiting.pop()
            if isinstance(schema, dict) and id(schema) not in self._read_from:
                self._read_from[id(schema)] = path, schema
                self._read(path, schema)
        together: dict[int, list[tuple[str, dict[str, Any]]]] = {}
        for place, read in self._read_from.items():
            together.setdefault(self._first_of(place), []).append(read)
        for schemas in together.values():
            _check_open_ends(schemas)
        return self._root

    def _first_of(self, place: int) -> int:
        while place in self._same_value:
            place = self._same_value[place]
        return place

    def _join(self, one: Any, other: Any) -> None:
        first, second = self._first_of(id(one)), self._first_of(id(other))
        if first != second:
            self._same_value[second] = first

    def _read(self, path: str, schema: dict[str, Any]) -> None:
        at = f"{path}." if path else ""
        self._place_names(schema)
        self._drop_or_refuse(at, schema)
        self._check_numbers(at, schema)
        _check_keys(at, schema)
        _check_strings(at, schema)
        for keyword in _COUNTS:
            if isinstance(schema.get(keyword), float) and schema[keyword] == int(schema[keyword]):
                schema[keyword] = int(schema[keyword])
        if isinstance(schema.get("format"), str):
            self._read_format(at, schema)
        if isinstance(schema.get("pattern"), str):
            schema["pattern"] = _pattern(f"{at}pattern", schema["pattern"])
        if isinstance(schema.get("patternProperties"), dict):
            known = schema["patternProperties"].items()
            schema["patternProperties"] = {_pattern(f"{at}patternProperties", key): one for key, one in known}
        if not SPELT_BY_OPTION:
            _name_other_keys(schema)
        self._waiting += _inside(at, schema)
        for keyword in ("allOf", "anyOf", "oneOf"):
            for one in schema[keyword] if isinstance(schema.get(keyword), list) else ():
                self._join(schema, one)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            found = self._find(reference)
            self._join(schema, found)
            self._waiting.append((reference[2:].replace("/", "."), found))

    def _place_names(self, schema: dict[str, Any]) -> None:
        """Put names of keys that are listed, or have a pattern or a length, into the keywords for such keys.

        Maps of Pydantic and Zod have them. Other names stay, to be refused.
        """
        names, seen = schema.get("propertyNames"), set[int]()
        while isinstance(names, dict) and str(names.get("$ref")).startswith("#/"):
            if id(names) in seen or names.keys() - {"$ref", *_ANNOTATIONS}:
                return
            seen.add(id(names))
            names = self._find(names["$ref"])
        if not isinstance(names, dict):
            return
        said = {key: one for key, one in names.items() if key not in _ANNOTATIONS}
        if said.get("type") == "string":
            del said["type"]
        if not said:
            del schema["propertyNames"]
            return
        if schema.get("properties") or schema.get("patternProperties"):
            return
        value = schema.get("additionalProperties", True)
        texts, pattern = _listed_names(said), _pattern_of_names(said)
        if texts is not None:
            schema["properties"] = dict.fromkeys(texts, value)
        elif pattern is not None:
            schema["patternProperties"] = {pattern: value}
        else:
            return
        schema["additionalProperties"] = False
        del schema["propertyNames"]

    def _drop_or_refuse(self, at: str, schema: dict[str, Any]) -> None:
        for keyword, harmless in _REFUSED.items():
            if keyword not in schema:
                continue
            if not any(type(schema[keyword]) is type(one) and schema[keyword] == one for one in harmless):
                raise SchemaRefused(f"{at}{keyword} cannot be enforced while the answer is generated; leave it out.")
            del schema[keyword]
        for keyword, other in _OF_OTHERS.items():
            if other not in schema:
                schema.pop(keyword, None)

    def _check_numbers(self, at: str, schema: Mapping[str, Any]) -> None:
        for keyword in _BOUNDS:
            number = schema.get(keyword)
            changed = isinstance(number, WrittenNumber) and not number.is_float
            if changed or (isinstance(number, int | float) and abs(number) > _MAX_EXACT):
                _refuse_number(f"{at}{keyword}", number)
        for keyword in ("const", "enum"):
            for path, number in _numbers_in(schema.get(keyword), f"{at}{keyword}"):
                if (isinstance(number, WrittenNumber) and not number.is_float) or not _is_exact(number):
                    _refuse_number(path, number)

    def _read_format(self, at: str, schema: dict[str, Any]) -> None:
        kind = schema["format"]
        if kind in _OTHER_FORMATS:
            known = ", ".join(sorted(FORMATS))
            raise SchemaRefused(f"{at}format: {kind} cannot be enforced; {known} can. Leave it out, or give a pattern.")
        if kind not in FORMATS:
            del schema["format"]

    def _find(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference[2:].split("/"):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
            else:
                found = found.get(key) if isinstance(found, dict) else None
        return found


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _inside(at: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas of which a schema is made, with their paths."""
    for keyword in _ONE:
        yield f"{at}{keyword}", schema.get(keyword)
    for keyword in _LIST:
        value = schema.get(keyword)
        yield from ((f"{at}{keyword}.{n}", one) for n, one in enumerate(value if isinstance(value, list) else ()))
    for keyword in _MAP:
        value = schema.get(keyword)
        known = value.items() if isinstance(value, dict) else ()
        yield from ((f"{at}{keyword}.{clean_key(name)}", one) for name, one in known)


def _listed_names(said: Mapping[str, Any]) -> list[str] | None:
    """The names that a schema lists; None if it says something else."""
    texts = [said["const"]] if said.keys() == {"const"} else said["enum"] if said.keys() == {"enum"} else None
    if not isinstance(texts, list):
        return None
    return list(dict.fromkeys(text for text in texts if isinstance(text, str)))


def _pattern_of_names(said: Mapping[str, Any]) -> str | None:
    """The pattern of names that have one, or a length; None if they have something else."""
    if said.keys() == {"pattern"} and isinstance(said["pattern"], str):
        return str(said["pattern"])
    least, most = said.get("minLength", 0), said.get("maxLength", "")
    counts = [count for count in (least, most) if count != ""]
    if said.keys() <= {"minLength", "maxLength"} and all(
        type(one) is int and 0 <= one <= _MAX_LENGTH for one in counts
    ):
        return f"^[^]{{{least},{most}}}$"
    return None


def _check_keys(at: str, schema: Mapping[str, Any]) -> None:
    """Refuse a least number of keys that one key, written several times, would meet."""
    least, required = schema.get("minProperties"), schema.get("required")
    if not isinstance(least, int | float):
        return
    counted = len(set(required)) if isinstance(required, list) and all(isinstance(r, str) for r in required) else 0
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if least > counted + 1 and not closed:
        raise SchemaRefused(
            f"{at}minProperties: {least} cannot be enforced, as the same key might be written several times; at most "
            f"{counted + 1} can be, one more than are required. Name the keys in required."
        )


def _name_other_keys(schema: dict[str, Any]) -> None:
    """Let keys that are not named be what a pattern says, which numbers do not fit: "\\u0078" would be a second "x".

    With a schema of their own they stay as they are, since it would count for the named ones, too."""
    open_to_any = schema.get("additionalProperties", True) in (True, {}) and not schema.get("patternProperties")
    if schema.get("properties") and open_to_any:
        schema |= {"patternProperties": {_ANY_KEY: True}, "additionalProperties": False}


def _check_open_ends(schemas: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Refuse a whole number that is excluded as a bound while the other bound is less than 1 away.

    llguidance's numbers between them include it.
    """

    def bounds(*keywords: str) -> list[tuple[str, float]]:
        found = [(f"{at}.{key}" if at else key, one[key]) for at, one in schemas for key in keywords if key in one]
        return [(path, number) for path, number in found if type(number) in (int, float, WrittenNumber)]

    excluded = [(name, 1) for name in bounds("exclusiveMinimum")] + [(name, -1) for name in bounds("exclusiveMaximum")]
    for (path, number), side in excluded:
        others = bounds("maximum", "exclusiveMaximum") if side > 0 else bounds("minimum", "exclusiveMinimum")
        near = any(0 < (other - number) * side < 1 for _, other in others)
        if near and number == int(number) and any(one.get("type") != "integer" for _, one in schemas):
            raise SchemaRefused(
                f"{path}: {number} cannot be excluded beside a bound that is less than 1 away; give the least "
                "number as minimum, or the greatest as maximum."
            )


def _check_strings(at: str, schema: Mapping[str, Any]) -> None:
    for keyword in ("const", "enum"):
        text = json.dumps(schema.get(keyword), ensure_ascii=False)
        if re.search(r"\\u00[01]", text) and any(map(_UNNAMED_CONTROLS.search, _strings_in(schema.get(keyword)))):
            raise SchemaRefused(f"{at}{keyword} holds a control character, which no answer may hold; leave it out.")


def _strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    items = value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else ()
    for item in items:
        yield from _strings_in(item)


def _numbers_in(value: Any, path: str) -> Iterator[tuple[str, int | float]]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _numbers_in(item, f"{path}.{clean_key(str(key))}")


def _is_exact(number: int | float) -> bool:
    return abs(number) < 2**63 and (isinstance(number, float) or int(float(number)) == number)


def _refuse_number(path: str, number: Any) -> None:
    shown = number.written if isinstance(number, WrittenNumber) else str(number)
    raise SchemaRefused(
        f"{path}: {shown[:40]} is not a number that the grammar keeps exactly; use up to 15 digits, or a string with a "
        "pattern."
    )


def _pattern(path: str, pattern: str) -> str:
    try:
        return from_ecma(pattern)
    except PatternRefused as error:
        raise SchemaRefused(f"{path}: {pattern[:60]!r} cannot be enforced: {error}.") from error
