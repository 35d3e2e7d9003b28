"""Conversations to train a drafter on, written by the target itself: a drafter has to guess its words only."""

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from speculative.engine import EngineCore
from speculative.errors import ConfigError, EngineFault
from speculative.request import FinishReason, Request, SamplingParams

Progress = Callable[[int, int], None]
Prompt = tuple[int, ...]

# What numpy raises for a file that is cut short, altered, or no archive at all.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, TypeError, KeyError, ValueError, OSError)

ANSWER_TEMPERATURES = (0.0, 1.0, 0.7, 1.0)  # as served: greedy, and the model's own distribution


@dataclass(frozen=True, slots=True, eq=False)
class Conversations:
    """Prompts and their answers, as token ids, one after another.

    token_ids: [N] int32, all conversations.
    lengths: [C] int64, tokens of each.
    prompt_lengths: [C] int64, tokens before the answer.
    temperatures: [C] float32, at which the answer was drawn.
    """

    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    prompt_lengths: np.ndarray[Any, np.dtype[np.int64]]
    temperatures: np.ndarray[Any, np.dtype[np.float32]]

    def __post_init__(self) -> None:
        if not self.lengths.shape == self.prompt_lengths.shape == self.temperatures.shape:
            raise ConfigError("The conversations' lengths, prompt_lengths and temperatures differ in number.")
        if (self.lengths < 1).any() or int(self.lengths.sum()) != len(self.token_ids):
            raise ConfigError("The conversations' lengths do not fit their token_ids; write the data again.")
        if (self.prompt_lengths < 0).any() or (self.prompt_lengths > self.lengths).any():
            raise ConfigError("The conversations' prompt_lengths do not fit their lengths; write the data again.")
        if (self.token_ids < 0).any():
            raise ConfigError("The conversations' token_ids are below 0 in places; write the data again.")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[C] where each conversation begins."""
        starts: np.ndarray[Any, np.dtype[np.int64]] = np.cumsum(self.lengths) - self.lengths
        return starts

    def answer_counts(self, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """[vocab_size] how often each token stands in an answer."""
        within = np.arange(len(self.token_ids)) - np.repeat(self.starts, self.lengths)
        answers = self.token_ids[within >= np.repeat(self.prompt_lengths, self.lengths)]
        return np.bincount(answers, minlength=vocab_size)

    def require_fit(self, vocab_size: int, max_length: int) -> None:
        """Check that a model with so many tokens and positions can read them.

        Raises:
            ConfigError: it cannot; they were written by another model.
        """
        highest, longest = (int(array.max(initial=0)) for array in (self.token_ids, self.lengths))
        if highest >= vocab_size:
            raise ConfigError(
                f"The conversations hold token id {highest}, but the model's vocabulary has {vocab_size}; give data "
                "of this model."
            )
        if longest > max_length:
            raise ConfigError(
                f"The longest conversation has {longest} tokens, but the model has {max_length} positions; give "
                "shorter ones."
            )

    def first(self, count: int) -> "Conversations":
        """The first so many conversations."""
        num_tokens = int(self.lengths[:count].sum())
        return Conversations(
            self.token_ids[:num_tokens], self.lengths[:count], self.prompt_lengths[:count], self.temperatures[:count]
        )

    @classmethod
    def pack(
        cls, prompts: Sequence[Prompt], answers: Sequence[Prompt], temperatures: Sequence[float]
    ) -> "Conversations":
        """Put prompts and their answers one after another."""
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        return cls(
            np.array([token for tokens in whole for token in tokens], np.int32),
            np.array([len(tokens) for tokens in whole], np.int64),
            np.array([len(prompt) for prompt in prompts], np.int64),
            np.array(temperatures, np.float32),
        )

    @classmethod
    def joined(cls, parts: Sequence["Conversations"]) -> "Conversations":
        """All of the parts, one after another."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    @classmethod
    def load(cls, path: Path) -> "Conversations":
        """Read an .npz file with the four arrays.

        Raises:
            ConfigError: the file is missing or damaged, lacks an array, or its arrays do not fit each other.
        """
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return cls(
                    _whole_numbers(arrays["token_ids"], np.int32),
                    _whole_numbers(arrays["lengths"], np.int64),
                    _whole_numbers(arrays["prompt_lengths"], np.int64),
                    arrays["temperatures"].astype(np.float32),
                )
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except _DAMAGE as error:
            raise ConfigError(f"{path} cannot be read as conversations ({error}); write it again.") from error

    def save(self, path: Path) -> None:
        """Write what `load` reads: the whole file, or, when interrupted, none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        with temporary.open("wb") as file:
            np.savez_compressed(
                file,
                token_ids=self.token_ids,
                lengths=self.lengths,
                prompt_lengths=self.prompt_lengths,
                temperatures=self.temperatures,
            )
        os.replace(temporary, path)


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The frame that a chat template puts around a question: `opening` + question + `closing`, and the answer
    follows."""

    opening: Prompt
    closing: Prompt

    @classmethod
    def between(cls, first: Sequence[int], second: Sequence[int]) -> "ChatFrame":
        """Read the frame off two rendered conversations that differ in their question only.

        Raises:
            ConfigError: they have no common beginning, or no common end.
        """
        opening = _common_length(first, second)
        closing = _common_length(first[::-1], second[::-1])
        if not opening or not closing:
            raise ConfigError("The chat template puts nothing around a question; give prompts in a .jsonl file.")
        return cls(tuple(first[:opening]), tuple(first[len(first) - closing :]))


