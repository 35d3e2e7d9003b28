"""Vendors of servers: what each is asked for beside what a client wants, and how it samples.

To add a vendor, write a subclass of `Vendor` and enter it in `VENDORS`. Standard library only: the proxy needs no more.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from serve_app.referee.wire.exchange import CHAT
from serve_app.referee.wire.reply import Json

Extras = Mapping[str, Any]
"""Fields of a request, with their values."""
Keeps = Literal["nothing", "most", "all"]

_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
AS_SENT = (*_NUMBERS, "top_k", "min_tokens", "stop_token_ids", "ignore_eos", "allowed_token_ids", "logit_bias")
"""Fields of requests that say how a token is sampled, by the names that servers share."""
_GENERATION_CONFIG = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TRANSFORMERS_PLAIN = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_new_tokens", "max_length",
    "transformers_version", "use_cache", "cache_implementation", "return_dict_in_generate",
    "stop_strings", "max_time",
)  # fmt: skip
_ONE_IS_OFF = ("num_beams", "num_beam_groups", "typical_p", "length_penalty", "num_return_sequences")


class Vendor:
    """A vendor's server: it takes the fields that vLLM takes, unless a subclass says otherwise."""

    owned_by = ""
    """The `owned_by` of its `GET /v1/models`; "" = it is named by hand."""
    defaults: Mapping[str, Any] = {}
    """Sampling parameters of requests that do not set them."""
    reads_generation_config: Literal["always", "chats", "never"] = "never"
    """For which requests the model's generation_config.json replaces the defaults."""
    fields: tuple[str, ...] = ()
    """Its own fields that say how a token is sampled."""
    logprobs_after_grammar = True
    """True if the reported logprobs are those that a grammar leaves."""
    logprobs_after_temperature = False
    """True if they are those after penalties and temperature."""
    keeps: Keeps = "nothing"
    """The demands of a request that it is known to honour.

    most: `n`, stop strings, bad words and structure. Each token is reported, the one that ended the answer, too, and
        every number that was asked for.
    all: limits, every keyword of a schema, and each field that says whether tools are to be called, too.
    """
    joins_texts_by = "\n"
    """Separator between the texts of one message."""

    def extras(self, path: str, streamed: bool) -> tuple[Extras, ...]:
        """Return what to ask it for, most first, nothing last; the next where the server refuses it."""
        del streamed
        logprobs = {"logprobs": True if path == CHAT else 1}
        return {**logprobs, "return_token_ids": True}, logprobs, {}

    def values(self, generation: Mapping[str, Any], own: Mapping[str, float], body: Json, *, is_chat: bool) -> Json:
        """Return what it samples with, by its own names.

        Args:
            generation: the model's generation_config.json.
            own: what the operator says that it samples with where a request does not say.
            body: of the request.
            is_chat: whether that is a chat.
        """
        reads = self.reads_generation_config
        kept = generation if reads == "always" or (reads == "chats" and is_chat) else {}
        known = {name: kept[name] for name in _GENERATION_CONFIG if kept.get(name) is not None}
        sent = {name: body[name] for name in AS_SENT if body.get(name) is not None}
        return {**self.defaults, **known, **own, **sent}

    def why_not_ours(self, values: Json) -> str:
        """Return why its rules for these values cannot be written in our parameters; "" = they can."""
        del values
        return ""

    def ours(self, values: Json) -> Json:
        """The parameters of ours that sample so."""
        return values


class _Vllm(Vendor):
    owned_by = "vllm"
    keeps: Keeps = "most"
    reads_generation_config = "always"


class _Truespec(_Vllm):
    owned_by = "truespec"
    logprobs_after_grammar = False
    keeps: Keeps = "all"


class _TensorRtLlm(Vendor):
    owned_by = "tensorrt_llm"

    def extras(self, path: str, streamed: bool) -> tuple[Extras, ...]:
        return super().extras(path, streamed)[1:]


