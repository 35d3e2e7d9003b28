"""Text to token ids and back, token by token, without ever showing half a character."""

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from speculative.errors import ConfigError, InvalidRequest, UnsupportedModel

SHIPPED_TEMPLATES = Path(__file__).parents[1] / "chat_templates"
"""Chat templates that come with the package: as `model.chat_template`, each is known by its file's name."""

# What a template may raise on what a client sent: itself, or by a call or an operation that does not fit.
_FAULTS_OF_A_TEMPLATE = (
    *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError),
)

_PROBE = "Hello, wörld!  \n\tdef f(x): return x\r\n你好 🙂 é ▁ don't"


class Tokenizer:
    """A model's tokenizer.

    Decoding goes through one table, token id to bytes, so that a text decoded at once and the same text decoded token
    by token are equal by construction. Encoding never changes the tokenizer: any thread may call it.
    """

    def __init__(self, wrapped: Any, generation_eos: Sequence[int] = ()) -> None:
        """Wrap a fast tokenizer of `transformers`; `generation_eos` are its generation config's end tokens."""
        self._wrapped = wrapped
        self._core = wrapped.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        self._scheme = _ByteScheme.read(json.loads(self._core.to_str())["decoder"])
        self._bytes: dict[int, bytes] = {}
        self._templates: dict[bool, ChatTemplate] = {}
        added = self._core.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token.content: token_id for token_id, token in added.items()}
        own_eos = () if wrapped.eos_token_id is None else (int(wrapped.eos_token_id),)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*generation_eos, *own_eos)))
        self.vocab_size: int = max(self._core.get_vocab(with_added_tokens=True).values()) + 1
        self.prefix_ids: tuple[int, ...] = self._read_prefix()
        """The tokens that the model wants at the start of a text."""
        self._check_decoding()

    def _read_prefix(self) -> tuple[int, ...]:
        bare, whole = self.encode("x", continuation=True), self.encode("x")
        return tuple(whole[: len(whole) - len(bare)]) if whole[-len(bare) :] == bare else ()

    @classmethod
    def from_folder(cls, path: str | Path, chat_template: str | None = None) -> "Tokenizer":
        """Load the tokenizer of a local Hugging Face folder; `chat_template` replaces its own template: a
        file, or a name of `shipped_templates`.

        Raises:
            ConfigError: the folder holds no fast tokenizer, or the file no template.
            UnsupportedModel: the tokenizer decodes in a way this class does not know.
        """
        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"{folder} holds no tokenizer.json. Name a folder with a fast tokenizer.")
        wrapped = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if chat_template is not None:
            wrapped.chat_template = _read_template(chat_template)
        return cls(wrapped, _generation_eos(folder))

    def encode(self, text: str, *, continuation: bool = False) -> list[int]:
        """Token ids of a plain text, with the tokens that the model wants at its start unless it follows other text."""
        return list(self._core.encode(text, add_special_tokens=not continuation).ids)

    def chat_template(self, *, with_tools: bool = False) -> "ChatTemplate":
        """The template of a conversation, where a model has several the one for tools; empty where it has none."""
        known = self._templates.get(with_tools)
        if known is None:
            known = self._templates[with_tools] = self._read_own_template(with_tools)
        return known

    def _read_own_template(self, with_tools: bool) -> "ChatTemplate":
        if self._wrapped.chat_template is None:
            return ChatTemplate("", frozenset())
        source = self._wrapped.get_chat_template(tools=[{}] if with_tools else None)
        try:
            return ChatTemplate.read(source)
        except TemplateError:  # reported when it is used
            return ChatTemplate(source, frozenset())

    def description(self) -> dict[str, Any]:
        """The tokenizer's class, chat template and special tokens, by the names of tokenizer_config.json."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {name: None if (token := getattr(self._wrapped, name)) is None else str(token) for name in names}
        return {
            "tokenizer_class": type(self._wrapped).__name__,
            **tokens,
            "chat_template": self.chat_template().source or None,
            "add_bos_token": bool(self.prefix_ids) and self.prefix_ids[0] == self._wrapped.bos_token_id,
        }

    @property
    def eos_token_id(self) -> int | None:
        """The end of text that the tokenizer names, which is the first of several that a model may have."""
        named: int | None = self._wrapped.eos_token_id
        return named

    def added_id(self, text: str) -> int | None:
        """The token added to the vocabulary for this text, special or not; None if there is none."""
        return self._added.get(text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the chat template, with its tools and further template variables.

        As by `apply_chat_template` of transformers, fields of messages that are None count as left out.

        Raises:
            InvalidRequest: as of `render_chat`.
        """
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        return self.encode_rendered(self.render_chat(given, tools=tools, variables=variables))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a conversation that `render_chat` has rendered.

        Raises:
            InvalidRequest: the template has written something that is no text.
        """
        try:
            return list(self._core.encode(text, add_special_tokens=False).ids)
        except (TypeError, ValueError) as error:
            raise InvalidRequest("messages", f"The model's chat template refuses these messages: {error}.") from error

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation in the chat template, with its tools and further template variables.

        The template is given the messages as they are: what is None in them is none there.

        Raises:
            InvalidRequest: the model has no chat template, or the template refuses these messages.
        """
        if self._wrapped.chat_template is None:
            raise InvalidRequest(
                "messages", "This model has no chat template; send a prompt to /v1/completions instead."
            )
        try:
            given = [dict(tool) for tool in tools] or None
            texts, _ = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=given,
                chat_template=self._wrapped.get_chat_template(tools=given),
                **{"add_generation_prompt": True, **self._wrapped.special_tokens_map, **(variables or {})},
            )
        except _FAULTS_OF_A_TEMPLATE as error:
            raise InvalidRequest("messages", f"The model's chat template refuses these messages: {error}.") from error
        return str(texts[0])

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """How the special tokens are spelt."""
        return tuple(token.content for token in self._core.get_added_tokens_decoder().values() if token.special)

    @cached_property
    def _plain_core(self) -> Any:
        core = RawTokenizer.from_str(self._core.to_str())
        core.encode_special_tokens = True
        return core

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text within others, in which special tokens are the characters that they are spelt with."""
        return list(self._plain_core.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """Text of the ids; bytes that form no character become U+FFFD.

        With `continuation` the ids follow other text, and the space that sentencepiece puts before a first word stays.
        """
        detokenizer = self.detokenizer(skip_special=skip_special, continuation=continuation)
        return "".join(detokenizer.push(ids)) + detokenizer.finish()

    def detokenizer(
        self, *, skip_special: bool = True, shown: Iterable[str] = (), continuation: bool = False
    ) -> "Detokenizer":
        """A new incremental decoder; its parts add up to what `decode` returns with the same arguments. `shown` are
        special tokens that are not skipped in any case."""
        strip = 0 if continuation else self._scheme.num_stripped
        skipped = self.special_ids.difference(self._added.get(text, -1) for text in shown) if skip_special else ()
        return Detokenizer(self.token_bytes, frozenset(skipped), strip)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that the tokenizer does not know (a padded vocabulary)."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._core.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if token is None else self._scheme.to_bytes(token)
        return known

    def token_text(self, token_id: int) -> str:
        """One token for people to read; one that is not whole characters reads `bytes:\\xf0\\x9f`, as OpenAI has it."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _check_decoding(self) -> None:
        ids = self._core.encode(_PROBE, add_special_tokens=False).ids
        ours, theirs = self.decode(ids), self._core.decode(ids, skip_special_tokens=True)
        if ours != theirs:
            raise UnsupportedModel(
                f"This tokenizer decodes {theirs!r} where the byte table gives {ours!r}. Use another."
            )


