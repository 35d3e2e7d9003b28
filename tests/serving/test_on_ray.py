"""The service as its users meet it: on a real local Ray, over HTTP."""

import concurrent.futures
import time
from pathlib import Path

import openai
import pytest

from tests.support.services import LOOPING, MODEL, Service, app_args, deployed
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(1200)]


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


def test_a_client_that_leaves_frees_what_it_held_and_its_answer_is_replayed(disaggregated: Service) -> None:
    def leave(after: int) -> None:
        most = 1900 if after == 1 else 40
        body = {"model": MODEL, "prompt": f"go on {after}", "max_tokens": most, "stream": True, "ignore_eos": True}
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
    assert total("requests_total", outcome="abort") > 0
    assert disaggregated.metrics()["tme"] == pytest.approx(1.0, abs=1e-4)


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
