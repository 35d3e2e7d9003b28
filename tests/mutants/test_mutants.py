"""Faults, put back, are caught by a check of the offline suite that the sound engine passes.

What finds each of them in a running engine is the audit's matter.
"""

from pathlib import Path

import pytest

from deploy.audit.mutants import MUTANTS
from tests.support.mutant_checks import CHECKS, World
from tests.support.tiny_models import write_tiny_model

CAUGHT_BY = {
    "F1 stale drafts near the length limit": "logprobs_hold_near_the_length_limit",
    "F2 scored ids gathered from the logits": "scored_ids_agree_with_the_most_likely",
    "F4 draft probabilities in another order": "the_joint_distribution_is_the_targets",
    "F4 draft probabilities never reach the verifier": "acceptance_is_what_p_and_q_allow",
    "F5 a reused slot's last token after a handoff": "logprobs_hold_after_a_handoff_into_a_used_slot",
    "F6 draft and residual share their noise": "the_joint_distribution_is_the_targets",
    "F6 the coin is used again for the residual": "the_joint_distribution_is_the_targets",
    "F6 block verification with accept uniforms keyed by position": "the_joint_distribution_holds_for_likely_runs",
    "F7 q before the filters, drafts sampled after them": "the_joint_distribution_is_the_targets",
    "F8 argmax match at T > 0": "the_joint_distribution_is_the_targets",
    "F8 the residual is drawn from p": "the_joint_distribution_is_the_targets",
    "F9 sampling parameters skipped on drafted positions": "greedy_equals_plain",
    "F9 penalties blind to the round's own drafts": "greedy_equals_plain",
    "F10 logprob 0 for every token": "logprobs_are_teacher_forced",
    "F10 logprobs for the first token of a run only": "every_token_has_its_entry",
    "F10 logprobs of another row": "logprobs_are_teacher_forced",
    "F10 logits modified in place": "raw_logprobs_ignore_the_parameters",
    "F11 prompt logprobs damaged at chunk borders": "prompt_logprobs_are_teacher_forced",
    "F12 the first draft is committed unverified": "greedy_equals_plain",
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
    assert set(CAUGHT_BY.values()) <= set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_the_sound_engine_passes(folder: Path, name: str) -> None:
    CHECKS[name](World(folder))


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_the_mutant_is_caught(folder: Path, name: str) -> None:
    with pytest.raises(AssertionError):
        CHECKS[CAUGHT_BY[name]](World(folder, MUTANTS[name].install))
