"""Reads the body of a request, no further than a limit."""

import asyncio

from fastapi import Request

from serve_app.errors import BodyTimeout, BodyTooLarge
from serve_app.openai.off_loop import off_loop
from serve_app.openai.parsing import parse
from serve_app.openai.wire import W

_MAX_ORDER_BYTES = 4096  # of what an operator or trainer orders
_BODY_TIMEOUT_S = 30.0  # for all of a body to come


async def read_order(request: Request, kind: type[W]) -> W:
    """An operator's or trainer's order; a body that is empty sets nothing."""
    return parse(await read_body(request, _MAX_ORDER_BYTES) or b"{}", kind)


async def read_wire(request: Request, kind: type[W], most: int) -> W:
    """A client's request, of so many bytes at most."""
    body = await read_body(request, most)
    return await off_loop(body, lambda: parse(body, kind))


async def read_body(request: Request, most: int) -> bytes:
    """The body, read no further than the limit."""
    too_large = BodyTooLarge("", f"The body is longer than {most} bytes. Shorten the prompt or send fewer at once.")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > most:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise too_large
            return bytes(body)
    except TimeoutError as error:
        raise BodyTimeout(f"The body did not come within {_BODY_TIMEOUT_S:g} s.") from error
