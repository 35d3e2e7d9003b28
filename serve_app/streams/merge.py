"""Many streams as one, in the order in which their items arrive."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of several async generators as they come, each generator's in order; a single one is returned as it is.

    An error of one ends all. Closing closes all of them; at most one item of each waits to be taken.
    """
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    arrived: asyncio.Queue[tuple[T, ...] | Exception] = asyncio.Queue(maxsize=len(streams))  # () = a stream ended
    pumps = [asyncio.create_task(_pump(stream, arrived)) for stream in streams]
    try:
        running = len(pumps)
        while running:
            items = await arrived.get()
            if isinstance(items, Exception):
                raise items
            for item in items:
                yield item
            running -= not items
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(stream: AsyncGenerator[T, None], arrived: "asyncio.Queue[tuple[T, ...] | Exception]") -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await arrived.put((item,))
    except Exception as error:
        await arrived.put(error)
    else:
        await arrived.put(())
