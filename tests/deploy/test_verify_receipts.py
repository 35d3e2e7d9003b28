"""Receipts through the real HTTP app, and who checks them: sound ones verify with both engines, forged ones do not."""

import asyncio
import base64
import contextlib
import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
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
from deploy.run.replied import replied_in
from deploy.run.verify import EngineName, ReceiptVerdict, Verifier
from serve_app.backends.torch_backend import TorchBackend
from serve_app.http.routes import build_ingress
from serve_app.openai.frontend import FrontEnd
from serve_app.referee.records.receipts import NotAReceipt, Receipt, read_receipt, receipts_in
from serve_app.referee.records.signatures import PublicKey, SigningKey
from serve_app.streams.pooled import PooledTokenSource
from serve_app.telemetry.metrics import BufferSink, Metrics
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig
from speculative.errors import ConfigError
from speculative.kernels.library import cpu_kernels
from tests.support.engines import NGRAM, settings
from tests.support.fake_serving import BackendSource, make_backend
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.slow


def read_receipts(text: str) -> list[Receipt]:
    return [read_receipt(one) for one in receipts_in(text)[0]]


async def verify(
    receipt: Receipt, folder: Path, engine: EngineName, key: PublicKey | None = None, precision: str = ""
) -> ReceiptVerdict:
    async with Verifier(folder, engine, receipt.num_tokens, key, precision) as verifier:
        return await verifier.check(receipt)


ENGINES: tuple[EngineName, ...] = ("torch", "transformers")
PROMPT = "the quick brown fox jumps over the lazy dog, the quick brown fox"
# Seeded requests are coupled unless they say otherwise; here the service's verifier is to judge.
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 48, "ignore_eos": True, "seed": 7, "temperature": 0.8}
BODY |= {"reproducible": False}
RULES = {
    "top_p": 0.95, "top_k": 100, "min_p": 0.001, "presence_penalty": 0.5, "frequency_penalty": 0.2,
    "repetition_penalty": 1.1, "logit_bias": {"40": 3.0}, "bad_words": ["the", "fox"], "min_tokens": 8,
    "ignore_eos": False, "stop_token_ids": [77],
}  # fmt: skip


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
    source = PooledTokenSource(backend, Metrics(BufferSink("r"), model_name="tiny", pool="monolith"))
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


STRUCTURED = {"structured_outputs": {"regex": "[a-z ]{12,40}"}, "ignore_eos": False}


@pytest.mark.parametrize("sampled", [False, True], ids=["deterministic drafts", "sampled drafts"])
@pytest.mark.parametrize("verifier", ["token_wise", "coupled"])
async def test_sound_receipts_verify(folder: Path, other: Path, verifier: str, sampled: bool) -> None:
    async with service(folder, other if sampled else None, verifier=verifier) as client:
        requests = ({}, RULES, STRUCTURED, {"temperature": 0, "logprobs": 0})
        replies = [await ask(client, **BODY | fields) for fields in requests]
    made = [one for reply in replies for one in read_receipts(json.dumps(reply))]
    assert any(one.drafts for receipt in made for one in receipt.rounds)
    for receipt in made:
        assert {one.verifier for one in receipt.rounds} == {verifier}
        for engine in ENGINES:
            found = await verify(receipt, folder, engine)
            assert not found.reason, found
            assert found.draws.num_checked + len(receipt.claimed_draws) >= 0.9 * len(receipt.token_ids)
            assert bool(receipt.claimed_draws) == bool(found.open)
            assert not found.open or (sampled and verifier == "token_wise")


@pytest.mark.parametrize("logprobs", [None, 0])
async def test_a_bfloat16_answer_verifies_in_float32(folder: Path, logprobs: int | None) -> None:
    async with service(folder, dtype="bfloat16") as client:
        reply = await ask(client, **BODY | {"max_tokens": 100, "temperature": 1.0, "logprobs": logprobs})
    for engine in ENGINES:
        found = await verify(*read_receipts(json.dumps(reply)), folder, engine)
        assert not found.reason, found
        assert (found.tolerance_nats, found.tolerance) == (0.5, "for bfloat16")
        assert (found.tme is None) == (logprobs is None)
        assert ("logprobs: it has none" in found.not_shown) == (logprobs is None)


