"""JSON schemas: what a walk at random writes is valid, or the schema is refused by the path of what cannot be held."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from serve_app.backends.base import ChatPrompt
from serve_app.openai.tools.forced_calls import call_form
from serve_app.text.grammar import StructureCompiler
from serve_app.text.patterns import PatternRefused, from_ecma, split_lookaheads, with_ascii_classes
from serve_app.text.schemas import SchemaRefused, held
from speculative.errors import InvalidRequest
from speculative.request import Structure
from tests.support.front_ends import completion

EOS = (2, 0)


LIKELY = set(b'abxy0159-+.eE"\\u78{}[],:/ \nT')


def walk(compiler: StructureCompiler, structure: Structure, tokens: list[bytes], rng: random.Random) -> str | None:
    """What a model that knows nothing writes, in tokens that make its answers short and odd; None = it never ended."""
    constraint, output, text = compiler(structure), [], b""
    for _ in range(400):
        allowed = constraint.allowed(output, ())[0].nonzero()[0].tolist()
        if EOS[0] in allowed and (len(allowed) <= len(EOS) or rng.random() < 0.4 or len(text) > 60):
            return text.decode()
        allowed = [token for token in allowed if token not in EOS]
        closing = [token for token in allowed if tokens[token] in (b'"', b"}", b"]")]
        likely = closing if closing and len(text) > 60 else [token for token in allowed if set(tokens[token]) <= LIKELY]
        output.append(rng.choice(likely or allowed))
        text += tokens[output[-1]]
    return None


def accepts(compiler: StructureCompiler, structure: Structure, tokens: list[bytes], text: str) -> bool:
    """Whether a text, written byte by byte, is a whole answer."""
    ids = [tokens.index(bytes([byte])) for byte in text.encode()]
    masks = compiler(structure).allowed([], ids)
    return len(masks) == len(ids) + 1 and bool(masks[-1][EOS[0]])


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
HELD: list[dict[str, Any]] = [
    {"type": "object", "minProperties": 1, "additionalProperties": INTEGER},
    {"type": "object", "maxProperties": 2, "additionalProperties": INTEGER},
    {"type": "object", "properties": {"x": INTEGER, "é": INTEGER}, "additionalProperties": STRING},
    {"type": "object", "properties": {"x\t": INTEGER, 'y"': INTEGER}},
    {"type": "object", "patternProperties": {"^x": INTEGER, "^y": STRING}, "additionalProperties": False},
    {"type": "object", "patternProperties": {"^x": INTEGER}},
    {"type": "object", "properties": {"x": {}}, "required": ["y", "x"], "additionalProperties": INTEGER},
    {"allOf": [{"properties": {"x": INTEGER}, "required": ["x"]}, {"properties": {"y": STRING}}], "type": "object"},
    {"type": "object", "propertyNames": STRING, "properties": {"x": INTEGER}, "required": ["x"]},
    {"oneOf": [INTEGER, STRING, {"type": "array", "items": INTEGER}]},
    {"oneOf": [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]} for k in "ab"]},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "object", "properties": {"k": {"enum": ["x", 1]}}}],  # as of Pydantic
     "discriminator": {"propertyName": "k"},
     "$defs": {"a": {"type": "object", "properties": {"k": {"const": "a", "default": "a"}, "x": INTEGER}}}},
    {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 10}, {"type": "null"}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "b": {"maximum": 3}}},
    {"type": "integer", "exclusiveMinimum": -5, "maximum": 9007199254740991},
    {"type": "integer", "minimum": -9007199254740991, "multipleOf": 7},
    {"type": "number", "minimum": 0.1, "exclusiveMaximum": 0.5},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {"type": "number", "minimum": 1e-5, "maximum": 1e-3},
    {"type": "number", "multipleOf": 0.25, "maximum": 10, "minimum": -10},
    {"type": "number", "minimum": -1.5, "maximum": 1e6},
    {"const": 1e15}, {"const": -1.25}, {"enum": [1, 1.5, "a", None, {"a": [1, {"b": 2}]}, [], True]},
    {"enum": ["a", "bb", "ccc"], "minLength": 2}, {"enum": [1, 5, 9], "minimum": 3},
    {"type": "string", "minLength": 2, "maxLength": 3}, {"type": "string", "pattern": "^a.b$"},
    {"type": "string", "pattern": r"\d{2}|x$"}, {"type": "string", "pattern": r"^[\w.-]+@\S$", "maxLength": 9},
    {"type": "string", "pattern": "^[a&~/]{2,}$", "maxLength": 4},
    {"type": "array", "prefixItems": [INTEGER], "items": STRING, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": ["integer", "null"]}, "minItems": 2},
    {"type": ["integer", "string"], "minimum": 3, "minLength": 2},
    {"uniqueItems": False, "type": "array", "x-order": 1, "$comment": "a", "example": []},
    {"type": "string", "format": "binary"}, {"type": "integer", "format": "int32"}, {"format": "path", "maxLength": 2},
    *({"type": "string", "format": kind} for kind in ("date", "time", "date-time", "ipv4", "ipv6", "uuid", "email")),
]  # fmt: skip


def test_what_a_schema_allows_is_valid_with_every_key_once_that_counts(
    compiler: StructureCompiler, tokens: list[bytes]
) -> None:
    rng, ended = random.Random(11), 0
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for schema in HELD:
        for _ in range(25):
            text = walk(compiler, Structure("json_schema", json.dumps(schema)), tokens, rng)
            if text is None:
                continue
            ended += 1
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))
    assert ended > 20 * len(HELD)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"minProperties": 2}, "minProperties"),
    ({"properties": {"a": {"not": {}}}}, "properties.a.not"),
    ({"if": {}, "then": {}}, "if"),
    ({"anyOf": [{"uniqueItems": True}]}, "anyOf.0.uniqueItems"),
    ({"allOf": [{}, {"contains": {}}]}, "allOf.1.contains"),
    ({"propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"dependentSchemas": {"a": {}}}, "dependentSchemas"),
    ({"dependencies": {"a": ["b"]}}, "dependencies"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"unevaluatedItems": False}, "unevaluatedItems"),
    ({"$defs": {"a": {"not": {}}}}, "$defs.a.not"),
    ({"$ref": "#/elsewhere/a", "elsewhere": {"a": {"not": {}}}}, "elsewhere"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"items": {"nullable": True}}, "items.nullable"),
    ({"format": "regex"}, "format"),
    ({"const": -(2**63)}, "const"),
    ({"enum": [1, {"a": [9007199254740993]}]}, "enum.1.a.0"),
    ({"minimum": 9007199254740992}, "minimum"),
    ({"exclusiveMaximum": 1e300}, "exclusiveMaximum"),
    ({"multipleOf": 2**60}, "multipleOf"),
    ({"items": {"pattern": "(?=a)"}}, "items.pattern"),
    ({"patternProperties": {r"\bx": {}}}, "patternProperties"),
    ({"items": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}, "items.exclusiveMinimum"),
    ({"exclusiveMaximum": -1, "allOf": [{"exclusiveMinimum": -1.25}]}, "exclusiveMaximum"),
    ({"exclusiveMinimum": 1, "$ref": "#/$defs/a", "$defs": {"a": {"maximum": 1.5}}}, "exclusiveMinimum"),
    ({"x-guidance": {"lenient": True}}, "x-guidance.lenient"),
    ({"x-guidance": {"json_allowed_escapes": "u"}}, "x-guidance.json_allowed_escapes"),
]


def test_what_cannot_be_held_is_refused_by_its_path(compiler: StructureCompiler) -> None:
    for schema, path in REFUSED:
        with pytest.raises(SchemaRefused, match=rf"^{re.escape(path)}\b"):
            held(schema)
        with pytest.raises(InvalidRequest, match=re.escape(path)):
            compiler(Structure("json_schema", json.dumps(schema)))


def test_alternatives_that_are_not_told_apart_are_refused_in_our_words(compiler: StructureCompiler) -> None:
    two = [{"properties": {"k": {"const": "a"}}}, {"properties": {"k": {"enum": ["a", "b"]}}}]
    for schema in ({"oneOf": two, "discriminator": {"propertyName": "k"}}, {"oneOf": [INTEGER, {"type": "number"}]}):
        with pytest.raises(InvalidRequest, match=r"a required property with a const") as caught:
            compiler(Structure("json_schema", json.dumps(schema)))
        assert "coerce" not in caught.value.message


def test_the_api_names_the_field_that_a_schema_came_in() -> None:
    schema = {"properties": {"a": {"minProperties": 4}}}
    sent = {
        "response_format.json_schema.schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        },
        "structured_outputs.json": {"structured_outputs": {"json": schema}},
        "guided_json": {"guided_json": json.dumps(schema)},
    }
    for field, fields in sent.items():
        with pytest.raises(InvalidRequest, match=r"properties\.a\.minProperties: 4 cannot be enforced") as caught:
            completion(**fields)
        assert caught.value.field == field
    with pytest.raises(InvalidRequest, match="send the schema by itself") as caught:
        completion(structured_outputs={"grammar": 'start: "a" | %json {"type": "object"}'})
    assert caught.value.field == "structured_outputs.grammar"


def test_no_second_spelling_of_a_key_escapes_its_schema(compiler: StructureCompiler, tokens: list[bytes]) -> None:
    schema = Structure("json_schema", '{"properties": {"x": {"type": "integer"}}, "x-guidance": {}}')
    assert accepts(compiler, schema, tokens, '{"x":1}') and accepts(compiler, schema, tokens, '{"x":1,"y":"a"}')
    for text in ('{"\\u0078":"a"}', '{"x":1,"\\u0078":"a"}', '{"y":1,"x":"a"}', '{"x":1,"x":2}'):
        assert not accepts(compiler, schema, tokens, text)
    tools = ({"function": {"name": "f", "parameters": json.loads(schema.text)}},)
    forced = call_form(ChatPrompt(tools=tools, use="named", function="f"))
    assert not accepts(compiler, forced, tokens, '{"\\u0078": "a"}') and accepts(compiler, forced, tokens, '{"x": 1}')


SAMPLES = [
    *map(chr, range(1, 0x250)),
    *"٣é\u1680\u2003\u2028\u2029\ufeff\u0085\U0001f642ſKabc",
    *("aa", "ab", "a\nb", "\r", "", "ba", "abb", ".a", "a.a", "a..b", "  "),
]
EQUAL = [
    (r"^\d$", "[0-9]"), (r"^\D$", "[^0-9]"), (r"^\w$", "[A-Za-z0-9_]"), (r"^\W$", "[^A-Za-z0-9_]"),
    (r"^\s$", "[\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]"),
    (r"^[^\s]$", "[^\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]"),
    ("^.$", "[^\n\r\u2028\u2029]"), ("^[a-c-]$", "[abc-]"), (r"^[\w-.]$", "[A-Za-z0-9_.-]"),
    (r"^[\[]$", r"\["), (r"^\u0041$", "A"), (r"^\x41$", "A"),
    (r"^\u{1F642}$", "\U0001f642"), (r"^\/$", "/"),
    (r"^\-$", "-"), ("^#$", "#"), ("^ $", " "), ("^(?<n>a)(?:b)$", "ab"),
    (r"^[\d\-x]$", "[0-9x-]"), (r"^[\w\-\_]$", "[A-Za-z0-9_-]"), (r"^\_$", "_"), (r"^\{$", r"\{"), ("^[^{}]$", "[^{}]"),
    ("^]$", r"\]"), ("^(?P<n>}|a)(?P<m>b)?$", r"(\}|a)b?"),
    *((pattern, pattern) for pattern in (
        r"^(?!\.)(?!.*\.\.)[ab.]+$", r"^(?=.*b)(?=a)[ab]+$", r"^(?!ab$|[cd]|\.)[a-d.]*$", r"^(?! *$)[ ab]*$",
        r"^(?!a+$)[ab]*$", r"^(?!.*[b]{2})(?:[ab]|\n)*$", r"^(?!.*b)(?:[ab]|\n)*$", r"^(?![^a])[ab]*$",
    )),
    ("^a*?$", "a*"), ("^[^a-y]$", "[^a-y]"), (r"^[\Wa]$", "[^0-9A-Z_b-z]"),
]  # fmt: skip


def test_patterns_of_schemas_are_ecmas(compiler: StructureCompiler, tokens: list[bytes]) -> None:
    """Against Python's expressions, character by character."""
    for pattern, same in EQUAL:
        structure = Structure("json_schema", json.dumps({"type": "string", "pattern": pattern}))
        for sample in SAMPLES:
            if sample == "\x7f" or (sample < " " and sample not in "\b\t\n\f\r"):
                continue  # which no answer holds
            wanted = re.fullmatch(same, sample) is not None
            got = accepts(compiler, structure, tokens, json.dumps(sample, ensure_ascii=False))
            assert got == wanted, (pattern, sample)