class _Sglang(Vendor):
    owned_by = "sglang"
    reads_generation_config = "chats"
    logprobs_after_temperature = True

    def extras(self, path: str, streamed: bool) -> tuple[Extras, ...]:
        known = super().extras(path, streamed)
        return known[1:] if path == CHAT and streamed else known

    def why_not_ours(self, values: Json) -> str:
        top_p, min_p, top_k = values.get("top_p", 1.0) < 1, values.get("min_p", 0.0) > 0, (values.get("top_k") or 0) > 0
        if (top_p and top_k) or (min_p and (top_p or top_k)):
            return "top_p and top_k or min_p together: SGLang applies them to the whole distribution"
        if values.get("repetition_penalty", 1.0) != 1:
            return "repetition_penalty: whether the prompt's tokens count depends on SGLang's version"
        return ""


class _LlamaCpp(Vendor):
    owned_by = "llamacpp"
    defaults: Mapping[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}  # its /props shows it
    logprobs_after_grammar = False

    def extras(self, path: str, streamed: bool) -> tuple[Extras, ...]:
        _, logprobs, nothing = super().extras(path, streamed)
        top = {"top_logprobs": 1} if path == CHAT else {}  # its default is 20 for each token
        return {**logprobs, **top}, nothing

    def why_not_ours(self, values: Json) -> str:
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

    def ours(self, values: Json) -> Json:
        temperature, min_p = values.get("temperature", 1.0), values.get("min_p", 0.0)
        if temperature > 0 and min_p > 0:
            return values | {"min_p": min_p ** (1 / temperature)}  # it filters before the temperature
        return values


class _TextOnly(Vendor):
    """One that reports nothing more than text, or that is not known."""

    def extras(self, path: str, streamed: bool) -> tuple[Extras, ...]:
        del path, streamed
        return ({},)


class _Transformers(_TextOnly):
    """`transformers serve`, which takes few fields, and else what generation_config.json or the request's
    `generation_config` say."""

    defaults: Mapping[str, Any] = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0}  # of `generate`
    fields = ("generation_config",)
    logprobs_after_grammar = False
    joins_texts_by = " "

    def values(self, generation: Mapping[str, Any], own: Mapping[str, float], body: Json, *, is_chat: bool) -> Json:
        sent = json.loads(body.get("generation_config") or "{}")
        values = {**self.defaults, **own}
        for given in (generation, sent):
            values |= {name: value for name, value in given.items() if value is not None}
        values |= {name: body[name] for name in ("temperature", "top_p") if body.get(name) is not None}
        if body.get("frequency_penalty") is not None:
            values["repetition_penalty"] = 1.0 + body["frequency_penalty"]
        if body.get("logit_bias") and is_chat:
            values["logit_bias"] = body["logit_bias"]
        if not values.pop("do_sample"):
            values["temperature"] = 0.0  # whatever was sent
        return values

    def why_not_ours(self, values: Json) -> str:
        if values["top_p"] < 1 and values.get("min_p", 0.0) > 0 and values["temperature"] > 0:
            return "top_p and min_p together: transformers applies min_p last"
        plain = {*_GENERATION_CONFIG, *_TRANSFORMERS_PLAIN, "logit_bias"}
        others = [name for name, value in values.items() if name not in plain and not name.startswith("output_")]
        on = [name for name in others if not is_off(values[name]) and not (name in _ONE_IS_OFF and values[name] == 1)]
        return f"{on[0][:60]}: what it does to the distribution is not known here" if on else ""

    def ours(self, values: Json) -> Json:
        return {name: value for name, value in values.items() if name in (*_GENERATION_CONFIG, "logit_bias")}


VENDORS: dict[str, Vendor] = {
    "vllm": _Vllm(),
    "sglang": _Sglang(),
    "llama.cpp": _LlamaCpp(),
    "trtllm": _TensorRtLlm(),
    "truespec": _Truespec(),
    "transformers": _Transformers(),
    "other": _TextOnly(),
}
"""By the name of the dialect, as `--dialect` takes it."""

FALLBACK = "vllm"


def vendor_of(dialect: str) -> Vendor:
    """The vendor whose server speaks so; `other` if it is not known."""
    return VENDORS.get(dialect, VENDORS["other"])


def dialect_of(owner: str) -> str | None:
    """The dialect of a server whose models are owned so; None = it is not known."""
    return next((name for name, one in VENDORS.items() if owner and one.owned_by == owner), None)


def is_off(value: Any) -> bool:
    """Return whether a field with this value is as good as none."""
    return value is None or value == 0 or (isinstance(value, Sequence | Mapping) and not value)
