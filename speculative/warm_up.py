"""Made-up requests, run before the first real one: nothing is set up, or tried out, at a user's expense."""

import time

from speculative.drafting.weightless import LookupDrafter
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from speculative.scheduling.draft_length import DynamicLength
from speculative.scheduling.step_cost import StepCost

_LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # sequences
_MOST_S = 2.5  # after so many seconds no further load is begun; it will begin with what a smaller one costs
_LEAST_STEPS, _MOST_STEPS = 4, 60
_PROMPT = (0, 1, 2)
_LONG_PROMPT = _PROMPT * 128
_SHORT_STEPS = 12  # of one sequence; then it is tried with a long prompt, which shows what a token of context costs


def warm_up(engine: EngineCore) -> None:
    """Run a few steps of one request; where the length of drafts is dynamic, so many that it knows what steps cost.

    The engine has to be idle. It keeps nothing of these requests: no prefix, counts, rates of acceptance or seeds.
    """
    length = engine.scheduler.draft_length
    if isinstance(length, DynamicLength):
        _try_lengths(engine, length)
    else:
        _run(engine, 1, _LEAST_STEPS)
    length.restart()
    if isinstance(engine.drafter, LookupDrafter):
        engine.drafter.restart()
    engine.scheduler.pool.drop_prefixes()
    engine.self_check.reset()
    engine.take_stats()


def _try_lengths(engine: EngineCore, length: DynamicLength) -> None:
    """Have it know what steps cost at one load after another, and what context costs at the first."""
    length.is_trial = True
    started = time.perf_counter()
    for num_sequences in _LOADS:
        is_late = num_sequences > engine.config.max_num_seqs or time.perf_counter() > started + _MOST_S
        if num_sequences > 1 and is_late:
            break
        cost = length.cost(num_sequences)
        _run(engine, num_sequences, _SHORT_STEPS if num_sequences == 1 else _MOST_STEPS, cost)
        if num_sequences == 1:
            _run(engine, num_sequences, _MOST_STEPS, cost, _LONG_PROMPT)


def _run(
    engine: EngineCore, num_sequences: int, steps: int, cost: StepCost | None = None, prompt: tuple[int, ...] = _PROMPT
) -> None:
    """Run so many steps, or fewer where their cost is known by then."""
    prompt = prompt[: engine.max_model_len // 2]
    room = engine.max_model_len - len(prompt)
    params = SamplingParams(max_tokens=min(room, steps * (1 + engine.config.drafter.max_drafts)), ignore_eos=True)
    requests = [Request(f"warm-up-{number}", prompt, params, seed=number) for number in range(num_sequences)]
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        if cost is not None and cost.is_known:
            break
        engine.step()
    for request in requests:
        engine.abort(request.request_id)