@pytest.mark.skipif(cpu_kernels() is None, reason="rounded weights need the CPU kernels")
async def test_rounded_weights_are_checked_as_they_were_rounded(folder: Path) -> None:
    async with service(folder, dtype="bfloat16", quantization="w4a8") as client:
        reply = await ask(client, **BODY)
    (receipt,) = read_receipts(json.dumps(reply))
    assert (receipt.weights, receipt.quantization) == ("w4a8", "w4a8")
    refused = await verify(receipt, folder, "torch")
    assert "computed in w4a8, and bfloat16 is the coarsest" in refused.reason
    found = await verify(receipt, folder, "torch", None, "w4a8")
    assert not found.reason and found.replayed_by == "truespec with w4a8 weights"
    independent = await verify(receipt, folder, "transformers", None, "w4a8")
    assert not independent.reason and independent.replayed_by == "transformers in float32 with w4a8 weights"
    assert (found.tolerance, independent.tolerance) == ("for w4a8", "for w4a8")


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
        assert not (await verify(receipt, folder, "torch")).reason


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
    assert (receipt.ending.finish_reason, receipt.ending.stop_strings) == ("stop", ())
    assert (cut.ending.finish_reason, cut.ending.stop_strings) == ("stop", (text[20:24],))
    for one in (receipt, cut):
        assert not (await verify(one, folder, "torch")).reason
    for changes, reported in (
        ({"num_delivered": cut.num_delivered - 1}, "tokens were delivered, and the stop string"),
        ({"ending": dataclasses.replace(cut.ending, stop_strings=())}, "can only be 'length'"),
        ({"ending": dataclasses.replace(cut.ending, finish_reason="length")}, "can only be 'stop'"),
        ({"token_ids": receipt.token_ids, "token_kinds": receipt.token_kinds, "rounds": receipt.rounds}, "follow"),
    ):
        forged = dataclasses.replace(cut, **changes)
        assert reported in (await verify(forged, folder, "torch")).reason


@pytest.mark.parametrize("asked", [{"stop_token_ids": [77, 78, 79]}, {"ignore_eos": False, "logit_bias": {"2": 20.0}}])
@pytest.mark.parametrize("include", [False, True])
async def test_an_answer_that_a_token_ends_is_whole(folder: Path, asked: dict[str, Any], include: bool) -> None:
    rules = {"min_tokens": 5, "include_stop_str_in_output": include, "stop": "never", "max_tokens": 400}
    async with service(folder) as client:
        reply = await ask(client, **BODY | rules | asked | {"temperature": 3.0})
    (receipt,) = read_receipts(json.dumps(reply))
    assert receipt.ending.finish_reason == "stop" and len(receipt.token_ids) > 5
    found = await verify(receipt, folder, "torch")
    assert not found.reason, found.reason
    endless = dataclasses.replace(receipt.params, ignore_eos=True, stop_token_ids=())
    forged = dataclasses.replace(receipt, params=endless)
    assert "can only be 'length'" in (await verify(forged, folder, "torch")).reason


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


def cut(wire: dict[str, Any], num_rounds: int = 3) -> None:
    """Without the last rounds."""
    kept = wire["rounds"][:-num_rounds]
    wire["rounds"], count = kept, sum(one["num_tokens"] for one in kept)
    for name in ("token_ids", "token_kinds", "logprobs"):
        wire[name] = wire[name][:count] if wire[name] is not None else None
    wire["num_delivered"] = count


def last_round_twice(wire: dict[str, Any]) -> None:
    count = wire["rounds"][-1]["num_tokens"]
    wire["rounds"].append(wire["rounds"][-1])
    for name in ("token_ids", "token_kinds", "logprobs"):
        wire[name] += wire[name][-count:]
    wire["num_delivered"] += count
    wire["params"]["max_tokens"] += count


def rounds_swapped(wire: dict[str, Any]) -> None:
    """Two rounds of equal length, each with the tokens of the other."""
    rounds, start = wire["rounds"], 0
    starts = [start := start + one["num_tokens"] for one in rounds]
    first, second = next(
        (one, other)
        for one in range(2, len(rounds))
        for other in range(one + 1, len(rounds) - 1)
        if rounds[one]["num_tokens"] == rounds[other]["num_tokens"] == 2
    )
    rounds[first], rounds[second] = rounds[second], rounds[first]
    for name in ("token_ids", "token_kinds", "logprobs"):
        one, other = (slice(starts[number] - 2, starts[number]) for number in (first, second))
        wire[name][one], wire[name][other] = wire[name][other], wire[name][one]


