"""Requests to our own service, read off their clients' JSON: the prompts, and the fields that an engine is asked for.

This shares no code with what serves but the tokenizer.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from serve_app.backends.base import ChatPrompt, ModelInfo
from serve_app.referee.wire.demands import Demands
from serve_app.referee.wire.exchange import CHAT, GENERATE, RESPONSES
from serve_app.referee.wire.reply import Json
from serve_app.referee.wire.vendors import VENDORS
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest
from speculative.request import Request

_AS_SENT: Json = {
    "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False, "speculate": True, "priority": 0,
    "cache_salt": "",
}  # fmt: skip
"""Fields that go on as they are sent, with what the service takes where they are not."""
_OF_REQUESTS = ("seed", "chosen_seed", "priority", "adapter", "cache_salt", "resume")
_LISTS: Json = {"stop_token_ids": (), "allowed_token_ids": None, "logprob_token_ids": ()}
_LEGACY_MAX_TOKENS = 16
_LEAST_DEEP = 50  # brackets of a call's arguments; what is nested deeper may be shown otherwise
_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_LOGPROBS = "message.output_text.logprobs"


ToolUse = Literal["none", "auto", "required", "named"]


class Unclear(Exception):
    """A prompt that cannot be made again from its request alone."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request."""

    body: Json  # with the fields of chats, or of completions
    is_chat: bool
    model: ModelInfo
    tokenizer: Tokenizer

    @classmethod
    def of(cls, path: str, sent: Json, model: ModelInfo, tokenizer: Tokenizer) -> "ClientRequest":
        """Read a body that was sent to this path."""
        read = {RESPONSES: _of_responses, GENERATE: _of_generate}.get(path, dict)
        return cls(read(sent), path in (CHAT, RESPONSES), model, tokenizer)

    @property
    def num_choices(self) -> int:
        """Return the choices of each prompt."""
        return self.body.get("n") or 1

    @property
    def prompts(self) -> list[Any]:
        """Return the prompts, as texts or ids; a chat has one."""
        prompt = None if self.is_chat else self.body["prompt"]
        return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]

    @property
    def demands(self) -> Demands:
        """Return what the answers have to keep to."""
        return Demands.of(self.body, self.tokenizer, VENDORS["truespec"], is_chat=self.is_chat)

    @property
    def functions(self) -> list[str]:
        """Return the names of the tools."""
        return [tool["function"]["name"] for tool in self.body.get("tools") or ()]

    @property
    def structure(self) -> tuple[str, str] | None:
        """Return the structure that an answer has to have: its kind, and its text."""
        outputs = self.body.get("structured_outputs") or {}
        grammar = outputs.get("grammar") or self.body.get("guided_grammar")
        return self.demands.structure if grammar is None else ("grammar", grammar)

    def chat_prompt(self, use: ToolUse) -> ChatPrompt:
        """Return the conversation as parsers of answers know it. use: of the tools."""
        tools, choice = tuple(map(_tool, self.body.get("tools") or ())), self.body.get("tool_choice")
        function = choice["function"]["name"] if isinstance(choice, dict) else ""
        variables = self.body.get("chat_template_kwargs") or {}
        return ChatPrompt((), tools, use, function, self.body.get("parallel_tool_calls") is not False, variables)

    @property
    def budget(self) -> int | None:
        """Return the most tokens of an answer, None = it is not said."""
        named = self.body.get("max_completion_tokens") if self.is_chat else None
        return self.body.get("max_tokens") if named is None else named

    @property
    def num_logprobs(self) -> int | None:
        """Return how many likeliest tokens are shown beside each; None = no logprobs are."""
        if not self.is_chat:
            return self.body.get("logprobs")
        return (self.body.get("top_logprobs") or 0) if self.body.get("logprobs") else None

    def expected(self, choice: int, num_prompt: int) -> Json:
        """The fields of the engine's request for one of a prompt's choices."""
        body, computing = self.body, self.model.computing
        fields = {name: default if body.get(name) is None else body[name] for name, default in _AS_SENT.items()}
        lists = {
            name: default if body.get(name) is None else tuple(dict.fromkeys(body[name]))
            for name, default in _LISTS.items()
        }
        seed, model = body.get("seed"), body.get("model")
        room = self.model.max_model_len - num_prompt
        most = self.budget
        if most is None:
            most = room if self.is_chat else min(_LEGACY_MAX_TOKENS, room)
        coupled = seed is not None and computing.couples_seeds and fields["temperature"] != 0
        echoed = self.num_logprobs if body.get("echo") else None
        of_prompt = [count for count in (body.get("prompt_logprobs"), echoed) if count is not None]
        others = {
            "top_k": max(body.get("top_k") or 0, 0),
            "logit_bias": {int(token): bias for token, bias in (body.get("logit_bias") or {}).items()},
            "bad_words": set(self.demands.limits.bad_words),
            "max_tokens": max(most, 1),
            "logprobs": self.num_logprobs,
            "prompt_logprobs": max(of_prompt, default=None) if choice == 0 else None,
            "reproducible": coupled if body.get("reproducible") is None else body["reproducible"],
            "chosen_seed": seed is not None,
            "adapter": model if any(model == one.name for one in self.model.adapters) else "",
        }
        seeds = {}
        if seed is not None:  # of the first choice its own, of the others a hash of that and their number
            first = (seed % 2**64).to_bytes(8, "little")
            digest = hashlib.blake2b(first + choice.to_bytes(8, "little"), digest_size=8).digest()
            seeds = {"seed": int.from_bytes(digest if choice else first, "little")}
        resumes = {} if body.get("resume") is None else {"resume": body["resume"]}
        return fields | lists | others | seeds | resumes

    def has_prompt(self, ids: Sequence[int], number: int) -> bool:
        """Return whether a prompt has these tokens, in one of the forms that its template takes; True where that cannot
        be told from the request alone."""
        most = self.body.get("truncate_prompt_tokens")
        kept = max(self.model.max_model_len - max(self.budget or 1, 1), 1) if most == -1 else most or 0
        try:
            if not self.is_chat:
                prompt, special = self.prompts[number], self.body.get("add_special_tokens") is not False
                if isinstance(prompt, str):
                    prompt = self.tokenizer.encode(prompt, special=special)
                return tuple(prompt[-kept:]) == tuple(ids)
            none = True
            for form in self._conversation():
                if tuple(form[-kept:]) == tuple(ids):
                    return True
                none = False
        except Unclear:
            return True
        # Some templates tell the time, and what spells a special token may be encoded in another way.
        text = json.dumps(self.body, ensure_ascii=False)
        source = self.tokenizer.chat_template(with_tools=bool(self.body.get("tools"))).source
        return none or "strftime_now" in source or any(one in text for one in self.tokenizer.special_texts)

    def _conversation(self) -> Iterator[Sequence[int]]:
        body, tokenizer = self.body, self.tokenizer
        said = _messages(body) if "input" in body else body["messages"]
        messages, tools = [_message(one) for one in said], [_tool(one) for one in body.get("tools") or ()]
        goes_on, begins, effort = (
            body.get(name) for name in ("continue_final_message", "add_generation_prompt", "reasoning_effort")
        )
        thinks = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        ending = {"add_generation_prompt": not goes_on if begins is None else begins, "continue_final_message": goes_on}
        variables = {**thinks, **(body.get("chat_template_kwargs") or {}), **ending}
        special = body.get("add_special_tokens")
        before, behind = (tokenizer.prefix_ids, tokenizer.suffix_ids) if special else ((), ())
        for form in _forms(messages):
            try:
                text = tokenizer.render_chat(form, tools=tools, variables=variables)
                yield (*before, *tokenizer.encode_rendered(text), *behind)
            except InvalidRequest:  # this form is none that the template takes
                continue


