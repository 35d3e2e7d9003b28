"""Replies of our own service as they went over the wire, each beside the engine's traces of its choices: whatever both
know is equal, and is what the client's JSON asks for.

This shares no code with what serves but the tokenizer. What is found says nothing of a client's own words.
"""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from serve_app.backends.base import ModelInfo, Parsers, Reading
from serve_app.referee.judge.answer import Alternatives, Answer
from serve_app.referee.records.records import Record
from serve_app.referee.wire.calls import lost_part, value_of
from serve_app.referee.wire.client_request import ClientRequest, ToolUse, engine_fields
from serve_app.referee.wire.demands import Made
from serve_app.referee.wire.exchange import CHAT, COMPLETIONS, GENERATE, RESPONSES, Exchange
from serve_app.referee.wire.parts import Facts, of_completion, of_response
from serve_app.referee.wire.reply import Choice, Json, Reply, read_reply
from serve_app.text.tokenizer import Tokenizer
from speculative.request import FinishReason, TokenKind

PREFIX = "wire: "
"""Begins what is said of a difference."""
_MASKED = -9999.0  # of a token that cannot occur, which JSON has no number for
_ELSEWHERE = ("summary",)  # of reasoning, which is returned whole, and not summarized
_CALL_MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_REPEATED: Json = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "temperature": 1.0, "top_p": 1.0, "user": None,
    "parallel_tool_calls": True, "previous_response_id": None, "top_logprobs": 0,
    "max_tool_calls": None, "prompt_cache_key": None, "safety_identifier": None, "tool_choice": "auto",
}  # fmt: skip
"""Fields of a request that a response of the Responses API says again, and what it says where they are not sent."""

_KINDS = {COMPLETIONS: ("text_completion", "text_completion"), CHAT: ("chat.completion", "chat.completion.chunk")}
"""Names of whole replies, and of the parts of streams."""


class _End(NamedTuple):
    """The text of a choice, and how it ends, by its tokens and the client's stop strings."""

    text: str
    texts: list[str]  # of each token
    num: int  # of tokens, up to the end
    reason: str
    stop: str | int | None  # the string or token that ended it


@dataclass(frozen=True, slots=True)
class OwnReader:
    """Reads the answers in exchanges with this service."""

    model: ModelInfo  # that it serves
    tokenizer: Tokenizer  # of the same folder
    parsers: Parsers | None = None  # of reasoning and calls in its answers; None = the service's own find the calls

    def answers(self, exchange: Exchange, traces: Sequence[Record]) -> list[Answer]:
        """The answers of a complete reply, one a trace, in their order; those that differ say what does."""
        answers = [answer for trace in traces if (answer := trace.answer()) is not None]
        try:
            sent = json.loads(exchange.request)
            asked = ClientRequest.of(exchange.path, sent, self.model, self.tokenizer)
            comparison = _Comparison(exchange, sent, asked, traces, self.parsers)
        except Exception:  # of a request that the front end has taken; its answers are judged by their traces
            return answers
        found = comparison.differences()
        pairs = zip(answers, found, strict=False)
        return [
            replace(answer, wire="differs", broken_limit=f"{PREFIX}{why}") if why else replace(answer, wire="agrees")
            for answer, why in pairs
        ]


