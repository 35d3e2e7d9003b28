"""The bytes that the strings of a tokenizer's tokens stand for: the `decoder` of its tokenizer.json."""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from speculative.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BY_BYTE = "truespec.replaced_by_byte"
_KEEPING = {"Sequence", "NFC", "ByteLevel", "Digits", "Split"}  # steps that lose nothing of a text
_MOST_COMPOSED = 4  # bytes that NFC makes one, at most


def _replaced_by_byte(error: UnicodeError) -> tuple[str, int]:
    """Return U+FFFD for each byte, as ByteFallback does. ByteFallback also loses the characters before them in a run of
    bytes; those have been shown by then and stay here."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_BY_BYTE, _replaced_by_byte)


@dataclass(frozen=True, slots=True)
class ByteScheme:
    """The bytes that token strings stand for.

    byte_level: whether a token is spelled in GPT-2's stand-ins for bytes, so that an added token, which is plain text,
        must not be read like the others.
    """

    to_bytes: Callable[[str], bytes]  # of one token
    first_to_bytes: Callable[[str], bytes]  # of a text's first token
    stripped: str = " "  # the character dropped at the start of a decoded text
    num_stripped: int = 0  # the most of it that are dropped
    byte_level: bool = False
    errors: str = "replace"  # name in `codecs` of the handler of bytes that form no character

    @classmethod
    def read(cls, decoder: Mapping[str, Any] | None) -> "ByteScheme":
        """Read the scheme from the `decoder` section of a tokenizer.json. Raises UnsupportedModel: it is none that is
        known."""
        steps = _flattened(decoder)
        kinds = [step["type"] for step in steps]
        if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
            return cls(byte_level_bytes, byte_level_bytes, byte_level=True)
        strip = steps.pop() if kinds[-2:] == ["Fuse", "Strip"] else {}
        readable = all(map(_is_readable, steps)) and not strip.get("stop") and len(strip.get("content", " ")) == 1
        if not steps or not readable:
            raise UnsupportedModel(
                f"tokenizer.json: the `decoder` is {decoder}; known are ByteLevel, Metaspace, and sentencepiece's "
                "chain of Replace (of a text), ByteFallback, Fuse and Strip (at the start). Convert the tokenizer, or "
                "serve another model."
            )
        falls_back = "ByteFallback" in kinds
        changes, first_changes = ([_change(step, first=first) for step in steps] for first in (False, True))
        return cls(
            lambda token: _bytes_of(token, changes, falls_back),
            lambda token: _bytes_of(token, first_changes, falls_back),
            strip.get("content", " "),
            strip.get("start", 0),
            errors=_BY_BYTE if falls_back else "replace",
        )


def byte_level_bytes(token: str) -> bytes:
    """A token in GPT-2's stand-ins for bytes; one with any other character is plain text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def longest_token(core: RawTokenizer) -> tuple[int, bytes] | None:
    """Return the most bytes of a text that one token stands for, and the bytes that none has, which may be left out;
    None = unknown, as of a tokenizer that does not work on bytes, or changes a text by steps that may lose some."""
    vocabulary, added = core.get_vocab(with_added_tokens=False), core.get_added_tokens_decoder().values()
    lost = bytes(byte for character, byte in _BYTE_OF_CHARACTER.items() if character not in vocabulary)
    steps = "".join(step.__getstate__().decode() for step in (core.normalizer, core.pre_tokenizer) if step is not None)
    kinds = set(re.findall(r'"type":"(\w+)"', steps))
    keeps_all = "ByteLevel" in kinds and kinds <= _KEEPING and "Removed" not in steps and not (lost and "NFC" in kinds)
    if not isinstance(core.model, BPE) or not keeps_all or any(token.lstrip or token.rstrip for token in added):
        return None
    longest = max([*map(len, vocabulary), *(len(token.content.encode()) for token in added)])
    return longest * (_MOST_COMPOSED if "NFC" in kinds else 1), lost


def _flattened(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flattened(part)]


def _is_readable(step: Mapping[str, Any]) -> bool:
    """Return whether a step is known; replacements are, where they are of a text and not of a regular expression."""
    is_of_text = step["type"] == "Replace" and bool(step["pattern"].get("String"))
    return is_of_text or step["type"] in ("Metaspace", "ByteFallback", "Fuse")


def _change(step: Mapping[str, Any], *, first: bool) -> tuple[str, str] | None:
    """A text, and what a step puts in its place in a token, or in the first one of a text."""
    if step["type"] == "Replace":
        return step["pattern"]["String"], step["content"]
    if step["type"] == "Metaspace":
        return step["replacement"], "" if first and step["prepend_scheme"] != "never" else " "
    return None


def _bytes_of(token: str, changes: Sequence[tuple[str, str] | None], falls_back: bool) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token) if falls_back else None
    if byte is not None:
        return bytes([int(byte[1], 16)])
    for old, new in filter(None, changes):
        token = token.replace(old, new)
    return token.encode()


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_table()
