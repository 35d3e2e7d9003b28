"""Answers as they travel from the replicas to the controller."""

import pickle
from dataclasses import replace

from speculative.request import TokenKind
from tests.support.referees import served

NUM = 1000


def test_strata_add_little_to_a_message() -> None:
    answer = served(
        token_ids=(5,) * NUM,
        logprobs=(-1.0,) * NUM,
        kinds=(TokenKind.ACCEPTED,) * NUM,
        rounds_since_handoff=tuple(range(NUM)),
        preempted=(False,) * NUM,
        max_model_len=NUM,
    )
    assert [len(names) for names in (answer.strata[0], answer.strata[-1])] == [6, 7], "the last is near the limit"
    sent = pickle.dumps(answer)
    assert len(sent) - len(pickle.dumps(replace(answer, strata=()))) < 4 * NUM
    assert pickle.loads(sent) == answer