class _Comparison:
    """The comparison of one exchange."""

    def __init__(
        self, exchange: Exchange, sent: Json, asked: ClientRequest, traces: Sequence[Record], parsers: Parsers | None
    ) -> None:
        self._exchange, self._sent, self._asked, self._traces = exchange, sent, asked, traces
        self._tokenizer, self._model = asked.tokenizer, asked.model
        self._body, self._demands = asked.body, asked.demands
        choice: Any = self._body.get("tool_choice") or "auto"
        has_tools = asked.is_chat and bool(self._body.get("tools"))
        self._use: ToolUse = "none" if not has_tools else "named" if isinstance(choice, dict) else choice
        reads = parsers is not None and (parsers.reads_reasoning or (parsers.reads_tools and self._use == "auto"))
        self._reads_calls = parsers is not None and parsers.reads_tools
        self._reading: Reading | None = None
        if parsers is not None and reads and asked.is_chat:
            self._reading = parsers.reading(asked.chat_prompt(self._use), traces[0].request.prompt_token_ids)
        self._plain = self._use == "none" and self._reading is None
        self._ends = [self._end(trace) for trace in traces]

    def differences(self) -> list[str]:
        """What differs of each choice, in words; "" = nothing does."""
        try:
            reply = read_reply(self._exchange)
            found = _first(self._of_reply(reply))
            return [found or self._of_choice(reply, index) for index in range(len(self._traces))]
        except Exception as error:
            return [f"the reply cannot be read ({type(error).__name__})"] * len(self._traces)

    def _of_choice(self, reply: Reply, index: int) -> str:
        choice, wrong = reply.choices[index], ""
        with contextlib.suppress(Exception):  # of a body that the front end has taken
            wrong = _first(self._of_request(index))
        return (
            wrong
            or _first(self._of_text(choice, index))
            or _first(self._of_tokens(choice.wire, index))
            or self._broken_demand(choice, index)
        )

    # ---- the request

    def _of_request(self, index: int) -> Facts:
        number, choice = divmod(index, self._asked.num_choices)
        request = self._traces[index].request
        kept, right = engine_fields(request), self._asked.expected(choice, len(request.prompt_token_ids))
        for name, value in right.items():
            yield f"{name} of the engine's request", kept[name], value
        structure, wanted = request.params.structure, self._asked.structure
        thinks = wanted is not None and self._reading is not None and self._reading.thought_end
        if self._demands.functions or thinks:
            has_structure = structure is not None and structure.kind == "grammar"
        elif wanted is None or structure is None:
            has_structure = wanted is None and structure is None
        else:
            has_structure = wanted[0] == structure.kind and value_of(wanted[1]) == value_of(structure.text)
        yield "the structure of the engine's request", has_structure, True
        if self._sent.get("timeout") is not None:
            yield "timeout of the engine's request", (request.timeout_s or math.inf) <= self._sent["timeout"], True
        ids, first = request.prompt_token_ids, self._traces[index - choice].request.prompt_token_ids
        yield "the engine's prompt", ids == first and (choice > 0 or self._asked.has_prompt(ids, number)), True

    # ---- the reply as a whole

    def _of_reply(self, reply: Reply) -> Facts:
        asked, head = self._asked, reply.head
        indices = range(asked.num_choices * len(asked.prompts))
        # A whole reply has its choices in order; those of a stream come as they will.
        shown = sorted(reply.choices) if self._exchange.streamed else [*reply.choices]
        yield "the numbers of the choices", [reply.choices[one].wire.get("index") for one in shown], [*indices]
        yield "the number of the engine's requests", len(self._traces), len(indices)
        ids = [trace.request.request_id for trace in self._traces]
        named = self._sent.get("request_id") or ids[0].rpartition("-")[0]
        yield "the requests' ids", ids, [f"{ids[0].rpartition('-')[0]}-{index}" for index in indices]
        if self._exchange.path == GENERATE:
            yield "request_id", head["request_id"], named
        else:
            yield "id and model", (head["id"], head["model"]), (ids[0].rpartition("-")[0], self._sent["model"])
        yield "the kind of the reply", self._exchange.streamed, bool(self._sent.get("stream"))
        yield from self._of_usage(reply)
        made = {name for trace in self._traces for name in trace.weight_versions}
        about = head if self._exchange.path == RESPONSES else head.get("metadata") or {}
        if self._exchange.path != GENERATE:
            yield "weight_version", about["weight_version"] in made, True
        if self._exchange.path == RESPONSES:
            yield from self._of_response(reply)
        elif self._exchange.path != GENERATE:
            yield from of_completion(reply.parts, made, _KINDS[self._exchange.path][self._exchange.streamed])
            if self._exchange.streamed:
                yield "the stream's end", self._exchange.reply.endswith(b"data: [DONE]\n\n"), True
        if asked.is_chat or self._exchange.path == GENERATE:
            yield from self._of_prompt(head, 0)

    def _of_usage(self, reply: Reply) -> Facts:
        options = self._sent.get("stream_options") or {}
        if self._exchange.streamed and self._exchange.path != RESPONSES and not options.get("include_usage"):
            yield "the number of usages", len(reply.usages), 0
            return
        usage, traces, each = reply.usages[-1], self._traces, self._asked.num_choices
        details = usage["completion_tokens_details"]
        num_prompt = sum(len(trace.request.prompt_token_ids) for trace in traces[::each])
        num_tokens = sum(end.num for end in self._ends)
        counts = [one["completion_tokens"] for one in reply.usages]
        each_part = bool(self._exchange.streamed and options.get("continuous_usage_stats"))
        yield "the number of usages", len(counts), len(reply.parts) if each_part else 1
        yield "usage: prompt_tokens", usage["prompt_tokens"], num_prompt
        yield "usage: completion_tokens", usage["completion_tokens"], num_tokens
        yield "usage: total_tokens", usage["total_tokens"], num_prompt + num_tokens
        yield "usage: the counts of the stream", counts, sorted(counts)
        sums = [(one["prompt_tokens"], one["total_tokens"]) for one in reply.usages]
        yield "usage: the sums of the stream", sums, [(num_prompt, num_prompt + count) for count in counts]
        cached = sum(trace.num_cached for trace in traces[::each])
        yield "usage: cached_tokens", usage["prompt_tokens_details"]["cached_tokens"], cached
        pairs = [*zip(traces, self._ends, strict=True)]
        accepted = sum(trace.kinds[: end.num].count(TokenKind.ACCEPTED) for trace, end in pairs)
        one = len(traces) == 1 and traces[0].numerics.engine != "vllm"  # whose rounds may come together
        if one or all(end.num == len(trace.token_ids) for trace, end in pairs):
            rejected = sum(trace.num_drafted - trace.kinds.count(TokenKind.ACCEPTED) for trace in traces)
            yield "usage: accepted_prediction_tokens", details["accepted_prediction_tokens"], accepted
            yield "usage: rejected_prediction_tokens", details["rejected_prediction_tokens"], rejected

    def _of_response(self, reply: Reply) -> Facts:
        """The fields that only the Responses API has."""
        head, choice = reply.head, reply.choices[0]
        cut = self._ends[0].reason == "length"
        yield "status", head["status"], "incomplete" if cut else "completed"
        yield "incomplete_details", head["incomplete_details"], {"reason": "max_output_tokens"} if cut else None
        statuses = [item["status"] for item in head["output"]]
        yield "the items' status", statuses, ["completed"] * (len(statuses) - 1) + [head["status"]]
        for name, default in _REPEATED.items():
            yield f"the response's {name}", head[name], default if self._sent.get(name) is None else self._sent[name]
        for name in ("text", "tools", "reasoning"):
            yield f"the response's {name}", _repeats(head[name], self._sent.get(name)), True
        num = len(self._tokenizer.encode_continuation(choice.reasoning)) if choice.reasoning else 0
        yield "usage: reasoning_tokens", head["usage"]["completion_tokens_details"]["reasoning_tokens"], num
        yield from of_response(reply.parts, streamed=self._exchange.streamed)

    # ---- one choice

    def _of_text(self, wire: Choice, index: int) -> Facts:
        """Its text and how it ended."""
        end, use, path = self._ends[index], self._use, self._exchange.path
        if isinstance(end.stop, str) is False and self._asked.budget != 0:
            yield "the engine's end", self._traces[index].finish_reason, FinishReason(end.reason)
        chose = bool(wire.calls) and use != "named" and end.reason == "stop" and path == CHAT
        yield "finish_reason", wire.finish_reason, "tool_calls" if chose else end.reason
        if path in (COMPLETIONS, CHAT):
            yield "stop_reason", wire.wire.get("stop_reason"), end.stop
            if len(self._traces[index].weight_versions) == 1:
                computing, params = self._model.computing, self._traces[index].request.params
                fixed = params.greedy or params.reproducible or not params.speculate
                again = not computing.unrepeatable and (fixed or not computing.drafts_shift_draws)
                yield "reproducible", wire.wire.get("reproducible"), None if self._body.get("seed") is None else again
        if path == GENERATE:
            return
        content, reasoning = wire.text, wire.reasoning
        if self._plain:
            yield "its text", content, self._echoed(index) + end.text
            yield "its reasoning and its calls", (reasoning, wire.calls), ("", {})
        elif use in ("none", "auto"):
            mark = "" if self._reading is None else self._reading.thought_end or ""
            is_hidden = bool(mark) and self._shown is not None and mark not in end.text
            text = self._marked(index, mark) if is_hidden else end.text
            yield "its text", _is_told(text, content, reasoning, mark, bool(wire.calls)), True
            if mark in text and not (self._reads_calls or wire.calls) and use == "none":
                yield "its content", content.strip(), text.partition(mark)[2].strip()
        if use == "auto" or (use == "required" and self._shown is not None):  # else it may hold special tokens' texts
            lost = lost_part(end.text, self._asked.functions, wire, self._demands.max_calls)
            yield lost, bool(lost) and self._reading is None, False

    def _of_tokens(self, wire: Json, index: int) -> Facts:
        """Its tokens, and what is told of each."""
        body, trace, num = self._body, self._traces[index], self._ends[index].num
        shows, prompt = bool(body.get("return_token_ids")), list(trace.request.prompt_token_ids)
        entries = self._entries(index)
        path = self._exchange.path
        yield "token_ids", wire.get("token_ids"), trace.token_ids[:num] if shows else None
        kinds = [kind.value for kind in trace.kinds[:num]] if body.get("return_token_kinds") else None
        yield "token_kinds", wire.get("token_kinds"), kinds
        if path in (COMPLETIONS, CHAT):
            numbers = [one.logprob for one in entries] if shows and entries is not None else None
            yield "token_logprobs", wire.get("token_logprobs"), numbers
        if path == COMPLETIONS:
            yield "prompt_token_ids", wire.get("prompt_token_ids"), prompt if shows else None
            yield from self._of_prompt(wire, index)
        yield from self._of_logprobs(wire.get("logprobs"), entries, index)
        runs = wire.get("weight_versions") or ()
        if runs:
            told = [run["version"] for run in runs for _ in range(run["tokens"])]
            right = num, set(trace.weight_versions)
            yield "weight_versions", (len(told), set(told) | right[1]), right

    def _of_prompt(self, wire: Json, index: int) -> Facts:
        """The prompt's logprobs, as the reply or one of its choices has them."""
        trace, num = self._traces[index], self._body.get("prompt_logprobs")
        if self._asked.is_chat and self._exchange.path == CHAT:
            named = [*trace.request.prompt_token_ids] if self._body.get("return_token_ids") else None
            yield "prompt_token_ids", wire.get("prompt_token_ids"), named
        rows: Any = wire.get("prompt_logprobs")
        if num is None or index % self._asked.num_choices:
            yield "prompt_logprobs", rows, None
            return
        ids, beside_of = trace.request.prompt_token_ids[1:], _beside_of(trace)
        own = [_finite(one) for one in trace.prompt_logprobs]
        yield "prompt_logprobs of the first token", rows[:1], [None]
        yield "prompt_logprobs", [row[str(token)]["logprob"] for token, row in zip(ids, rows[1:], strict=True)], own
        for place, (token, row) in enumerate(zip(ids, rows[1:], strict=True), start=1):
            texts = [one["decoded_token"] for one in row.values()]
            right = [self._tokenizer.token_text(int(name)) for name in row]
            yield f"prompt_logprobs: the texts of token {place}", texts, right
            beside = beside_of(place)
            if beside is None:
                continue
            yield f"prompt_logprobs: the rank of token {place}", _can_rank(row[str(token)], beside), True
            top = [(one, _finite(value)) for one, value in beside.top[:num]]
            others = [(str(one), value, rank) for rank, (one, value) in enumerate(top, start=1) if one != token]
            shown = [(name, one["logprob"], one["rank"]) for name, one in row.items() if name != str(token)]
            yield f"prompt_logprobs of token {place}", shown, others

    def _of_logprobs(self, wire: Json | None, entries: "list[_Entry] | None", index: int) -> Facts:
        path = self._exchange.path
        if entries is None:
            yield "logprobs", wire if path != RESPONSES else (wire or {}).get("content") or None, None
            return
        assert wire is not None
        if path == COMPLETIONS:
            for name, values in self._columns(entries).items():
                yield f"logprobs: {name}", wire.get(name), values
            return
        rows = [self._row(one) for one in entries]
        if path == RESPONSES and not self._plain:  # those of calls belong to no message
            waiting = iter(row["logprob"] for row in rows)
            yield "logprobs", all(one["logprob"] in waiting for one in wire["content"]), True
            return
        yield "logprobs", [one.get("logprob") for one in wire["content"]], [one["logprob"] for one in rows]
        pairs = zip(wire["content"], rows, strict=True)
        told = [{name: one.get(name) for name in row} for one, row in pairs]
        yield "logprobs: what stands beside them", told, rows

    def _entries(self, index: int) -> "list[_Entry] | None":
        """What is told of each token, the echoed prompt's first; None = nothing was asked for."""
        asked, trace, end = self._asked, self._traces[index], self._ends[index]
        params, prompt = trace.request.params, trace.request.prompt_token_ids
        if asked.num_logprobs is None and not params.logprob_token_ids:
            return None
        echoed = self._echoed(index)
        offsets = list(accumulate(map(len, end.texts), initial=len(echoed)))
        own = zip(trace.token_ids[: end.num], trace.logprobs, offsets, strict=False)
        beside = _beside_of(trace)
        entries = [_Entry(*one, beside(place)) for place, one in enumerate(own, start=len(prompt))]
        if not self._body.get("echo") or asked.num_logprobs is None:
            return entries
        first = self._traces[index - index % asked.num_choices]
        texts = self._tokenizer.detokenizer(skip_special=False).push(prompt)
        known = "".join(texts) == echoed  # else some of it has another text alone
        before = accumulate(map(len, texts[:-1]), initial=0) if known else [None] * len(prompt)
        of_prompt = enumerate(zip(prompt, [None, *first.prompt_logprobs], before, strict=True))
        beside = _beside_of(first)
        return [*(_Entry(*one, beside(place)) for place, one in of_prompt), *entries]

    def _row(self, one: "_Entry") -> Json:
        """An entry of a chat, or of generation from tokens."""
        top = None if one.beside is None else [self._named(*pair) for pair in one.beside.top]
        row = self._named(one.token, one.logprob) | ({} if top is None else {"top_logprobs": top})
        if self._exchange.path == GENERATE or one.beside is None:
            return row
        return row | {"scored": _by_id(one.beside) or None}

    def _named(self, token: int, logprob: float | None) -> Json:
        if self._exchange.path == GENERATE:
            return {"token_id": token, "logprob": _finite(logprob)}
        return {"token": self._name(token), "logprob": _finite(logprob), "bytes": [*self._tokenizer.token_bytes(token)]}

    def _name(self, token: int) -> str:
        as_ids = self._body.get("return_tokens_as_token_ids")
        return f"token_id:{token}" if as_ids else self._tokenizer.token_text(token)

    def _columns(self, entries: "Sequence[_Entry]") -> dict[str, list[Any]]:
        """The lists of a completion's logprobs, as far as they are known; of entries without an offset it is any."""
        columns: dict[str, list[Any]] = {
            "tokens": [self._name(one.token) for one in entries],
            "token_logprobs": [_finite(one.logprob) for one in entries],
        }
        if all(one.beside is not None for one in entries):
            columns["top_logprobs"] = [self._top(one) for one in entries]
            if self._body.get("logprob_token_ids"):
                columns["scored_logprobs"] = [_by_id(one.beside) for one in entries if one.beside is not None]
        if all(one.offset is not None for one in entries):
            columns["text_offset"] = [one.offset for one in entries]
        return columns

    def _top(self, one: "_Entry") -> dict[str, float | None] | None:
        """The likeliest tokens by their texts, of which the first counts, and the emitted one."""
        if one.logprob is None or one.beside is None:
            return None
        pairs = [*one.beside.top[: self._body.get("logprobs") or 0], (one.token, one.logprob)]
        return {self._name(token): _finite(value) for token, value in reversed(pairs)}

    def _echoed(self, index: int) -> str:
        """The text of the prompt that stands before a choice's own; "" = none does."""
        if not self._body.get("echo"):
            return ""
        prompt = self._asked.prompts[index // self._asked.num_choices]
        if isinstance(prompt, str) and self._body.get("truncate_prompt_tokens") is None:
            return prompt
        return self._tokenizer.decode(self._traces[index].request.prompt_token_ids, skip_special=False)

    def _end(self, trace: Record) -> _End:
        """Return what a choice says and how it ends, by its tokens alone."""
        if self._asked.budget == 0:
            return _End("", [], 0, "length", None)
        body, ids, params, shown = self._body, trace.token_ids, trace.request.params, self._shown
        stops, includes = self._demands.stops, bool(body.get("include_stop_str_in_output"))
        ends = {*(body.get("stop_token_ids") or ()), *(() if body.get("ignore_eos") else self._model.eos_token_ids)}
        ended = bool(ids) and ids[-1] in ends
        detokenizer = self._tokenizer.detokenizer(skip_special=shown is not None, shown=shown or (), continuation=True)
        texts = detokenizer.push(ids[:-1] if ended and not includes else ids)
        texts += [""] * (len(ids) - len(texts))
        start, whole = sum(map(len, texts[: params.min_tokens])), "".join(texts) + detokenizer.finish()
        found = [(at + len(stop), at, stop) for stop in stops if (at := whole.find(stop, start)) >= 0]
        if not found:
            own = self._tokenizer.eos_token_id if not body.get("ignore_eos") else None
            token = ids[-1] if ended and ids[-1] != own else None
            return _End(whole, texts, len(ids), "stop" if ended else "length", token)
        last, at, stop = min(found)
        before = accumulate(map(len, texts))
        num = next((number for number, size in enumerate(before, start=1) if size >= last), len(ids))
        return _End(whole[: last if includes else at], texts[:num], num, "stop", stop)

    @property
    def _shown(self) -> Sequence[str] | None:
        """The special tokens that an answer's text has; None = all of them."""
        if self._body.get("skip_special_tokens") is False or (
            self._reading is not None and self._reading.keeps_special
        ):
            return None
        return _CALL_MARKS if self._use == "auto" and not self._reads_calls else ()

    def _marked(self, index: int, mark: str) -> str:
        """The text of a choice with what ends its reasoning, where that is a token without a text."""
        detokenizer = self._tokenizer.detokenizer(shown=(*(self._shown or ()), mark), continuation=True)
        texts = detokenizer.push(self._traces[index].token_ids[: self._ends[index].num])
        return "".join(texts) + detokenizer.finish()

    def _broken_demand(self, wire: Choice, index: int) -> str:
        """Return which demand of its client a choice breaks, in words; "" = none."""
        end, trace, reading = self._ends[index], self._traces[index], self._reading
        if self._asked.budget == 0:
            return ""
        stop = end.stop if isinstance(end.stop, str) else None
        text, calls = (end.text, {}) if self._plain else (wire.text, wire.calls)
        choice = replace(wire, text=text, calls=calls, finish_reason=end.reason, stopped_by=stop)
        mark = "" if reading is None else reading.thought_end or ""
        made = Made(trace.token_ids[: end.num], loses_text=reading is not None, mark=mark)
        return self._demands.broken_form(choice, made)


class _Entry(NamedTuple):
    """A token and its logprob; the characters before it, and what stands beside it, None = that is not known."""

    token: int
    logprob: float | None
    offset: int | None
    beside: Alternatives | None


def _beside_of(trace: Record) -> Callable[[int], Alternatives | None]:
    """What the engine reported beside the logprob in a place of prompt and answer; None = it is not kept."""
    params, num_prompt = trace.request.params, len(trace.request.prompt_token_ids)
    known = {one.place: one for one in trace.alternatives.kept}

    def beside(place: int) -> Alternatives | None:
        asked = params.prompt_logprobs if place < num_prompt else params.logprobs or params.logprob_token_ids
        return known.get(place) if place and asked else Alternatives(place)

    return beside


def _first(facts: Facts) -> str:
    """The first that differs, in words; "" = none does."""
    for name, sent, right in facts:
        if sent != right:
            numbers = all(type(one) in (int, float) for one in (sent, right))
            return f"{name} is {sent}, and has to be {right}" if numbers else f"{name} is not what it has to be"
    return ""


def _can_rank(entry: Json, beside: Alternatives) -> bool:
    """Return whether a token of the prompt can have its rank, beside the likeliest; engines count ties differently."""
    values, own = [value for _, value in beside.top if value is not None], entry["logprob"]
    likelier = sum(value > own for value in values)
    most = likelier + values.count(own) if values and own > values[-1] else math.inf
    return bool(likelier < entry["rank"] <= most)


def _repeats(returned: Any, sent: Any) -> bool:
    """Return whether a setting that a response says again is as it was sent, as far as it is said."""
    if isinstance(sent, dict):
        own = [name for name in sent if name in returned and sent[name] is not None and name not in _ELSEWHERE]
        return all(_repeats(returned[name], sent[name]) for name in own)
    if isinstance(sent, list):
        return len(returned) == len(sent) and all(map(_repeats, returned, sent))
    return sent is None or bool(returned == sent)


def _is_told(text: str, content: str, reasoning: str, mark: str, called: bool) -> bool:
    """Return whether content and reasoning are parts of a text, in the order in which a parser finds them.

    Args:
        mark: what ends the reasoning; "" = it is not known.
        called: whether calls were found, which may stand between parts of the content.
    """
    at = text.find(reasoning.strip())
    rest = text[at + len(reasoning.strip()) :] if at >= 0 else ""
    if mark and mark in text:
        rest = text.partition(mark)[2]
    waiting = iter(rest)
    is_there = all(one in waiting for one in content.strip()) if called else content.strip() in rest
    return at >= 0 and is_there


def _by_id(beside: Alternatives) -> dict[str, float | None]:
    return {str(token): _finite(logprob) for token, logprob in beside.scored}


def _finite(logprob: float | None) -> float | None:
    return _MASKED if logprob == -math.inf else logprob
