"""Conversations to train a drafter on, written by the target itself: a drafter has to guess its words only."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speculative.engine import EngineCore
from speculative.errors import ConfigError, EngineFault
from speculative.request import FinishReason, Request, SamplingParams

Progress = Callable[[int, int], None]
Prompt = tuple[int, ...]

ANSWER_TEMPERATURES = (0.0, 1.0, 0.7, 1.0)  # as served: greedy, and the model's own law


@dataclass(frozen=True, slots=True, eq=False)
class Conversations:
    """Prompts and their answers, as token ids, one after another.

    token_ids: [N] int32, all conversations. lengths: [C] int64, tokens of each.
    prompt_lengths: [C] int64, tokens before the answer. temperatures: [C] float32, at which the answer was drawn.
    """

    token_ids: np.ndarray[Any, np.dtype[np.int32]]
    lengths: np.ndarray[Any, np.dtype[np.int64]]
    prompt_lengths: np.ndarray[Any, np.dtype[np.int64]]
    temperatures: np.ndarray[Any, np.dtype[np.float32]]

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.prompt_lengths) == len(self.temperatures):
            raise ConfigError("The conversations' lengths, prompt_lengths and temperatures differ in number.")
        if int(self.lengths.sum()) != len(self.token_ids) or (self.prompt_lengths > self.lengths).any():
            raise ConfigError("The conversations' lengths do not fit their token_ids; write the data again.")

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
    def load(cls, path: Path) -> "Conversations":
        """Read an .npz file with the four arrays.

        Raises:
            ConfigError: the file is missing, damaged or lacks an array.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls(
                    arrays["token_ids"].astype(np.int32),
                    arrays["lengths"].astype(np.int64),
                    arrays["prompt_lengths"].astype(np.int64),
                    arrays["temperatures"].astype(np.float32),
                )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{path} cannot be read as conversations ({error}); write it again.") from error

    def save(self, path: Path) -> None:
        """Write what `load` reads."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path,
            token_ids=self.token_ids,
            lengths=self.lengths,
            prompt_lengths=self.prompt_lengths,
            temperatures=self.temperatures,
        )


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """What a chat template puts around a question: `opening` + question + `closing`, and the answer follows."""

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
    """What each request got, and whether it came to an end by itself; in the order of the requests."""
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


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
