"""Fields that requests of /v1/completions and /v1/chat/completions share.

Requests are checked here as far as possible without model and tokenizer.
"""

import json
import re
from dataclasses import fields
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from serve_app.openai.wire import INT32_MAX, Many, OneOf, Wire
from serve_app.text.json_text import load_json
from serve_app.text.schemas import MAX_FORM_BYTES, SchemaRefused, held
from speculative.errors import InvalidRequest
from speculative.request import MAX_LOGPROBS, MAX_PRIORITY, MAX_SCORED_IDS, MAX_SEED, SamplingParams, Structure

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024  # of each
MAX_LOGIT_BIASES = 300
MAX_BAD_WORDS = 1024
MAX_CACHE_SALT = 1024  # characters
LEGACY_MAX_TOKENS = 16  # what /v1/completions generates by default

UNSUPPORTED_ENDPOINTS: dict[str, str] = {
    "embeddings": "embeddings are not served; this server generates text.",
    "images": "images are not served; this server generates text.",
    "audio": "audio is not served; this server generates text.",
    "moderations": "moderation is not served; this server generates text.",
    "rerank": "reranking is not served; this server generates text.",
    "batches": "batches are not served; send the requests themselves.",
    "files": "files are not served; send text in the request.",
    "fine_tuning": "fine-tuning is not served.",
    "assistants": "assistants are not served; use /v1/chat/completions.",
    "threads": "threads are not served; use /v1/chat/completions.",
    "load_lora_adapter": "adapters are those of vllm.lora_modules in the configuration; add it there and restart.",
    "unload_lora_adapter": "adapters are those of vllm.lora_modules in the configuration; remove it there and restart.",
}
"""First path parts under /v1 that clients may try, and what to use instead."""


class StreamOptions(Wire):
    """The contents of a stream besides the text."""

    include_usage: bool | None = None
    """The stream ends with a chunk that has the usage."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk has the usage up to there."""
    include_obfuscation: bool | None = None
    """Accepted, without effect."""


class JsonSchemaFormat(Wire):
    """A JSON schema as OpenAI's response_format wraps it. Every one is enforced strictly."""

    name: str
    """A name of your choice."""
    description: str | None = None
    """A description for your own use."""
    schema_text: str = Field(alias="schema")
    """The JSON schema."""
    strict: bool | None = None
    """Accepted, without effect: schemas are always enforced."""

    @field_validator("schema_text", mode="before", json_schema_input_type=dict[str, Any])
    @classmethod
    def _to_text(cls, schema: Any) -> str:
        return _schema_text(schema)


class ResponseFormat(Wire):
    """The structure of an answer, in OpenAI's form."""

    type: Annotated[str, OneOf(("text", "json_object", "json_schema"))]
    """`json_schema` needs the field `json_schema`."""
    json_schema: JsonSchemaFormat | None = None
    """`name`, `schema`, and optionally `description` and `strict`."""

    def structure(self) -> Structure | None:
        """The structure to enforce; None for plain text. Raises InvalidRequest: type and json_schema do not match."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise InvalidRequest(
                "response_format.json_schema", "response_format.json_schema and type = json_schema need each other."
            )
        if self.json_schema is not None:
            return Structure("json_schema", self.json_schema.schema_text)
        return Structure("json_object") if self.type == "json_object" else None


def _check_grammar(grammar: str) -> str:
    if re.search(r"%json\s*\{", grammar):
        raise PydanticCustomError("unsupported", "%json is not served in a grammar; send the schema by itself.")
    return grammar


def _schema_or_its_text(schema: Any) -> str | None:
    if isinstance(schema, str):
        try:
            schema = load_json(schema)
        except (ValueError, RecursionError) as error:
            why = {"why": str(error)[:200]}
            raise PydanticCustomError("schema", "must be a JSON schema; this text is not JSON: {why}.", why) from error
    return None if schema is None else _schema_text(schema)


SchemaText = Annotated[
    str | None, BeforeValidator(_schema_or_its_text, json_schema_input_type=dict[str, Any] | str | None)
]
"""A JSON schema, as an object or its text."""
Expression = Annotated[str, Field(min_length=1)]
Grammar = Annotated[str, Field(min_length=1), AfterValidator(_check_grammar)]
Choices = Annotated[Many[str], Field(min_length=1)]


class StructuredOutputs(Wire):
    """The structure of an answer, in vLLM's form: exactly one of the fields."""

    schema_text: SchemaText = Field(None, alias="json")
    """A JSON schema, as an object or its text."""
    regex: Expression | None = None
    """An expression in the syntax of Rust's regex crate, which the whole answer matches."""
    choice: Choices | None = None
    """Texts, one of which is the answer."""
    grammar: Grammar | None = None
    """A Lark grammar."""

    def structure(self) -> Structure:
        """The structure to enforce. Raises InvalidRequest: none or several are given."""
        choice = None if self.choice is None else json.dumps(self.choice)
        texts: dict[Any, str | None] = {
            "json_schema": self.schema_text,
            "regex": self.regex,
            "choice": choice,
            "grammar": self.grammar,
        }
        asked = [(kind, text) for kind, text in texts.items() if text is not None]
        if len(asked) != 1:
            raise InvalidRequest(
                "structured_outputs",
                f"structured_outputs takes exactly one of json, regex, choice and grammar; got {len(asked)}.",
            )
        return Structure(*asked[0])


