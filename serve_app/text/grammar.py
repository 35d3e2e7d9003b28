"""Structured output: which tokens keep an answer within a JSON schema, a regular expression, a grammar, or choices.

llguidance (https://github.com/guidance-ai/llguidance) does the parsing: a lexer made of derivatives of regular
expressions under an Earley parser, walked over the trie of the vocabulary. A mask is exact: a token is allowed if and
only if some text after it still fits. Nothing is forced and no tokenisation is preferred, so the distribution of an
answer is the model's own, restricted to the form."""

import json
import logging
import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from serve_app.text.patterns import with_ascii_classes
from serve_app.text.schemas import MAX_FORM_BYTES, OPTIONS_BEGIN, SPELT_BY_OPTION, held_text
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest
from speculative.request import Structure

Bools = np.ndarray[Any, np.dtype[np.bool_]]
_T = TypeVar("_T")

_DIALECT = "(It is read as Rust's regex crate reads it, without look-around; \\d, \\w and \\s are ASCII.)"
_FIELD = "response_format"  # the front end says which field asked
_NUM_KEPT = 32  # compiled structures
_MAX_MESSAGE = 300
_MAX_COMPILE_S = 10.0
_MAX_REMAINDERS = 50_000  # of multipleOf: a tenth of a second
# Under unbounded white space, the library's default, a small model may write blanks until its tokens run out. Laid-out
# JSON still fits; a schema can say otherwise (`"x-guidance": {"whitespace_pattern": ...}`).
_JSON_OPTIONS: Any = {"whitespace_pattern": r"( |\n[ \t]{0,40})?"}
# Characters are written as they are, and not by their numbers: "\u0078" would be a second spelling of the key "x", for
# which `properties` does not hold.
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'} if SPELT_BY_OPTION else {}
_ESCAPES_TEXT = "".join(f"{json.dumps(name)}: {json.dumps(value)}, " for name, value in _ESCAPES.items())
_START = '%llguidance {"no_forcing": true}\nstart: @structure'
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "max_lexer_states": 50_000,  # of 1 to 2 KiB
    "verbose_errors": False,
}
# The library's compiler recurses along chains of rules and references, and the process dies where its stack ends. A
# level takes under 10 KiB of stack and at least eight bytes of text, so this much outlasts the longest text.
_STACK_BYTES = 256 << 20
_stack_size_lock = threading.Lock()
_logger = logging.getLogger("truespec.structured")


class StructureCompiler:
    """Makes the constraints of one model's requests. Any thread may call it.

    A structure is compiled once and kept while it is among the last used; a constraint made from a kept one costs well
    under a millisecond.

    Args:
        folder: the checkpoint, with its tokenizer; read when the first structure comes.
        vocab_size: width of the model's logits. Ids beyond the tokenizer's own are never allowed.
        eos_token_ids: the tokens that end an answer in the engine.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled = lru_cache(maxsize=_NUM_KEPT)(self._compile)

    def __call__(self, structure: Structure) -> "StructureConstraint":
        """A constraint for one request, at the start of its answer. Raises InvalidRequest: the structure does not
        compile, uses what is not supported, is too large or too costly, or nothing fits it."""
        return StructureConstraint(self._compiled(structure).deep_copy(), self._vocab_size, self._eos_token_ids)

    def _compile(self, structure: Structure) -> LLMatcher:
        _check_size(structure)
        vocabulary = self._read_vocabulary()
        try:
            matcher = _on_deep_stack(lambda: _new_matcher(vocabulary, structure))
        except TimeoutError as error:
            raise _refused(structure, f"it takes more than {_MAX_COMPILE_S:.0f} s to compile; simplify it") from error
        except Exception as error:  # whatever the library thinks of a text is a fault of the text
            raise _refused(structure, str(error)) from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # where it fails, it fails for every answer
        if matcher.is_error():
            raise _refused(structure, matcher.get_error())
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise InvalidRequest(_FIELD, "This model has no end-of-text token, so a structured answer could never end.")
        with self._lock:
            if self._vocabulary is None:
                tokenizer = Tokenizer.from_folder(self._folder)
                tokens = _TokenTable(tokenizer, self._vocab_size, self._eos_token_ids)
                self._vocabulary = LLTokenizer(TokenizerWrapper(tokens))
            return self._vocabulary


class StructureConstraint:
    """The tokens that one request may emit so that its answer keeps to its structure (a `TokenConstraint`).

    The end of text is allowed exactly where the answer so far is complete. A structure that outgrows the library's
    limits on the way allows nothing more: the engine then fails the request rather than end it half done.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._num_read = 0  # output tokens that the matcher has seen
        self._ended = False

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> list[Bools]:
        """Masks [vocab_size] of what may follow output + drafts[:j], up to the first draft that is not allowed."""
        self._catch_up(output)
        matcher, ended = self._matcher, self._ended
        masks = [self._mask(matcher, ended)]
        for place, draft in enumerate(drafts):
            if not masks[-1][draft]:
                break
            if place == 0:
                matcher = matcher.deep_copy()  # a few microseconds; not every grammar can be rolled back
            matcher.consume_token(draft)
            ended = ended or draft in self._eos
            masks.append(self._mask(matcher, ended))
        return masks

    def _catch_up(self, output: Sequence[int]) -> None:
        if self._ended or self._num_read == len(output):
            return
        unread = list(output[self._num_read :])
        end = next((place for place, token in enumerate(unread) if token in self._eos), None)
        self._ended = end is not None
        self._num_read = len(output)
        if unread[:end]:
            self._matcher.consume_tokens(unread[:end])

    def _mask(self, matcher: LLMatcher, ended: bool) -> Bools:
        if ended:
            mask = np.zeros(self._vocab_size, np.bool_)
            mask[self._eos] = True
            return mask
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(np.bool_)
        # Where the matcher is in error, or a grammar names the end of text itself, its own bit would end an answer that
        # is not complete.
        mask[self._eos] = matcher.is_accepting()
        if matcher.is_error():
            _logger.warning("A structured answer cannot continue: %s", _one_line(matcher.get_error()))
        return mask


