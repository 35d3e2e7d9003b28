"""The sampling of a watched request, from the request and the server's own defaults."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve_app.referee.wire.reply import Json
from serve_app.referee.wire.vendors import AS_SENT, Vendor, is_off
from speculative.errors import InvalidRequest
from speculative.request import SamplingParams

# fmt: off
_IRRELEVANT = frozenset((
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "stop",
    "seed", "user", "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_tokens", "verbose",
    "return_tokens_as_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "spaces_between_special_tokens", "detokenize", "priority", "request_id", "metadata", "store", "service_tier",
    "safety_identifier", "prompt_cache_key", "cache_prompt", "cache_salt", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs", "documents", "tools",
    "parallel_tool_calls", "reasoning_effort", "logprob_token_ids", "logprobs_mode", "verify", "receipt",
    "speculate", "reproducible", "kv_transfer_params", "echo", "suffix", "timings_per_token", "id_slot", "n_probs",
    "post_sampling_probs", "truncate_prompt_tokens", "best_of", "weight_version", "return_hidden_states",
    "custom_params", "vllm_xargs", "tool_choice", "response_format",
))
# fmt: on
"""Fields that do not change from which distribution a token is drawn, or whose values are looked at below."""

_TEXT_FORM = ("text", None)
_GRAMMARS = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag", "regex",
    "ebnf", "json_schema", "grammar", "guided_decoding",
)  # fmt: skip
"""Fields with a grammar; vLLM, SGLang and TensorRT-LLM report the logprobs that it leaves."""
_PLAIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,39}")


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampling of the choices of one request."""

    params: SamplingParams
    seed: int | None
    stops: bool  # whether a text or token that it names may have ended them
    untested: str = ""  # why their tokens cannot be compared with a distribution, "" = they can
    compared: bool = True  # whether their logprobs are the model's
    num_choices: int = 1  # of each prompt


def sampled_as(
    vendor: Vendor, generation: Mapping[str, Any], own: Mapping[str, float], body: Json, *, is_chat: bool
) -> Sampled:
    """Return how a vendor's server samples the choices of a request; the arguments are those of `Vendor.values`."""
    seed = body.get("seed")
    seed = seed % 2**64 if isinstance(seed, int) and seed >= 0 else None
    stops = bool(body.get("stop") or body.get("stop_token_ids"))
    params, untested = SamplingParams(logprobs=0), _untested(body, vendor.fields)
    try:
        values = vendor.values(generation, own, body, is_chat=is_chat)
        untested = untested or vendor.why_not_ours(values)
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        most = max(1, int(asked), int(body.get("min_tokens") or 0))  # whatever the server's own limit is
        params = SamplingParams(logprobs=0, max_tokens=most, **_read(vendor.ours(values)))
    except (InvalidRequest, TypeError, ValueError, OverflowError, AttributeError) as error:
        what = f"{error.field}: its value" if isinstance(error, InvalidRequest) else "a parameter: its value"
        params, untested = SamplingParams(logprobs=0), untested or f"{what} cannot be repeated"
    has_grammar = _has_form(body) or _has_to_call(body) or any(not is_off(body.get(name)) for name in _GRAMMARS)
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1
    is_bare = params.temperature in (0, 1) and not any(penalties) and not params.logit_bias
    compared = not (vendor.logprobs_after_grammar and has_grammar) and (
        not vendor.logprobs_after_temperature or is_bare
    )
    num = body.get("n")
    num_choices = max(1, num) if isinstance(num, int) else 1
    return Sampled(params, seed, stops, untested, compared, num_choices)


def _read(values: Mapping[str, Any]) -> Json:
    read: Json = dict(values)
    read["top_k"] = max(0, int(values.get("top_k") or 0))  # -1 and 0 switch it off
    read |= {name: tuple(values[name]) for name in ("stop_token_ids", "allowed_token_ids") if name in values}
    if "logit_bias" in values:
        bias = values["logit_bias"]
        read["logit_bias"] = tuple((int(token), float(value)) for token, value in dict(bias).items())
    return read


def _untested(body: Json, fields: Sequence[str]) -> str:
    """Return why the distribution of the answers cannot be computed again; "" = it can."""
    if _has_form(body):
        return "response_format: the server's own grammar decides what is allowed"
    if _has_to_call(body):
        return "tool_choice: the server's own grammar decides what is allowed"
    if body.get("best_of") and body["best_of"] != (body.get("n") or 1):
        return "best_of: the answers are a selection"
    if body.get("echo"):
        return "echo: the reply holds the prompt, too"
    known = {*AS_SENT, *_IRRELEVANT, *fields}
    unknown = [name for name, value in body.items() if name not in known and not is_off(value)]
    if not unknown:
        return ""
    name = unknown[0] if _PLAIN_NAME.fullmatch(unknown[0]) else "a field"  # others are a client's own words
    return f"{name}: what it does to the distribution is not known here"


def _has_form(body: Json) -> bool:
    form = body.get("response_format")
    return isinstance(form, Mapping) and form.get("type") not in _TEXT_FORM


def _has_to_call(body: Json) -> bool:
    return body.get("tool_choice") not in (None, "auto", "none")
