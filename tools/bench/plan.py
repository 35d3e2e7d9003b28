"""The plan of a bench: engines by name, cases, and how often."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from speculative.errors import ConfigError

Measure = Literal["decode", "whole", "first-token", "prefix-hit"]


@dataclass(frozen=True, slots=True)
class EngineName:
    """An engine and its settings, as the command line names it: `family/variant[:option=value]...`.

    Raises:
        ConfigError: `parse` was given something else.
    """

    text: str
    family: str
    variant: str
    options: dict[str, str] = field(hash=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one name."""
        name, *rest = text.split(":")
        family, slash, variant = name.partition("/")
        options = dict(part.partition("=")[::2] for part in rest)
        if not (slash and family and variant) or not all("=" in part for part in rest):
            raise ConfigError(
                f"--engines: {text!r} is not of the form family/variant[:option=value]..., as ours/ngram:k=2."
            )
        return cls(text, family, variant, options)


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One kind of prompts, so many at once, at one temperature."""

    kind: str
    streams: int
    temperature: float

    def __str__(self) -> str:
        plural = "stream" if self.streams == 1 else "streams"
        return f"{self.kind}, {self.streams} {plural}, T = {self.temperature:g}"


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Everything a run needs to know.

    head, draft_model: of drafters with weights.
    measure: tokens a second once every stream has its first token, or from the first prompt to the last token; or
        tokens of the prompts a second, until every stream has its first one, of new prompts or (`prefix-hit`) of those
        that were answered just before.
    """

    model: Path  # a folder
    engines: tuple[EngineName, ...]
    prompts: dict[str, list[list[int]]]  # token ids, by kind
    streams: tuple[int, ...]
    temperatures: tuple[float, ...]
    rounds: int
    tokens: int  # of every answer
    threads: int  # of every engine whose name gives none
    dtype: str
    against: tuple[str, ...]  # the engines of which the best, case by case, is what the others are compared with
    measure: Measure = "decode"
    together: bool = False  # our engines of the same weights share a process and one copy of them
    gguf: Path | None = None  # the same weights for llama.cpp
    head: str | None = None
    draft_model: str | None = None
    pythons: dict[str, str] = field(default_factory=dict)  # interpreters of engines with an environment of their own

    def __post_init__(self) -> None:
        names = [engine.text for engine in self.engines]
        if len(set(names)) < len(names):
            raise ConfigError("--engines names one twice.")
        strangers = [name for name in self.against if name not in names]
        if strangers:
            raise ConfigError(f"--against {', '.join(strangers)}: not among --engines ({', '.join(names)}).")

    def cases(self) -> Iterator[BenchCase]:
        """All of them, in order."""
        for temperature in self.temperatures:
            for streams in self.streams:
                for kind in self.prompts:
                    yield BenchCase(kind, streams, temperature)

    def round_prompts(self, case: BenchCase, number: int) -> list[list[int]]:
        """The prompts of one round, the same for every engine; rounds go through the set."""
        prompts = self.prompts[case.kind]
        begin = number * case.streams
        return [prompts[(begin + stream) % len(prompts)] for stream in range(case.streams)]

    @property
    def keeps_prefixes(self) -> bool:
        """Return whether engines keep the prompts that they have computed; else each round begins with nothing."""
        return self.measure == "prefix-hit"

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt, its answer, and room for drafts behind its end."""
        longest = max(len(prompt) for prompts in self.prompts.values() for prompt in prompts)
        return longest + self.tokens + 64

    def as_dict(self) -> dict[str, Any]:
        """The settings that figures depend on, for JSON."""
        return {
            "engines": [engine.text for engine in self.engines],
            "kinds": list(self.prompts),
            "streams": list(self.streams),
            "temperatures": list(self.temperatures),
            "rounds": self.rounds,
            "tokens": self.tokens,
            "threads": self.threads,
            "dtype": self.dtype,
            "against": list(self.against),
            "measure": self.measure,
            "together": self.together,
        }
