"""Runs a referee: over records that were kept, or as a server to which a proxy sends what it captures."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from deploy.watch.exchanges import Exchange
from deploy.watch.referee import Referee, RefereeOptions
from deploy.watch.replayers import ReplayerOptions, make_replayer

Report = Callable[[str], None]

_REPORT_EVERY = 1000  # answers


@contextlib.asynccontextmanager
async def running_referee(options: RefereeOptions, replayer_options: ReplayerOptions) -> AsyncIterator[Referee]:
    """A referee with its engine, at work until the block ends."""
    log = logging.getLogger("truespec.referee")
    level = log.level
    log.setLevel(logging.ERROR)  # it would repeat what the findings say
    replayer = make_replayer(replayer_options)
    try:
        model = await replayer.start()
        referee = Referee(options, model, replayer)
        work = asyncio.create_task(referee.run())
        try:
            yield referee
        finally:
            work.cancel()
            await asyncio.wait([work])
    finally:
        log.setLevel(level)
        await replayer.stop()


def judge_records(
    records: Iterator[Exchange | str], options: RefereeOptions, replayer: ReplayerOptions, say: Report
) -> dict[str, Any]:
    """Judge every record, and return the report."""
    return asyncio.run(_judge_records(records, options, replayer, say))


async def _judge_records(
    records: Iterator[Exchange | str], options: RefereeOptions, replayer_options: ReplayerOptions, say: Report
) -> dict[str, Any]:
    async with running_referee(options, replayer_options) as referee:
        room = asyncio.Semaphore(options.max_queue // 2)  # choices of one record wait together
        tasks: set[asyncio.Task[None]] = set()

        async def judge(exchange: Exchange) -> None:
            try:
                await referee.judge(exchange)
            finally:
                room.release()

        for number, record in enumerate(records, start=1):
            if isinstance(record, str):
                referee.leave_out(record)
                continue
            await room.acquire()
            task = asyncio.create_task(judge(record))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if number % _REPORT_EVERY == 0:
                say(f"{number:,} records read")
        if tasks:
            await asyncio.gather(*tasks)
        return referee.report()
