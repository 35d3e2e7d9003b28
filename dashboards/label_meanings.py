"""What the labels of the metrics mean, value by value: the generated documentation and its tests read this."""

from collections.abc import Mapping

from serve_app.telemetry.metric_names import PREFIX, REFUSALS, STRATA, Metric
from speculative.stats import CHECKS, INVARIANTS, LOGPROB_RULES

Meaning = Mapping[str, str] | str
"""Each value with what it means; a text where the values are no fixed set."""

# label -> metric without its prefix ("" = all others that have the label) -> meaning
_MEANINGS: dict[str, dict[str, Meaning]] = {
    "model_name": {"": "The name that clients use."},
    "pool": {
        "": {
            "prefill": "computes prompts and replays; what the referee counts is reported here, too",
            "decode": "decodes, and answers HTTP where there is no router",
            "monolith": "both in one",
            "router": "answers HTTP before replicas that may die",
        }
    },
    "replica": {"": "Ray Serve's name of the replica. Only gauges have it: they do not add up."},
    "position": {"": "Place of the draft token in its round, 0 = first."},
    "nats": {"": "The drift that was exceeded. The thresholds overlap: a token counts at each that it exceeds."},
    "version": {"": "Of truespec."},
    "fingerprint": {"": "Of the model's configuration and weights."},
    "drafter": {"": "`drafter.kind` of the configuration."},
    "kernels": {"": {"cpu": "our own, for processors with AVX-512", "triton": "paged attention on a GPU, by Triton"}},
    "key": {"": "The id of an API key, never the key."},
    "outcome": {
        "": {
            "stop": "ended with a stop token or a stop string",
            "length": "reached its max_tokens, or the model's longest length",
            "abort": "its client left",
            "error": "the engine or the service failed, or its time was up",
            "rejected": "was not begun: too much was under way, or it asks for what cannot be served",
        }
    },
    "result": {
        "handoffs_total": {
            "ok": "taken in by the decode engine",
            "refused": "not taken in, and the prompt computed there (`truespec_handoff_refusals_total` says why)",
            "failed": "no prefill replica gave one, and the prompt was computed by the decode engine",
        },
        "resumes_total": {"resumed": "goes on at another replica", "failed": "ended with an error"},
        "replays_total": {
            "ok": "computed and compared",
            "failed": "could not be computed or submitted: the answer stays unverified",
            "skipped": "not tried: too many waited",
            "outdated": "not comparable: the weights have been changed since",
            "refused": "not computed: the model cannot have given that answer (too long, or ids that are no tokens)",
        },
        "canaries_total": {
            "passed": "nothing was found wrong: speculation is back",
            "failed": "something was: speculation stays off for longer",
            "inconclusive": "too little was drafted, or the trial could not be run; it is repeated",
        },
        "key_file_reloads_total": {"ok": "the new keys hold", "failed": "the file is broken: the old keys go on"},
        "weight_updates_total": {"ok": "the new weights serve", "failed": "the old ones go on"},
    },
    "phase": {
        "handoff_seconds_total": {
            "prefill": "from the request for a prefill to its answer, as the decode replica sees it",
            "export": "copying keys and values out of the prefill engine's cache",
            "pack": "making the handoff ready to travel, by its transport",
            "unpack": "getting it from its transport, on the decode replica",
            "check": "its checksum and manifest",
            "insert": "copying keys and values into the decode engine's cache",
        },
        "weight_update_seconds_total": {
            "load": "reading the new weights, beside the requests",
            "switch": "from the pause to the first step with the new weights",
        },
    },
    "reason": {
        "refusals_total": REFUSALS,
        "prefill_failures_total": {
            "died": "the replica was lost, or could not be reached",
            "timeout": "it took longer than `recovery.prefill_timeout_s`",
            "full": "the pool takes nothing more",
            "engine": "its engine failed on the request",
        },
        "handoff_refusals_total": {
            "request": "it was computed for another prompt",
            "manifest": "with another model, dtype, drafter or layout",
            "version": "by a build that speaks another wire format",
            "damaged": "it was cut or altered on its way, or contradicts itself",
            "drafter": "what the drafter needs of it is missing, or of another shape",
            "lost": "vLLM was to read it by NIXL, and could not, or it was no longer there",
        },
        "breaker_trips_total": {
            "selfcheck": "a zero-mean check of the engine raised its alarm",
            "invariant": "a step broke a rule that holds in every step",
            "logprobs": "logprobs broke their contract",
            "drift": "replays gave other logprobs",
            "law": "replays show that tokens do not follow the distribution they were to follow",
        },
    },
    "check": {"": CHECKS},
    "kind": {"selfcheck_violations_total": INVARIANTS, "logprob_violations_total": LOGPROB_RULES},
    "stratum": {"": STRATA},
    "term": {
        "": {
            "probability": "p(y) minus the sum of p squared, y the token served",
            "surprisal": "-log p(y) minus its mean under p, nats",
        }
    },
    "alarm": {
        "": {
            "drift": "the logprobs served are not those replayed",
            "probability": "tokens are likelier, or less likely, than tokens drawn from p",
            "surprisal": "tokens are more, or less, surprising than tokens drawn from p",
            "support": "tokens that the request's rules or filters leave out",
            "greedy": "tokens of greedy requests that are not the likeliest",
            "impossible": "an answer that no engine takes: too long for the model, or ids that are no tokens",
        }
    },
    "distribution": {
        "": {
            "tested": "sampled with random numbers not seen before: evidence on the distribution of the tokens",
            "greedy": "nothing was drawn; each token was held against the likeliest",
            "repeated_seed": "its seed was seen before, so its tokens are no further evidence: nobody tested them",
            "untested": "the replay gave logprobs only",
        }
    },
    "verdict": {
        "": {
            "verified": "computed again, and nothing found wrong in what was checked",
            "unverified": "the check did not come about",
            "suspect": "found wrong, or made where something was found wrong",
        }
    },
}


def meaning_of(metric: Metric, label: str) -> Meaning:
    """What a metric's label means.

    Raises:
        KeyError: nobody has said it.
    """
    meanings = _MEANINGS[label]
    name = metric.name.removeprefix(PREFIX)
    return meanings[name] if name in meanings else meanings[""]
