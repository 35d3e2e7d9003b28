"""Text to token ids and back, token by token, without ever showing half a character."""

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RawTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from serve_app.text.byte_scheme import ByteScheme, byte_level_bytes, longest_token
from serve_app.text.template_marks import PLAIN, Render, behind_answer, marks, rendered
from serve_app.text.tokenizer_file import added_ids, begins_nothing, differences, lossy, read_tokenizer, untyped_tokens
from speculative.errors import ConfigError, InvalidRequest, UnsupportedModel
from speculative.model.end_tokens import end_tokens, read_if_there

SHIPPED_TEMPLATES = Path(__file__).parents[1] / "chat_templates"
"""Chat templates that come with the package: as `model.chat_template`, each is known by its file's name."""

_PROBE = "Hello, wörld!  \n\tdef f(x): return x\r\n你好 🙂 é ▁ don't"


class Tokenizer:
    """A model's tokenizer: ids are those that its files say, whatever `transformers` makes of them.

    Decoding goes through one table, token id to bytes, so that a text decoded at once and the same text decoded token
    by token are equal by construction. Encoding never changes the tokenizer: any thread may call it.
    """

    def __init__(
        self,
        wrapped: Any,
        core: RawTokenizer | None = None,
        ends: Mapping[int, Sequence[str]] | None = None,
        remarks: Sequence[str] = (),
    ) -> None:
        """Wrap a fast tokenizer of `transformers`, for its chat template and the names of its tokens.

        Args:
            wrapped: the tokenizer.
            core: what makes ids; None = its own.
            ends: the ids that end an answer, and the files that say so; None = its own end token.
            remarks: what whoever serves it should know.
        """
        self._wrapped = wrapped
        self._core = core or wrapped.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        decoder = self._core.decoder
        self._scheme = ByteScheme.read(None if decoder is None else json.loads(decoder.__getstate__()))
        self._bytes: dict[int, bytes] = {}
        self._templates: dict[bool, ChatTemplate] = {}
        added = self._core.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token.content: token_id for token_id, token in added.items()}
        self._added_ids = frozenset(added)
        self._plain = self._read_plain()
        if ends is None:
            ends = {} if wrapped.eos_token_id is None else {int(wrapped.eos_token_id): ()}
        self._ends = dict(ends)
        self.eos_token_ids: tuple[int, ...] = tuple(self._ends)
        self.vocab_size: int = max(self._core.get_vocab(with_added_tokens=True).values()) + 1
        self.prefix_ids, self.suffix_ids = added_ids(self._core)
        """The tokens that the model wants at the start of a text, and at its end, where hardly any has some."""
        self._remarks = tuple(remarks)
        self._longest = longest_token(self._core)
        encoded = self._core.encode(_PROBE, add_special_tokens=False).ids
        ids = [token for token in encoded if token not in self._plain]
        ours, theirs = self.decode(ids), self._core.decode(ids, skip_special_tokens=True)
        if ours != theirs:
            raise UnsupportedModel(
                f"tokenizer.json: its `decoder` gives {theirs!r} where the byte table gives {ours!r}. Use another."
            )

    def _read_plain(self) -> frozenset[int]:
        """Added tokens whose text must not be read as GPT-2's stand-ins for bytes, though it could be.

        One that merges or a single byte may make as well, which no text tells apart, is read as bytes.
        """
        if not self._scheme.byte_level:
            return frozenset()
        unlike = {text: token for text, token in self._added.items() if byte_level_bytes(text) != text.encode()}
        pieces = self._core.get_vocab(with_added_tokens=False) if unlike else {}
        shared = {text for text, token in unlike.items() if pieces.get(text) == token}
        if shared:
            merges = json.loads(self._core.to_str())["model"].get("merges") or ()
            made = {(one.replace(" ", "") if isinstance(one, str) else "".join(one)) for one in merges}
            shared = {text for text in shared if len(text) == 1 or text in made}
        return frozenset(token for text, token in unlike.items() if text not in shared)

    @classmethod
    def from_folder(cls, path: str | Path, chat_template: str | None = None) -> "Tokenizer":
        """Load the tokenizer of a local Hugging Face folder; `chat_template` replaces its own template: a
        file, or a name of `shipped_templates`.

        Raises:
            ConfigError: the folder holds no fast tokenizer, its files are damaged or contradict each other, the file
                holds no template, or one whose marks are no tokens here.
            UnsupportedModel: the tokenizer decodes in a way this class does not know.
        """
        folder = Path(path)
        core, remarks = read_tokenizer(folder)
        ends = end_tokens(folder)
        wrapped, failed = _wrap(folder)
        own = wrapped.chat_template
        if not all(isinstance(one, str) for one in _sources(own)):
            raise ConfigError(f"{folder}: `chat_template` is {own!r}, and must be a text; take it from its source.")
        if chat_template is not None:
            shipped = SHIPPED_TEMPLATES / f"{chat_template}.jinja"
            path = shipped if Path(chat_template).name == chat_template and shipped.is_file() else Path(chat_template)
            try:
                wrapped.chat_template = path.read_text(encoding="utf-8")
                ChatTemplate.read(wrapped.chat_template)
            except (OSError, UnicodeDecodeError, TemplateError) as error:
                raise ConfigError(
                    f"model.chat_template: {chat_template} cannot be read as a Jinja template: {error}. It must be at "
                    "this path on every node that answers HTTP, or come with the package, as do "
                    f"{' and '.join(shipped_templates())}."
                ) from error
        name = type(wrapped).__name__
        rebuilt = () if failed else differences(core, wrapped.backend_tokenizer, name, folder)
        tokenizer = cls(wrapped, core, ends, (*remarks, *failed, *rebuilt, *lossy(core, folder)))
        if chat_template is not None:
            tokenizer._compare_templates(chat_template, own)
        return tokenizer

    def _compare_templates(self, named: str, own: str | dict[str, str] | None) -> None:
        """Refuse a template of another model, and remark on one of ours that shows other prompts than its own."""
        sources = _sources(own)
        theirs = [list(rendered(self._renders(source))) for source in sources]
        ours = list(rendered(self._renders(None)))
        known = marks([text for texts in theirs for text in texts])
        unknown = [mark for mark in marks(ours) if mark not in known and not self._is_one_token(mark)]
        if unknown:
            fix = (
                "remove the setting to use the template of the model's folder"
                if sources
                else "the model's folder has no template of its own: give one that was made for this model"
            )
            raise ConfigError(
                f"model.chat_template: {named} writes {', '.join(unknown)}, and the model's tokenizer has no such "
                f"token: it would read plain text instead; {fix}."
            )
        plain = range(len(PLAIN))
        both = [(ours[at], texts[at]) for texts in theirs for at in plain if None not in (ours[at], texts[at])]
        if named in shipped_templates() and sources and (not both or any(one != other for one, other in both)):
            self._remarks += (
                f"model.chat_template: {named} replaces the template of the model's own folder, and prompts are other "
                "ones without tools, too. Remove the setting to use the model's own.",
            )

    def _renders(self, source: str | None) -> Render:
        """Return what renders a template: None = the one that is served."""
        return lambda messages, tools: self._wrapped.apply_chat_template(
            list(messages), tools=list(tools) or None, chat_template=source, tokenize=False, add_generation_prompt=True
        )

    def _is_one_token(self, text: str) -> bool:
        token_id = self._core.token_to_id(text)
        return token_id is not None and token_id in self._core.encode(f"x{text}x", add_special_tokens=False).ids

    def ends(self) -> str:
        """Return which tokens end an answer, and the files that say so, for people to read."""
        if not self._ends:
            return "No file of the model names an end token: an answer ends by its length or a stop string only."
        named = [
            f"{token} {self._core.id_to_token(token)!r}" + (f" ({', '.join(files)})" if files else "")
            for token, files in self._ends.items()
        ]
        which = "the token" if len(named) == 1 else "any of the tokens"
        return f"An answer ends with {which} {'; '.join(named)}."

    def remarks(self) -> tuple[str, ...]:
        """Return what whoever serves this tokenizer should know: what its files contradict each other in, and what its
        chat template writes that other files do not know."""
        return (*self._remarks, *self._template_remarks())

    def _template_remarks(self) -> Iterator[str]:
        for source in _sources(self._wrapped.chat_template):
            try:
                ChatTemplate.read(source)
            except TemplateError as error:
                yield f"The chat template is damaged, and conversations are refused ({error}); take it from its source."
                return
        if self._wrapped.chat_template is None:
            return
        render = self._renders(None)
        unknown = [mark for mark in marks(list(rendered(render))) if not self._is_one_token(mark)]
        if unknown:
            yield (
                f"The chat template writes {', '.join(unknown)}, which the tokenizer reads as plain text. If the model "
                "was not trained so, its tokenizer.json lacks these tokens."
            )
        rest = behind_answer(render)
        found = max((text for text in self._added if text and rest.startswith(text)), key=len, default=None)
        if found is None or found == self._wrapped.bos_token or self._added[found] in self._ends:
            return
        if self._added[found] in self.special_ids or marks([found]):
            yield (
                f"The chat template ends an answer with {found} (token {self._added[found]}), which no file names as "
                "an end token: an answer may go on behind it. If the model ends with it, add it to `eos_token_id` in "
                "generation_config.json."
            )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text that begins; with `special` also the tokens that the model wants around it."""
        return _ids(self._core, text, special=special)

    def fewest_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least, by its length alone; 0 where that says nothing."""
        if self._longest is None:
            return 0
        most_bytes, lost = self._longest
        return -(-len(text.encode(errors="ignore").translate(None, lost)) // most_bytes)

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of a text that goes on after others: nothing is put before it, neither tokens nor a space.

        They are those of both texts together without those of the first, unless characters of both form one token.
        """
        going_on = self._going_on.encode_batch([text], add_special_tokens=False)[0]
        ids = list(going_on.ids)
        if self._going_on is self._core:
            return ids
        for place, token in enumerate(ids):
            if token in self._added_ids:  # behind it text may begin again, as the whole tokenizer has it
                begun = _ids(self._core, text[going_on.offsets[place][0] :])
                if begun[:1] == [token]:
                    return [*ids[:place], *begun]
        return ids

    @cached_property
    def _going_on(self) -> RawTokenizer:
        return begins_nothing(self._core)

    def chat_template(self, *, with_tools: bool = False) -> "ChatTemplate":
        """The template of a conversation, where a model has several the one for tools; empty where it has none."""
        if with_tools not in self._templates:
            self._templates[with_tools] = self._read_own_template(with_tools)
        return self._templates[with_tools]

    def _read_own_template(self, with_tools: bool) -> "ChatTemplate":
        if self._wrapped.chat_template is None:
            return ChatTemplate("", frozenset())
        try:
            source = self._wrapped.get_chat_template(tools=[{}] if with_tools else None)
        except ValueError:  # several, and none for this; reported when it is used
            return ChatTemplate("", frozenset())
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

        As by `apply_chat_template` of transformers, fields of messages that are None count as left out. Raises
        InvalidRequest: as of `render_chat`."""
        given = [{name: value for name, value in message.items() if value is not None} for message in messages]
        return self.encode_rendered(self.render_chat(given, tools=tools, variables=variables))

    def encode_rendered(self, text: str) -> list[int]:
        """Token ids of a conversation that `render_chat` has rendered. Raises InvalidRequest: the template has written
        something that is no text."""
        try:
            return _ids(self._core, text)
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

        The template is given the messages as they are: what is None in them is none there. Raises InvalidRequest: the
        model has no chat template, or the template refuses these messages."""
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
        except Exception as error:  # a template may raise anything
            raise InvalidRequest("messages", f"The model's chat template refuses these messages: {error}.") from error
        return str(texts[0])

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Return how the special tokens are spelt."""
        return tuple(token.content for token in self._core.get_added_tokens_decoder().values() if token.special)

    @cached_property
    def _plain_cores(self) -> dict[bool, RawTokenizer]:
        begins = RawTokenizer.from_str(self._core.to_str())
        begins.encode_special_tokens = True
        follows = begins_nothing(begins, after_special=True)
        follows.encode_special_tokens = True
        return {True: begins, False: follows}

    def encode_plain(self, text: str, *, begins: bool) -> list[int]:
        """Token ids of a text in which special tokens are the characters that they are spelt with.

        Args:
            text: what stands before the next special token.
            begins: whether it is the start of all; else it follows a special token.
        """
        return _ids(self._plain_cores[begins], text)

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
        skipped = self.special_ids.difference(self._added.get(text, -1) for text in shown) if skip_special else ()
        scheme = self._scheme
        begins = () if continuation else (self._first_bytes, scheme.stripped * scheme.num_stripped)
        return Detokenizer(self.token_bytes, frozenset(skipped), *begins, errors=scheme.errors)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id that the tokenizer does not know (a padded vocabulary)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._read_bytes(token_id, self._scheme.to_bytes)
        return known

    def _first_bytes(self, token_id: int) -> bytes:
        return self._read_bytes(token_id, self._scheme.first_to_bytes)

    def _read_bytes(self, token_id: int, to_bytes: Callable[[str], bytes]) -> bytes:
        token = self._core.id_to_token(token_id)
        if token is None:
            return b""
        return token.encode() if token_id in self._plain else to_bytes(token)

    def token_text(self, token_id: int) -> str:
        """One token for people to read; one that is not whole characters reads `bytes:\\xf0\\x9f`, as OpenAI has it."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    @cached_property
    def ids_by_text(self) -> dict[str, int]:
        """The token of each text that one token only has."""
        found: dict[str, int | None] = {}
        for token in range(self.vocab_size):
            text = self.token_text(token)
            found[text] = None if text in found else token
        return {text: token for text, token in found.items() if token is not None and text and "\ufffd" not in text}


@dataclass(slots=True)
class Detokenizer:
    """Turns a growing run of token ids into text.

    A character whose bytes are spread over tokens counts to the token that completes it. Constant work per byte.
    """

    token_bytes: Callable[[int], bytes]  # of a token
    skipped: frozenset[int]  # ids without text
    first_bytes: Callable[[int], bytes] | None = None  # of the first token, where it differs
    stripped: str = ""  # characters, all the same, that are dropped at the start as far as the text has them
    _: KW_ONLY
    errors: str = "replace"  # what becomes of bytes that form no character, as `codecs` names it
    _utf8: codecs.IncrementalDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self.errors)

    def push(self, ids: Sequence[int]) -> list[str]:
        """The text that each of the ids adds."""
        if self.first_bytes is None and not self.stripped:
            raw, decode = self.token_bytes, self._utf8.decode
            return ["" if token_id in self.skipped else decode(raw(token_id)) for token_id in ids]
        return ["" if token_id in self.skipped else self._text(token_id) for token_id in ids]

    def finish(self) -> str:
        """The rest: U+FFFD for a character that was never completed, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _text(self, token_id: int) -> str:
        raw = self.token_bytes(token_id)
        if self.first_bytes is not None and raw:
            raw, self.first_bytes = self.first_bytes(token_id), None
        text = self._utf8.decode(raw)
        while self.stripped and text:
            if not text.startswith(self.stripped[0]):
                self.stripped = ""
                break
            text, self.stripped = text[1:], self.stripped[1:]
        return text


@dataclass(slots=True)
class StopMatcher:
    """Watches a growing text for stop strings, and holds back what may still become one.

    The stop string that is completed first wins, wherever token borders lie; of several completed by the same
    character, the longest.
    """

    strings: Sequence[str]
    include: bool = False  # whether the stop string itself is delivered, too
    found: str | None = None  # the stop string that ended the text
    _held: str = ""

    @property
    def stopped(self) -> bool:
        """Return whether a stop string ended the text."""
        return self.found is not None

    def push(self, text: str) -> str:
        """Add text; returns what is now certain to be delivered. Once stopped, everything further is dropped."""
        if not self.strings or self.stopped:
            return "" if self.stopped else text
        grown, self._held = self._held + text, ""
        places = [(at + len(string), at, string) for string in self.strings if (at := grown.find(string)) >= 0]
        if places:
            end, begin, self.found = min(places)
            return grown[: end if self.include else begin]
        certain = max(0, len(grown) - max(map(len, self.strings)))
        while not any(string.startswith(grown[certain:]) for string in self.strings):
            certain += 1
        self._held = grown[certain:]
        return grown[:certain]

    def finish(self) -> str:
        """The held-back text: no stop string came."""
        held, self._held = self._held, ""
        return held


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


def _ids(core: RawTokenizer, text: str, *, special: bool = False) -> list[int]:
    """Token ids of a text. Only as a batch does the library tokenize without Python's lock, which the event loop needs,
    and without the offsets and texts of the tokens, which are a hundred times as large."""
    return list(core.encode_batch_fast([text], add_special_tokens=special)[0].ids)


def _sources(template: str | dict[str, str] | None) -> list[str]:
    """The templates that a model has: none, one, or several by name."""
    return list(template.values()) if isinstance(template, dict) else [] if template is None else [template]


def shipped_templates() -> list[str]:
    """Names of the chat templates that come with the package."""
    return sorted(path.stem for path in SHIPPED_TEMPLATES.glob("*.jinja"))


def _wrap(folder: Path) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer as `transformers` has it, with the folder's chat template; and why it is none of the class that the
    folder asks for, if so. Raises ConfigError: transformers cannot load any."""
    options = {"local_files_only": True, **untyped_tokens(folder)}
    failed: tuple[str, ...] = ()
    try:
        wrapped = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **options)
        wrapped.backend_tokenizer  # noqa: B018  # a slow one has none
    except Exception as error:  # of whatever class the folder asks for
        why = " ".join(str(error).split())
        failed = (f"Its tokenizer.json is used alone: transformers cannot load the tokenizer of {folder}: {why}",)
        try:
            wrapped = PreTrainedTokenizerFast.from_pretrained(str(folder), **options)
        except Exception as again:
            said = f"transformers cannot load the tokenizer of {folder} ({again}); take its files from their source."
            raise ConfigError(said) from again
    older = read_if_there(folder / "chat_template.json").get("chat_template")
    if wrapped.chat_template is None and older is not None:
        wrapped.chat_template = older
    return wrapped, failed
