"""Receipts through the real HTTP app, and who checks them: sound ones verify with both engines, forged ones do not."""

import asyncio
import base64
import copy
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from deploy.cli.main import main
from deploy.run.replayers import make_replayer
from deploy.run.verify import EngineName, verify
from serve_app.backends.torch_backend import TorchBackend
from serve_app.http.routes import build_ingress
from serve_app.openai.frontend import FrontEnd
from serve_app.referee.receipts import NotAReceipt, Receipt, read_receipts
from serve_app.referee.signatures import PublicKey, SigningKey
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig
from speculative.errors import ConfigError
from speculative.kernels.bindings import cpu_kernels
from tests.support.engines import NGRAM, settings
from tests.support.fake_serving import BackendSource, make_backend
from tests.support.tiny_models import write_tiny_model

ENGINES = pytest.mark.parametrize("engine", ["torch", "transformers"])
PROMPT = "the quick brown fox jumps over the lazy dog, the quick brown fox"
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 48, "ignore_eos": True, "seed": 7, "temperature": 0.8}
RULES = {
    "top_p": 0.95,
    "top_k": 100,
    "min_p": 0.001,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "logit_bias": {"40": 3.0},
    "bad_words": ["the", "fox"],
    "min_tokens": 8,
    "ignore_eos": False,
    "stop_token_ids": [77],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tokenizer=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same family and vocabulary, with other weights: what drafts, or pretends to have answered."""
    return write_tiny_model(tmp_path_factory.mktemp("other") / "tiny", tokenizer=True, seed=1)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key.pem"
    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return path


def public_key(key: Path) -> Path:
    path = key.with_suffix(".pub")
    path.write_bytes(SigningKey(key).public._key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return path


@asynccontextmanager
async def service(
    folder: Path, drafter: Path | None = None, key: Path | None = None, **changes: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """The HTTP app over a real engine; with `drafter`, a model draws the drafts."""
    sampled = DrafterConfig(kind="draft_model", model=str(drafter), num_draft_tokens=3)
    config = settings(drafter=NGRAM if drafter is None else sampled, kv_cache_tokens=2048, **changes)
    backend = TorchBackend(str(folder), "tiny", config)
    info = await backend.start()
    source = PooledTokenSource(backend, Metrics([BufferSink("r")], model_name="tiny", pool="monolith"))
    signing_key = None if key is None else SigningKey(key)
    app = build_ingress(FrontEnd(source, Tokenizer.from_folder(str(folder)), info, signing_key=signing_key))
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
            yield client
    finally:
        await backend.stop()


async def ask(client: httpx.AsyncClient, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    reply = await client.post(path, json={"receipt": True} | fields, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


async def receipts(folder: Path, drafter: Path | None = None, **changes: Any) -> list[Receipt]:
    """Of one request each that is plain, has rules, is constrained, or is greedy."""
    async with service(folder, drafter, **changes) as client:
        replies = [
            await ask(client, **BODY | fields)
            for fields in (
                {},
                RULES,
                {"structured_outputs": {"regex": "[a-z ]{12,40}"}, "ignore_eos": False, "reproducible": False},
                {"temperature": 0, "logprobs": 0},
            )
        ]
    return [one for reply in replies for one in read_receipts(json.dumps(reply))]


@ENGINES
@pytest.mark.parametrize("sampled", [False, True], ids=["deterministic drafts", "sampled drafts"])
@pytest.mark.parametrize("verifier", ["token_wise", "block", "coupled"])
async def test_sound_receipts_verify(
    folder: Path, other: Path, verifier: str, sampled: bool, engine: EngineName
) -> None:
    made = await receipts(folder, other if sampled else None, verifier=verifier)
    assert any(one.drafts for receipt in made for one in receipt.rounds)
    for receipt in made:
        found = await asyncio.to_thread(verify, receipt, folder, engine)
        assert not found.reason, found
        assert found.draws.num_checked >= (0.3 if verifier == "block" else 0.9) * len(receipt.token_ids)


@ENGINES
@pytest.mark.parametrize("logprobs", [None, 0])
async def test_a_bfloat16_answer_verifies_in_float32(folder: Path, engine: EngineName, logprobs: int | None) -> None:
    async with service(folder, dtype="bfloat16") as client:
        reply = await ask(client, **BODY | {"max_tokens": 100, "temperature": 1.0, "logprobs": logprobs})
    found = await asyncio.to_thread(verify, *read_receipts(json.dumps(reply)), folder, engine)
    assert not found.reason, found
    assert (found.tolerance == "for bfloat16") == (logprobs is None)
    assert found.tolerance_nats == 0.5 if logprobs is None else 0.001 < found.tolerance_nats < 0.5


@pytest.mark.skipif(cpu_kernels() is None, reason="rounded weights need the CPU kernels")
async def test_rounded_weights_are_checked_as_they_were_rounded(folder: Path) -> None:
    async with service(folder, dtype="bfloat16", quantization="int8") as client:
        reply = await ask(client, **BODY)
    (receipt,) = read_receipts(json.dumps(reply))
    assert (receipt.weights, receipt.quantization) == ("int8", "int8")
    found = await asyncio.to_thread(verify, receipt, folder, "torch")
    assert not found.reason and found.replayed_by == "truespec with int8 weights"
    assert (await asyncio.to_thread(verify, receipt, folder, "transformers")).tolerance == "for int8 weights"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_each_choice_of_each_prompt_has_its_receipt(folder: Path, stream: bool) -> None:
    asked = BODY | {"prompt": [PROMPT, "hello"], "n": 2, "seed": None, "return_token_ids": True, "stream": stream}
    async with service(folder) as client:
        if stream:
            raw = (await client.post("/v1/completions", json=asked | {"receipt": True}, timeout=120)).text
            *before, last, done = [part.removeprefix("data: ") for part in raw.strip().split("\n\n")]
            assert done == "[DONE]" and "receipts" not in "".join(before)
            chunks, reply = [json.loads(one) for one in before], json.loads(last)
        else:
            reply = await ask(client, **asked)
            chunks = [{"choices": [choice]} for choice in reply["choices"]]
        assert "receipts" not in await ask(client, **BODY | {"receipt": False})
    found = read_receipts(json.dumps(reply))
    assert [one.id for one in found] == [f"{reply['id']}-{index}" for index in range(4)]
    assert len({one.seed for one in found}) == 4
    for index, receipt in enumerate(found):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [token for choice in own for token in choice["token_ids"]] == list(receipt.token_ids)
        assert list(receipt.prompt_token_ids) == own[0]["prompt_token_ids"]
        assert receipt.logprobs is None and receipt.num_delivered == len(receipt.token_ids)
        assert not (await asyncio.to_thread(verify, receipt, folder, "torch")).reason


async def test_a_chat_that_a_stop_string_ends_within_a_round(folder: Path) -> None:
    talk = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60, "seed": 3}
    async with service(folder) as client:
        whole = await ask(client, "/v1/chat/completions", **talk, logprobs=True, return_token_ids=True)
        text = whole["choices"][0]["message"]["content"]
        stopped = await ask(client, "/v1/chat/completions", **talk, stop=text[20:24], return_token_ids=True)
    receipt, cut = *read_receipts(json.dumps(whole)), *read_receipts(json.dumps(stopped))
    logprobs = [entry["logprob"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert receipt.logprobs == tuple(logprobs)
    assert list(cut.token_ids[: cut.num_delivered]) == stopped["choices"][0]["token_ids"]
    assert cut.token_ids == receipt.token_ids[: len(cut.token_ids)] and len(cut.token_ids) < len(receipt.token_ids)
    for one in (receipt, cut):
        assert not (await asyncio.to_thread(verify, one, folder, "torch")).reason


async def test_an_engine_without_rounds_refuses(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(str(folder))
    backend, _ = make_backend(tokenizer)
    app = build_ingress(FrontEnd(BackendSource(backend), tokenizer, backend.info))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        reply = await client.post("/v1/completions", json={"model": "fake", "prompt": "a", "receipt": True})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "receipt" and "engine.kind: torch" in reply.json()["error"]["message"]


# -- forgeries --------------------------------------------------------------------------------------------------------

Forge = Callable[[dict[str, Any]], None]


def judged(wire: dict[str, Any], kind: str) -> tuple[dict[str, Any], int, int]:
    """The first round with a sampled draft of a kind, its index there, and the index of the token."""
    start = 0
    for one in wire["rounds"]:
        for offset in range(one["num_tokens"]):
            if wire["token_kinds"][start + offset] == kind and one["draft_probs"]:
                return one, offset, start + offset
        start += one["num_tokens"]
    raise AssertionError(f"no {kind} token")


def other_token(wire: dict[str, Any]) -> None:
    wire["token_ids"][20] = (wire["token_ids"][20] + 101) % 500


def other_seed(wire: dict[str, Any]) -> None:
    wire["seed"] = str(int(wire["seed"]) ^ 1)


def other_draft(wire: dict[str, Any]) -> None:
    one, offset, _ = judged(wire, "accepted")
    one["drafts"][offset] = (one["drafts"][offset] + 1) % 500


def smaller_q(wire: dict[str, Any]) -> None:
    """A rejected draft, as if it had been unlikely enough to be accepted."""
    one, offset, _ = judged(wire, "recovered")
    one["draft_probs"][offset] = 1e-12


def larger_q(wire: dict[str, Any]) -> None:
    """What replaced a draft, as if the drafter had thought more of it than the model."""
    one, _, _ = judged(wire, "recovered")
    one["last_prob"] = 1.0


def other_rounds(wire: dict[str, Any]) -> None:
    """An accepted token, as if it had been drawn by itself."""
    one, offset, index = judged(wire, "accepted")
    wire["token_kinds"][index] = "bonus"
    before = one | {"num_tokens": offset + 1, "num_drafted": offset, "drafts": one["drafts"][:offset]}
    after = one | {"num_tokens": one["num_tokens"] - offset - 1, "num_drafted": one["num_drafted"] - offset - 1}
    parts = [before, after | {"drafts": one["drafts"][offset + 1 :]}]
    for part in parts:
        part["draft_probs"] = one["draft_probs"][: len(part["drafts"])]
    at = wire["rounds"].index(one)
    wire["rounds"][at : at + 1] = parts


def other_prompt(wire: dict[str, Any]) -> None:
    wire["prompt_token_ids"][3] = (wire["prompt_token_ids"][3] + 1) % 500


def other_fingerprint(wire: dict[str, Any]) -> None:
    wire["fingerprint"] = "0" * 32


def other_temperature(wire: dict[str, Any]) -> None:
    wire["params"]["temperature"] = 0.4


def other_filter(wire: dict[str, Any]) -> None:
    wire["params"]["top_k"] = 2


def other_penalty(wire: dict[str, Any]) -> None:
    wire["params"]["repetition_penalty"] = 1.6


def other_rules(wire: dict[str, Any]) -> None:
    wire["params"]["bad_words"] = [[wire["token_ids"][30]]]


def a_stop_before_the_end(wire: dict[str, Any]) -> None:
    wire["params"]["stop_token_ids"] = [wire["token_ids"][10]]


def fewer_tokens_allowed(wire: dict[str, Any]) -> None:
    wire["params"]["max_tokens"] = 20


def a_last_token_that_nobody_accepted(wire: dict[str, Any]) -> None:
    _, _, index = judged(wire, "recovered")
    wire["token_kinds"][index] = "accepted"


def other_logprob(wire: dict[str, Any]) -> None:
    wire["logprobs"][5] -= 0.5


def as_if_greedy(wire: dict[str, Any]) -> None:
    wire["params"]["temperature"] = 0


def unknown_token(wire: dict[str, Any]) -> None:
    wire["token_ids"][4] = 100_000


FORGERIES = (
    *(other_token, other_seed, other_draft, smaller_q, larger_q, other_rounds, other_prompt, other_fingerprint),
    *(other_temperature, other_filter, other_penalty, other_rules, a_stop_before_the_end, fewer_tokens_allowed),
    *(a_last_token_that_nobody_accepted, other_logprob, as_if_greedy, unknown_token),
)


@pytest.fixture(scope="module")
def sound(folder: Path, other: Path, key_file: Path) -> dict[str, Any]:
    """A signed receipt of sampled drafts, verified token by token."""

    async def made() -> dict[str, Any]:
        asked = BODY | {"max_tokens": 100, "logprobs": 0, "temperature": 1.0, "reproducible": False}
        async with service(folder, other, key_file) as client:
            return await ask(client, **asked)

    return asyncio.run(made())["receipts"][0]  # type: ignore[no-any-return]


@ENGINES
@pytest.mark.parametrize("forge", FORGERIES)
def test_a_forged_receipt_does_not_verify(
    sound: dict[str, Any], folder: Path, forge: Forge, engine: EngineName, key_file: Path
) -> None:
    key = PublicKey.from_file(public_key(key_file))
    assert not verify(*read_receipts(json.dumps(sound)), folder, engine, key).reason
    forged = copy.deepcopy(sound)
    forge(forged)
    (receipt,) = read_receipts(json.dumps(forged))
    assert verify(receipt, folder, engine).reason
    assert "signature" in verify(receipt, folder, engine, key).reason
    if forge is other_token:
        assert verify(receipt, folder, engine).draws.wrong == 20


def test_no_receipt_has_rounds_of_another_engine(sound: dict[str, Any], folder: Path) -> None:
    forged = copy.deepcopy(sound)
    forged["rounds"][0]["verifier"] = "vllm"
    (receipt,) = read_receipts(json.dumps(forged))
    assert "vLLM's answers have no receipts" in verify(receipt, folder, "torch").reason


def test_weights_that_others_have_do_not_verify(sound: dict[str, Any], other: Path) -> None:
    assert "fingerprint" in verify(*read_receipts(json.dumps(sound)), other, "torch").reason


def test_any_field_is_under_the_signature(sound: dict[str, Any], folder: Path, key_file: Path) -> None:
    key = PublicKey.from_file(public_key(key_file))
    for name, value in {"created": 1, "model": "x", "num_delivered": 3, "truespec": "9", "computing": "x"}.items():
        (receipt,) = read_receipts(json.dumps(sound | {name: value}))
        assert "signature" in verify(receipt, folder, "torch", key).reason
    (unsigned,) = read_receipts(json.dumps(sound | {"signature": None}))
    assert verify(unsigned, folder, "torch", key).reason == "it is not signed"
    assert not verify(unsigned, folder, "torch").reason
    reordered = json.dumps(dict(reversed(sound.items())), indent=3)
    assert not verify(*read_receipts(reordered), folder, "torch", key).reason
    damaged = sound | {"signature": sound["signature"] | {"value": base64.b64encode(b"x" * 64).decode()}}
    assert "signature" in verify(*read_receipts(json.dumps(damaged)), folder, "torch", key).reason


def test_several_weights_cannot_be_checked(sound: dict[str, Any], folder: Path) -> None:
    (receipt,) = read_receipts(json.dumps(sound | {"weight_versions": ["default", "step-2"]}))
    with pytest.raises(ConfigError, match="weights were changed"):
        verify(receipt, folder, "torch")


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"format": "truespec-receipt-9"}, "format is 'truespec-receipt-9'"),
        ({"seed": "seven"}, "seed: String should match"),
        ({"seed": 7}, "seed: Input should be a valid string"),
        ({"note": "x"}, "fields that 'truespec-receipt-1' does not have"),
        ({"token_ids": []}, "token_ids: Tuple should have at least 1 item"),
        ({"params": {"temperature": -1}}, "temperature must be"),
        ({"rounds": [{"verifier": "none", "num_tokens": 1}]}, r"rounds\.0\.verifier"),
    ],
)
def test_what_is_no_receipt_is_refused(sound: dict[str, Any], changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(NotAReceipt, match=reported):
        read_receipts(json.dumps(sound | changes))
    for text in ("[]", "{", "7", '{"receipts": []}', '{"receipts": [7]}', "[" * 100_000):
        with pytest.raises(NotAReceipt):
            read_receipts(text)


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    for content, reported in (
        (b"", "holds no private key"),
        (X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), "another kind"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=reported):
            SigningKey(path)
    with pytest.raises(ConfigError, match="holds no public key"):
        PublicKey.from_file(path)


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_found(sound: dict[str, Any], folder: Path, key_file: Path, tmp_path: Path) -> None:
    path, key = tmp_path / "receipt.json", str(public_key(key_file))
    path.write_text(json.dumps({"id": "cmpl-1", "receipts": [sound]}))
    run = CliRunner().invoke
    found = run(main, ["verify", str(path), "--model", str(folder), "--public-key", key])
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines()[-1] == "VERIFIED"
    assert "valid" in found.stdout and "0.001 nats, measured by 100 logprobs" in found.stdout
    other_token(forged := copy.deepcopy(sound))
    path.write_text(json.dumps(forged))
    found = run(main, ["verify", str(path), "--model", str(folder)])
    assert found.exit_code == 1 and "NOT VERIFIED: " in found.stdout and "token 20 " in found.stdout
    found = run(main, ["verify", str(path), "--model", str(folder), "--json"])
    verdict = json.loads(found.stdout)
    assert (found.exit_code, verdict["verified"]) == (1, False) and "token 20 " in verdict["reason"]
    for arguments in (
        [str(path), "--model", str(tmp_path / "missing")],
        [str(tmp_path / "missing.json"), "--model", str(folder)],
        [str(path), "--model", str(folder), "--public-key", str(path)],
        [str(path)],
    ):
        assert run(main, ["verify", *arguments]).exit_code == 2


def test_one_that_cannot_be_checked_does_not_keep_the_others_from_it(
    sound: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the model is loaded once for all."""
    loaded: list[object] = []
    monkeypatch.setattr(
        "deploy.run.verify.make_replayer", lambda options: loaded.append(options) or make_replayer(options)
    )
    path, run = tmp_path / "receipts.json", CliRunner().invoke
    two = sound | {"id": "cmpl-2", "weight_versions": ["default", "step-2"]}
    path.write_text(json.dumps({"receipts": [sound | {"seed": 7}, two, sound, sound]}))
    found = run(main, ["verify", str(path), "--model", str(folder), "--json"])
    verdicts = [json.loads(line) for line in found.stdout.splitlines()]
    assert (found.exit_code, [one["verified"] for one in verdicts]) == (2, [None, None, True, True])
    assert "seed: Input should be a valid string" in verdicts[0]["reason"]
    assert verdicts[1]["id"] == "cmpl-2" and "weights were changed" in verdicts[1]["reason"]
    assert "Receipt 1 of 4 cannot be checked: seed: Input" in found.stderr
    assert len(loaded) == 1
    other_token(forged := copy.deepcopy(sound))
    path.write_text(json.dumps({"receipts": [{}, forged]}))
    assert run(main, ["verify", str(path), "--model", str(folder)]).exit_code == 1


WITHOUT_RAY = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ImportError("ray is not installed")
sys.meta_path.insert(0, Blocked())
from deploy.cli.main import main
main()
"""


@ENGINES
def test_it_needs_no_ray(sound: dict[str, Any], folder: Path, tmp_path: Path, engine: str) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(sound))
    command = [sys.executable, "-c", WITHOUT_RAY, "verify", str(path), "--model", str(folder), "--engine", engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "VERIFIED" in done.stdout, done.stderr
