"""Our service, watched through the proxy: with a fault and without."""

import pytest

from tools.faults.watched import SOUND, watch_faults

pytestmark = pytest.mark.slow


def test_a_fault_is_found_through_the_proxy_and_named() -> None:
    (found,) = watch_faults(["F10 logprobs of another row"], most_tokens=20_000)
    assert found.found.startswith("drift")
    assert found.tokens < 2_000
    assert not found.is_wrong


def test_nothing_is_found_in_a_sound_server() -> None:
    runs = watch_faults([SOUND], most_tokens=1_500)
    assert [one.found for one in runs] == [""] * 4
    assert all(one.tokens >= 1_500 for one in runs)
    assert {one.way for one in runs} == {"n-gram", "n-gram, handoffs", "draft model", "draft model, handoffs"}
