"""How the tokens of a watched request were sampled, from the request and the server's own defaults."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculative.errors import InvalidRequest
from speculative.request import SamplingParams

Json = dict[str, Any]

_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""What llama-server samples with where a request does not say (its /props shows it)."""
_TRANSFORMERS = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}
"""What `generate` of transformers samples with where nothing says."""
_TRANSFORMERS_PLAIN = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_new_tokens", "max_length",
    "transformers_version", "use_cache", "cache_implementation", "return_dict_in_generate",
    "stop_strings", "max_time",
)  # fmt: skip
_ONE_IS_OFF = ("num_beams", "num_beam_groups", "typical_p", "length_penalty", "num_return_sequences")

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_AS_SENT = (*_NUMBERS, "top_k", "min_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids", "logit_bias")
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
_LOGPROBS_BEFORE_GRAMMAR = ("llama.cpp", "truespec", "transformers")
_PLAIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.]{0,39}")


@dataclass(frozen=True, slots=True)
class Sampled:
    """How the choices of one request were sampled. stops: whether a text or token that it names may have ended them.
    untested: why their tokens cannot be compared with a distribution, "" = they can. compared: whether their logprobs
    are the model's. num_choices: of each prompt."""

    params: SamplingParams
    seed: int | None
    stops: bool
    untested: str = ""
    compared: bool = True
    num_choices: int = 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How servers of one vendor sample.

    Args:
        dialect: of the server, as `asking` names them.
        generation: the model's generation_config.json; {} = it has none.
        own: what the operator says that the server samples with where a request does not say; it goes first.
    """

    dialect: str
    generation: Mapping[str, Any]
    own: Mapping[str, float]

    @classmethod
    def of(cls, dialect: str, folder: Path, own: Mapping[str, float]) -> "Sampling":
        """Of a vendor that serves the model in this folder."""
        path = folder / "generation_config.json"
        read = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return cls(dialect, read, own)

    def sampled_as(self, body: Json, *, is_chat: bool) -> Sampled:
        """How the choices of a request were sampled; the body is the client's."""
        seed = body.get("seed")
        seed = seed % 2**64 if isinstance(seed, int) and seed >= 0 else None
        stops = bool(body.get("stop") or body.get("stop_token_ids"))
        params, untested = SamplingParams(logprobs=0), _untested(body, self.dialect)
        try:
            values = self._values(body, is_chat=is_chat)
            untested = untested or _NOT_OURS.get(self.dialect, _all_ours)(values)
            params = SamplingParams(logprobs=0, max_tokens=_most_tokens(body), **_read(self._ours(values)))
        except (InvalidRequest, TypeError, ValueError, OverflowError, AttributeError) as error:
            what = f"{error.field}: its value" if isinstance(error, InvalidRequest) else "a parameter: its value"
            params, untested = SamplingParams(logprobs=0), untested or f"{what} cannot be repeated"
        compared = self.dialect in _LOGPROBS_BEFORE_GRAMMAR or not _has_grammar(body)
        compared &= self.dialect != "sglang" or _is_bare(params)  # it reports them after penalties and temperature
        num = body.get("n")
        return Sampled(params, seed, stops, untested, compared, max(1, num) if isinstance(num, int) else 1)

    def _values(self, body: Json, *, is_chat: bool) -> Json:
        """What the server samples with, by its own names."""
        if self.dialect == "transformers":
            return self._transformers(body, is_chat=is_chat)
        known: Json = dict(_LLAMA_CPP) if self.dialect == "llama.cpp" else {}
        reads_file = self.dialect in ("vllm", "truespec") or (self.dialect == "sglang" and is_chat)
        if reads_file:
            known |= {name: value for name in _GENERATION_CONFIG if (value := self.generation.get(name)) is not None}
        return known | dict(self.own) | {name: body[name] for name in _AS_SENT if body.get(name) is not None}

    def _transformers(self, body: Json, *, is_chat: bool) -> Json:
        """Of `transformers serve`, which takes few fields, and else what generation_config.json or the request's
        `generation_config` say."""
        sent = json.loads(body.get("generation_config") or "{}")
        values = _TRANSFORMERS | dict(self.own)
        for given in (self.generation, sent):
            values |= {name: value for name, value in given.items() if value is not None}
        values |= {name: body[name] for name in ("temperature", "top_p") if body.get(name) is not None}
        if body.get("frequency_penalty") is not None:
            values["repetition_penalty"] = 1.0 + body["frequency_penalty"]
        if body.get("logit_bias") and is_chat:
            values["logit_bias"] = body["logit_bias"]
        if not values.pop("do_sample"):
            values["temperature"] = 0.0  # whatever was sent
        return values

    def _ours(self, values: Json) -> Json:
        """The parameters of ours that sample so."""
        temperature, min_p = values.get("temperature", 1.0), values.get("min_p", 0.0)
        if self.dialect == "transformers":
            return {name: value for name, value in values.items() if name in (*_GENERATION_CONFIG, "logit_bias")}
        if self.dialect == "llama.cpp" and temperature > 0 and min_p > 0:
            return values | {"min_p": min_p ** (1 / temperature)}  # it filters before the temperature
        return values