def test_patterns_are_searched_for_and_what_ecma_has_not_is_refused(
    compiler: StructureCompiler, tokens: list[bytes]
) -> None:
    structure = Structure("json_schema", '{"type": "string", "pattern": "(^a|b)$"}')
    assert [accepts(compiler, structure, tokens, f'"{text}"') for text in ("a", "xb", "xa", "bx")] == [1, 1, 0, 0]
    for pattern in (
        "^(?=a)a|b", "^(?!(a))b", "^(?!.*ab)b", r"^(?!.*\s)b",
        "(?=a)", "(?<!a)b", r"(a)\1", r"\bx", r"(?i)a", r"(?i:a)", "a++", "a{2}{3}", "[]", "[a", "[[a]",
        "[^]", "[a&&b]", "[a--b]", "[a~~b]", "{", r"\cJ", r"\0", r"[\b]", r"\A", r"\z", r"\x4",
        r"\p", "a{,3}", "{,3}", r"\k<n>", "\\", r"\a", "(?P=n)", "(?P<n>a)(?P=n)",
    ):  # fmt: skip
        with pytest.raises(PatternRefused, match="is not supported"):
            from_ecma(split_lookaheads(pattern)[1])


def test_classes_of_an_expression_are_ascii(compiler: StructureCompiler, tokens: list[bytes]) -> None:
    for expression, fits, other in (
        (r"\d", "3", "٣"), (r"[\dx]", "x", "٣"), (r"\w", "a", "é"), (r"\s", " ", "\u2003"), (r"\D", "٣", "3"),
        (r"[^\w]", "é", "a"), (r"\p{Nd}", "٣", "x"), (r"\\d", "\\d", "3"), (r"[\]\d]", "]", "٣"),
        (r"(?i)a\d", "A1", "b"),
    ):  # fmt: skip
        structure = Structure("regex", expression)
        assert accepts(compiler, structure, tokens, fits), expression
        assert not accepts(compiler, structure, tokens, other), expression
    assert with_ascii_classes("a\\") == "a\\"
