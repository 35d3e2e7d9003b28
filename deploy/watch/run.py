"""Runs a referee: over records that were kept, or as a server to which a proxy sends what it captures."""

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from deploy.reports.progress import View
from deploy.run.replayers import ReplayerOptions, make_replayer
from deploy.watch.referee import Referee, RefereeOptions
from serve_app.referee.wire.exchange import Exchange

_READ_AHEAD = 64  # records


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


async def judge_records(
    records: Iterator[Exchange | str], options: RefereeOptions, replayer_options: ReplayerOptions, view: View
) -> dict[str, Any]:
    """Judge every record, and return the report; after Ctrl-C it is about those judged by then, and `interrupted`."""
    view.stage("loading the model")
    async with running_referee(options, replayer_options) as referee:
        interrupted, num_read = False, 0
        room = asyncio.Semaphore(options.max_queue // 2)  # choices of one record wait together

        def note() -> str:
            found = referee.first_finding
            return f"{num_read:,} records read, {referee.judged.num_answers:,} answers judged; found so far: " + (
                found.found if found else "nothing"
            )

        async def judge(exchange: Exchange) -> None:
            try:
                await referee.judge(exchange)
            finally:
                room.release()

        view.stage("judging", note)
        try:
            async with asyncio.TaskGroup() as tasks:
                async for record in _read_ahead(records):
                    num_read += 1
                    if isinstance(record, str):
                        referee.leave_out(record)
                        continue
                    await room.acquire()
                    tasks.create_task(judge(record))
        except asyncio.CancelledError:
            interrupted = True
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return referee.report() | {"interrupted": interrupted}


async def _read_ahead(records: Iterator[Exchange | str]) -> AsyncIterator[Exchange | str]:
    """The records, read in a thread: standard input may keep its reader waiting, and meanwhile answers are judged."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[Exchange | str | BaseException | None](_READ_AHEAD)

    def put(read: Exchange | str | BaseException | None) -> None:
        asyncio.run_coroutine_threadsafe(queue.put(read), loop).result()

    def read_all() -> None:
        with contextlib.suppress(RuntimeError, concurrent.futures.CancelledError):  # the loop has ended
            try:
                for record in records:
                    put(record)
                put(None)
            except Exception as error:
                put(error)

    threading.Thread(target=read_all, name="records", daemon=True).start()
    while (read := await queue.get()) is not None:
        if isinstance(read, BaseException):
            raise read
        yield read
