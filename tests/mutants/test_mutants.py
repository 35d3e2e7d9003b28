"""Ten faults, put back, are caught by checks of the offline suite that the sound engine passes.

The audit finds every known fault in a running engine (`tests/tools/test_faults.py`). A service might never hear of
these ten: that takes a replay of an answer that shows them, the acceptance of an engine without the fault, or the rules
of penalties, ends and seeds applied by other code than the engine's. Faults of verification are caught by the
distribution of what it emits (`tests/speculative/test_joint_distribution.py`), those of the logprobs' form by their
contract (`tests/speculative/sampling/test_logprob_checks.py`).
"""

from pathlib import Path

import pytest

from tests.support.mutant_checks import CHECKS, World
from tests.support.tiny_models import write_tiny_model
from tools.faults.mutants import MUTANTS

CAUGHT_BY = {
    "F1 stale drafts near the length limit": "logprobs_hold_near_the_length_limit",
    "F5 a reused slot's last token after a handoff": "logprobs_hold_after_a_handoff_into_a_used_slot",
    "F9 penalties blind to the round's own drafts": "greedy_equals_plain",
    "F10 logprobs of another row": "logprobs_are_teacher_forced",
    "F11 prompt logprobs damaged at chunk borders": "prompt_logprobs_are_teacher_forced",
    "F14 blocks of the prefix cache lack the drafter's keys and values": "drafts_go_on_from_the_prefix_cache",
    "F15 penalties forget what was said before a preemption": "preemption_changes_nothing",
    "F17 unseeded requests share a stream": "unseeded_requests_differ",
    "F21 a stop inside an accepted run is overlooked": "nothing_follows_a_stop",
    "F22 speculation silently off while logprobs are asked for": "speculation_stays_on_while_logprobs_are_asked_for",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("mutants") / "m", vocab_size=64)


def test_every_check_has_a_mutant() -> None:
    assert set(CAUGHT_BY) <= set(MUTANTS)
    assert set(CAUGHT_BY.values()) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_sound_engine_passes(folder: Path, name: str) -> None:
    CHECKS[name](World(folder))


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_the_mutant_is_caught(folder: Path, name: str) -> None:
    with pytest.raises(AssertionError):
        CHECKS[CAUGHT_BY[name]](World(folder, MUTANTS[name].install))
