"""A structure is validated by other libraries than those that keep answers within it."""

import json
import time

import pytest

from serve_app.referee.structure_checks import breaks_structure

SCHEMA = {
    "type": "object",
    "properties": {"price": {"type": "number", "multipleOf": 0.1}, "name": {"type": "string", "pattern": "^[a-z]+$"}},
    "required": ["price"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("kind", "text", "answer", "found"),
    [
        ("json_object", "", '{"a": 1}', ""),
        ("json_object", "", "[1]", "it is no JSON object"),
        ("json_object", "", '{"a": NaN}', "it is not JSON"),
        ("json_schema", SCHEMA, '{"price": 0.3}', ""),  # no multiple of 0.1 in binary
        ("json_schema", SCHEMA, '{"price": 1, "name": "ab"}', ""),
        ("json_schema", SCHEMA, '{"price": 0.35}', "it breaks `multipleOf` of its JSON schema"),
        ("json_schema", SCHEMA, '{"name": "ab"}', "it breaks `required` of its JSON schema"),
        ("json_schema", SCHEMA, '{"price": 1, "name": "AB"}', "it breaks `pattern` of its JSON schema"),
        ("json_schema", SCHEMA, '{"price": 1', "it is not JSON"),
        ("json_schema", {"type": "integer"}, "1.0", ""),
        ("json_schema", {"type": "integer"}, "true", "it breaks `type` of its JSON schema"),
        ("json_schema", {"$ref": "http://example.com/x.json"}, "1", ""),  # nothing is fetched
        ("json_schema", {"patternProperties": {"^a": {"type": "null"}}}, '{"a": 1}', ""),  # not checked
        ("regex", r"\d{3}|[a-d]+", "123", ""),
        ("regex", r"\d{3}", "1234", "it does not match its regular expression"),
        ("regex", r"\d", "٣", "it does not match its regular expression"),  # classes are ASCII
        ("regex", r"[a-z&&[^b]]+", "b", ""),  # Python reads it otherwise
        ("regex", r"[a[bc]]", "d", ""),
        ("regex", r"[a-c]+[0-9]", "ab7", ""),
        ("regex", r"[a-c]+[0-9]", "abd", "it does not match its regular expression"),
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


NESTED = {
    "$defs": {"n": {"anyOf": [{"$ref": "#/$defs/m"}] * 2}, "m": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
    "$ref": "#/$defs/n",
}


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("regex", "(a*)*(a*)*b", "a" * 200),
        ("json_schema", json.dumps({"pattern": "(a*)*(a*)*b"}), json.dumps("a" * 200)),
        ("json_schema", json.dumps(NESTED), "[" * 40 + "1" + "]" * 40),
        ("json_schema", json.dumps({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}), "1"),
        ("json_object", "", "[" * 90_000),
    ],
)
def test_no_client_keeps_it_busy(kind: str, text: str, answer: str) -> None:
    began = time.process_time()
    breaks_structure(kind, text, answer)
    assert time.process_time() - began < 5
