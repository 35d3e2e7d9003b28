"""In which format a model writes the calls that it makes as it likes: that of the calls in its chat template."""

from serve_app.openai.tools.call_readers import FreeCalls, HermesCalls, LlamaCalls, MistralCalls, XmlCalls
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest

FORMATS: tuple[type[FreeCalls], ...] = (XmlCalls, HermesCalls, MistralCalls, LlamaCalls)

_ID = "c4a11b0b5"  # some templates take no other length
_CALL = {"id": _ID, "type": "function", "function": {"name": "probe", "arguments": {"key": "value"}}}
_CONVERSATION = (
    {"role": "user", "content": "Call it."},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "done", "tool_call_id": _ID, "name": "probe"},
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Does nothing.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


def format_of(tokenizer: Tokenizer) -> type[FreeCalls] | None:
    """The format in which a model's chat template writes a call; None = none that is known here."""
    try:
        text = tokenizer.render_chat(_CONVERSATION, tools=(_TOOL,))
    except InvalidRequest:
        return None
    return next((one for one in FORMATS if one.rendered.search(text)), None)