def _schema_text(schema: Any) -> str:
    if not isinstance(schema, dict):
        raise PydanticCustomError("schema", "must be a JSON schema: an object.")
    try:
        text = json.dumps(schema)
        if len(text) <= MAX_FORM_BYTES:  # else it is refused for that
            held(schema)
        return text
    except SchemaRefused as error:
        raise PydanticCustomError("unsupported", "{why}", {"why": str(error)}) from error
    except RecursionError as error:
        raise PydanticCustomError("schema", "is nested too deeply.") from error


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Seconds = Annotated[float, Field(ge=0.001, le=86400)]


class WireRequest(Wire):
    """Fields of both generation endpoints."""

    model: str
    """The served model's name, or an adapter's."""
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    """The longest answer, in tokens."""
    min_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    """The answer does not end before so many tokens."""
    temperature: float | None = None
    """Divides the logits. 0 = greedy, 1 = the model's own distribution, which is the default."""
    top_p: float | None = None
    """Sample from the likeliest tokens that have this share of the probability together, above 0 and up to 1."""
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    """Sample from so many likeliest tokens; 0 or -1 = from all."""
    min_p: float | None = None
    """Sample from tokens with at least this share of the likeliest one's probability."""
    presence_penalty: float | None = None
    """Taken from the logits of tokens that are in the answer."""
    frequency_penalty: float | None = None
    """Taken from the logits of tokens, once for each time that they are in the answer."""
    repetition_penalty: float | None = None
    """Makes tokens of prompt and answer less likely if it is above 1."""
    logit_bias: dict[str, float] | None = None
    """Token ids, and what is added to their logits."""
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=MAX_BAD_WORDS)
    """Texts that the answer must not contain."""
    allowed_token_ids: Many[TokenId] | None = Field(None, min_length=1)
    """The only tokens that the answer may contain."""
    response_format: ResponseFormat | None = None
    """`text`, `json_object`, or `json_schema` with a schema."""
    structured_outputs: StructuredOutputs | None = None
    """One of `json` (a schema), `regex`, `choice` and `grammar`, which the answer has to match."""
    reproducible: bool | None = None
    """The text follows from seed and prompt, whatever is drafted. Default: if a `seed` is sent, and the engine can."""
    logprob_token_ids: list[TokenId] | None = Field(None, max_length=MAX_SCORED_IDS)
    """Tokens whose logprobs are returned at every position."""
    guided_json: SchemaText = None
    """Old name of `structured_outputs.json`; the reply has a `warning` header."""
    guided_regex: Expression | None = None
    """Old name of `structured_outputs.regex`."""
    guided_choice: Choices | None = None
    """Old name of `structured_outputs.choice`."""
    guided_grammar: Grammar | None = None
    """Old name of `structured_outputs.grammar`."""
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """Logprobs of the prompt's tokens and of so many alternatives, in the first choice of each prompt."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT32_MAX)
    """Keep so many last tokens of the prompt; -1 = as many as fit."""
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT)
    """The prefix cache is shared with requests of the same salt only, and `drafter.kind: suffix` drafts no other
    request's text from its answer."""
    n: int | None = Field(None, ge=1, le=INT32_MAX)
    """The number of choices for each prompt."""
    seed: int | None = Field(None, ge=-(2**63), le=MAX_SEED)
    """Each choice says whether its text can be had again with this seed, and why not."""
    stop: str | list[str] | None = None
    """Texts that end the answer."""
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    """Tokens that end the answer."""
    ignore_eos: bool | None = None
    """The answer does not end with the model's end tokens."""
    stream: bool | None = None
    """Reply by server-sent events."""
    stream_options: StreamOptions | None = None
    """With `stream`: `include_usage`, `continuous_usage_stats`."""
    return_token_ids: bool | None = None
    """The reply has the token ids of prompt and answer, and logprobs as plain arrays."""
    return_token_kinds: bool | None = None
    """The reply says of each token how it came about: `first`, `accepted`, `recovered` or `bonus`."""
    return_tokens_as_token_ids: bool | None = None
    """Logprobs name tokens by their ids: `token_id:7`."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default: true."""
    include_stop_str_in_output: bool | None = None
    """The stop string that ended the answer is part of its text."""
    speculate: bool | None = None
    """`false`: plain decoding for this request."""
    verify: bool | None = None
    """The reply waits for the answer's replay, and has the `verdict` and what was `checked`."""
    receipt: bool | None = None
    """The reply has `receipts` (a stream's last chunk), with which a third party can check each choice by `truespec
    verify`. Refused with vLLM."""
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    """Order in the queue, the lower the earlier."""
    timeout: Seconds | None = None
    """Seconds from its arrival until the request is given up."""
    resume: bool | None = None
    """The answer continues on another replica when the one that decodes it is lost. Needs `pools.router` or
    `recovery.resume`."""
    # accepted but unused: clients send them for identification, billing or caching
    user: str | None = None
    """Accepted, without effect."""
    metadata: dict[str, Any] | None = None
    """Accepted, without effect."""
    service_tier: str | None = None
    """Accepted, without effect."""
    safety_identifier: str | None = None
    """Accepted, without effect."""
    prompt_cache_key: str | None = None
    """Accepted, without effect."""
    prompt_cache_retention: str | None = None
    """Accepted, without effect."""
    prompt_cache_options: dict[str, Any] | None = None
    """Accepted, without effect."""
    parallel_tool_calls: bool | None = None
    """With `tools`: `false` allows one call at most."""
    spaces_between_special_tokens: bool | None = None
    """Accepted, without effect: text is the tokens' own bytes."""

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _not_zero(cls, count: int | None) -> int | None:
        if count == 0:
            raise PydanticCustomError("truncation", "must be at least 1, or -1 for as many as fit.")
        return count

    @field_validator("stop", mode="before")
    @classmethod
    def _few_whole_strings(cls, stop: Any) -> Any:
        strings = [stop] if isinstance(stop, str) else stop
        if strings is None:
            return None
        if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
            raise PydanticCustomError("stop", "must be a string or a list of strings.")
        if len(strings) > MAX_STOP_STRINGS:
            raise PydanticCustomError("stop", "may hold at most {most} strings.", {"most": MAX_STOP_STRINGS})
        if "" in strings:
            raise PydanticCustomError("stop", "must not hold an empty string.")
        if max(map(len, strings), default=0) > MAX_STOP_CHARACTERS:
            most = {"most": MAX_STOP_CHARACTERS}
            raise PydanticCustomError("stop", "may hold strings of at most {most} characters.", most)
        return stop

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few_token_ids(cls, bias: Any) -> Any:
        if isinstance(bias, dict):
            if len(bias) > MAX_LOGIT_BIASES:
                raise PydanticCustomError("logit_bias", "may hold at most {most} tokens.", {"most": MAX_LOGIT_BIASES})
            if not all(_TOKEN_ID.fullmatch(token) for token in bias):
                raise PydanticCustomError("logit_bias", "must have token ids as its keys.")
            if len({int(token) for token in bias}) < len(bias):  # such as 5 and 05
                raise PydanticCustomError("logit_bias", "must not name a token twice.")
        return bias

    @property
    def structure(self) -> Structure | None:
        """The structure of the answer, whichever field asks for it."""
        if self._outputs is not None:
            return self._outputs.structure()
        return None if self.response_format is None else self.response_format.structure()

    @property
    def _outputs(self) -> StructuredOutputs | None:
        """`structured_outputs`, or what its older names say."""
        if not self.deprecated_fields:
            return self.structured_outputs
        return StructuredOutputs.model_construct(**{own: getattr(self, old) for old, own in _GUIDED.items()})

    @property
    def deprecated_fields(self) -> tuple[str, ...]:
        """Old names that the client used."""
        return tuple(name for name in _GUIDED if getattr(self, name) is not None)

    @property
    def structure_field(self) -> str:
        """The field that asks for the structure."""
        if self.deprecated_fields:
            return self.deprecated_fields[0]
        if self.structured_outputs is None:
            return "response_format"
        kind = self.structured_outputs.structure().kind
        return f"structured_outputs.{'json' if kind == 'json_schema' else kind}"

    def sampling_fields(self) -> dict[str, Any]:
        """Fields of SamplingParams, as far as they need neither model nor tokenizer; unsent fields are left out."""
        sent = {name: value for name in _AS_SENT if (value := getattr(self, name)) is not None}
        lists = {name: tuple(dict.fromkeys(value)) for name in _ID_LISTS if (value := getattr(self, name)) is not None}
        bias = tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        return sent | lists | {"logit_bias": bias, "top_k": max(self.top_k or 0, 0), "structure": self.structure}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, in whichever form they were sent."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return it as in SamplingParams: None = off, 0 = the prompt's own tokens only."""
        return self.prompt_logprobs

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return whether every chunk has the usage up to there."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_budget(self) -> tuple[str, int | None]:
        """The field that limits the output, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def prompt_only(self) -> bool:
        """Return whether nothing is to be generated, but the prompt echoed."""
        return self.token_budget[1] == 0

    def check_together(self) -> None:
        """Check fields against each other. Raises InvalidRequest: two fields contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream_options needs stream = true.")
        old = self.deprecated_fields
        if old and self.structured_outputs is not None:
            raise InvalidRequest(
                old[0], f"{old[0]} is an old name of structured_outputs; send structured_outputs only."
            )
        if len(old) > 1:
            raise InvalidRequest(old[1], f"{old[0]} and {old[1]} both constrain the answer; send one of them.")
        if self.structure is not None:
            self._check_structure(self.structure_field.partition(".")[0])

    def _check_structure(self, name: str) -> None:
        if self.response_format is not None and name != "response_format" and self.response_format.type != "text":
            raise InvalidRequest(name, f"response_format and {name} both constrain the answer; send one of them.")
        other = "min_tokens" if self.min_tokens else "ignore_eos" if self.ignore_eos else None
        if other is not None:
            raise InvalidRequest(name, f"{name} ends the answer by itself: it cannot be combined with {other}.")


_ID_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
_CONVERTED = {*_ID_LISTS, "max_tokens", "top_k", "logit_bias", "bad_words", "prompt_logprobs"}
_AS_SENT = [one.name for one in fields(SamplingParams) if one.name in WireRequest.model_fields.keys() - _CONVERTED]
_GUIDED = {"guided_json": "schema_text"} | {f"guided_{name}": name for name in ("regex", "choice", "grammar")}
_TOKEN_ID = re.compile("[0-9]{1,10}")
