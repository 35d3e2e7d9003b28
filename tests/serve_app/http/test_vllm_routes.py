"""What clients of vLLM's server ask beside OpenAI's endpoints."""

import json
from typing import Any

import httpx
import pytest

from serve_app.backends.base import PauseMode
from serve_app.cluster.desired_state import WeightsRef
from serve_app.http.access.access import Access
from serve_app.http.access.request_gate import TRAINER, Gate
from serve_app.http.routes import Operations
from serve_app.http.vllm_routes import VllmRoutes
from serve_app.text.tokenizer import Tokenizer
from tests.serve_app.http.test_routes import error_of
from tests.support.fake_operator import FakeWeights
from tests.support.fake_serving import Served, ServeFake

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one two"}]


class Trainer:
    """A trainer's view of a service that lets it in without a key."""

    def __init__(self, serve_fake: ServeFake, **gate: Any) -> None:
        self.weights = FakeWeights()
        settings = {"model_config": {"dtype": "torch.float32"}}
        operations = Operations(vllm=VllmRoutes(settings, self.weights))
        gate = {"open_trainer_api": True} | gate
        self.server = serve_fake(operations=operations, gate=Gate(Access(), **gate))

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return httpx.post(self.server.url + path, json=body, timeout=60)

    def get(self, path: str) -> Any:
        reply = httpx.get(self.server.url + path, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()


@pytest.fixture
def trainer(serve_fake: ServeFake) -> Trainer:
    return Trainer(serve_fake)


# ---- tokenizer


def test_text_is_tokenized_as_a_completion_would_be(server: Served, tokenizer: Tokenizer) -> None:
    reply = server.post("/tokenize", model="fake", prompt="hello<|im_end|>", return_token_strs=True).json()
    ids = tokenizer.encode("hello<|im_end|>")
    strings = [tokenizer.token_text(token) for token in ids]
    assert reply == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": strings}
    assert server.post("/detokenize", tokens=ids).json() == {"prompt": "hello<|im_end|>"}


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({}, "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "<|im_end|>\n"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "one two"),
    ],
)
def test_a_conversation_is_tokenized_as_a_chat_would_be(server: Served, fields: dict[str, Any], ending: str) -> None:
    tokens = server.post("/tokenize", messages=MESSAGES, **fields).json()["tokens"]
    text = server.post("/detokenize", tokens=tokens).json()["prompt"]
    assert text.endswith(ending)
    server.post("/v1/chat/completions", model="fake", messages=MESSAGES, max_tokens=1, **fields)
    assert list(server.source.requests[-1].prompt_token_ids) == tokens


def test_the_tokenizer_is_described_so_that_prompts_can_be_built_elsewhere(server: Served) -> None:
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and info["bos_token"] is None
    assert "add_generation_prompt" in info["chat_template"]


@pytest.mark.parametrize(
    ("path", "body", "field", "code"),
    [
        ("/tokenize", {}, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt", "invalid_value"),
        ("/tokenize", {"messages": [{"role": "x", "content": "a"}]}, "messages.0.role", "invalid_value"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x", None),
        ("/detokenize", {}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [10**6]}, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0", "invalid_value"),
        ("/detokenize", {"tokens": [5], "skip": 1}, "skip", "unknown_parameter"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(
    server: Served, path: str, body: dict[str, Any], field: str, code: str | None
) -> None:
    error = error_of(server.post(path, **body), 400)
    assert error["param"] == field and error["code"] in (code, "unsupported_parameter"), error


def test_another_models_tokenizer_is_not_here(server: Served) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        assert error_of(server.post(path, model="gpt", **body), 404)["code"] == "model_not_found"


# ---- what the server is


def test_the_server_says_what_it_is(trainer: Trainer) -> None:
    assert trainer.get("/version")["version"][0].isdigit()
    assert trainer.get("/get_world_size") == {"world_size": 1}
    config = {"model_config": {"dtype": "torch.float32"}}
    assert trainer.get("/server_info?config_format=json")["vllm_config"] == config
    assert json.loads(trainer.get("/server_info")["vllm_config"]) == config
    assert error_of(httpx.get(f"{trainer.server.url}/server_info?config_format=xml"), 400)["param"] == "config_format"


# ---- weights


@pytest.mark.parametrize("finish", [None, {}, {"weight_version": "step-7"}])
def test_weights_are_named_and_served_when_the_update_is_finished(trainer: Trainer, finish: Any) -> None:
    assert trainer.post("/init_weight_transfer_engine", {"init_info": {"backend": "folder"}}).status_code == 200
    assert trainer.post("/start_weight_update", {}).status_code == 200
    named = {"update_info": {"path": "/m/v1", "drafter_path": "/m/head"}}
    assert trainer.post("/update_weights", named).status_code == 200
    (_, nothing), staged = trainer.weights.asked
    assert nothing is None, "what an earlier trainer named is forgotten"
    assert staged == ("stage", WeightsRef(0, "", "/m/v1", "/m/head"))
    assert trainer.post("/finish_weight_update", finish).status_code == 200
    assert trainer.weights.asked[2:] == [("finish", "" if not finish else "step-7")]


def test_prime_rls_folder_is_served_at_once(trainer: Trainer) -> None:
    assert trainer.post("/update_weights", {"weight_dir": "/m/v2"}).status_code == 200
    (order,) = trainer.weights.asked  # in one step, so that no other trainer's folder can come between
    assert order == ("update", WeightsRef(0, "", "/m/v2"), PauseMode.WAIT, 600.0)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "10.0.0.1"}}, "init_info.master_address"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}, "init_info.backend"),
        ("/update_weights", {"update_info": {"names": ["w"]}}, "update_info.names"),
        ("/update_weights", {}, "update_info.path"),
        ("/update_weights", {"update_info": {"path": "a"}, "weight_dir": "b"}, "update_info.path"),
        ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
        ("/finish_weight_update", {"weight_version": "a b"}, "weight_version"),
    ],
)
def test_a_transfer_that_would_wait_for_ever_is_refused_by_name(
    trainer: Trainer, path: str, body: Any, field: str
) -> None:
    assert error_of(trainer.post(path, body), 400)["param"] == field
    assert trainer.weights.asked == []


