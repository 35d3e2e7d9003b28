"""Headers on their way through the proxy: all in their order, without those of a single connection."""

from collections.abc import Sequence

from multidict import CIMultiDict

Raw = Sequence[tuple[bytes, bytes]]
"""Names and values as they came."""

_OF_A_CONNECTION = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


def passed_on(raw: Raw, *, without: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """The headers for the other side. without: lower-case names of more that stay behind."""
    headers = [
        (name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape")) for name, value in raw
    ]
    gone = _OF_A_CONNECTION | without
    for name, value in headers:
        if name.lower() == "connection":
            gone |= {one.strip().lower() for one in value.split(",")}
    return CIMultiDict([(name, value) for name, value in headers if name.lower() not in gone])


def with_length(headers: CIMultiDict[str], length: int) -> CIMultiDict[str]:
    """The same with another Content-Length, in its place, if there is one."""
    return CIMultiDict(
        [(name, str(length) if name.lower() == "content-length" else value) for name, value in headers.items()]
    )
