"""How the tokens of a watched request were sampled, from the request and the server's own defaults."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculative.errors import InvalidRequest
from speculative.request import SamplingParams

Json = dict[str, Any]

DIALECTS = ("vllm", "sglang", "llama.cpp", "trtllm", "truespec", "transformers", "other")

_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_READS_GENERATION_CONFIG = ("vllm", "sglang", "truespec")
_LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""What llama-server samples with where a request does not say (its /props shows it)."""

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_AS_SENT = (*_NUMBERS, "top_k", "min_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids", "logit_bias")
# fmt: off
_IRRELEVANT = frozenset((
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options", "stop",
    "seed", "user", "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_tokens",
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


@dataclass(frozen=True, slots=True)
class Sampled:
    """How the choices of one request were sampled. stops: whether a text or token that it names may have ended them.
    untested: why their tokens cannot be compared with a distribution, "" = they can."""

    params: SamplingParams
    seed: int | None
    stops: bool
    untested: str = ""


def server_defaults(dialect: str, folder: Path, own: Mapping[str, float]) -> dict[str, float]:
    """What a server samples with where a request does not say.

    Args:
        dialect: one of `DIALECTS`.
        folder: the model's; vLLM, SGLang and truespec read its generation_config.json.
        own: what the operator says; it goes first.
    """
    known: dict[str, float] = dict(_LLAMA_CPP) if dialect == "llama.cpp" else {}
    path = folder / "generation_config.json"
    if dialect in _READS_GENERATION_CONFIG and path.is_file():
        read = json.loads(path.read_text(encoding="utf-8"))
        known |= {name: read[name] for name in _GENERATION_CONFIG if read.get(name) is not None}
    return known | dict(own)


def sampled_as(body: Json, defaults: Mapping[str, float]) -> Sampled:
    """How the choices of a request were sampled; the body is the client's."""
    seed = body.get("seed")
    seed = seed % 2**64 if isinstance(seed, int) and seed >= 0 else None
    sent = {name: body[name] for name in _AS_SENT if body.get(name) is not None}
    values = dict(defaults) | sent
    untested, stops = _untested(body), bool(body.get("stop") or body.get("stop_token_ids"))
    try:
        params = SamplingParams(logprobs=0, max_tokens=_most_tokens(body), **_read(values))
    except (InvalidRequest, TypeError, ValueError) as error:
        return Sampled(
            SamplingParams(logprobs=0), seed, stops, untested or f"its parameters cannot be repeated: {error}"
        )
    return Sampled(params, seed, stops, untested)


def _most_tokens(body: Json) -> int:
    """Large enough for `min_tokens`, whatever the server's own limit is."""
    asked = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    return max(1, int(asked), int(body.get("min_tokens") or 0))


def _read(values: Mapping[str, Any]) -> Json:
    read: Json = dict(values)
    read["top_k"] = max(0, int(values.get("top_k") or 0))  # -1 and 0 switch it off
    read |= {name: tuple(values[name]) for name in ("stop_token_ids", "allowed_token_ids") if name in values}
    if "logit_bias" in values:
        bias = values["logit_bias"]
        read["logit_bias"] = tuple((int(token), float(value)) for token, value in dict(bias).items())
    return read


def _untested(body: Json) -> str:
    """Why the distribution of the answers cannot be computed again, "" = it can."""
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type") not in _TEXT_FORM:
        return "response_format: the server's own grammar decides what is allowed"
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        return "tool_choice: the server's own grammar decides what is allowed"
    if (body.get("best_of") or 1) != (body.get("n") or 1):
        return "best_of: the answers are a selection"
    if body.get("echo"):
        return "echo: the reply holds the prompt, too"
    known = {*_AS_SENT, *_IRRELEVANT}
    unknown = [name for name, value in body.items() if name not in known and not _is_off(value)]
    return f"{unknown[0][:60]}: what it does to the distribution is not known here" if unknown else ""


def _is_off(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, Sequence | Mapping) and not value)
