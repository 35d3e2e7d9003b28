"""Ten faults, put back, are caught by tests of the offline suite.

The audit finds every known fault in a running engine (`tests/tools/test_faults.py`). A service might never hear of
these ten: that takes a replay of an answer that shows them, the acceptance of an engine without the fault, or the rules
of penalties, ends and seeds applied by other code than the engine's. Faults of verification are caught by the
distribution of what it emits (`tests/speculative/test_joint_distribution.py`), those of the logprobs' form by their
contract (`tests/speculative/sampling/test_logprob_checks.py`).
"""

import re
import subprocess
import sys

import pytest

from tests.support.project_files import ROOT

ENGINE, DRAFTERS = "tests/speculative/test_engine.py", "tests/speculative/drafting/test_neural_drafter.py"
CAUGHT_BY = {
    "F1 stale drafts near the length limit": f"{ENGINE}::test_greedy_text_is_the_plain_one[4]",
    "F5 a reused slot's last token after a handoff": f"{ENGINE}::test_block_sizes_need_not_agree",
    "F9 penalties blind to the round's own drafts": "tests/speculative/sampling/test_logits_processors.py"
    "::test_processed_logprobs_are_those_of_the_naive_distribution_at_every_position",
    "F10 logprobs of another row": f"{ENGINE}::test_served_logprobs_are_those_of_teacher_forcing",
    "F11 prompt logprobs damaged at chunk borders": "tests/speculative/test_prompt_logprobs.py"
    "::test_chunks_and_blocks_of_any_size_give_the_same",
    "F14 blocks of the prefix cache lack the drafter's keys and values": f"{DRAFTERS}"
    "::test_a_drafter_that_is_the_target_is_always_right_through_handoff_preemption_and_prefix_hits",
    "F15 penalties forget what was said before a preemption": "tests/speculative/test_tree_engine.py"
    "::test_answers_are_those_without_drafts[eagle3-few blocks]",
    "F17 unseeded requests share a stream": "tests/speculative/selfcheck/test_rounds.py"
    "::test_whether_to_draft_at_all_by_the_coin_alarms",
    "F21 a stop inside an accepted run is overlooked": "tests/speculative/scheduling/test_scheduler.py"
    "::test_a_stop_inside_an_accepted_run_ends_the_text_there",
    "F22 speculation silently off while logprobs are asked for": f"{ENGINE}::test_greedy_text_is_the_plain_one[7]",
}


@pytest.fixture(scope="module")
def failed() -> list[str]:
    """The tests that fail where each has its fault; without the faults the suite has them pass."""
    options = ["-q", "-n0", "-rf", "--tb=no", "-p", "no:cacheprovider", "-p", "tests.support.faults_put_back"]
    command = [sys.executable, "-m", "pytest", *options, *CAUGHT_BY.values()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    return re.findall(r"^FAILED (.*?)(?: - |$)", run.stdout, re.M)


@pytest.mark.parametrize("fault", CAUGHT_BY)
def test_a_fault_is_caught(failed: list[str], fault: str) -> None:
    assert any(test.startswith(CAUGHT_BY[fault]) for test in failed)
