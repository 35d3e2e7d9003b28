"""The service as its users meet it: on a real local Ray, over HTTP."""

import concurrent.futures
import time
from pathlib import Path

import openai
import pytest

from tests.support.services import MODEL, Service, app_args, deployed
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]

LOOPING = "one two three one two three one two three one two"


def test_same_text_and_logprobs_as_the_monolith(disaggregated: Service, monolith: Service) -> None:
    # One request at a time: every step then has the same shapes on both sides, and float32 gives the same bits.
    for temperature in (0.0, 0.9):
        for prompt in ("abc", LOOPING, "long " * 150):
            body = {
                "prompt": prompt,
                "max_tokens": 24,
                "temperature": temperature,
                "seed": 7,
                "logprobs": 3,
                "prompt_logprobs": None if temperature else 1,  # with it no prefix comes from the cache
                "return_token_ids": True,
                "ignore_eos": True,
            }
            (apart,) = disaggregated.completion(**body)["choices"]
            (together,) = monolith.completion(**body)["choices"]
            assert len(apart["token_ids"]) == 24
            assert apart["token_ids"] == together["token_ids"]
            assert apart["logprobs"] == together["logprobs"]
            assert apart.get("prompt_logprobs") == together.get("prompt_logprobs")
            assert temperature or apart["prompt_logprobs"][0] is None


def test_transformers_agrees_with_what_was_served(disaggregated: Service) -> None:
    def total(result: str) -> float:
        return disaggregated.count("independent_replays_total", result=result)

    def agreed() -> bool:
        disaggregated.completion(prompt=LOOPING, max_tokens=24, verify=True)
        return total("agrees") > 2  # more than the call that starts it

    wait_for(agreed, "an answer that transformers checks", timeout_s=900)  # it has what everything else leaves it
    assert [total(result) for result in ("disagrees", "outdated", "unsupported", "failed")] == [0, 0, 0, 0]


def test_n_choices_share_one_prefill_and_keep_their_own_seeds(disaggregated: Service, monolith: Service) -> None:
    body = {"prompt": "once upon", "max_tokens": 16, "temperature": 1.0, "return_token_ids": True, "seed": 3}
    before = disaggregated.count("prompt_tokens_total", pool="prefill")
    choices = disaggregated.completion(**body, n=4)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 4
    alone = disaggregated.completion(**body)["choices"][0]
    assert alone["token_ids"] == choices[0]["token_ids"]
    assert [c["token_ids"] for c in monolith.completion(**body, n=4)["choices"]] == [c["token_ids"] for c in choices]
    wait_for(lambda: disaggregated.count("prompt_tokens_total", pool="prefill") > before, "prefill counts")


def test_sixty_four_mixed_requests_all_finish_and_everything_is_freed(disaggregated: Service) -> None:
    def ask(number: int) -> int:
        reply = disaggregated.completion(
            prompt=f"{number} " + "word " * (1 + 37 * number % 200),
            max_tokens=1 + number % 40,
            temperature=(0.0, 0.7, 1.3)[number % 3],
            seed=number,
            ignore_eos=True,
        )
        return int(reply["usage"]["completion_tokens"])

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        counts = list(pool.map(ask, range(64)))
    assert counts == [1 + number % 40 for number in range(64)]
    wait_for(disaggregated.idle, "return to idle")


def test_a_client_that_leaves_frees_what_it_held(disaggregated: Service) -> None:
    body = {"model": MODEL, "prompt": "go on", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with disaggregated.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        for number, _ in enumerate(response.iter_lines()):
            if number > 4:
                break
    wait_for(disaggregated.idle, "return to idle")
    assert 'outcome="abort"' in disaggregated.metrics_text()


def test_an_answer_is_replayed_even_if_its_client_leaves_before_the_end(disaggregated: Service) -> None:
    def leave(after: int) -> None:
        body = {"model": MODEL, "prompt": f"go on {after}", "max_tokens": 40, "stream": True, "ignore_eos": True}
        with disaggregated.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
            for number, line in enumerate(response.iter_lines()):
                if number >= after or '"finish_reason":"length"' in line.replace(" ", ""):
                    break

    total = disaggregated.count

    def ended() -> float:  # without those of answers that carry their verdict, which nobody submits
        return total("replays_total") - verdicts

    wait_for(lambda: disaggregated.idle() and not total("replay_lag_seconds"), "return to idle")
    time.sleep(2)  # replays that run, and reports of replicas
    before = total("replays_requested_total")
    verdicts = total("replays_total") - before
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, [1, 5, 999] * 16))
    wait_for(disaggregated.idle, "return to idle")
    wait_for(lambda: total("replays_requested_total") >= before + 32, "the answers' end")
    wait_for(lambda: ended() == total("replays_requested_total"), "a result of every replay")


