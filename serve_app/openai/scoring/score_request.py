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
    """The served model's name, or an adapter's."""
    contexts: Annotated[Many[Annotated[_Text | _Ids, Discriminator(_context_kind)]], Field(min_length=1)]
    """Texts, or lists of token ids."""
    labels: Annotated[
        Many[Annotated[_Text | Annotated[int, Tag("<id>")] | _Ids, Discriminator(_label_kind)]], Field(min_length=1)
    ]
    """Texts, token ids, or lists of token ids, each scored after each context."""
    normalize: bool = True
    """A score is the label's share of its context's labels (softmax); with `false`, its probability."""
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Order in the queue, the lower the earlier."""
    timeout: Seconds | None = None
    """Seconds from its arrival until the request is given up."""
    user: str | None = None
    """Accepted, without effect."""
