"""Replicas with a faulty engine, for tests only: the fault is there while a file is."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from serve_app.backends.torch_backend import TorchBackend, load_engine
from serve_app.config.app_config import AppConfig
from serve_app.config.base import PoolName
from speculative.config import EngineConfig
from speculative.engine import EngineCore
from speculative.request import TokenDelta
from speculative.sampling.draft_probs import PointMass
from speculative.sampling.token_wise import verify_token_wise
from speculative.sampling.verification import VerifyInput, VerifyOutput
from speculative.state.batch import StepInput

_HELD_AT = 100  # tokens of an answer

Fault = Callable[[EngineCore, Path], None]


def commit_first_drafts(engine: EngineCore, flag: Path) -> None:
    """The first draft of a round is emitted, whatever the target says."""
    right = engine.parts.sampler.verify_uncoupled

    def verify(step: VerifyInput) -> VerifyOutput:
        if not flag.exists():
            return right(step)
        first = step.judged & (step.offsets == 0)
        surely = step.probs.scatter(1, step.drafts.clamp(min=0)[:, None], 1.0)
        return verify_token_wise(
            replace(step, probs=torch.where(first[:, None], surely, step.probs), draft_probs=PointMass())
        )

    engine.parts.sampler.verify_uncoupled = verify


def misplace_rounds_with_drafts(engine: EngineCore, flag: Path) -> None:
    """Rounds with drafts are computed some positions further on; what they leave in the KV cache is wrong too."""
    right = engine.runner.forward_with_features

    def forward(step_input: StepInput, capture: tuple[int, ...]) -> Any:
        wrong = flag.exists() and step_input.draft_counts.any()
        return right(replace(step_input, positions=step_input.positions + 9) if wrong else step_input, capture)

    engine.runner.forward_with_features = forward  # type: ignore[method-assign]


def slow_steps(engine: EngineCore, flag: Path) -> None:
    """Every step takes longer: no fault of what is said, but time to do something meanwhile."""
    right = engine.step

    def step() -> list[TokenDelta]:
        if flag.exists():
            time.sleep(0.03)
        return right()

    engine.step = step  # type: ignore[method-assign]


def hold_long_answers(engine: EngineCore, flag: Path) -> None:
    """No step is made while a sequence has many tokens: its stream cannot end, however slow whoever watches it is."""
    right = engine.step

    def step() -> list[TokenDelta]:
        if flag.exists() and any(sequence.num_output >= _HELD_AT for sequence in engine.scheduler._running):
            time.sleep(0.01)
            return []
        return right()

    engine.step = step  # type: ignore[method-assign]


def with_fault(replica: Any, fault: Fault, flag: Path) -> Any:
    """The deployment class with the fault in its engine."""

    class Faulty(replica):  # type: ignore[misc]
        @staticmethod
        def make_backend(config: AppConfig, pool: PoolName) -> TorchBackend:
            def make(folder: Path, engine_config: EngineConfig) -> EngineCore:
                engine = load_engine(folder, engine_config)
                fault(engine, flag)
                return engine

            return TorchBackend(config.model.source, config.model.served_name, config.engine_config(pool), make)

    Faulty.__name__ = Faulty.__qualname__ = replica.__name__
    return Faulty
