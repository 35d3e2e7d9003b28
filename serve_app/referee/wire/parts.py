"""Replies of our own service part by part, as clients read them: whatever several parts say is said alike, and in its
place."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from serve_app.referee.wire.reply import Json

Facts = Iterator[tuple[str, Any, Any]]
"""What is compared: its name, the value that went over the wire, and the right one."""

_HEAD = ("id", "object", "created", "model")
_BEGUN: Json = {"status": "in_progress", "output": [], "usage": None, "completed_at": None, "incomplete_details": None}
_LATER = ("store", "system_fingerprint", "weight_version")
_STEMS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


def of_completion(parts: Sequence[Json], versions: Collection[str], kind: str) -> Facts:
    """The facts of a completion or a chat, whole or in chunks.

    Args:
        versions: of the weights that made it.
        kind: the name of its parts.
    """
    yield "the kind of a part", {part["object"] for part in parts}, {kind}
    yield "the number of heads", len({tuple(part[name] for name in _HEAD) for part in parts}), 1
    named = {part["metadata"]["weight_version"] for part in parts if part.get("metadata")}
    yield "weight_version of a part", named <= {*versions}, True
    chunks: dict[int, list[Json]] = {}
    for part in parts:
        for choice in part["choices"]:
            chunks.setdefault(choice["index"], []).append(choice)
    for own in chunks.values():
        yield "finish_reason before the end", [one for one in own[:-1] if one["finish_reason"] is not None], []
        if kind != "text_completion":
            messages = [one.get("message") or one["delta"] for one in own]
            yield "the roles", [one.get("role") for one in messages], ["assistant", *[None] * (len(messages) - 1)]
            calls: dict[int, Json] = {}
            for message in messages:
                for number, call in enumerate(message.get("tool_calls") or ()):
                    calls.setdefault(call.get("index", number), call)
            yield "the kinds of its calls", {call["type"] for call in calls.values()} <= {"function"}, True
            yield from _of_ids("its calls", [call["id"] for call in calls.values()])


def of_response(parts: Sequence[Json], *, streamed: bool) -> Facts:
    """The facts of a response of the Responses API, whole or in events."""
    last = parts[-1].get("response") or parts[-1]
    items = last["output"]
    yield from _of_ids("the items", [item["id"] for item in items])
    yield from _of_ids("its calls", [item["call_id"] for item in items if item["type"] == "function_call"])
    yield "the roles", {item["role"] for item in items if item["type"] == "message"} <= {"assistant"}, True
    if not streamed:
        return
    yield "the numbers of the events", [part["sequence_number"] for part in parts], [*range(len(parts))]
    *events, end = [{name: part[name] for name in part if name != "sequence_number"} for part in parts]
    yield "the event that ends the response", end["type"], f"response.{last['status']}"
    kinds = [event["type"] for event in events[:2]]
    yield "the events that begin the response", kinds, ["response.created", "response.in_progress"]
    for event in events[:2]:
        begun = {name: value for name, value in event["response"].items() if name not in _LATER}
        yield "the response as it begins", begun, {name: (last | _BEGUN)[name] for name in begun}
    deltas = [event for event in events if event["type"].endswith(".delta")]
    others = [event for event in events[2:] if not event["type"].endswith(".delta")]
    yield "the events of its items", others, [event for at, item in enumerate(items) for event in _events(at, item)]
    for at, item in enumerate(items):
        text, logprobs = _said(item)
        own = [event for event in deltas if event["output_index"] == at]
        yield "the places of the deltas", {event["item_id"] for event in own} <= {item["id"]}, True
        yield "the texts of the deltas", "".join(event["delta"] for event in own), text
        yield "logprobs of the deltas", [one for event in own for one in event.get("logprobs", ())], logprobs


def _of_ids(whose: str, ids: Sequence[str]) -> Facts:
    yield f"the number of ids of {whose}", len({*filter(None, ids)}), len(ids)


def _said(item: Json) -> tuple[str, list[Json]]:
    if item["type"] == "function_call":
        return item["arguments"], []
    return item["content"][0]["text"], item["content"][0].get("logprobs", [])


def _events(at: int, item: Json) -> Iterator[Json]:
    """The events of an item without its deltas."""
    is_call, stem = item["type"] == "function_call", f"response.{_STEMS[item['type']]}"
    place = {"item_id": item["id"], "output_index": at} | ({} if is_call else {"content_index": 0})
    begun: Json = {"status": "in_progress", **({"arguments": ""} if is_call else {"content": []})}
    yield {"type": "response.output_item.added", "output_index": at, "item": item | begun}
    if is_call:
        yield {"type": f"{stem}.done", **place, "name": item["name"], "arguments": item["arguments"]}
    else:
        (part,) = item["content"]
        empty = part | {"text": ""} | ({"logprobs": []} if "logprobs" in part else {})
        yield {"type": "response.content_part.added", **place, "part": empty}
        shown = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield {"type": f"{stem}.done", **place, **shown}
        yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "output_index": at, "item": item}