class Detokenizer:
    """Turns a growing run of token ids into text.

    A character whose bytes are spread over tokens counts to the token that completes it. Constant work per byte.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int], num_stripped: int) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._num_stripped = num_stripped  # leading spaces still to be dropped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> list[str]:
        """The text that each of the ids adds."""
        return [self._text(b"" if token_id in self._skipped else self._token_bytes(token_id)) for token_id in ids]

    def finish(self) -> str:
        """The rest: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _text(self, raw: bytes) -> str:
        text = self._utf8.decode(raw)
        while self._num_stripped and text:
            if not text.startswith(" "):
                self._num_stripped = 0
                break
            text = text[1:]
            self._num_stripped -= 1
        return text


class StopStrings:
    """The stop strings of one request, compiled once."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.patterns = tuple((string, _prefix_table(string)) for string in strings)


class StopMatcher:
    """Watches a growing text for stop strings, and holds back what may still become one.

    The stop string that is completed first wins, wherever token borders lie; of several completed by the same
    character, the longest. Knuth, Morris and Pratt's automaton per string: constant work per character and string.
    """

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        """With `include` the stop string itself is delivered, too."""
        self._patterns = stops.patterns
        self._include = include
        self._matched = [0] * len(stops.patterns)  # characters of each string that the text's end agrees with
        self._held = ""
        self.stopped = False
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """Add text; returns what is now certain to be delivered. Once stopped, everything further is dropped."""
        if not self._patterns or self.stopped:
            return "" if self.stopped else text
        grown = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            completed = self._advance(character)
            if completed:
                self.stopped, self._held = True, ""
                self.found = grown[position - completed : position]
                return grown[: position if self._include else position - completed]
        certain = len(grown) - max(self._matched)
        self._held = grown[certain:]
        return grown[:certain]

    def finish(self) -> str:
        """The held-back text: no stop string came."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Feed one character; returns the length of the longest stop string it completes, or 0."""
        completed = 0
        for index, (string, table) in enumerate(self._patterns):
            matched = self._matched[index]
            while matched and string[matched] != character:
                matched = table[matched - 1]
            matched += string[matched] == character
            self._matched[index] = matched
            if matched == len(string):
                completed = max(completed, matched)
        return completed