def a_round_of_minus_one_token(wire: dict[str, Any]) -> None:
    """Its tokens are as many as before."""
    empty = wire["rounds"][0] | {"num_tokens": -(10**9)}
    wire["rounds"][1:1] = [empty, empty | {"num_tokens": 10**9}]


@pytest.fixture(scope="module")
def sound(folder: Path, other: Path, key_file: Path) -> dict[str, Any]:
    """A signed receipt of sampled drafts, verified token by token."""
    return made_by("token_wise", folder, other, key_file)


@pytest.fixture(scope="module")
def bound(folder: Path, other: Path) -> dict[str, Any]:
    """A receipt whose draws rest on the seed alone."""
    return made_by("coupled", folder, other)


def made_by(verifier: str, folder: Path, other: Path, key_file: Path | None = None) -> dict[str, Any]:
    """A receipt of an answer with sampled drafts and logprobs, as JSON."""

    async def made() -> dict[str, Any]:
        asked = BODY | {"max_tokens": 100, "logprobs": 0, "temperature": 1.0}
        async with service(folder, other, key_file, verifier=verifier) as client:
            return await ask(client, **asked)

    receipt: dict[str, Any] = asyncio.run(made())["receipts"][0]
    assert {one["verifier"] for one in receipt["rounds"]} == {verifier}
    return receipt


def checked(folder: Path, *wires: dict[str, Any], engine: EngineName = "torch") -> list[ReceiptVerdict]:
    """What `truespec verify` says of receipts, the model loaded once."""

    async def all_of_them() -> list[ReceiptVerdict]:
        async with Verifier(folder, engine, 256) as verifier:
            return [await verifier.check(one) for wire in wires for one in read_receipts(json.dumps(wire))]

    return asyncio.run(all_of_them())


def forged(wire: dict[str, Any], forge: Forge) -> dict[str, Any]:
    forge(changed := copy.deepcopy(wire))
    return changed


def put(*path: Any) -> Forge:
    """Puts the last of the path, or what it makes of the value there, in the place that the others name."""
    *names, last, value = path

    def forge(wire: dict[str, Any]) -> None:
        place: Any = wire
        for name in names:
            place = place[name]
        place[last] = value(place[last]) if callable(value) else value

    return forge


def in_a_round(kind: str, field: str, value: Any) -> Forge:
    """Puts a value in the place of the first sampled draft of a kind."""

    def forge(wire: dict[str, Any]) -> None:
        one, offset, _ = judged(wire, kind)
        put(field, offset, value)(one)

    return forge


def verified_by(name: str) -> Forge:
    return put("rounds", lambda rounds: [one | {"verifier": name} for one in rounds])


def higher(logprobs: list[float]) -> list[float]:
    return [min(one + 0.3, 0.0) for one in logprobs]


def a_draft_accepted_that_was_rejected(wire: dict[str, Any]) -> None:
    wire["token_kinds"][judged(wire, "recovered")[2]] = "accepted"


def replaced_by_the_rejected_draft(wire: dict[str, Any]) -> None:
    one, offset, index = judged(wire, "recovered")
    one["drafts"][offset] = wire["token_ids"][index]


def replaced_as_if_drafted_surely(wire: dict[str, Any]) -> None:
    """What replaced a draft, as if the drafter had thought more of it than the model."""
    judged(wire, "recovered")[0]["last_prob"] = 1.0


