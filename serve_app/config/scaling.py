"""Autoscaling, as the configuration describes it."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from serve_app.config.base import LOAD_POLICY, AtLeastOne, Delay, FieldError, PoolName, Section, Target


class _Scaling(Section):
    """Bounds and patience of a pool that grows and shrinks."""

    min_replicas: AtLeastOne = 1
    """Replicas that always run."""
    max_replicas: AtLeastOne
    """Most replicas."""
    target_ongoing_requests: Target = 8.0
    """Policy `requests`: requests in flight per replica that Serve aims at."""
    upscale_delay_s: Delay = 10.0
    """Time for which more replicas must be wanted before they start."""
    downscale_delay_s: Delay = 120.0
    """Time for which fewer replicas must be wanted before some stop; each finishes its streams first."""
    look_back_period_s: Target = 10.0
    """Period over which load is averaged."""

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise FieldError("min_replicas", f"must be at most max_replicas ({self.max_replicas}); lower it.")
        return self


class AutoscalingSection(_Scaling):
    """Ray Serve chooses the number of replicas, by a policy."""

    policy: Literal["load", "requests"] = "load"
    """`load`: by the seconds of work that wait for a prefill replica, by KV use and running requests of the others;
    `requests`: by the requests in flight, Ray Serve's own policy."""
    target_backlog_s: Target = 2.0
    """Policy `load`, prefill: most seconds of prompts that should wait for a replica."""
    target_kv_usage: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Policy `load`, decode and monolith: largest share of the KV blocks that should be in use."""
    target_running_share: Target = 0.8
    """Policy `load`, decode and monolith: requests in the engine, as a share of `engine.max_num_seqs`."""

    @model_validator(mode="after")
    def _targets_of_its_policy(self) -> Self:
        of_load = ("target_backlog_s", "target_kv_usage", "target_running_share")
        for name in of_load if self.policy == "requests" else ("target_ongoing_requests",):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise FieldError(name, f"has no effect with policy {self.policy}; remove it or change policy.")
        return self

    def serve_options(self, pool: PoolName) -> dict[str, Any]:
        """Ray Serve's `autoscaling_config`."""
        options = self.model_dump(include=set(_Scaling.model_fields)) | {"metrics_interval_s": 1.0}
        if self.policy == "load":
            most = {"kv_usage": self.target_kv_usage, "running_share": self.target_running_share}
            if pool == "prefill":
                most = {"backlog_s": self.target_backlog_s}
            options["policy"] = {"policy_function": LOAD_POLICY, "policy_kwargs": {"targets": most}}
        return options


class ServePolicySection(Section):
    """A policy in Ray Serve's words."""

    policy_function: Literal["serve_app.cluster.autoscaling:LoadPolicy"]
    """Scales by load."""
    policy_kwargs: dict[str, dict[str, Annotated[float, Field(strict=False)]]]
    """`targets`: what a replica should have at most of `backlog_s` (prefill), `kv_usage` and `running_share`."""

    @model_validator(mode="after")
    def _has_known_targets(self) -> Self:
        known = {"backlog_s", "kv_usage", "running_share"}
        targets = self.policy_kwargs.get("targets", {})
        above_0 = all(0 < value < math.inf for value in targets.values())
        if set(self.policy_kwargs) != {"targets"} or not targets or set(targets) - known or not above_0:
            raise FieldError("policy_kwargs", f"must be targets: above 0, of {', '.join(sorted(known))}.")
        return self


class ServeAutoscalingSection(_Scaling):
    """Autoscaling in Ray Serve's words; without a `policy` it goes by the requests in flight."""

    metrics_interval_s: Target = 1.0
    """Period in which replicas are asked."""
    policy: ServePolicySection | None = None
    """Scales by load."""

    def as_ours(self) -> dict[str, Any]:
        """The same in the words of a pool's `autoscaling`."""
        kept = self.model_dump(include=self.model_fields_set & set(_Scaling.model_fields))
        if self.policy is None:
            return kept | {"policy": "requests"}
        kept.pop("target_ongoing_requests", None)
        return kept | {f"target_{name}": value for name, value in self.policy.policy_kwargs["targets"].items()}
