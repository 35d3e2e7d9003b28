"""POST /v1/score: what requests may contain."""

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from serve_app.openai.requests import Seconds
from serve_app.openai.wire import Many, Wire
from speculative.request import MAX_PRIORITY


def _context_kind(value: Any) -> str:
    return "<ids>" if isinstance(value, list) else "<text>"


def _label_kind(value: Any) -> str:
    return "<id>" if type(value) is int else _context_kind(value)


_Text = Annotated[str, Field(min_length=1), Tag("<text>")]
_Ids = Annotated[Many[int], Field(min_length=1), Tag("<ids>")]


class ScoreRequest(Wire):
    """POST /v1/score."""

    model: str
    contexts: Annotated[Many[Annotated[_Text | _Ids, Discriminator(_context_kind)]], Field(min_length=1)]
    labels: Annotated[
        Many[Annotated[_Text | Annotated[int, Tag("<id>")] | _Ids, Discriminator(_label_kind)]], Field(min_length=1)
    ]
    normalize: bool = True
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    timeout: Seconds | None = None
    user: str | None = None
