"""The protocol of everything that computes answers again: engines, `transformers`, actors on Ray."""

from typing import Protocol

from serve_app.backends.base import Replayed
from speculative.request import Request


class Replayer(Protocol):
    """Computes what was generated again, given prompt and answer.

    `tests/support/replayer_conformance.py` is what each passes. Its method is called from one asyncio loop:

        replayed = await replayer.replay(answer.scored("replay-1"))
        judgement = judge.judge(answer, replayed)
    """

    async def replay(self, request: Request) -> Replayed:
        """Compute a request that has `score_from`, on fresh KV and without speculation.

        Of each token from there on: its raw logprob (nats), and where it lies in the distribution that the request's
        parameters demand; `Replayed.replayed` is None where only logprobs can be computed.

        Raises:
            InvalidRequest: of field `prompt`, where an id is no token of the model.
            SequenceTooLong: the model takes fewer tokens.
        """
        ...