other_token = put("token_ids", 20, lambda token: (token + 101) % 500)
OF_ANY_VERIFIER: dict[str, Forge] = {
    "another token": other_token,
    "an unknown token": put("token_ids", 4, 100_000),
    "another draft": in_a_round("accepted", "drafts", lambda draft: (draft + 1) % 500),
    "an unknown draft": in_a_round("recovered", "drafts", 10**30),
    "every logprob higher": put("logprobs", higher),
    "no logprobs": put("logprobs", None),
    "cut off": cut,
    "cut off as if the model had ended there": lambda wire: (cut(wire), put("ending", "finish_reason", "stop")(wire)),
    "its last round twice": last_round_twice,
    "rounds swapped": rounds_swapped,
    "a round of minus one token": a_round_of_minus_one_token,
    "stop strings that came before the end": put("ending", "stop_strings", ["a", "e", "i", "o", "t", " "]),
}
FORGERIES: dict[str, dict[str, Forge]] = {
    "token_wise": OF_ANY_VERIFIER
    | {
        "another verifier": verified_by("coupled"),
        "another verifier of a round": put("rounds", 7, "verifier", "coupled"),
        "a rejected draft that was too unlikely to be rejected": in_a_round("recovered", "draft_probs", 1e-12),
        "a token that replaced a sure draft": replaced_as_if_drafted_surely,
        "an accepted token as if drawn by itself": other_rounds,
        "a bad word": lambda wire: put("params", "bad_words", [[wire["token_ids"][30]]])(wire),
        "a stop before the end": lambda wire: put("params", "stop_token_ids", [wire["token_ids"][10]])(wire),
        "fewer tokens allowed": put("params", "max_tokens", 20),
        "a rejected draft accepted": a_draft_accepted_that_was_rejected,
        "as if greedy": put("params", "temperature", 0),
    },
    "coupled": OF_ANY_VERIFIER
    | {
        "another verifier": verified_by("token_wise"),
        "another verifier of a round": put("rounds", 7, "verifier", "token_wise"),
        "replaced by the rejected draft": replaced_by_the_rejected_draft,
    },
}


@pytest.mark.parametrize(
    ("verifier", "engine"), [("token_wise", "torch"), ("token_wise", "transformers"), ("coupled", "torch")]
)
def test_a_forged_receipt_does_not_verify(
    sound: dict[str, Any], bound: dict[str, Any], folder: Path, verifier: str, engine: EngineName
) -> None:
    right = sound if verifier == "token_wise" else bound
    forgeries = FORGERIES[verifier]
    first, *others = checked(folder, right, *(forged(right, forge) for forge in forgeries.values()), engine=engine)
    claimed = len(read_receipts(json.dumps(right))[0].claimed_draws)
    assert not first.reason and first.draws.num_checked + claimed >= 100
    assert [name for name, one in zip(forgeries, others, strict=True) if not one.reason] == []
    assert others[0].draws.wrong == 20


def test_tokens_that_rest_on_invented_drafts_are_not_verified(sound: dict[str, Any], folder: Path) -> None:
    """With a small enough q any token is an accepted draft."""

    def longer(wire: dict[str, Any]) -> None:
        invented = {"num_tokens": 4, "num_drafted": 4, "drafts": [44] * 4, "draft_probs": [1e-30] * 4, "last_prob": 0}
        wire["rounds"].append(wire["rounds"][-1] | invented)
        wire["token_ids"] += [44] * 4
        wire["token_kinds"] += ["accepted"] * 4
        wire["logprobs"] = wire["params"]["logprobs"] = None
        wire["num_delivered"] = wire["params"]["max_tokens"] = len(wire["token_ids"])

    (found,) = checked(folder, forged(sound, longer))
    claimed = len(found.receipt.claimed_draws)
    assert not found.reason and f"UNDECIDED: {claimed} of 104 tokens rest on what the receipt says" in found.in_words()
    assert found.to_wire()["verified"] is None and found.draws.num_checked == 104 - claimed < 100


def test_a_reply_is_compared_with_its_receipts(folder: Path) -> None:
    """Its text is what a client reads, and nothing signs it."""

    async def made() -> list[dict[str, Any]]:
        talk = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "logprobs": True}
        talk |= {"ignore_eos": True}  # else a forged end may be its own
        whole = BODY | {"prompt": [PROMPT, "hello"], "n": 2, "max_tokens": 9, "logprobs": 0, "return_token_ids": True}
        async with service(folder) as client:
            chat = await ask(client, "/v1/chat/completions", **talk, n=2)
            return [chat, await ask(client, **whole), await ask(client, **whole | {"echo": True})]

    def said(reply: dict[str, Any]) -> list[str]:
        async def check() -> list[str]:
            receipts, wire = receipts_in(json.dumps(reply))
            read = [read_receipt(one) for one in receipts]
            async with Verifier(folder, "torch", 128) as verifier:
                pairs = zip(read, replied_in(wire, read), strict=True)
                return [(await verifier.check(*pair)).reason for pair in pairs]

        return asyncio.run(check())

    def longer(text: str) -> str:
        return text + " indeed"

    chat, whole, echoed = asyncio.run(made())
    for reply in (chat, whole, echoed):
        assert not any(said(reply))
        for forge, reported in {
            put("choices", 0, "finish_reason", "stop"): "finish_reason",
            put("choices", 0, "stop_reason", "x"): "stop_reason",
            put("usage", "completion_tokens", lambda own: own + 1): "completion tokens",
            put("usage", "prompt_tokens", lambda own: own - 1): "prompt tokens",
            put("id", "cmpl-of-another"): "receipt of another",
            put("choices", lambda own: own[1:]): "receipts",
            put("receipts", lambda own: own[::-1]): "receipt of another",
        }.items():
            assert reported in said(forged(reply, forge))[0]
    for reply, forge, reported in (
        (chat, put("choices", 0, "message", "content", longer), "the reply's text"),
        (chat, put("choices", 0, "message", "reasoning_content", "Hm."), ""),
        (chat, put("choices", 0, "logprobs", "content", 3, "logprob", -9.0), "other logprobs"),
        (whole, put("choices", 0, "text", longer), "the reply's text"),
        (whole, put("choices", 0, "token_ids", 2, 7), "other token ids"),
        (echoed, put("choices", 0, "text", lambda own: "x" + own), "the reply's text"),
        (echoed, put("choices", 0, "logprobs", "token_logprobs", -1, -9.0), "other logprobs"),
    ):
        found = said(forged(reply, forge))
        assert reported in found[0] and not any(found[1:])


