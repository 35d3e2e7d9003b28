"""vLLM's scheduler, with control over who may draft. It runs in the process of vLLM's engine.

vLLM itself cannot switch speculation off while it runs, nor for one request. In a step its scheduler verifies the
drafts that its requests carry: removing them before the step is enough to make it plain decoding. So nothing is
restarted, and no request loses anything.

`scheduler_cls` is an argument of vLLM's, but not a stable interface: `settings.TESTED` lists the tested versions.
"""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from serve_app.backends.vllm_parts.orphan import end_with_parent
from serve_app.backends.vllm_parts.settings import TERMS
from speculative.request import Speculation

_ROUNDS_REPORTED = 64  # the last ones; outputs that a slow reader finds merged are distinguished by them


class SpeculationScheduler(Scheduler):
    """Verifies drafts only for requests that may currently draft."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        end_with_parent()
        self._speculation = Speculation.ON
        self._sampled_drafts = not self.vllm_config.additional_config[TERMS]["sampled_drafts_fail"]
        if self.num_spec_tokens:
            # The same number of drafts for every batch size. By default vLLM gives a request with one token left to
            # compute, as after every handoff, drafts that were never made, and verifies these.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)
        self._rounds: dict[str, list[tuple[int, int]]] = {}  # by request: tokens emitted up to its end, drafts

    def add_request(self, request: Any) -> None:
        """Add a request; one of our own may carry an order."""
        order = _terms(request).get("speculation")
        if order is not None:
            self._speculation = Speculation(order)
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The next step, without the drafts that must not be verified in it."""
        mixed = not self._sampled_drafts and any(
            request.sampling_params is not None and request.sampling_params.temperature > 0
            for request in self.requests.values()
        )
        for request in self.running:
            if request.spec_token_ids and (mixed or not self._may_draft(request)):
                request.spec_token_ids = []
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """What the step emitted, each output with its rounds."""
        drafted = {
            request_id: sum(token >= 0 for token in tokens)  # -1 stands for no draft
            for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items()
        }
        requests = dict(self.requests)
        reported = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in reported.values():
            for output in outputs.outputs:
                rounds = self._rounds.setdefault(output.request_id, [])
                if output.new_token_ids:
                    before = rounds[-1][0] if rounds else 0
                    rounds.append((before + len(output.new_token_ids), drafted.get(output.request_id, 0)))
                request = requests.get(output.request_id)
                preempted = request is not None and request.num_preemptions > 0
                terms = {"rounds": rounds[-_ROUNDS_REPORTED:], "preempted": preempted}
                output.kv_transfer_params = (output.kv_transfer_params or {}) | {TERMS: terms}
        for request_id in self._rounds.keys() - self.requests.keys():
            del self._rounds[request_id]
        return reported

    def has_requests(self) -> bool:
        """Whether there is something to do, also while paused: ongoing reads are completed."""
        return super().has_requests() or any(
            request.request_id not in self.finished_recving_kv_req_ids for request in self._reading()
        )

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget what was computed, including what came from elsewhere or waits to be read.

        Raises:
            RuntimeError: some of it is being read; try again a step later.
        """
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