def engine_fields(request: Request) -> Json:
    """The fields of an engine's request, by the names that clients have."""
    params = request.params
    named = {name: getattr(params, name) for name in params.__slots__}
    own = {name: getattr(request, name) for name in _OF_REQUESTS}
    return {**named, **own, "logit_bias": dict(params.logit_bias), "bad_words": set(params.bad_words)}


def _of_generate(sent: Json) -> Json:
    shared = {name: sent.get(name) for name in ("model", "cache_salt", "priority", "request_id")}
    return {**shared, **sent["sampling_params"], "prompt": sent["token_ids"], "return_token_ids": True}


def _of_responses(sent: Json) -> Json:
    text, reasoning = (sent.get(name) or {} for name in ("text", "reasoning"))
    shown = _LOGPROBS in (sent.get("include") or ()) or bool(sent.get("top_logprobs"))
    choice = sent.get("tool_choice")
    return {
        **sent,
        "max_completion_tokens": sent.get("max_output_tokens"),
        "response_format": text.get("format"),
        "reasoning_effort": reasoning.get("effort"),
        "logprobs": shown,
        "tools": [{"function": {**one, "return": None}} for one in sent.get("tools") or ()],
        "tool_choice": {"function": {"name": choice["name"]}} if isinstance(choice, dict) else choice,
    }


