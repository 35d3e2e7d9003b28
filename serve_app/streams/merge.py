"""Many streams as one, in the order in which their items arrive."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of several async generators as they come, each generator's in order; a single one is returned as it is.

    An error of one ends all. Closing closes all of them; at most one item of each waits to be taken.
    """
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    arrived: asyncio.Queue[_Arrival[T]] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(stream, arrived)) for stream in streams]
    try:
        running = len(pumps)
        while running:
            arrival = await arrived.get()
            if arrival.error is not None:
                raise arrival.error
            for item in arrival.items:
                yield item
            running -= not arrival.items
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Arrival(Generic[T]):
    items: tuple[T, ...] = ()  # none: the stream ended
    error: Exception | None = None


async def _pump(stream: AsyncGenerator[T, None], arrived: "asyncio.Queue[_Arrival[T]]") -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await arrived.put(_Arrival((item,)))
    except Exception as error:
        await arrived.put(_Arrival(error=error))
    else:
        await arrived.put(_Arrival())
