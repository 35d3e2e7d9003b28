"""vLLM's scheduler, with control over who may draft. It runs in the process of vLLM's engine.

vLLM itself cannot switch speculation off while it runs, nor for one request. In a step its scheduler verifies the
drafts that its requests carry: removing them before the step is enough to make it plain decoding. So nothing is
restarted, and no request loses anything. How many tokens a drafter makes at the end of a step is a number that the
scheduler gives with it: none where none may be verified.

`scheduler_cls` is an argument of vLLM's, but not a stable interface: `settings.TESTED` is the tested version.
"""

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from serve_app.backends.vllm_parts.orphan import end_with_parent
from serve_app.backends.vllm_parts.planned_drafts import Computed, PlannedDrafts
from serve_app.backends.vllm_parts.settings import TERMS
from speculative.request import Request, SamplingParams, Speculation
from speculative.scheduling.draft_length import DynamicLength

_ROUNDS_REPORTED = 64  # the last ones; outputs that a slow reader finds merged are distinguished by them


class SpeculationScheduler(Scheduler):
    """Verifies drafts only for requests that may currently draft."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        end_with_parent()
        terms = self.vllm_config.additional_config[TERMS]
        self._speculation = Speculation.ON
        self._sampled_drafts = not terms["sampled_drafts_fail"]
        # By number of drafts: what vLLM looks up by the size of the batch. Unless it is set, vLLM gives a request with
        # one token left to compute, as after every handoff, drafts that were never made, and verifies these.
        self._lookups = [[number] * (self.max_num_running_reqs + 1) for number in range(self.num_spec_tokens + 1)]
        self._steers_drafter = terms["steers_drafter"]
        self._planned: PlannedDrafts | None = None
        if terms["expected_acceptance"] is not None and self.num_spec_tokens:
            policy = DynamicLength(self.num_spec_tokens)
            policy.restart(terms["expected_acceptance"])
            self._planned = PlannedDrafts(policy, self.num_spec_tokens, by_model=terms["drafts_by_model"])
        self._began = self._ended = 0.0  # of the last step
        self._last_step: dict[str, Computed] = {}
        self._num_made = 0
        # By request: tokens emitted up to the end of the round, drafts, and how many of these were accepted.
        self._rounds: dict[str, list[tuple[int, int, int]]] = {}

    def add_request(self, request: Any) -> None:
        """Add a request; one of our own may carry an order."""
        terms = _terms(request)
        order = terms.get("speculation")
        if order is not None:
            self._speculation = Speculation(order)
        if self._planned is not None and "speculate" in terms:
            self._planned.add(_ours(request))
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The next step, without the drafts that must not be verified in it."""
        if self.num_spec_tokens:
            self._choose_drafts()
        self._began = self._ended = time.perf_counter()
        return super().schedule(*args, **kwargs)

    def _choose_drafts(self) -> None:
        """Keep those drafts of the last step that may be verified; then set the number of drafts of this one."""
        if self._planned is not None:
            if self._last_step:
                self._planned.observe(self._last_step, self._ended - self._began, self._num_made)
                self._last_step = {}
            self._planned.keep(self.requests)  # only now: of the last step, also those that it ended count
        mixed = not self._sampled_drafts and any(
            request.sampling_params is not None and request.sampling_params.temperature > 0
            for request in self.requests.values()
        )
        drafting = {} if mixed else {name: one for name, one in self.requests.items() if self._may_draft(one)}
        for request in self.running:
            if request.spec_token_ids:
                name, made = request.request_id, len(request.spec_token_ids)
                number = made if self._planned is None else self._planned.num_verified(name, made)
                request.spec_token_ids = request.spec_token_ids[: number if name in drafting else 0]
        self._num_made = self.num_spec_tokens
        if not drafting and self._steers_drafter:
            self._num_made = 0
        elif self._planned is not None and drafting:
            running = [request.request_id for request in self.running]
            self._num_made = self._planned.plan(running, [name for name in running if name in drafting])
        self.dynamic_sd_lookup = self._lookups[self._num_made]

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Take in the drafts; with them a step is over."""
        super().update_draft_token_ids(draft_token_ids)
        self._ended = time.perf_counter()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Return what the step emitted, each output with its rounds."""
        step = _computed(scheduler_output, model_runner_output)
        if self._planned is not None:
            self._last_step = step
        requests = dict(self.requests)
        reported = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in reported.values():
            for output in outputs.outputs:
                rounds = self._rounds.setdefault(output.request_id, [])
                if output.new_token_ids:
                    before = rounds[-1][0] if rounds else 0
                    judged = step[output.request_id]
                    rounds.append((before + len(output.new_token_ids), judged.num_drafted, judged.num_accepted))
                request = requests.get(output.request_id)
                preempted = request is not None and request.num_preemptions > 0
                terms = {"rounds": rounds[-_ROUNDS_REPORTED:], "preempted": preempted}
                output.kv_transfer_params = (output.kv_transfer_params or {}) | {TERMS: terms}
        for request_id in self._rounds.keys() - self.requests.keys():
            del self._rounds[request_id]
        self._ended = time.perf_counter()
        return reported

    def has_requests(self) -> bool:
        """Return whether there is something to do, also while paused: ongoing reads are completed."""
        return super().has_requests() or any(
            request.request_id not in self.finished_recving_kv_req_ids for request in self._reading()
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget what was computed, including what came from elsewhere or waits to be read, and what was accepted.
        Raises RuntimeError: some of it is being read; try again a step later."""
        if reset_running_requests and self._planned is not None:
            self._planned.restart()
        if reset_running_requests and hasattr(self.connector, "recall"):  # it is one of ours
            self.connector.recall()
            for request in [one for one in self._reading() if one.request_id in self.finished_recving_kv_req_ids]:
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request.request_id)
                self._update_waiting_for_remote_kv(request)
                request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        return bool(super().reset_prefix_cache(reset_running_requests, reset_connector))

    def _reading(self) -> list[Any]:
        """Requests whose handoff is being read."""
        waiting = self.kv_holding_waiting
        return [request for request in waiting if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS]

    def _may_draft(self, request: Any) -> bool:
        terms = _terms(request)
        on_trial = self._speculation is Speculation.CANARY and terms.get("canary", False)
        return terms.get("speculate", False) and (self._speculation is Speculation.ON or on_trial)


def _terms(request: Any) -> dict[str, Any]:
    params = request.sampling_params
    extra: dict[str, Any] = (params.extra_args if params is not None else None) or {}
    return extra.get(TERMS) or {}


def _ours(request: Any) -> Request:
    """Return what the choice of lengths reads of a request."""
    params = request.sampling_params
    speculate = _terms(request)["speculate"]
    ours = SamplingParams(max_tokens=params.max_tokens, temperature=params.temperature, speculate=speculate)
    return Request(request.request_id, tuple(request.prompt_token_ids), ours)


def _computed(scheduled: Any, output: Any) -> dict[str, Computed]:
    """Return what a step did for each request, before anything ends it."""
    step = {}
    for name, number in scheduled.num_scheduled_tokens.items():
        drafts = scheduled.scheduled_spec_decode_tokens.get(name, ())
        sampled = output.sampled_token_ids[output.req_id_to_index[name]] if output.sampled_token_ids else []
        num_drafted = sum(token >= 0 for token in drafts)  # -1 stands for no draft
        step[name] = Computed(number - len(drafts), num_drafted, list(sampled))
    return step