def _messages(sent: Json) -> list[Json]:
    """The conversation that items of the Responses API make up: what the model says in one turn is one message. Raises
    Unclear: some of it is kept by the server."""
    given: Any = sent["input"]
    items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    instructions = sent.get("instructions")
    messages: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    turn: Json = {}

    def close() -> None:
        if any(turn.get(name) for name in ("content", "tool_calls", "reasoning")):
            messages.append({"role": "assistant", **turn})
        turn.clear()

    for item in items:
        kind = item.get("type") or ("message" if "role" in item else "item_reference")
        if kind == "item_reference" or sent.get("previous_response_id"):
            raise Unclear
        content, calls = turn.get("content"), turn.get("tool_calls")
        if kind == "reasoning":
            if content is not None or calls:
                close()
            parts = item.get("content") or item.get("summary") or ()
            turn["reasoning"] = turn.get("reasoning", "") + "\n".join(part["text"] for part in parts)
        elif kind == "function_call":
            called = {"id": item["call_id"], "function": {"name": item["name"], "arguments": item.get("arguments")}}
            turn.setdefault("tool_calls", []).append(called)
        elif item.get("role") == "assistant":
            if content is not None and not calls:
                close()
            turn["content"] = [*(turn.get("content") or ()), *_parts(item["content"])]
        else:
            close()
            output = {"role": "tool", "tool_call_id": item.get("call_id"), "name": item.get("name")}
            said = item.get("output") if kind == "function_call_output" else item["content"]
            messages.append((output if kind != "message" else {"role": item["role"]}) | {"content": _parts(said)})
    close()
    return messages


def _parts(content: Any) -> list[Json]:
    listed = [{"text": content}] if isinstance(content, str) else content
    return [{"text": part.get("text") or part.get("refusal") or ""} for part in listed] or [{"text": ""}]


def _message(sent: Json) -> Json:
    """A message as chat templates expect it."""
    content, calls = sent.get("content") or None, sent.get("tool_calls")
    if isinstance(content, list):
        text = "\n".join(part["text"] for part in content)
    else:
        text = content or sent.get("refusal") or ""
    is_missing = sent.get("content") in (None, []) and bool(calls)
    role, reasoning = sent["role"], sent.get("reasoning") or sent.get("reasoning_content")
    made = {"role": "system" if role == "developer" else role, "content": None if is_missing else text}
    if calls:
        made["tool_calls"] = [_call(one) for one in calls]
    if reasoning:
        made |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return made | {name: sent[name] for name in ("tool_call_id", "name") if sent.get(name) is not None}


def _call(sent: Json) -> Json:
    arguments = sent["function"].get("arguments") or "{}"
    text = json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Unclear from error
    if not isinstance(read, dict) or _HALF_PAIR.search(text) or text.count("{") + text.count("[") > _LEAST_DEEP:
        raise Unclear
    function = {"name": sent["function"]["name"], "arguments": read, "text": text}
    return {**({} if sent.get("id") is None else {"id": sent["id"]}), "type": "function", "function": function}


def _tool(sent: Json) -> Json:
    names, function = ("name", "description", "parameters", "return"), sent["function"]
    return {"type": "function", "function": {name: function[name] for name in names if function.get(name) is not None}}


def _forms(messages: Sequence[Json]) -> Iterator[list[Json]]:
    """The messages in the forms that templates take: content as a text or as parts, a call's arguments as an object or
    as its text, and no content in four ways."""
    calls = any("tool_calls" in message for message in messages)
    for in_parts, as_text, nothing in itertools.product(
        (False, True), (False, True), ("as sent", None, "", "left out")
    ):
        if calls or not (as_text or nothing != "as sent"):
            yield [_in_form(message, in_parts, as_text, nothing) for message in messages]


def _in_form(message: Json, in_parts: bool, as_text: bool, nothing: str | None) -> Json:
    made = dict(message)
    if "tool_calls" in message:
        if not made["content"] and nothing != "as sent":
            made["content"] = nothing
        if not message["content"] and nothing == "left out":
            del made["content"]
        made["tool_calls"] = [
            {**call, "function": {"name": own["name"], "arguments": own["text" if as_text else "arguments"]}}
            for call in message["tool_calls"]
            for own in (call["function"],)
        ]
    if in_parts and made.get("content") is not None:
        made["content"] = [{"type": "text", "text": made["content"]}]
    return made
