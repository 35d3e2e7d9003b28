"""The one fault that this package can put into an engine, for requests of a rehearsal: a first draft that was rejected
is committed all the same, as in systems that forgot to verify it."""

from collections.abc import Sequence as Sequences
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from serve_app.backends.torch_backend import load_engine
from speculative.config import EngineConfig
from speculative.engine import EngineCore
from speculative.scheduling.draft_length import DraftPlan
from speculative.state.sequence import Sequence
from speculative.step.sampler import SampledStep


def load_rehearsing(folder: Path, config: EngineConfig) -> EngineCore:
    """Load an engine with the fault in requests of a rehearsal; all others are computed as ever, to the bit.

    Its own checks see what was decided before, so that the referee has to find what was committed. As much is drafted
    for these requests as is configured, whether it pays or not, and nothing is learned of them.
    """
    engine = load_engine(folder, config)
    report, length = engine.parts.sampler.report, engine.scheduler.draft_length
    choose, observe = length.choose, length.observe

    def reporting(step_input: Any, sampled: SampledStep, **options: Any) -> Any:
        chosen = [entry.sequence.request.rehearsal for entry in step_input.sampled_entries]
        return report(step_input, _unverified(engine, sampled, chosen) if any(chosen) else sampled, **options)

    def choosing(decoding: Sequences[Sequence]) -> DraftPlan:
        if not decoding or not all(one.request.rehearsal for one in decoding):
            return choose(decoding)
        return DraftPlan(dict.fromkeys([one.request.request_id for one in decoding], config.drafter.num_draft_tokens))

    def observing(entries: Any, *args: Any, **options: Any) -> None:
        if not any(entry.sequence.request.rehearsal for entry in entries):
            observe(entries, *args, **options)

    engine.parts.sampler.report = reporting  # type: ignore[method-assign]
    length.choose, length.observe = choosing, observing  # type: ignore[method-assign]
    return engine


def _unverified(engine: EngineCore, sampled: SampledStep, chosen: list[bool]) -> SampledStep:
    """The step with the first draft of each chosen entry in the place of the token that replaced it."""
    given, verified = sampled.given, sampled.verified
    faulty = torch.tensor(chosen, device=given.counts.device) & (given.counts > 0) & (verified.num_accepted == 0)
    tokens = torch.where(faulty, given.drafts[given.first_rows], verified.token_ids)
    verified = replace(verified, token_ids=tokens)
    return replace(sampled, verified=verified, token_ids=engine.parts.sampler.ops.emitted_at_rows(verified, given))
