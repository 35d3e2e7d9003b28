"""Test helper: responses kept in this process."""

from serve_app.openai.kept_responses import ResponseStore


class KeptInMemory:
    """What the controller is to the service: a store behind calls (a `KeptResponses`)."""

    def __init__(self, max_bytes: int = 10**6) -> None:
        self.store = ResponseStore(max_bytes, 60.0)

    async def put(self, response_id: str, owner: str, record: bytes) -> bool:
        return self.store.put(response_id, owner, record)

    async def get(self, response_id: str, owner: str) -> bytes | None:
        return self.store.get(response_id, owner)

    async def delete(self, response_id: str, owner: str) -> bool:
        return self.store.delete(response_id, owner)