class _TokenTable:
    """A table of the bytes of each token, from the same table that decodes the answers, in the form llguidance
    reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        special_ids = tokenizer.special_ids.union(eos_token_ids)
        self.special_token_ids = sorted(token for token in special_ids if token < vocab_size)

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that is forced. Nothing is forced here, so nobody asks."""
        raise NotImplementedError(text)


def _new_matcher(vocabulary: LLTokenizer, structure: Structure) -> LLMatcher:
    start = {"lark_grammar": _START}
    grammar = json.dumps({"grammars": [start, {"name": "structure", **_grammar(structure)}]})
    return LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))


def _grammar(structure: Structure) -> dict[str, Any]:
    """The structure as one grammar of llguidance's list. Raises ValueError."""
    if structure.kind == "grammar":
        return {"lark_grammar": structure.text.replace(OPTIONS_BEGIN, f"{OPTIONS_BEGIN}{_ESCAPES_TEXT}")}
    if structure.kind == "choice":
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, _choices(structure.text)))}"}
    if structure.kind == "regex":
        listed = LLMatcher.grammar_from_regex(with_ascii_classes(structure.text))
    else:
        schema = '{"type": "object"}' if structure.kind == "json_object" else held_text(structure.text)
        listed = LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS | _ESCAPES)
    grammar: dict[str, Any] = json.loads(listed)["grammars"][0]
    return {key: value for key, value in grammar.items() if key != "name"}


def _choices(text: str) -> list[str]:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("it must be a JSON list of one or more strings")
    return choices


def _check_size(structure: Structure) -> None:
    """Refuse what is too long, and divisors that would be compiled for minutes, or wrongly.

    `multipleOf` becomes an automaton with a state per remainder, and several that meet in one number become one with
    their least common multiple, which the library's limits do not count and its 32-bit products may overflow.
    """
    num_bytes = len(structure.text.encode(errors="replace"))
    if num_bytes > MAX_FORM_BYTES:
        raise _refused(structure, f"it has {num_bytes} bytes; the limit is {MAX_FORM_BYTES}")
    if structure.kind not in ("json_schema", "grammar"):
        return
    text = re.sub(r"\\u00([0-7][0-9a-fA-F])", lambda match: chr(int(match[1], 16)), structure.text)
    found = re.findall(r'"multipleOf"\s*:\s*(\d+(?:\.\d+)?(?:[eE][-+]?\d{1,3})?)', text)
    divisors = [Fraction(number) for number in found]
    unit = Fraction(1, math.lcm(*(divisor.denominator for divisor in divisors)))
    if math.lcm(*(int(divisor / unit) for divisor in divisors)) > _MAX_REMAINDERS:
        raise _refused(structure, f"the divisors in its multipleOf leave more than {_MAX_REMAINDERS} remainders")


def _on_deep_stack(work: Callable[[], _T]) -> _T:
    """Run on a thread of its own with a large stack. Raises TimeoutError when it takes too long; it is then left."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    with _stack_size_lock:  # the size holds for whatever thread is started next
        before = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="truespec-compile", daemon=True).start()
        finally:
            threading.stack_size(before)
    return future.result(timeout=_MAX_COMPILE_S)


_OVERLAP = "the schemas of a oneOf overlap; give each a required property with a const of its own, or use anyOf"


def _refused(structure: Structure, reason: str) -> InvalidRequest:
    reason = _OVERLAP if "coerce_one_of" in reason else reason
    name = structure.kind.replace("_", " ")
    dialect = f" {_DIALECT}" if structure.kind == "regex" else ""
    return InvalidRequest(
        _FIELD, f"The {name} cannot be used: {_one_line(reason, _MAX_MESSAGE - len(dialect))}{dialect}"
    )


def _one_line(message: str, most: int = _MAX_MESSAGE) -> str:
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= most else f"{line[:most]}…"
