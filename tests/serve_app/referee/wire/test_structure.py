"""A structure is validated by other libraries than those that keep answers within it."""

import json
import time

import pytest

from serve_app.referee.wire.structure import breaks_structure

SCHEMA = {
    "type": "object",
    "properties": {"price": {"type": "number", "multipleOf": 0.1}, "name": {"type": "string", "pattern": "^[a-z]+$"}},
    "required": ["price"],
    "additionalProperties": False,
}
OBJECT = {"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}}
TYPE = "it breaks `type` of its JSON schema"


@pytest.mark.parametrize(
    ("kind", "text", "answer", "found"),
    [
        ("json_object", "", '{"a": 1}', ""),
        ("json_object", "", "[1]", "it is not a JSON object"),
        ("json_object", "", '{"a": NaN}', "it is not JSON"),
        ("json_object", "", '{"a": 1e99999999999999999999}', ""),  # JSON, which no arithmetic holds
        ("json_schema", {"type": "object"}, '{"a": ' + "1" * 5000 + "}", ""),
        ("json_schema", {"type": "integer", "minimum": 5}, "4", "it breaks `minimum` of its JSON schema"),
        ("json_schema", {"enum": [1, "a"]}, "true", "it breaks `enum` of its JSON schema"),
        ("json_schema", {"items": OBJECT}, json.dumps([{"a": "b"}] * 200 + [{"a": 1}]), TYPE),  # a usual answer's size
        ("json_schema", {"pattern": "|".join(["ab"] * 1000)}, '"c"', ""),  # too long an expression
        ("regex", "|".join(["ab"] * 1000), "c", ""),
        ("json_schema", SCHEMA, '{"price": 0.3}', ""),  # no multiple of 0.1 in binary
        ("json_schema", SCHEMA, '{"price": 0.35}', "it breaks `multipleOf` of its JSON schema"),
        ("json_schema", SCHEMA, '{"price": 1, "name": "AB"}', "it breaks `pattern` of its JSON schema"),
        ("json_schema", SCHEMA, '{"price": 1', "it is not JSON"),
        ("json_schema", {"pattern": r"^\s$"}, '"\u3000"', ""),  # white space in ECMA-262
        ("json_schema", {"pattern": r"^\s$"}, '"x"', "it breaks `pattern` of its JSON schema"),
        ("json_schema", {"enum": ["\ud83d"]}, '"\ufffd"', ""),  # half a character, which no answer holds
        ("json_schema", {"type": "integer"}, "1.0", ""),
        ("json_schema", {"$ref": "http://example.com/x.json"}, "1", ""),  # nothing is fetched
        ("json_schema", {"patternProperties": {"^a": {"type": "null"}}}, '{"a": 1}', ""),  # not checked
        ("regex", r"\d{3}|[a-d]+", "123", ""),
        ("regex", r"\d{3}", "1234", "it does not match its regular expression"),
        ("regex", r"\d", "٣", ""),  # a digit to some
        ("regex", r"[a-z&&[^b]]+", "b", ""),  # Python reads it otherwise
        ("choice", ["yes", "no"], "no", ""),
        ("choice", ["yes", "no"], "non", "it is none of its choices"),
        ("grammar", 'start: "a"', "b", ""),  # no other library reads it here
    ],
)
def test_an_answer_keeps_to_its_structure_or_says_why_not(kind: str, text: object, answer: str, found: str) -> None:
    assert breaks_structure(kind, text if isinstance(text, str) else json.dumps(text), answer) == found


@pytest.mark.parametrize(
    ("kind", "text", "answer", "broken"),
    [
        ("choice", '["yes", "no"]', "ye", False),
        ("choice", '["yes", "no"]', "yo", True),
        ("regex", "[a-d]{3}", "ab", False),
        ("regex", "[a-d]{3}", "ax", True),
        ("regex", "[a-dä]{3}", "ab\ufffd", False),  # cut within a character
        ("json_object", "", '{"a', False),
        ("json_object", "", "Sure", True),
        ("json_schema", "{}", " [1, ", False),
        ("json_schema", "{}", "Sure", True),
    ],
)
def test_of_an_answer_that_was_cut_off_its_beginning_is_checked(
    kind: str, text: str, answer: str, broken: bool
) -> None:
    assert bool(breaks_structure(kind, text, answer, whole=False)) is broken


@pytest.mark.parametrize("pattern", [r"^\w+$", r"^[\d]", r"^a\s+$", r"^\W", r"a\b"])
def test_classes_that_may_be_unicodes_or_asciis_are_checked_in_texts_that_both_read_alike(pattern: str) -> None:
    schema, odd = json.dumps({"type": "string", "pattern": pattern}), "_" if "W" in pattern else " ;"
    assert breaks_structure("regex", pattern, odd) and breaks_structure("json_schema", schema, f'"{odd}"')
    for text in ("a\u3000", "\u0663", "\u00e4"):  # a space, a digit and a letter, as Unicode has it
        assert not breaks_structure("regex", pattern, text) and not breaks_structure("json_schema", schema, f'"{text}"')
    assert breaks_structure("json_schema", schema, "1") == TYPE, "the rest of the schema is checked"


NESTED = {
    "$defs": {"n": {"anyOf": [{"$ref": "#/$defs/m"}] * 2}, "m": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
    "$ref": "#/$defs/n",
}


DIALECT = {"$schema": "https://json-schema.org/draft/2020-12/schema", "enum": [*range(10_000)]}


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("regex", "(a*)*(a*)*b", "a" * 200),
        ("json_schema", json.dumps({"pattern": "(a*)*(a*)*b"}), json.dumps("a" * 200)),
        ("json_schema", json.dumps(NESTED), "[" * 40 + "1" + "]" * 40),
        ("json_schema", json.dumps({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}), "1"),
        ("json_object", "", "[" * 90_000),
        ("json_schema", json.dumps({"items": {"enum": list(range(10_000))}}), json.dumps([9999] * 4000)),
        ("json_schema", json.dumps({"items": {f"x-{n}": 1 for n in range(7000)}}), json.dumps([1] * 30_000)),
        ("json_schema", json.dumps({"uniqueItems": True}), json.dumps([1, "a", *range(2, 14_000)])),
        ("json_schema", json.dumps({"items": DIALECT}), json.dumps([9999] * 4000)),
        ("json_schema", json.dumps({"items": {"pattern": "(?:a|a)+c|d"}}), json.dumps(["a" * 12 + "d"] * 2000)),
        ("json_schema", '{"p\\u0061tternProperties": {"(a*)*(a*)*b": {}}}', json.dumps({"a" * 25: 1})),
        ("json_schema", json.dumps({"allOf": [{"pattern": f"{n}|" + "(a|b)" * 390 + "|c"} for n in range(50)]}), '"c"'),
        ("regex", "|".join(f"({n:05d})?" for n in range(10_000)), "1"),
    ],
)
def test_no_client_keeps_it_busy(kind: str, text: str, answer: str) -> None:
    began = time.process_time()
    breaks_structure(kind, text, answer)
    assert time.process_time() - began < 1
