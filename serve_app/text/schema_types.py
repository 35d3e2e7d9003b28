"""Types that a JSON schema allows, behind references and combinations of any depth."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any
from urllib.parse import unquote

ANY = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_KINDS: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
Types = frozenset[str]
_Own = Callable[[Mapping[str, Any]], Types | None]


def kinds_of(value: Any) -> Types:
    """The types of JSON Schema that a value has."""
    return frozenset(_KINDS[type(value)])


def value_types(schema: Any, root: Any) -> Types:
    """The types that a value may have by its schema, a part of `root`; `ANY` where the schema does not say.

    A whole number counts as `number`, too.
    """
    return _Lookup(root, _own_types, ANY).types(schema)


def argument_types(name: str, parameters: Any) -> Types:
    """The types that a function's argument may have by the schema of its parameters; `ANY` where that does not say."""

    def own(schema: Mapping[str, Any]) -> Types | None:
        argument = _argument(schema, name)
        return None if argument is None else value_types(argument, parameters)

    return _Lookup(parameters, own, None).types(parameters)


def have_distinct_constants(name: str, options: Iterable[Any], root: Any) -> bool:
    """Return whether objects of several schemas, parts of `root`, differ by the constants that a property has."""

    def own(schema: Mapping[str, Any]) -> Types | None:
        argument = _argument(schema, name)
        return None if argument is None else _Lookup(root, _own_constants, None, strict=True).found(argument)

    lookup = _Lookup(root, own, None, strict=True)
    values = [lookup.found(one) for one in options]
    known = _known(values)
    return len(known) == len(values) and sum(map(len, known)) == len(frozenset().union(*known))


@dataclass(slots=True)
class _Lookup:
    """Looks for what is read off one schema, behind references and combinations. Each reference is followed once; one
    that leads back to itself adds nothing.
    """

    root: Any  # the schema in which references are
    own: _Own  # reads the types off one schema alone; None = it says nothing
    silent: Types | None  # what an option counts as that says nothing; None = it is left out
    _: KW_ONLY
    strict: bool = False  # with such an option, none of the others says anything
    _known: dict[str, Types | None] = field(default_factory=dict)

    def types(self, schema: Any) -> Types:
        """The types that are allowed; `ANY` where nothing is said, or the schema is too deep to be read."""
        found = self.found(schema)
        return ANY if found is None else found

    def found(self, schema: Any) -> Types | None:
        """Return what is said; None = nothing."""
        try:
            return self._found(schema)
        except RecursionError:
            return None

    def _found(self, schema: Any) -> Types | None:
        if not isinstance(schema, Mapping):
            return frozenset() if schema is False else self.silent
        found = [self.own(schema), *map(self._found, _listed(schema, "allOf"))]
        is_circle = False
        if isinstance(reference := schema.get("$ref"), str):
            found.append(self._referred(reference))
            is_circle = found[-1] is None
        for keyword in ("anyOf", "oneOf"):
            options = [self._found(one) for one in _listed(schema, keyword)]
            says = bool(_known(options)) and not (self.strict and None in options)
            found.append(frozenset().union(*_known(options)) if says else None)
        known = _known(found)
        if not known:
            return None if is_circle else self.silent
        return known[0].intersection(*known[1:]).union(["null"] if schema.get("nullable") is True else [])

    def _referred(self, reference: str) -> Types | None:
        if reference not in self._known:
            self._known[reference] = None
            self._known[reference] = self._found(_at(reference, self.root))
        return self._known[reference]


def _known(found: Iterable[Types | None]) -> list[Types]:
    return [types for types in found if types is not None]


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _own_types(schema: Mapping[str, Any]) -> Types | None:
    """The types that a schema itself allows, without what it refers to; None = it says nothing."""
    found: list[Types] = []
    named = schema.get("type")
    listed = named if isinstance(named, list) else [named]
    if kinds := [one.lower() for one in listed if isinstance(one, str) and one.lower() in ANY]:
        whole = ["integer"] if "number" in kinds else []
        found.append(frozenset([*kinds, *whole]))
    if values := _listed(schema, "enum"):
        found.append(frozenset().union(*map(kinds_of, values)))
    if "const" in schema:
        found.append(kinds_of(schema["const"]))
    return found[0].intersection(*found[1:]) if found else None


def _own_constants(schema: Mapping[str, Any]) -> Types | None:
    """JSON of the only values that a schema itself allows; None = it does not name them."""
    values = [schema["const"]] if "const" in schema else _listed(schema, "enum")
    return frozenset(map(json.dumps, values)) if values else None


def _argument(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of an argument, of that of an object; None = it says nothing."""
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return None if schema.get("patternProperties") else schema.get("additionalProperties") or None


def _at(reference: str, root: Any) -> Any:
    """The part of a schema that a reference within it names; True, which says nothing, where it names none."""
    found = root
    for part in unquote(reference).removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            return True
    return found if reference.startswith("#") else True