def test_metrics_agree_with_what_clients_were_reported(ray_port: int, tiny_folder: Path) -> None:
    with deployed(ray_port, "counted", app_args(tiny_folder, "disaggregated")) as service:
        # With logprobs: a quarter of the requests without is replayed as sent, and adds no compared tokens.
        body = {"max_tokens": 50, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        usages = [service.completion(prompt=LOOPING + " " * number, **body)["usage"] for number in range(4)]
        wait_for(lambda: service.metrics()["replayed_tokens"] == 200, "replay of all tokens")
        wait_for(lambda: service.metrics()["emitted_tokens"] >= 200, "the prefill replica's report")
        metrics = service.metrics()
        details = [usage["completion_tokens_details"] for usage in usages]
        assert metrics["emitted_tokens"] == sum(usage["completion_tokens"] for usage in usages) == 200
        assert metrics["draft_tokens"] > 0
        assert metrics["acceptance_rate"] == metrics["accepted_tokens"] / metrics["draft_tokens"]
        by_position = service.count("accepted_tokens_per_position_total")
        assert metrics["mean_accepted_length"] == pytest.approx(1 + by_position / metrics["drafts"])
        # What was accepted behind the last token of a request is counted, and not delivered.
        delivered = sum(one["accepted_prediction_tokens"] for one in details)
        assert delivered <= metrics["accepted_tokens"] <= delivered + 4 * len(usages)
        assert metrics["handoffs_by_result"] == {"ok": 4}
        assert metrics["tme"] == pytest.approx(1.0, abs=1e-4)


def test_responses_are_kept_by_the_controller_for_every_replica(disaggregated: Service, monolith: Service) -> None:
    client = disaggregated.openai
    first = client.responses.create(model=MODEL, input="one two", max_output_tokens=4)
    assert client.responses.retrieve(first.id).output == first.output
    second = client.responses.create(
        model=MODEL, input="three", previous_response_id=first.id, max_output_tokens=4, temperature=0
    )
    items = [{"role": "user", "content": "one two"}, *first.output, {"role": "user", "content": "three"}]
    alone = monolith.openai.responses.create(model=MODEL, input=items, max_output_tokens=4, temperature=0)  # type: ignore[arg-type]
    assert alone.output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="max_mib"):
        monolith.openai.responses.create(model=MODEL, input="a", previous_response_id=second.id)


def test_prompts_of_one_body_are_all_sent_at_once(disaggregated: Service) -> None:
    reply = disaggregated.completion(prompt=[f"prompt {number}" for number in range(12)], max_tokens=2, temperature=0)
    assert len(reply["choices"]) == 12
    assert 'reason="timeout"' not in disaggregated.metrics_text(), "a prefill was lost, and asked for again"


def test_too_many_requests_are_reported_when_to_come_again(ray_port: int, tiny_folder: Path) -> None:
    args = app_args(tiny_folder, "monolith", limits={"max_ongoing_requests": 2, "max_queued_requests": 4})
    with deployed(ray_port, "full", args) as service, concurrent.futures.ThreadPoolExecutor(24) as pool:
        with service.http() as http:
            replies = list(
                pool.map(
                    lambda _: http.post(
                        "/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 200, "ignore_eos": True}
                    ),
                    range(24),
                )
            )
        statuses = {reply.status_code for reply in replies}
        assert statuses <= {200, 429, 503} and {200, 429} <= statuses
        refused = [reply for reply in replies if reply.status_code != 200]
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        wait_for(service.idle, "return to idle")
        assert service.completion(prompt="x", max_tokens=2)["usage"]["completion_tokens"] <= 2
