"""Conversations to train a head on, written by the target itself: a head has to guess its words only."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from serve_app.text.tokenizer import Tokenizer
from speculative.engine import EngineCore
from speculative.errors import ConfigError, EngineFault, InvalidRequest
from speculative.request import FinishReason, Request, SamplingParams

Prompt = tuple[int, ...]
Answered = tuple[Prompt, Prompt, float]  # a prompt, its answer, and the temperature at which it was drawn
Messages = list[dict[str, str]]

ANSWER_TEMPERATURES = (0.0, 1.0, 0.7, 1.0)  # as served: greedy, and the model's own distribution
_ARRAYS = ("token_ids", "lengths", "prompt_lengths", "temperatures")
MAX_QUESTION, MAX_ANSWER = 96, 256  # tokens; of an answer, the first ones are the hardest to draft


@dataclass(frozen=True, slots=True, eq=False)
class Conversations:
    """Prompts and their answers, as token ids, one after another."""

    token_ids: np.ndarray[Any, np.dtype[np.int32]]  # [N] int32, all conversations
    lengths: np.ndarray[Any, np.dtype[np.int64]]  # [C] int64, tokens of each
    prompt_lengths: np.ndarray[Any, np.dtype[np.int64]]  # [C] int64, tokens before the answer
    temperatures: np.ndarray[Any, np.dtype[np.float32]]  # [C] float32, at which the answer was drawn

    def __post_init__(self) -> None:
        if not len(self.lengths) == len(self.prompt_lengths) == len(self.temperatures):
            raise ConfigError("The conversations' lengths, prompt_lengths and temperatures differ in number.")
        fit = (self.lengths >= 1) & (self.prompt_lengths >= 0) & (self.prompt_lengths <= self.lengths)
        if not fit.all() or int(self.lengths.sum()) != len(self.token_ids) or (self.token_ids < 0).any():
            raise ConfigError("The conversations' arrays do not fit each other; write the data again.")

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

    @classmethod
    def pack(cls, answered: Sequence[Answered]) -> "Conversations":
        """Put prompts and their answers one after another."""
        return cls(
            np.array([token for prompt, answer, _ in answered for token in prompt + answer], np.int32),
            np.array([len(prompt) + len(answer) for prompt, answer, _ in answered], np.int64),
            np.array([len(prompt) for prompt, _, _ in answered], np.int64),
            np.array([temperature for _, _, temperature in answered], np.float32),
        )

    @classmethod
    def load(cls, path: Path) -> "Conversations":
        """Read an .npz file with the four arrays."""
        with np.load(path, allow_pickle=False) as arrays:
            types = zip(_ARRAYS, (np.int32, np.int64, np.int64, np.float32), strict=True)
            return cls(*(arrays[name].astype(of) for name, of in types))

    def save(self, path: Path) -> None:
        """Write what `load` reads."""
        np.savez_compressed(path, **{name: getattr(self, name) for name in _ARRAYS})


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[Messages]:
    """Prompts of a .jsonl file: each line an object with `prompt` (a text) or `messages` (a conversation). Raises
    ConfigError: a line holds neither, or the model's template does not take it."""
    prompts: list[Messages] = []
    lines = path.read_text(encoding="utf-8").split("\n")  # a text may hold what else splits lines, such as U+2028
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            messages = entry["messages"] if "messages" in entry else [{"role": "user", "content": entry["prompt"]}]
            tokenizer.encode_chat(_to_answer(messages))
        except (ValueError, KeyError, TypeError, InvalidRequest) as error:
            raise ConfigError(
                f'{path} line {number}: {error!r}; give {{"prompt": ...}} or {{"messages": [...]}} as the model takes '
                "them."
            ) from error
        prompts.append(messages)
    return prompts


def write_questions(engine: EngineCore, tokenizer: Tokenizer, count: int) -> list[Prompt]:
    """Let the model ask `count` questions, each framed as a prompt; those that came to no end are left out."""
    one, other = (tuple(tokenizer.encode_chat([{"role": "user", "content": text}])) for text in ("A", "7"))
    opening = one[: _common_length(one, other)]
    closing = one[len(one) - _common_length(one[::-1], other[::-1]) :]
    if not opening or not closing:
        raise ConfigError("The chat template puts nothing around a question; give prompts in a .jsonl file.")
    params = SamplingParams(max_tokens=MAX_QUESTION, stop_token_ids=(closing[0],))
    requests = [Request(f"question-{index}", opening, params, seed=index) for index in range(count)]
    answers = _generate(engine, requests, "the model asks")
    return [opening + answer[:-1] + closing for answer, ended in answers if ended and answer[:-1]]


def write_answers(
    engine: EngineCore, prompts: Sequence[Prompt], *, max_tokens: int = MAX_ANSWER, seed: int = 0
) -> list[Answered]:
    """Let the model answer the prompts, in turn at each of ANSWER_TEMPERATURES."""
    temperatures = [ANSWER_TEMPERATURES[index % len(ANSWER_TEMPERATURES)] for index in range(len(prompts))]
    requests = [
        Request(f"answer-{index}", prompt, SamplingParams(max_tokens=max_tokens, temperature=heat), seed=seed + index)
        for index, (prompt, heat) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    answers = [answer for answer, _ in _generate(engine, requests, "the model answers")]
    return list(zip(prompts, answers, temperatures, strict=True))


def answer_prompts(engine: EngineCore, tokenizer: Tokenizer, prompts: Sequence[Messages]) -> list[Answered]:
    """Let the model answer. A message of the user that another one follows is answered, too, and that answer is part of
    the prompt of the next: a conversation for each answer. One ends early where it would outgrow the model."""
    found: list[Answered] = []
    waiting = list(prompts)
    while waiting:
        asked = [_to_answer(messages) for messages in waiting]
        encoded = [tuple(tokenizer.encode_chat(messages)) for messages in asked]
        answered = write_answers(engine, encoded, seed=len(found))
        found += answered
        longer = [
            [*done, {"role": "assistant", "content": tokenizer.decode(list(answer))}, *whole[len(done) :]]
            for whole, done, (_, answer, _) in zip(waiting, asked, answered, strict=True)
            if len(whole) > len(done)
        ]
        sizes = [len(tokenizer.encode_chat(_to_answer(messages))) + MAX_ANSWER for messages in longer]
        waiting = [messages for messages, size in zip(longer, sizes, strict=True) if size <= engine.max_model_len]
    return found


def _to_answer(messages: Messages) -> Messages:
    """The conversation up to the first message of the user that has to be answered."""
    roles = [message["role"] for message in messages]
    followed = (index for index, pair in enumerate(itertools.pairwise(roles)) if pair == ("user", "user"))
    return messages[: next(followed, len(messages)) + 1]


def _generate(engine: EngineCore, requests: Sequence[Request], label: str) -> list[tuple[Prompt, bool]]:
    """Return what each request got, and whether it came to an end by itself; in the order of the requests."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    ended: dict[str, bool] = {}
    for request in requests:
        engine.add(request)
    with click.progressbar(length=len(requests), label=label) as bar:
        while engine.has_work:
            for delta in engine.step():
                if delta.finish_reason is FinishReason.ERROR:
                    raise EngineFault(f"Generation of {delta.request_id} failed: {delta.error}")
                tokens[delta.request_id] += delta.token_ids
                if delta.finished:
                    ended[delta.request_id] = delta.finish_reason is FinishReason.STOP
                    bar.update(1)
    return [(tuple(tokens[request.request_id]), ended[request.request_id]) for request in requests]


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