@dataclass(frozen=True, slots=True)
class _ByteScheme:
    """How a tokenizer's token strings stand for bytes."""

    to_bytes: Callable[[str], bytes]
    num_stripped: int  # leading spaces dropped from a decoded text

    @classmethod
    def read(cls, decoder: dict[str, Any] | None) -> "_ByteScheme":
        """Read the scheme from the `decoder` section of a tokenizer.json."""
        steps = [] if decoder is None else decoder.get("decoders", [decoder])
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(_byte_level_bytes, 0)
        if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
            return cls(_sentencepiece_bytes, steps[3]["start"] if kinds[3:] else 0)
        raise UnsupportedModel(
            f"The tokenizer's decoder is {kinds or None}; known are ByteLevel and Replace, ByteFallback, Fuse, Strip "
            "(sentencepiece). Convert the tokenizer, or serve another model."
        )


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_table()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token, kept as plain text
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace("▁", " ").encode()


def _prefix_table(string: str) -> tuple[int, ...]:
    """For each position, the length of the longest proper prefix of `string` that ends there."""
    table = [0] * len(string)
    for position in range(1, len(string)):
        length = table[position - 1]
        while length and string[length] != string[position]:
            length = table[length - 1]
        table[position] = length + (string[length] == string[position])
    return tuple(table)


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files of a model folder that its tokenizer and its ends of text are read from, by name."""
    wanted = ("tokenizer", "special_", "added_tokens", "chat_template", "vocab", "merges", "config.", "generation_")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name.startswith(wanted)}


class _Generation(Extension):
    """The tag with which a template marks what the model says; ignored here."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template: its source, and the variables that it reads."""

    source: str
    variables: frozenset[str]

    @classmethod
    def read(cls, source: str) -> "ChatTemplate":
        """Raises TemplateError where the source is no template."""
        syntax = ImmutableSandboxedEnvironment(extensions=[_Generation, loopcontrols]).parse(source)
        return cls(source, frozenset(find_undeclared_variables(syntax)))


def _read_template(named: str) -> str:
    """The template of a file, or of a name among those that come with the package."""
    shipped = SHIPPED_TEMPLATES / f"{named}.jinja"
    path = shipped if Path(named).name == named and shipped.is_file() else Path(named)
    try:
        source = path.read_text(encoding="utf-8")
        ChatTemplate.read(source)
    except (OSError, UnicodeDecodeError, TemplateError) as error:
        raise ConfigError(
            f"model.chat_template: {named} cannot be read as a Jinja template: {error}. It must be at this path on "
            f"every node that answers HTTP, or come with the package, as do {' and '.join(shipped_templates())}."
        ) from error
    return source


def shipped_templates() -> list[str]:
    """Names of the chat templates that come with the package."""
    return sorted(path.stem for path in SHIPPED_TEMPLATES.glob("*.jinja"))


def _generation_eos(folder: Path) -> tuple[int, ...]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return ()
    eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    return tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
