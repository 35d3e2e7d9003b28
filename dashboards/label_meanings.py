"""Meanings of the labels of the metrics, value by value: the generated documentation and its tests read this."""

from collections.abc import Mapping

from serve_app.referee.strata import STRATA
from serve_app.telemetry.metric_names import (
    PREFIX,
    REFUSALS,
    REPLAY_ALARMS,
    TRIP_REASONS,
    WATCHED_RESULTS,
    Metric,
)
from speculative.stats import CHECKS, DRAW_CHECKS, INVARIANTS, LOGPROB_RULES

Meaning = Mapping[str, str] | str
"""Each value with its meaning; one text where the set of values is open."""

# label -> metric without its prefix ("" = all others with the label) -> meaning
_MEANINGS: dict[str, dict[str, Meaning]] = {
    "model_name": {"": "The name that clients use."},
    "pool": {
        "": {
            "prefill": "computes prompts and replays; the referee's counts are reported here, too",
            "decode": "decodes, and answers HTTP where there is no router",
            "monolith": "both in one",
            "router": "answers HTTP in front of replicas that may die",
            "watched": "a server of any make, watched by `truespec watch`",
        }
    },
    "replica": {"": "Ray Serve's name of the replica. Only gauges carry it, since they do not add up."},
    "answered_by": {
        "": "Ray Serve's name of the replica that answered; for a watched server the name in its header, or `server`."
    },
    "since_handoff": {
        "": {
            "none": "computed where the prompt was",
            "0": "the first round after the handoff",
            "1": "the second",
            "2_3": "the next two",
            "4_7": "the next four",
            "8_up": "all later rounds",
        }
    },
    "weights": {
        "": {
            "current": "drafted and verified with the newest weights that the replica has served",
            "previous": "with those before the last update, which requests that were running may still use",
            "older": "with weights before those",
        }
    },
    "sampling": {"": {"sampled": "temperature 1, without filters", "greedy": "temperature 0"}},
    "position": {"": "Position of the draft token in its round, 0 = first."},
    "nats": {"": "The drift that was exceeded. The thresholds overlap: a token counts at each that it exceeds."},
    "version": {"": "truespec's version."},
    "fingerprint": {"": "The fingerprint of the model's configuration and weights."},
    "drafter": {"": "`drafter.kind` of the configuration."},
    "engine": {"": "vLLM and its version."},
    "kernels": {"": {"cpu": "our own, for AVX-512 or AVX2", "triton": "on a GPU, by Triton"}},
    "code": {"": "The HTTP status code; 499 if the client left before its answer began."},
    "outcome": {
        "": {
            "stop": "ended with a stop token or a stop string",
            "length": "reached its max_tokens, or the model's longest length",
            "abort": "its client disconnected",
            "error": "the engine or the service failed, or the deadline passed",
            "rejected": "was not started: too much was in flight, or it asks for something that cannot be served",
        }
    },
    "result": {
        "handoffs_total": {
            "ok": "accepted by the decode engine",
            "refused": "not accepted; the decode engine computed the prompt (`truespec_handoff_refusals_total` has the "
            "reason)",
            "failed": "no prefill replica supplied one; the decode engine computed the prompt",
        },
        "resumes_total": {"resumed": "continues on another replica", "failed": "ended with an error"},
        "replay_alternatives_total": {
            "compared": "with the replay's of the same token",
            "left_out": "not compared: they were too many, or the replay knows nothing of the token",
        },
        "replays_total": {
            "ok": "computed and compared",
            "failed": "could not be submitted, or two attempts did not compute it: the answer stays unverified",
            "skipped": "not tried: too many were waiting",
            "outdated": "not comparable: the weights have been changed since",
            "refused": "not computed: no sound engine gives that answer (it breaks a limit of its request, is too "
            "long, or has invalid token ids)",
        },
        "independent_replays_total": {
            "agrees": "`transformers` finds what was served",
            "disagrees": "it does not, though the engine's own replay did: the engine's model code or its weights are "
            "wrong",
            "skipped": "not tried: others were waiting, or it has more than 4096 tokens",
            "outdated": "not comparable: the weights have been changed since",
            "unsupported": "`transformers` cannot have the weights that are served (the log says why)",
            "failed": "not computed: its process died, or no replica could start it",
        },
        "referee_controls_total": {
            "found": "the referee called it suspect, as it must",
            "missed": "it did not: verdicts of this referee cannot be trusted",
            "failed": "not replayed",
        },
        "canaries_total": {
            "passed": "no fault was found: speculation is re-enabled",
            "failed": "a fault was found: speculation stays off for longer",
            "inconclusive": "too little was drafted, or the trial could not be run; it is repeated",
        },
        "key_file_reloads_total": {
            "ok": "the new keys are in effect",
            "failed": "the file is invalid: the old keys stay in effect",
        },
        "replay_draws_total": {
            "follows": "the token is the one that the request's seed demands",
            "near": "it would be, if rounding had moved the replayed logits a little",
            "wrong": "no rounding explains it",
        },
        "watched_requests_total": WATCHED_RESULTS,
        "watched_answers_total": {
            "read": "with all that a replay needs",
            "unreadable": "not to be computed again (the referee's report has the reasons)",
        },
        "weight_updates_total": {"ok": "the new weights are served", "failed": "the old weights are still served"},
    },
    "phase": {
        "handoff_seconds_total": {
            "prefill": "from the request for a prefill to its answer, as the decode replica sees it",
            "export": "copying keys and values out of the prefill engine's cache",
            "pack": "preparing the handoff for its transport",
            "transfer": "the call's way to the prefill replica, and the handoff's way back, from node to node where "
            "they are on two",
            "unpack": "receiving it from its transport, on the decode replica",
            "check": "verifying its checksum and manifest",
            "insert": "copying keys and values into the decode engine's cache",
        },
        "weight_update_seconds_total": {
            "load": "reading the new weights while requests run",
            "switch": "from the pause to the first step with the new weights",
        },
    },
    "reason": {
        "refusals_total": REFUSALS,
        "prefill_failures_total": {
            "died": "the replica was lost, or could not be reached",
            "timeout": "it took longer than `recovery.prefill_timeout_s` and twice its estimated time",
            "full": "the pool accepts no more work",
            "engine": "its engine failed on the request",
        },
        "handoff_refusals_total": {
            "request": "it was computed for another prompt",
            "manifest": "it was computed with another model, dtype, drafter or layout",
            "version": "it was computed by a build that uses another wire format",
            "damaged": "it was truncated or altered in transit, or contradicts itself",
            "drafter": "the drafter's state is missing from it, or has another shape",
            "lost": "vLLM could not read it through NIXL, or it was no longer there",
        },
        "breaker_trips_total": TRIP_REASONS,
    },
    "change": {
        "referee_controls_total": {
            "logprobs": "each logprob is a nat too high",
            "token": "the surest tokens are replaced by others",
            "seed": "the seed is another",
            "alternatives": "the logprobs beside the tokens' own are 20 nats too low",
            "limit": "max_tokens is one less than the number of tokens",
        }
    },
    "check": {"": CHECKS, "replay_draws_total": DRAW_CHECKS},
    "kind": {"selfcheck_violations_total": INVARIANTS, "logprob_violations_total": LOGPROB_RULES},
    "stratum": {"": STRATA},
    "term": {
        "": {
            "probability": "p(y) minus the sum of p squared, where y is the served token",
            "surprisal": "-log p(y) minus its mean under p, nats",
        }
    },
    "alarm": {"": REPLAY_ALARMS},
    "distribution": {
        "": {
            "tested": "sampled with random numbers not seen before: evidence on the distribution of the tokens",
            "greedy": "nothing was sampled; each token was compared with the most likely one",
            "repeated_seed": "its seed was seen before, so its tokens add no evidence on the distribution; its draws "
            "are checked like any other's",
            "untested": "the replay returned logprobs only",
        }
    },
    "verdict": {
        "": {
            "verified": "recomputed; no fault found in its tokens, nor in the logprobs that it came with",
            "logprobs_only": "recomputed; its logprobs agree, and the replay could not compare its tokens",
            "unverified": "the check did not take place",
            "suspect": "found wrong, or generated in a window in which a fault was found",
        }
    },
}


def meaning_of(metric: Metric, label: str) -> Meaning:
    """Return what a metric's label means.

    Raises:
        KeyError: no meaning is listed for it.
    """
    meanings = _MEANINGS[label]
    name = metric.name.removeprefix(PREFIX)
    return meanings[name] if name in meanings else meanings[""]
