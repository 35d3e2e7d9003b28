"""Takes requests of the Responses API in: each becomes a chat request, and its answer a response, which may be kept."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.errors import PreviousResponseNotFound, UnknownResponse, UnsupportedParameter
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.frontend import FrontEnd
from serve_app.openai.off_loop import off_loop
from serve_app.openai.parsing import in_words
from serve_app.openai.plan import Planned
from serve_app.openai.responses.kept_responses import KeptResponses
from serve_app.openai.responses.response_items import AnyItem, Conversation, ItemReference, items_from
from serve_app.openai.responses.response_objects import Fields, ResponsesFormat, response_of
from serve_app.openai.responses.response_requests import ResponsesRequest
from speculative.errors import InvalidRequest

_NOTHING_KEPT = "this server keeps no responses; set responses.max_mib in its configuration"


@dataclass(slots=True)
class ResponsesAdapter:
    """The Responses API over a front end."""

    front_end: FrontEnd  # answers the chat requests
    kept: KeptResponses | None = None  # where responses are kept; None = nothing is

    async def prepare(self, wire: ResponsesRequest, owner: str, timeout_s: float | None = None) -> Planned:
        """Check a request and tokenise it; `owner` is whose responses it may refer to. Raises InvalidRequest: it can
        never be served; `field` names what is wrong."""
        earlier: Sequence[AnyItem] = ()
        if (response_id := wire.previous_response_id) is not None:
            name = "previous_response_id"
            if self.kept is None:
                raise UnsupportedParameter(name, f"{name}: {_NOTHING_KEPT}, or send all items of the conversation.")
            found = await self._find(response_id, owner)
            if found is None:
                raise PreviousResponseNotFound(
                    name, f"{name}: {self._unknown(response_id)} Send all items of the conversation instead."
                )
            said = [*found["items"], *found["response"]["output"]]
            earlier = await off_loop(said, lambda: items_from(said))
        items = [await self._referred(item, f"input.{number}", owner) for number, item in enumerate(wire.items)]
        conversation, chat = await off_loop([wire, *earlier], lambda: self._as_chat(wire, earlier, items))
        stores = self.kept is not None and wire.store is not False

        async def keep(response: Fields) -> bool:
            """Keep it with the conversation before it, so that it outlives the responses that this went on from."""
            assert self.kept is not None
            said = [item.model_dump(exclude_none=True, by_alias=True) for item in (*earlier, *items)]
            record = {"response": response | {"store": True}, "items": said}
            return await self.kept.put(response["id"], owner, json.dumps(record).encode())

        form = ResponsesFormat(wire.echo(), stores, keep, self.front_end.count_tokens)
        return await self.front_end.prepare(chat, form, conversation.in_our_words, timeout_s=timeout_s)

    @staticmethod
    def _as_chat(
        wire: ResponsesRequest, earlier: Sequence[AnyItem], items: Sequence[AnyItem]
    ) -> tuple[Conversation, ChatCompletionRequest]:
        conversation = wire.conversation(earlier, items)
        with in_words(conversation.in_our_words):
            chat = wire.as_chat(conversation)
            chat.check_together()
        return conversation, chat

    async def show(self, response_id: str, owner: str) -> Fields:
        """A response that was kept. Raises UnknownResponse: there is none of that id."""
        kept = await self._find(response_id, owner)
        if kept is None:
            raise self._unknown(response_id)
        response: Fields = kept["response"]
        return response

    async def delete(self, response_id: str, owner: str) -> Fields:
        """Forget a response. Raises UnknownResponse: there is none of that id."""
        if self.kept is None or not await self.kept.delete(response_id, owner):
            raise self._unknown(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    def _unknown(self, response_id: str) -> UnknownResponse:
        what = f"There is no response '{response_id[:100]}' here"
        if self.kept is None:
            return UnknownResponse(f"{what}: {_NOTHING_KEPT}.")
        return UnknownResponse(f"{what}: it was never kept, was deleted, or is too old.")

    async def _find(self, response_id: str, owner: str) -> Fields | None:
        record = None if self.kept is None else await self.kept.get(response_id, owner)
        if record is None:
            return None
        found: Fields = json.loads(record)
        return found

    async def _referred(self, item: AnyItem, path: str, owner: str) -> AnyItem:
        """Return what an item refers to; itself, where it is no reference."""
        if not isinstance(item, ItemReference):
            return item
        if self.kept is None:
            raise UnsupportedParameter(path, f"{path}: item_reference: {_NOTHING_KEPT}, or send the item itself.")
        found = await self._find(response_of(item.id), owner)
        for one in found["response"]["output"] if found is not None else ():
            if one["id"] == item.id:
                return items_from([one])[0]
        raise InvalidRequest(path, f"{path}: there is no item '{item.id[:100]}' here; send the item itself.")