def _all_ours(values: Json) -> str:
    del values
    return ""


def _not_ours_of_llama_cpp(values: Json) -> str:
    """Why llama.cpp's rules cannot be written in our parameters, "" = they can."""
    penalties = any(values.get(name, 0.0) != 0 for name in ("presence_penalty", "frequency_penalty"))
    if penalties or values.get("repetition_penalty", 1.0) != 1:
        return "penalties: llama.cpp counts the last tokens of the prompt, too"
    temperature, bias = values["temperature"], values.get("logit_bias") or ()
    if temperature > 0 and values["top_p"] < 1 and (temperature != 1 or values["min_p"] > 0):
        return "top_p: llama.cpp applies it before the temperature and before min_p"
    if values.get("ignore_eos"):
        return "ignore_eos: llama.cpp excludes the tokens that end an answer"
    biases = bias.values() if isinstance(bias, Mapping) else [value for _, value in bias]
    return "logit_bias: false excludes a token" if any(value is False for value in biases) else ""


def _not_ours_of_sglang(values: Json) -> str:
    top_p, min_p, top_k = values.get("top_p", 1.0) < 1, values.get("min_p", 0.0) > 0, (values.get("top_k") or 0) > 0
    if (top_p and top_k) or (min_p and (top_p or top_k)):
        return "top_p and top_k or min_p together: SGLang applies them to the whole distribution"
    if values.get("repetition_penalty", 1.0) != 1:
        return "repetition_penalty: whether the prompt's tokens count depends on SGLang's version"
    return ""


def _not_ours_of_transformers(values: Json) -> str:
    if values["top_p"] < 1 and values.get("min_p", 0.0) > 0 and values["temperature"] > 0:
        return "top_p and min_p together: transformers applies min_p last"
    plain = {*_GENERATION_CONFIG, *_TRANSFORMERS_PLAIN, "logit_bias"}
    others = [name for name, value in values.items() if name not in plain and not name.startswith("output_")]
    on = [name for name in others if not _is_off(values[name]) and not (name in _ONE_IS_OFF and values[name] == 1)]
    return f"{on[0][:60]}: what it does to the distribution is not known here" if on else ""


_NOT_OURS: Mapping[str, Callable[[Json], str]] = {
    "llama.cpp": _not_ours_of_llama_cpp,
    "sglang": _not_ours_of_sglang,
    "transformers": _not_ours_of_transformers,
}


def _is_bare(params: SamplingParams) -> bool:
    """Whether nothing but filters comes between the model's logits and the distribution."""
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1
    return params.temperature in (0, 1) and not any(penalties) and not params.logit_bias


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


def _untested(body: Json, dialect: str) -> str:
    """Why the distribution of the answers cannot be computed again, "" = it can."""
    if _has_form(body):
        return "response_format: the server's own grammar decides what is allowed"
    if _has_to_call(body):
        return "tool_choice: the server's own grammar decides what is allowed"
    if body.get("best_of") and body["best_of"] != (body.get("n") or 1):
        return "best_of: the answers are a selection"
    if body.get("echo"):
        return "echo: the reply holds the prompt, too"
    known = {*_AS_SENT, *_IRRELEVANT, *(("generation_config",) if dialect == "transformers" else ())}
    unknown = [name for name, value in body.items() if name not in known and not _is_off(value)]
    if not unknown:
        return ""
    name = unknown[0] if _PLAIN_NAME.fullmatch(unknown[0]) else "a field"  # others are a client's own words
    return f"{name}: what it does to the distribution is not known here"


def _has_form(body: Json) -> bool:
    form = body.get("response_format")
    return isinstance(form, Mapping) and form.get("type") not in _TEXT_FORM


def _has_to_call(body: Json) -> bool:
    return body.get("tool_choice") not in (None, "auto", "none")


def _has_grammar(body: Json) -> bool:
    """Whether a grammar decides which tokens there may be."""
    return _has_form(body) or _has_to_call(body) or any(not _is_off(body.get(name)) for name in _GRAMMARS)


def _is_off(value: Any) -> bool:
    return value is None or value == 0 or (isinstance(value, Sequence | Mapping) and not value)