@pytest.mark.parametrize("verifier", ["token_wise", "coupled"])
def test_drafts_of_greedy_answers_are_compared_with_their_tokens(folder: Path, verifier: str) -> None:
    async def made() -> dict[str, Any]:
        async with service(folder, verifier=verifier) as client:
            return (await ask(client, **BODY | {"temperature": 0}))["receipts"][0]  # type: ignore[no-any-return]

    def accepted(wire: dict[str, Any]) -> None:
        one = next(one for one in wire["rounds"] if one["num_tokens"] > 1)
        one["drafts"][0] = (one["drafts"][0] + 1) % 500

    sound = asyncio.run(made())
    first, second = checked(folder, sound, forged(sound, accepted))
    assert not first.reason and "its draft says otherwise" in second.reason


def test_the_tolerance_comes_from_the_engines_alone(sound: dict[str, Any], folder: Path) -> None:
    """Logprobs that are far off, or close, are evidence, and no measure of what rounding may do."""

    def none(wire: dict[str, Any]) -> None:
        wire["logprobs"] = wire["params"]["logprobs"] = None

    wires = [
        forged(sound, forge) for forge in (put("logprobs", 5, lambda own: own - 0.2), put("logprobs", higher), none)
    ]
    found = checked(folder, sound, *wires)
    assert {(one.tolerance_nats, one.tolerance) for one in found} == {(0.001, "for float32")}
    assert "TME 1.0022, the largest 0.2 nats off (token 5)" in found[1].in_words()
    assert "the logprob of token 5 is 0.2 nats from its own" in found[1].reason
    assert found[2].tme == pytest.approx(1.35, abs=0.03) and found[2].reason
    assert "not shown    logprobs: it has none" in found[3].in_words() and not found[3].reason


CLAIMS = {
    "id": "cmpl-of-another", "model": "GPT-9", "created": 10**12, "truespec": "9.9", "weight_versions": ["step-7"],
    "computing": "a machine", "quantization": "int3",
}  # fmt: skip


def test_what_is_only_claimed_is_printed_as_claimed(sound: dict[str, Any], folder: Path) -> None:
    (found,) = checked(folder, sound | CLAIMS)
    claimed = [line for line in found.in_words().splitlines() if line.startswith("  claimed ")]
    others = found.in_words().replace(claimed[0], "")
    for value in ("cmpl-of-another", "GPT-9", str(10**12), "9.9", "step-7", "a machine", "int3"):
        assert value in claimed[0] and value not in others
    assert len(claimed) == 1
    alike = {"dtype": "float32", "verifier": "token_wise", "weight_versions": ("step-7",)}
    assert found.to_wire()["claimed"] == CLAIMS | alike


OPEN = CLAIMS.keys() | {  # what docs/proof.md names as claimed, or as not shown
    *("params.ignore_eos", "params.min_tokens", "params.logprobs", "params.reproducible", "ending.include_stop"),
    *("params.frequency_penalty", "params.presence_penalty"),  # so little that no draw of this answer changes
    *("rounds.drafts", "rounds.draft_probs", "rounds.last_prob", "rounds.num_drafted"),
}
OTHER_WORDS = {"accepted": "bonus", "bonus": "accepted", "recovered": "bonus", "first": "bonus", "length": "stop"}


