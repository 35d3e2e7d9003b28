"""Our scheduler without an engine: whose drafts are verified, and what is reported of each round."""

from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.backends.vllm_parts.settings import Faults, scheduler_terms
from speculative.config import DrafterConfig
from speculative.request import Speculation
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = NEEDS_VLLM


def asking(temperature: float = 0.0, **terms: Any) -> SimpleNamespace:
    """A running request with drafts."""
    extra = {"truespec": {"speculate": True} | terms}
    params = SimpleNamespace(temperature=temperature, max_tokens=1000, extra_args=extra)
    return SimpleNamespace(sampling_params=params, spec_token_ids=[5, 6], num_preemptions=0, prompt_token_ids=[1, 2])


def scheduler(
    monkeypatch: pytest.MonkeyPatch,
    requests: dict[str, SimpleNamespace],
    *,
    sampled_drafts: bool = True,
    drafter: DrafterConfig | None = None,
) -> Any:
    """One of ours over vLLM's, of which nothing runs but what is called here."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from serve_app.backends.vllm_parts.vllm_scheduler import SpeculationScheduler

    drafter = drafter or DrafterConfig(num_draft_tokens=2)

    def begin(self: Any) -> None:
        terms = scheduler_terms(drafter, Faults(sampled_drafts=not sampled_drafts), ((), ()))
        self.vllm_config = SimpleNamespace(additional_config={"truespec": terms})
        self.requests, self.running = requests, list(requests.values())
        self.num_spec_tokens = 0 if drafter.kind == "none" else drafter.num_draft_tokens
        self.max_num_running_reqs = 4
        for name, request in requests.items():
            request.request_id = name

    monkeypatch.setattr(Scheduler, "__init__", begin)
    monkeypatch.setattr(Scheduler, "add_request", lambda self, request: None)
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self: {n: list(r.spec_token_ids) for n, r in self.requests.items()}
    )
    monkeypatch.setattr("serve_app.backends.vllm_parts.vllm_scheduler.end_with_parent", lambda: None)
    ours = SpeculationScheduler()
    for request in requests.values():
        ours.add_request(request)
    return ours


@pytest.mark.parametrize("speculation", Speculation)
def test_only_who_may_draft_is_verified(monkeypatch: pytest.MonkeyPatch, speculation: Speculation) -> None:
    requests = {"client": asking(), "canary": asking(canary=True), "plain": asking(speculate=False)}
    ours = scheduler(monkeypatch, requests)
    terms = {"truespec": {"speculation": speculation.value}}
    ours.add_request(SimpleNamespace(sampling_params=SimpleNamespace(extra_args=terms)))
    reported = ours.schedule()
    assert reported["plain"] == []
    assert bool(reported["client"]) == (speculation is Speculation.ON)
    assert bool(reported["canary"]) == (speculation is not Speculation.OFF)


def test_where_sampled_drafts_fail_one_sampled_request_keeps_drafts_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for sampled_drafts in (True, False):
        requests = {"greedy": asking(), "hot": asking(temperature=0.7)}
        ours = scheduler(monkeypatch, requests, sampled_drafts=sampled_drafts)
        ours.running = [requests["greedy"]]  # the other one waits, and may come with the next step
        assert bool(ours.schedule()["greedy"]) == sampled_drafts
    alone = {"greedy": asking()}
    assert scheduler(monkeypatch, alone, sampled_drafts=False).schedule()["greedy"] == [5, 6]


def test_rounds_are_reported_without_the_placeholders_that_nobody_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    requests = {"r": asking()}
    ours = scheduler(monkeypatch, requests)
    said = iter(([7], [8, 9], [3], [5]))

    def update(self: Any, *args: Any) -> dict[int, SimpleNamespace]:
        output = SimpleNamespace(request_id="r", new_token_ids=next(said), kv_transfer_params=None)
        return {0: SimpleNamespace(outputs=[output])}

    monkeypatch.setattr(Scheduler, "update_from_output", update)
    reported = []
    for drafts, drawn in (([-1, -1], [7]), ([8, 4, 4], [8, 9]), ([], [3]), ([5, 6], [5, 6, 2])):  # the last one ends it
        step = SimpleNamespace(
            num_scheduled_tokens={"r": 1 + len(drafts)}, scheduled_spec_decode_tokens={"r": drafts} if drafts else {}
        )
        output = SimpleNamespace(sampled_token_ids=[drawn], req_id_to_index={"r": 0})
        (told,) = ours.update_from_output(step, output)[0].outputs
        reported.append(told.kv_transfer_params["truespec"]["rounds"])
    assert reported[-1] == [(1, 0, 0), (3, 3, 1), (4, 0, 0), (5, 2, 2)]
    requests.clear()
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, *args: {})
    ours.update_from_output(SimpleNamespace(num_scheduled_tokens={}, scheduled_spec_decode_tokens={}), None)
    assert ours._rounds == {}, "what is over is remembered"


def test_a_drafter_makes_nothing_where_nothing_may_be_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's drafts cost time, whether they are verified or not."""
    for requests, kind, made in (
        ({"plain": asking(speculate=False)}, "ngram", 0),
        ({"plain": asking(speculate=False), "client": asking()}, "ngram", 2),
        ({"plain": asking(speculate=False)}, "suffix", 2),  # vLLM's insists on its number
    ):
        ours = scheduler(monkeypatch, requests, drafter=DrafterConfig(kind=kind, num_draft_tokens=2))
        ours.schedule()
        assert ours.dynamic_sd_lookup == [made] * 5


def test_drafts_of_dynamic_length_are_cut_to_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = {name: asking() for name in ("sure", "lost")}
    ours = scheduler(monkeypatch, requests, drafter=DrafterConfig(num_draft_tokens=2, length="dynamic"))
    monkeypatch.setattr(ours._planned, "plan", lambda running, drafting: 1)
    monkeypatch.setattr(ours._planned, "num_verified", lambda name, made: min(made, name == "sure"))
    assert ours.schedule() == {"sure": [5], "lost": []}
    assert ours.dynamic_sd_lookup == [1] * 5


def test_a_step_that_ends_a_request_is_learned_from_and_then_the_request_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under load some request ends in nearly every step."""
    from vllm.v1.core.sched.scheduler import Scheduler

    requests = {name: asking() for name in ("ends", "stays")}
    ours = scheduler(monkeypatch, requests, drafter=DrafterConfig(num_draft_tokens=2, length="dynamic"))

    def update(self: Any, *args: Any) -> dict[int, SimpleNamespace]:
        del self.requests["ends"]
        return {}

    monkeypatch.setattr(Scheduler, "update_from_output", update)
    seen: list[list[str]] = []
    monkeypatch.setattr(
        ours._planned.policy,
        "observe",
        lambda entries, *_: seen.append([one.sequence.request.request_id for one in entries]),
    )
    step = SimpleNamespace(num_scheduled_tokens={"ends": 1, "stays": 1}, scheduled_spec_decode_tokens={})
    output = SimpleNamespace(sampled_token_ids=[[7], [8]], req_id_to_index={"ends": 0, "stays": 1})
    ours.update_from_output(step, output)
    ours.running = list(ours.requests.values())
    ours.schedule()
    assert seen == [["ends", "stays"]]
    assert list(ours._planned._sequences) == ["stays"], "what is over is remembered"
