"""Whether the choices of a watched reply keep to what its request says of them, as far as the reply shows it."""

from dataclasses import replace
from typing import Any

from deploy.exchange.answers import Choice, Json, Reply
from serve_app.referee.client_demands import DEMANDING, ClientDemands, Delivered, Encode, vllm_spellings
from serve_app.referee.request_limits import broken_limit

_LIMITS = ("max_tokens", "max_completion_tokens", "min_tokens", "stop_token_ids", "ignore_eos")
"""Of which vendors differ in what they mean."""
_CHANGES_CHOICES = ("echo", "suffix", "best_of", "use_beam_search")
"""Fields with which the choices are not what was generated for each."""
_MOST_TEXTS, _MOST_CHARACTERS = 50, 2_000
"""Stop strings, or bad words, of a request, and characters of them all; no front end has limited those of others."""


def broken_demands(body: Json, reply: Reply, encode: Encode) -> dict[int, str]:
    """What choices break, in words, by their index; those that keep to everything are not there.

    Args:
        body: the client's request.
        reply: whole.
        encode: by the model's tokenizer.
    """
    try:
        return _found(body, reply, encode)
    except Exception:  # a body that nobody has checked may hold anything; its answers are judged all the same
        return {}


def _found(body: Json, reply: Reply, encode: Encode) -> dict[int, str]:
    if any(body.get(name) for name in _CHANGES_CHOICES):
        return {}
    read = {name: body[name] for name in DEMANDING if name not in _LIMITS and body.get(name) is not None}
    if body.get("min_tokens"):  # how much of a text they keep from being searched, only its server knows
        read.pop("stop", None)
    for name in ("stop", "bad_words"):
        if not _is_small(read.get(name) or []):
            read.pop(name)
    demands = replace(ClientDemands.of(read, encode, bad_words=vllm_spellings), ascii_classes=False)
    found = {index: why for index, one in reply.choices.items() if (why := _broken(demands, body, one))}
    wanted = demands.num_choices * _num_prompts(body)
    if len(reply.choices) != wanted:
        found[min(reply.choices)] = f"{len(reply.choices)} choices came, and the request demands {wanted}"
    return found


def _is_small(texts: str | list[str]) -> bool:
    several = [texts] if isinstance(texts, str) else texts
    return len(several) <= _MOST_TEXTS and sum(map(len, several)) <= _MOST_CHARACTERS


def _broken(demands: ClientDemands, body: Json, choice: Choice) -> str:
    """What one choice breaks, in words; "" = nothing."""
    by_text = isinstance(choice.stopped_by, str)
    whole = not (choice.called or by_text or body.get("tools") or _is_lenient(body))
    said = Delivered(choice.text, choice.token_ids or (), choice.finish_reason or "", shown_whole=whole)
    # of several that came at once, vLLM's versions differ in which one ends the text
    only = choice.stopped_by if isinstance(choice.stopped_by, str) and len(demands.stops) > 1 else None
    if why := broken_limit(demands.limits, said.token_ids) or demands.broken_end(said, only):
        return why
    by_token = body.get("stop_token_ids") or isinstance(choice.stopped_by, int)
    if by_token and not demands.keeps_stop:  # which may have come before the structure's own end
        said = replace(said, finish_reason="length")
    return demands.broken_structure(said)


def _is_lenient(body: Json) -> bool:
    """Whether its JSON schema is a wish."""
    schema: Any = (body.get("response_format") or {}).get("json_schema") or {}
    return schema.get("strict") is False


def _num_prompts(body: Json) -> int:
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt)
    return len(prompt or ()) if several else 1