def write_questions(
    engine: EngineCore,
    frame: ChatFrame,
    count: int,
    *,
    max_tokens: int = 64,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Prompt]:
    """Let the model ask `count` questions, each framed as a prompt; those that came to no end are left out."""
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(frame.closing[0],))
    requests = [Request(f"question-{index}", frame.opening, params, seed=seed + index) for index in range(count)]
    questions = []
    for answer, ended in _generate(engine, requests, progress):
        question = answer[:-1]
        if ended and question:
            questions.append(frame.opening + question + frame.closing)
    return questions


def write_answers(
    engine: EngineCore,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 512,
    seed: int = 0,
    progress: Progress | None = None,
) -> Conversations:
    """Let the model answer the prompts, in turn at each of ANSWER_TEMPERATURES."""
    temperatures = [ANSWER_TEMPERATURES[index % len(ANSWER_TEMPERATURES)] for index in range(len(prompts))]
    requests = [
        Request(
            f"answer-{index}", prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature), seed=seed + index
        )
        for index, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    answers = [answer for answer, _ in _generate(engine, requests, progress)]
    return Conversations.pack(prompts, answers, temperatures)


def _generate(
    engine: EngineCore, requests: Sequence[Request], progress: Progress | None
) -> Iterator[tuple[Prompt, bool]]:
    """Return what each request got, and whether it came to an end by itself; in the order of the requests."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended: dict[str, bool] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            if delta.finish_reason is FinishReason.ERROR:
                raise EngineFault(f"Generation of {delta.request_id} failed: {delta.error}")
            tokens[delta.request_id] += delta.token_ids
            if delta.finished:
                ended[delta.request_id] = delta.finish_reason is FinishReason.STOP
                if progress is not None:
                    progress(len(ended), len(requests))
    for request in requests:
        yield tuple(tokens[request.request_id]), ended[request.request_id]


def _whole_numbers(array: np.ndarray[Any, Any], dtype: type[np.signedinteger[Any]]) -> np.ndarray[Any, Any]:
    """A vector in that type; a ValueError says that it is none, or changes by it."""
    with np.errstate(invalid="ignore"):
        numbers = array.astype(dtype)
    if numbers.ndim != 1 or not np.array_equal(numbers, array):
        raise ValueError(f"no vector of {np.dtype(dtype).name}")
    return numbers


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
