"""From bytes to a request body, with errors that name the field."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from serve_app.errors import BodyTooLarge, MalformedBody, UnknownParameter, UnsupportedParameter
from serve_app.openai.wire import HALF_PAIR, NOT_WHOLE, SUSPECT_ESCAPE, UNSUPPORTED, W, strings_in
from serve_app.text.json_text import MAX_ECHO, load_json
from speculative.errors import InvalidRequest

_TEXT_FIELDS = frozenset(  # for the tokenizer
    {"prompt", "messages", "input", "instructions", "stop", "bad_words", "contexts", "labels"}
)

_MOST_VALUES = 2**18  # of a body
_MOST_NAMED = 2**15  # names, objects and lists among them, which take more time and memory; twice as many are strings


def parse(body: bytes, kind: type[W]) -> W:
    """Read a request body.

    Raises:
        BodyTooLarge: it holds too many values.
        MalformedBody: not a JSON object.
        UnsupportedParameter, UnknownParameter: a field this server does not serve, or nobody knows.
        InvalidRequest: a value is wrong; `field` is its path, such as `messages.0.content`.
    """
    _check_values(body)
    return checked(_load(body), kind)


def checked(fields: dict[str, Any], kind: type[W]) -> W:
    """A request body from its fields. Raises UnsupportedParameter, UnknownParameter, InvalidRequest: as `parse`
    does."""
    known = kind.model_fields
    refused = {name: rule for name, rule in UNSUPPORTED.items() if name not in known} | dict(kind.unsupported)
    supported = {}
    for name, value in fields.items():
        if name not in refused:
            supported[name] = value
            continue
        harmless, reason = refused[name]
        if not harmless(value, fields):
            raise UnsupportedParameter(name, f"{name}: {reason}")
    try:
        wire = kind.model_validate(supported)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]  # in OpenAI's words for the field
        *way, last = first["loc"]
        ours = [str(part) for part in way if not _is_tag(part)]
        if first["type"] == "extra_forbidden":  # the last part is the client's own name, and all others are ours
            path = ".".join((*ours, str(last)[:MAX_ECHO]))
            raise UnknownParameter(path, f"Unknown field '{path}'. Remove it, or check its spelling.") from error
        path = ".".join(ours if _is_tag(last) else (*ours, str(last)))
        if first["type"] == "missing":
            raise InvalidRequest(path, f"The field '{path}' is missing.") from error
        if first["type"] == "unsupported":
            raise UnsupportedParameter(path, f"{path}: {first['msg']}") from error
        got = first.get("input")
        names = {str: "a string", dict: "an object", list: "a list", type(None): "null"}
        shown = f"{got}"[:24] if isinstance(got, int | float) else names.get(type(got), "something else")
        raise InvalidRequest(path, f"{path}: {first['msg'].rstrip('.')}. Got {shown}.") from error
    wire.check_together()
    return wire


@contextmanager
def in_words(words: Callable[[str], str]) -> Iterator[None]:
    """Within it, what is refused is refused in the words of the endpoint that the client knows. words: gives a field,
    or a message, with that endpoint's names."""
    try:
        yield
    except InvalidRequest as error:
        raise type(error)(words(error.field), words(error.message)) from error


def _check_values(body: bytes) -> None:
    """Count what a body holds before it is read, during which Python's lock is held."""
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    too_many = bare.count(b'"') // 2 > 2 * _MOST_NAMED
    if len(body) > _MOST_NAMED and not too_many:
        structure = b"".join(bare.split(b'"')[::2])
        num_named = sum(map(structure.count, (b":", b"{", b"[")))
        too_many = structure.count(b",") > _MOST_VALUES or num_named > _MOST_NAMED
    if too_many:
        most = f"{_MOST_VALUES} values, {2 * _MOST_NAMED} strings, or {_MOST_NAMED} names, objects and lists"
        raise BodyTooLarge("", f"The body holds more than {most}. Send fewer at once.")


def _load(body: bytes) -> dict[str, Any]:
    try:
        text = body.decode("utf-8")
        fields = load_json(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise MalformedBody("", f"The body is not valid JSON in UTF-8: {reason}.") from error
    if not isinstance(fields, dict):
        raise MalformedBody("", "The body must be a JSON object.")
    try:
        for path, string in strings_in(fields, "") if SUSPECT_ESCAPE.search(text) else ():
            if HALF_PAIR.search(string):
                raise InvalidRequest(path, f"{path} {NOT_WHOLE}")
            if "\0" in string and path.partition(".")[0] not in _TEXT_FIELDS:
                raise InvalidRequest(path, f"{path} holds a NUL, which only text for the model may; remove it.")
    except RecursionError as error:
        raise MalformedBody("", "The body is nested too deeply.") from error
    return fields


def _is_tag(part: str | int) -> bool:
    """Return whether a part of a location is no field, but a kind that a value may have."""
    return isinstance(part, str) and part.startswith("<")
