"""Tolerances from made-up servers that compute a tiny model with a known error."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.watch.calibration import Floats, calibrate
from serve_app.referee.book.transformers_model import TransformersModel
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError
from tests.support.fake_http import QuietHandler, serving

pytestmark = pytest.mark.slow

PROMPTS = 16
TOP = 20


@contextmanager
def server(folder: Path, **is_: Any) -> Iterator[str]:
    """Serves next-token logprobs; `is_`: noise in nats, processed, unnamed, refuses (fields, or `ids`), form, blind,
    more_tokens, seen (gets the logprobs that it served, and the exact ones)."""
    model, tokenizer, lock = TransformersModel(folder), Tokenizer.from_folder(folder), threading.Lock()
    noise = np.random.default_rng(7)
    refuses = is_.get("refuses", ())

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self._reply(500 if is_.get("unnamed") else 200, {"data": [{"id": "tiny", "owned_by": "vllm"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.sent())
            unknown = {name for name in refuses if name in asked}
            if "prompt" not in asked or ("ids" in refuses and isinstance(asked["prompt"], list)):
                self._reply(400, {"error": {"message": "prompt must be a string"}})
            elif unknown:
                self._reply(422, {"detail": f"Unexpected fields in the request: {unknown}"})
            else:
                self._reply(200, self._answer(asked))

        def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
            prompt = asked["prompt"] if isinstance(asked["prompt"], list) else tokenizer.encode(asked["prompt"])
            with lock:
                logits = model.logits((*prompt, 0), len(prompt))[0].double().numpy()
            exact = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            logits = logits + is_.get("noise", 0.0) * noise.standard_normal(len(logits))
            if is_.get("processed"):
                logits = logits / asked["temperature"]
            logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            is_.get("seen", []).append((logprobs, exact))
            top = [int(token) for token in np.argsort(-logprobs)[:TOP]]
            reported = None if is_.get("blind") else self._reported(asked, top, logprobs)
            usage = {"prompt_tokens": len(prompt) + is_.get("more_tokens", 0)}
            return {"choices": [{"text": "x", "logprobs": reported, "finish_reason": "length"}], "usage": usage}

        def _reported(self, asked: dict[str, Any], top: list[int], logprobs: Any) -> dict[str, Any]:
            if is_.get("form") == "llama.cpp":
                entries = [{"id": token, "token": "?", "logprob": logprobs[token]} for token in top]
                return {"content": [{"id": top[0], "token": "?", "logprob": 0, "top_logprobs": entries}]}
            by_id = asked.get("return_tokens_as_token_ids")
            names = {token: f"token_id:{token}" if by_id else tokenizer.token_text(token) for token in top}
            return {"top_logprobs": [{names[token]: logprobs[token] for token in top}]}

        def _reply(self, status: int, wire: dict[str, Any]) -> None:
            self.say(status, json.dumps(wire).encode())

    with serving(Handler) as url:
        yield url


def calibrated(folder: Path, served: str | None = None, **is_: Any) -> Tolerance:
    with server(folder, **is_) as url:
        return calibrate(url, folder, served, PROMPTS)


def test_an_exact_server_gets_the_least_tolerance(folders: tuple[Path, Path]) -> None:
    found = calibrated(folders[0])
    assert found == replace(Tolerance.against_float32("float32"), distribution=0.005, source=found.source)
    assert not found.processed
    assert found.measured["prompts"] == PROMPTS
    assert found.measured["prompts_as"] == "token ids"
    assert found.measured["tme"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_what_is_measured_is_the_error_that_the_server_makes_and_twice_that_is_allowed(
    folders: tuple[Path, Path], noise: float
) -> None:
    seen: list[tuple[Floats, Floats]] = []
    found = calibrated(folders[0], noise=noise, seen=seen)
    measured = found.measured
    served, exact = (np.array(rows) for rows in zip(*seen[-PROMPTS:], strict=True))
    drawn = np.exp(served)  # with which an answer holds each token; over all of them, not only the likeliest
    apart = exact - served
    assert measured["tme"] - 1 == pytest.approx((drawn * np.expm1(np.abs(apart))).sum() / PROMPTS, rel=0.15)
    assert measured["gen_kl"] == pytest.approx((drawn * (np.expm1(apart) - apart)).sum() / PROMPTS, rel=0.4)
    shift = ((drawn - np.exp(exact)) * np.exp(exact)).sum(1)
    assert measured["probability_shift"] == pytest.approx(shift.mean(), abs=0.02 * noise)
    surprisal = ((drawn - np.exp(exact)) * np.minimum(-exact, 10)).sum(1) / 10
    assert measured["surprisal_shift"] == pytest.approx(surprisal.mean(), abs=0.02 * noise)
    assert 2 * noise < measured["edge_nats_999"] < 6 * noise, "two logits' errors, of the furthest in a thousand"
    if noise == 0.05:
        assert found.max_tme - 1 == pytest.approx(2 * (measured["tme"] - 1))
        assert found.edge_nats == pytest.approx(2 * measured["edge_nats_999"])
        assert found.jump_nats == max(0.01, 2 * measured["drift_nats_999"])


@pytest.mark.parametrize("processed", [False, True])
def test_logprobs_after_the_temperature_are_known_from_those_before(
    folders: tuple[Path, Path], processed: bool, tmp_path: Path
) -> None:
    found = calibrated(folders[0], processed=processed, noise=0.05)
    assert found.processed is processed
    kept = tmp_path / "tolerance.json"
    kept.write_text(json.dumps(found.to_wire()))
    assert Tolerance.read(kept, "--tolerance") == found


@pytest.mark.parametrize(
    "is_",
    [
        {"refuses": ("ids", "return_tokens_as_token_ids"), "unnamed": True},
        {"refuses": ("return_tokens_as_token_ids", "top_k", "min_p")},
        {"form": "llama.cpp"},
    ],
)
def test_servers_that_take_or_give_less_are_measured_all_the_same(
    folders: tuple[Path, Path], is_: dict[str, Any]
) -> None:
    found = calibrated(folders[0], "tiny" if "unnamed" in is_ else None, **is_)
    assert found.measured["model"] == "tiny"
    assert found.measured["prompts_as"] == ("text" if "ids" in is_.get("refuses", ()) else "token ids")
    assert found.measured["prompts"] == PROMPTS
    assert found.measured["tme"] == pytest.approx(1.0, abs=1e-4)
    assert found.measured["edge_nats_999"] < 1e-4


@pytest.mark.parametrize(
    ("is_", "reported"),
    [
        ({"blind": True}, r"no logprobs of its likeliest tokens.*--precision"),
        ({"more_tokens": 1}, r"answered 0 prompts.*tokenizer"),
        ({"refuses": ("logprobs",)}, r"does not answer a completion with logprobs: HTTP 422.*logprobs"),
        ({"unnamed": True}, r"--served"),
    ],
)
def test_a_server_that_cannot_be_measured_is_refused(
    folders: tuple[Path, Path], is_: dict[str, Any], reported: str
) -> None:
    with pytest.raises(ConfigError, match=reported):
        calibrated(folders[0], **is_)


def test_other_weights_and_the_urls_of_no_server_are_refused(folders: tuple[Path, Path]) -> None:
    target, draft = folders
    with server(draft) as url, pytest.raises(ConfigError, match=r"tiny are not those of --model.*other weights"):
        calibrate(url, target, None, PROMPTS)
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:1/v1/models: .*start the server"):
        calibrate("http://127.0.0.1:1", target, None, PROMPTS)
