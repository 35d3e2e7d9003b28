"""Headers on their way through the proxy: all in their order, without those of a single connection."""

from multidict import CIMultiDict, MultiMapping

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


def passed_on(headers: MultiMapping[str], *, without: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """The headers for the other side. without: lower-case names of more that stay behind."""
    gone = _OF_A_CONNECTION | without
    if connection := headers.get("Connection"):
        gone |= {name.strip().lower() for name in connection.split(",")}
    return CIMultiDict([(name, value) for name, value in headers.items() if name.lower() not in gone])


def with_length(headers: CIMultiDict[str], length: int) -> CIMultiDict[str]:
    """The same with another Content-Length, in its place, if there is one."""
    return CIMultiDict(
        [(name, str(length) if name.lower() == "content-length" else value) for name, value in headers.items()]
    )