def test_a_refused_update_is_no_success(trainer: Trainer) -> None:
    trainer.weights.refuses = True
    assert "no such folder" in error_of(trainer.post("/finish_weight_update"), 409)["message"]
    trainer.weights.refuses, trainer.weights.complete = False, False
    assert error_of(trainer.post("/finish_weight_update"), 504)["code"] == "request_timeout"
    assert trainer.post("/reset_prefix_cache").json() == {"success": False}


def test_pauses_have_vllms_form(trainer: Trainer) -> None:
    assert trainer.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    assert trainer.weights.asked == [("pause", PauseMode.KEEP, 600.0)]
    assert trainer.get("/is_paused") == {"is_paused": True}
    assert trainer.post("/resume").json() == {"status": "resumed"}
    assert trainer.get("/is_paused") == {"is_paused": False}
    trainer.post("/pause")
    assert trainer.weights.asked[2:] == [("pause", PauseMode.ABORT, 600.0), ("reset_caches",)]
    assert error_of(trainer.post("/pause?mode=later"), 400)["param"] == "mode"
    error = error_of(trainer.post("/pause?clear_cache=maybe"), 400)
    assert error["param"] == "clear_cache" and "clear_cache" in error["message"]
    assert trainer.weights.asked[4:] == []


def test_trainers_need_a_key_unless_they_are_let_in_without(serve_fake: ServeFake) -> None:
    closed = Trainer(serve_fake, open_trainer_api=False)
    for path in TRAINER:
        method = "GET" if path in ("/weight_info", "/is_paused") else "POST"
        reply = httpx.request(method, closed.server.url + path)
        assert "admin.open_trainer_api" in error_of(reply, 403)["message"]
    assert closed.weights.asked == []


# ---- browsers, and HEAD


def test_a_page_of_a_listed_origin_may_call_the_api(serve_fake: ServeFake) -> None:
    server = serve_fake(gate=Gate(Access(), cors_origins=["https://chat.example"]))
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    url = f"{server.url}/v1/chat/completions"
    allowed = httpx.options(url, headers={"origin": "https://chat.example"} | asks)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    assert httpx.options(url, headers={"origin": "https://other.example"} | asks).status_code == 400
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 1}
    served = httpx.post(url, json=body, headers={"origin": "https://chat.example"})
    assert served.headers["access-control-allow-origin"] == "https://chat.example"
    assert "x-request-id" in served.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in httpx.post(url, json=body).headers
    without = httpx.get(f"{serve_fake().url}/v1/models", headers={"origin": "https://chat.example"})
    assert "access-control-allow-origin" not in without.headers, "without a setting no page may"


def test_head_is_get_without_its_body(server: Served) -> None:
    for path in ("/health", "/v1/models", "/openapi.json", "/v1/nothing", "/nothing"):
        head, get = httpx.head(server.url + path), httpx.get(server.url + path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert get.is_error or head.headers["content-length"] == get.headers["content-length"]


# ---- old names


@pytest.mark.parametrize("stream", [False, True])
def test_old_names_of_structured_outputs_are_taken_with_a_warning(server: Served, stream: bool) -> None:
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 4, "stream": stream}
    reply = server.post("/v1/chat/completions", **body, guided_choice=["a", "b"])
    assert reply.status_code == 200 and "guided_choice is deprecated" in reply.headers["warning"]
    structure = server.source.requests[-1].params.structure
    assert structure is not None and structure.kind == "choice" and json.loads(structure.text) == ["a", "b"]
    new = server.post("/v1/chat/completions", **body, structured_outputs={"choice": ["a", "b"]})
    assert "warning" not in new.headers and server.source.requests[-1].params.structure == structure
