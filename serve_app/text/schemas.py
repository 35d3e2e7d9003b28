"""JSON schemas: the keywords that llguidance keeps exactly. All others are refused, by their path in the schema."""

import json
from importlib.metadata import version
from typing import Any

from serve_app.text.json_text import clean_key
from serve_app.text.patterns import PatternRefused, from_ecma, split_lookaheads
from serve_app.text.schema_types import have_distinct_constants, value_types

MAX_FORM_BYTES = 1 << 16  # of a form's text
OPTIONS_BEGIN = '%json {"x-guidance": {'  # of a schema in a grammar that is made here
SPELT_BY_OPTION = tuple(map(int, version("llguidance").split(".")[:2])) >= (1, 8)
"""True if the library has the option that keeps keys from being spelt by their characters' numbers; vLLM 0.32 wants an
older one."""

FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
"""Formats that are enforced."""
_OTHER_FORMATS = frozenset(  # of JSON Schema's; those that it does not define say nothing
    (
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
_OPEN_ENDS = (("exclusiveMinimum", "maximum", 1), ("exclusiveMaximum", "minimum", -1))
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SCHEMAS = ("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SAY_NOTHING = (
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "$id", "contentEncoding", "contentMediaType", "contentSchema", "discriminator"),
)
_KEPT = frozenset(
    ("type", "required", "pattern", "format", "$ref", *_NUMBERS, *_COUNTS, *_SCHEMAS, *_MAPS, *_SAY_NOTHING)
)
_HARMLESS: tuple[tuple[str, Any], ...] = (
    ("propertyNames", {"type": "string"}),
    ("propertyNames", {}),
    ("uniqueItems", False),
)
_OPTIONS = frozenset(("item_separator", "key_separator", "whitespace_flexible", "whitespace_pattern"))  # of x-guidance
_MAX_EXACT = 2**53 - 1
_ANY_KEY = r"^[^\\]*$"  # of the characters themselves: what the library escapes, such as quotes, it still escapes


class SchemaRefused(ValueError):
    """A schema cannot be held. The message begins with the path of the keyword in it."""


def held(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema in the form that the grammar takes. Raises SchemaRefused: it says what the grammar cannot hold."""
    read: list[tuple[str, dict[str, Any]]] = []
    made: dict[str, Any] = _held(schema, "", read)
    # The library's numbers between a bound that excludes a whole number and another less than 1 away include it. Which
    # bounds are those of one value is not looked at.
    for keyword, other, side in _OPEN_ENDS:
        ends = [one.get(name) for _, one in read for name in (other, f"exclusive{other.capitalize()}")]
        bounds = [end for end in ends if isinstance(end, int | float)]
        for path, part in read:
            number = part.get(keyword)
            if not isinstance(number, int | float) or number % 1 or "number" not in value_types(part, schema):
                continue
            if any(0 < (bound - number) * side < 1 for bound in bounds):
                raise SchemaRefused(
                    f"{path}.{keyword}: {number} cannot be excluded where another bound is less than 1 away; give the "
                    "least number as minimum, or the greatest as maximum.".lstrip(".")
                )
    return made


def held_text(text: str) -> str:
    """The same of a schema's text; what is not a JSON object, or nested too deeply, is left to the compiler to refuse.
    Raises SchemaRefused: it says what the grammar cannot hold."""
    try:
        schema = json.loads(text)
        return json.dumps(held(schema)) if isinstance(schema, dict) else text
    except SchemaRefused:
        raise
    except (ValueError, RecursionError):
        return text


def _held(schema: Any, path: str, read: list[tuple[str, dict[str, Any]]]) -> Any:
    if isinstance(schema, list):
        return [_held(one, f"{path}.{number}", read) for number, one in enumerate(schema)]
    if not isinstance(schema, dict):
        return schema
    read.append((path, schema))
    made: dict[str, Any] = {}
    others: list[Any] = []  # what must hold, too
    for keyword, value in schema.items():
        at = f"{path}.{clean_key(keyword)}" if path else clean_key(keyword)
        if (keyword, value) in _HARMLESS or (keyword == "format" and value not in (*FORMATS, *_OTHER_FORMATS)):
            continue
        _check(keyword, value, at)
        made[keyword] = value
        if keyword == "oneOf" and (tag := _tag(schema, read[0][1])) is not None:
            del made[keyword]
            options = [{"allOf": [one, {"required": [tag]}]} for one in _held(value, at, read)]
            others.append({"anyOf": options})
        elif keyword in _SCHEMAS:
            made[keyword] = _held(value, at, read)
        elif keyword in _MAPS and isinstance(value, dict):
            parts = {name: _held(one, f"{at}.{clean_key(name)}", read) for name, one in value.items()}
            by_pattern = keyword == "patternProperties"
            made[keyword] = {_pattern(at, name): one for name, one in parts.items()} if by_pattern else parts
        elif keyword == "pattern" and isinstance(value, str):
            ahead, rest = split_lookaheads(value)
            made[keyword] = _pattern(at, rest)
            others += [{"pattern": _pattern(at, one)} for one in ahead]
    if others:
        made["allOf"] = [*made.get("allOf", ()), *others]
    open_to_any = schema.get("additionalProperties", True) in (True, {}) and not schema.get("patternProperties")
    if not SPELT_BY_OPTION and schema.get("properties") and open_to_any:
        # "\u0078" would be a second "x": other keys are what a pattern says, which numbers do not fit.
        made |= {"patternProperties": {_ANY_KEY: True}, "additionalProperties": False}
    return made


def _tag(schema: dict[str, Any], root: dict[str, Any]) -> str | None:
    """The property by whose constant the alternatives of a discriminated union are told apart. Pydantic lets it have a
    default in the schema, and takes no object without it: with it, at most one alternative fits."""
    discriminator, options = schema.get("discriminator"), schema["oneOf"]
    name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    is_tag = isinstance(name, str) and isinstance(options, list) and have_distinct_constants(name, options, root)
    return name if is_tag else None


def _check(keyword: str, value: Any, at: str) -> None:
    if keyword == "x-guidance" and isinstance(value, dict):
        if other := sorted(value.keys() - _OPTIONS):
            raise SchemaRefused(f"{at}.{clean_key(other[0])}: every keyword of a schema is enforced; leave it out.")
    elif keyword not in _KEPT and not keyword.startswith("x-"):
        raise SchemaRefused(f"{at} cannot be enforced while the answer is generated; leave it out.")
    elif keyword in _NUMBERS:
        _check_numbers(value, at)
    elif keyword == "minProperties" and isinstance(value, int) and value > 1:
        raise SchemaRefused(
            f"{at}: {value} cannot be enforced, as a key might be written several times; at most 1 can be. "
            "Name the keys in required."
        )
    elif keyword == "format" and value in _OTHER_FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise SchemaRefused(f"{at}: {value} cannot be enforced; {known} can. Leave it out, or give a pattern.")


def _check_numbers(value: Any, at: str) -> None:
    """Refuse numbers that are not exact in the library's floats; it dies of some."""
    if isinstance(value, int | float) and abs(value) > _MAX_EXACT:
        raise SchemaRefused(f"{at}: the grammar keeps numbers up to {_MAX_EXACT}; use a string with a pattern.")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _check_numbers(item, f"{at}.{clean_key(str(key))}")


def _pattern(at: str, pattern: str) -> str:
    try:
        return from_ecma(pattern)
    except PatternRefused as error:
        raise SchemaRefused(f"{at}: {pattern[:60]!r} cannot be enforced: {error}.") from error
