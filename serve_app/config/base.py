"""Shared by all sections of the configuration."""

import difflib
import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from speculative.options import Option, options_of

PoolName = Literal["prefill", "decode", "monolith"]
AtLeastOne = Annotated[int, Field(ge=1)]
SomeModel = TypeVar("SomeModel", bound=BaseModel)


POOLS_OF_TOPOLOGY: dict[str, tuple[PoolName, ...]] = {
    "disaggregated": ("prefill", "decode"),
    "monolith": ("monolith",),
}


POOL_OF_DEPLOYMENT: dict[str, PoolName] = {
    "PrefillServer": "prefill",
    "DecodeServer": "decode",
    "MonolithServer": "monolith",
}


_LONGEST = 60  # letters of a value in a message


_WORDS = {
    "model_type": "must be a map (lines of `name: value`)",
    "dict_type": "must be a map (lines of `name: value`)",
    "list_type": "must be a list (lines that begin with `- `)",
    "tuple_type": "must be a list (lines that begin with `- `)",
    "dataclass_type": "must be an object",
    "string_type": "must be text; put it in quotes",
    "int_type": "must be a whole number, without quotes",
    "float_type": "must be a number, without quotes",
    "bool_type": "must be true or false, without quotes",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "string_too_short": "must not be empty",
    "too_short": "needs at least {min_length}",
    "finite_number": "must be a finite number",
    "string_pattern_mismatch": "must match {pattern}",
}
"""Pydantic's kinds of faults in the words of whoever writes the file."""


def fault_in_words(fault: Mapping[str, Any]) -> str:
    """Say what is wrong with a value, and what it is, of a fault that pydantic found."""
    if fault["type"] == "missing":
        return "is missing."
    context = fault.get("ctx", {})
    if "error" in context:  # of a check of ours, in its own words
        return str(fault["msg"]).removeprefix("Value error, ")
    plain = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in context.items()
    }
    said = _WORDS[fault["type"]].format_map(plain) if fault["type"] in _WORDS else fault["msg"]
    value = fault["input"]
    shown = {type(None): "nothing", list: "a list", dict: "a map"}.get(type(value)) or repr(value)
    return f"{said}, got {shown if len(shown) <= _LONGEST else f'{shown[:_LONGEST]}...'}."


class FieldError(ValueError):
    """An error between fields, reported at the one where the fix is easiest (dots lead into sections)."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class FieldErrors(ValueError):
    """All errors between fields that a section has, in their order."""

    def __init__(self, errors: Sequence[FieldError]) -> None:
        super().__init__("\n".join(map(str, errors)))
        self.errors = errors


class Section(BaseModel):
    """A part of the file: frozen, no unknown fields, no type coercion (neither `yes` nor "4" is a number)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    def __init_subclass__(cls, options: Mapping[str, Option] = types.MappingProxyType({}), **others: Any) -> None:
        """Read ranges and texts of what a base declares for the engine: pydantic finds only names, types and defaults.

        Args:
            options: further fields, where no class can name them.
            others: pydantic's.
        """
        super().__init_subclass__(**others)
        declared = [options_of(base) for base in cls.__bases__ if is_dataclass(base)]
        for name, own in {name: own for some in (*declared, options) for name, own in some.items()}.items():
            cls.__annotations__[name] = own.type
            field = Field(
                own.default,
                description=own.meaning,
                ge=own.least,
                le=own.most,
                gt=own.above,
                allow_inf_nan=None if own.above is None else False,
                pattern=own.pattern,
            )
            setattr(cls, name, field)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, data: Any) -> Any:
        for name in data if isinstance(data, Mapping) else ():
            if name not in cls.model_fields:
                close = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(cls.model_fields)}."
                raise FieldError(str(name), f"is not a field; {hint}")
        if not isinstance(data, Mapping):
            return data
        # A section whose lines are all commented out is null in YAML: it has its defaults.
        fields = cls.model_fields
        return {
            name: data[name] for name in data if data[name] is not None or not isinstance(fields[name].default, Section)
        }


Target = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Delay = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LOAD_POLICY = "serve_app.cluster.autoscaling:LoadPolicy"
