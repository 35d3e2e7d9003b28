"""What is asked of a service that has started cannot end it."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayError, WorkerCrashedError

from deploy import cluster


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([], []),
        (["no compiler"], ["warning: replicas compute without their kernels, which is slow: no compiler"]),
        (WorkerCrashedError(), ["warning: whether replicas have their kernels is not known: "]),
        (GetTimeoutError("late"), ["warning: whether replicas have their kernels is not known: late"]),
    ],
)
def test_a_start_goes_on_where_nobody_says_which_kernels_run(
    answer: list[str] | RayError, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(asked: str) -> Any:
        assert asked == "truespec"
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: SimpleNamespace(remote=lambda name: name))
    monkeypatch.setattr(ray, "get", get)
    reported: list[str] = []
    cluster._warn_of_kernels("truespec", reported.append)
    assert len(reported) == len(said) and all(map(str.startswith, reported, said))