def changes_of(wire: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of a receipt changed, or the last of a list left out, with the name of its field."""
    if isinstance(wire, dict):
        for key, value in wire.items():
            yield from ((where, wire | {key: new}) for where, new in changes_of(value, f"{name}.{key}".lstrip(".")))
    elif isinstance(wire, list):
        if wire:
            yield name, wire[:-1]
        for index, value in enumerate(wire[:3]):
            for where, new in changes_of(value, name):
                yield where, [*wire[:index], new, *wire[index + 1 :]]
    elif isinstance(wire, bool):
        yield name, not wire
    elif isinstance(wire, int):
        yield name, wire + 1
    elif isinstance(wire, float):
        yield name, wire + 0.05 if 0 <= wire < 0.9 else wire - 0.9
    elif isinstance(wire, str):
        yield name, str(int(wire) + 1) if wire.isdigit() else OTHER_WORDS.get(wire, wire + "x")


@pytest.mark.parametrize("verifier", ["token_wise", "coupled"])
def test_whatever_else_is_changed_is_refused(folder: Path, other: Path, verifier: str) -> None:
    names, wires = [], []
    for name, wire in changes_of(made_by(verifier, folder, other)):
        with contextlib.suppress(NotAReceipt):
            read_receipts(json.dumps(wire))
            names.append(name)
            wires.append(wire)
    found = checked(folder, *wires)
    assert len(set(names)) > 25 and {"seed", "token_ids", "logprobs", "rounds.num_tokens"} <= set(names)
    assert {name for name, one in zip(names, found, strict=True) if not one.reason} <= OPEN


async def test_any_field_is_under_the_signature(sound: dict[str, Any], folder: Path, key_file: Path) -> None:
    key = PublicKey.from_file(public_key(key_file))
    damaged = sound["signature"] | {"value": base64.b64encode(b"x" * 64).decode()}
    for change in ({"created": 1}, {"num_delivered": 3}, {"truespec": "9"}, {"seed": "9"}, {"signature": damaged}):
        assert "signature" in (await verify(*read_receipts(json.dumps(sound | change)), folder, "torch", key)).reason
    (unsigned,) = read_receipts(json.dumps(sound | {"signature": None}))
    assert (await verify(unsigned, folder, "torch", key)).reason == "it is not signed"
    assert not (await verify(unsigned, folder, "torch")).reason
    reordered = json.dumps(dict(reversed(sound.items())), indent=3)
    assert not (await verify(*read_receipts(reordered), folder, "torch", key)).reason


async def test_other_weights_or_engines_do_not_verify(sound: dict[str, Any], folder: Path, other: Path) -> None:
    assert "fingerprint" in (await verify(*read_receipts(json.dumps(sound)), other, "torch")).reason
    (receipt,) = read_receipts(json.dumps(forged(sound, verified_by("vllm"))))
    assert "vLLM's answers have no receipts" in (await verify(receipt, folder, "torch")).reason


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"format": "truespec-receipt-9"}, "format is 'truespec-receipt-9'"),
        ({"seed": "seven"}, "seed must match"),
        ({"note": "x"}, "note is not, or has not, the fields of 'truespec-receipt-2'; give the receipt as the service"),
        ({"logprobs": [0, "x"]}, r"logprobs\.1 must be a number, without quotes, got 'x'"),
        ({"params": {}}, "params is not, or has not, the fields"),
        ({"params": {"temperature": -1}}, "temperature must be"),
        ({"rounds": [{"verifier": "none", "num_tokens": 1}]}, r"rounds\.0\.verifier"),
    ],
)
def test_what_is_no_receipt_is_refused(sound: dict[str, Any], changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(NotAReceipt, match=reported):
        read_receipts(json.dumps(sound | changes))
    twice = json.dumps(sound).replace('"token_ids"', '"token_ids": [1], "token\\u005fids"')
    for text in ("[]", "{", "7", '{"receipts": []}', '{"receipts": [7]}', "[" * 100_000, twice, '{"a": NaN}'):
        with pytest.raises(NotAReceipt):
            read_receipts(text)
    for where in ("token_ids", "temperature", "num_tokens", "finish_reason", "key_id"):
        with pytest.raises(NotAReceipt, match=f"{where} is given twice"):
            read_receipts(json.dumps({"receipts": [sound]}).replace(f'"{where}"', f'"{where}": 1, "{where}"'))


def test_a_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    for content, reported in (
        (b"", "holds no private key"),
        (X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), "not Ed25519"),
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
    assert "valid" in found.stdout and "0.001 nats, for float32" in found.stdout
    assert "100 compared: TME 1, the largest" in found.stdout
    assert "asked for    max_tokens 100, temperature 1.0" in found.stdout
    assert "as claimed: compare it with your request" in found.stdout, "a shorter answer is sound if its limit is, too"
    path.write_text(json.dumps(forged(sound, other_token)))
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
    bound: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the model is loaded once for all."""
    loaded: list[object] = []
    monkeypatch.setattr(
        "deploy.run.verify.make_replayer", lambda options: loaded.append(options) or make_replayer(options)
    )
    path, run = tmp_path / "receipts.json", CliRunner().invoke
    two = bound | {"id": "cmpl-2", "weight_versions": ["default", "step-2"]}
    path.write_text(json.dumps({"receipts": [bound | {"seed": 7}, two, bound, bound]}))
    found = run(main, ["verify", str(path), "--model", str(folder), "--json"])
    verdicts = [json.loads(line) for line in found.stdout.splitlines()]
    assert (found.exit_code, [one["verified"] for one in verdicts]) == (2, [None, None, True, True])
    assert "seed must be text; put it in quotes, got 7" in verdicts[0]["reason"]
    assert verdicts[1]["id"] == "cmpl-2" and "weights were changed" in verdicts[1]["reason"]
    assert "Receipt 1 of 4 cannot be checked: seed must be text" in found.stderr
    assert len(loaded) == 1
    path.write_text(json.dumps({"receipts": [{}, forged(bound, other_token)]}))
    assert run(main, ["verify", str(path), "--model", str(folder)]).exit_code == 1


STRANGE_CLAIMS = {"id": "\x1b[2J\n", "model": "[bold]x[/bold]\r", "created": -(10**300)}
MALFORMED: list[Any] = [
    *(7, None, [], {}, {"format": []}, {"seed": "9" * 20}, {"weights": "w17"}, {"prompt_token_ids": [10**30]}),
    *({"rounds": [{"num_tokens": 10**12}]}, {"logprobs": [1e308] * 100}, {"prompt_token_ids": [1] * 4000}),
    {"params": {"structure": {"kind": "regex", "text": "(" * 3000}}},
    {"params": {"structure": {"kind": "grammar", "text": "start: start"}}},
    {"ending": {"finish_reason": "stop", "stop_strings": [""], "include_stop": False, "shown_special": []}},
    {"ending": {"finish_reason": "stop", "stop_strings": ["x" * 9999], "include_stop": True, "shown_special": None}},
]


def test_no_malformed_receipt_stops_the_others(bound: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    def changed(by: Any) -> Any:
        if not isinstance(by, dict) or not by:
            return by
        wire = copy.deepcopy(bound)
        return wire | {name: wire[name] | value if isinstance(value, dict) else value for name, value in by.items()}

    path = tmp_path / "receipts.json"
    content = [one for changes in MALFORMED for one in (bound, changed(changes))]
    path.write_text(json.dumps({"receipts": [*content, bound | STRANGE_CLAIMS]}))
    found = CliRunner().invoke(main, ["verify", str(path), "--model", str(folder), "--json"])
    verified = [json.loads(line)["verified"] for line in found.stdout.splitlines()]
    assert verified[::2] == [True] * (len(MALFORMED) + 1)
    believed = [str(one)[:60] for one, found in zip(MALFORMED, verified[1::2], strict=True) if found]
    assert believed == []
    words = CliRunner().invoke(main, ["verify", str(path), "--model", str(folder)])
    assert words.stdout.count("\nVERIFIED\n") == len(MALFORMED) + 1
    assert "\x1b" not in words.stdout and "id ?[2J?, model [bold]x[/bold]?, created -1000" in words.stdout


def test_it_needs_no_ray(bound: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(bound))
    without_ray = "import sys; sys.modules['ray'] = None; from deploy.cli.main import main; main()"
    command = [sys.executable, "-c", without_ray, "verify", str(path), "--model", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "VERIFIED" in done.stdout, done.stderr
