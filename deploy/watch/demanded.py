"""Whether the choices of a watched reply keep to what its request says of them, as far as the reply shows it."""

from typing import Any

from deploy.exchange.answers import Choice, Json, Reply
from serve_app.referee.client_demands import DEMANDING, ClientDemands, Delivered, Encode, vllm_spellings
from serve_app.referee.request_limits import broken_limit
from speculative.errors import InvalidRequest

_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens", "stop_token_ids", "ignore_eos")
"""Of which vendors differ in what they mean."""
_CHANGES_CHOICES = ("echo", "suffix", "best_of", "use_beam_search")
"""Fields with which the choices are not what was generated for each."""


def broken_demands(body: Json, reply: Reply, encode: Encode) -> dict[int, str]:
    """What choices break, in words, by their index; those that keep to everything are not there.

    Args:
        body: the client's request.
        reply: whole.
        encode: by the model's tokenizer.
    """
    if any(body.get(name) for name in _CHANGES_CHOICES):
        return {}
    read = {name: body[name] for name in DEMANDING if name not in _LIMITS and body.get(name) is not None}
    if body.get("min_tokens"):  # how much of a text they keep from being searched, only its server knows
        read.pop("stop", None)
    try:
        demands = ClientDemands.of(read, encode, bad_words=vllm_spellings)
    except (InvalidRequest, TypeError, ValueError, AttributeError, KeyError):
        return {}
    found = {index: why for index, one in reply.choices.items() if (why := _broken(demands, body, one))}
    wanted = demands.num_choices * _num_prompts(body)
    if len(reply.choices) != wanted:
        found[min(reply.choices)] = f"{len(reply.choices)} choices came, and the request demands {wanted}"
    return found


def _broken(demands: ClientDemands, body: Json, choice: Choice) -> str:
    """What one choice breaks, in words; "" = nothing."""
    whole = not (choice.called or choice.stopped_by or body.get("tools") or _is_lenient(body))
    said = Delivered(choice.text, choice.token_ids or (), choice.finish_reason or "", shown_whole=whole)
    limit = broken_limit(demands.limits, said.token_ids)
    return limit or demands.broken_end(said) or demands.broken_structure(said)


def _is_lenient(body: Json) -> bool:
    """Whether its JSON schema is a wish."""
    schema: Any = (body.get("response_format") or {}).get("json_schema") or {}
    return schema.get("strict") is False


def _num_prompts(body: Json) -> int:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)
    return len(prompt or ()) if several else 1
