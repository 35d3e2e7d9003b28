"""The handoff: what goes in comes out bit for bit, and what is damaged or foreign is refused."""

import dataclasses
import json
import struct
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from speculative.errors import EngineFault, HandoffRefused, InvalidRequest
from speculative.handoff import ComputedTokenState, Manifest, decode_state
from speculative.request import Request, SamplingParams
from tests.support.engines import encode_state, markov_engine

MANIFEST = Manifest(
    fingerprint="a1b2",
    dtype="float32",
    num_layers=2,
    num_kv_heads=3,
    head_dim=4,
    logprobs_mode="raw_logprobs",
    drafter_state="none",
)
HEADER_AT = 16  # magic, version, zero, header length


def make_state(num_tokens: int = 6, dtype: torch.dtype = torch.float32, **changes: Any) -> ComputedTokenState:
    kv = torch.randn(2, 2, num_tokens - 1, 3, 4, generator=torch.Generator().manual_seed(num_tokens)).to(dtype)
    state = ComputedTokenState(
        tuple(range(100, 100 + num_tokens)), num_prompt=max(1, num_tokens - 1), num_cached=0, kv=kv
    )
    return dataclasses.replace(state, **changes)


def resealed(blob: np.ndarray, **header_changes: Any) -> np.ndarray:
    """A blob whose sender meant other things: header fields replaced (None: dropped), and a checksum that holds."""
    data = blob.tobytes()
    (length,) = struct.unpack_from("<Q", data, 8)
    header = json.loads(data[HEADER_AT : HEADER_AT + length])
    header = {key: value for key, value in (header | header_changes).items() if value is not None}
    return with_header(blob, json.dumps(header).encode())


def with_header(blob: np.ndarray, header: bytes, claimed: int | None = None) -> np.ndarray:
    data = blob.tobytes()
    (length,) = struct.unpack_from("<Q", data, 8)
    kv = data[-(-(HEADER_AT + length) // 64) * 64 : -8]
    start = data[:8] + struct.pack("<Q", len(header) if claimed is None else claimed) + header
    body = start + bytes(-len(start) % 64) + kv
    return np.frombuffer(body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body)), np.uint8)


def refusal(blob: Any, manifest: Manifest = MANIFEST) -> HandoffRefused:
    with pytest.raises(HandoffRefused) as caught:
        decode_state(blob, manifest)
    return caught.value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17, 200])
def test_a_round_trip_keeps_every_bit(dtype: str, num_tokens: int) -> None:
    manifest = dataclasses.replace(MANIFEST, dtype=dtype)
    state = make_state(num_tokens, getattr(torch, dtype))
    if num_tokens > 2:
        state.kv.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40])
    blob = encode_state(state, manifest)
    assert blob.dtype == np.uint8
    assert blob.ndim == 1
    back = decode_state(blob, manifest)
    assert (back.token_ids, back.num_prompt, back.num_cached) == (state.token_ids, state.num_prompt, state.num_cached)
    assert back.num_computed == num_tokens - 1
    assert back.kv.dtype == state.kv.dtype
    assert back.kv.shape == state.kv.shape
    assert torch.equal(back.kv.contiguous().view(torch.uint8), state.kv.contiguous().view(torch.uint8))


def test_the_same_state_is_the_same_bytes() -> None:
    assert encode_state(make_state(), MANIFEST).tobytes() == encode_state(make_state(), MANIFEST).tobytes()


def test_a_read_only_array_is_taken_without_a_warning() -> None:
    """Arrays out of an object store are read-only; warnings are errors here."""
    blob = encode_state(make_state(), MANIFEST)
    blob.flags.writeable = False
    assert torch.equal(decode_state(blob, MANIFEST).kv, make_state().kv)
    assert torch.equal(decode_state(np.frombuffer(blob.tobytes(), np.uint8), MANIFEST).kv, make_state().kv)


def test_an_array_at_any_address_or_stride_is_taken() -> None:
    blob = encode_state(make_state(), MANIFEST)
    shifted = np.empty(blob.size + 1, np.uint8)[1:]
    shifted[:] = blob
    assert torch.equal(decode_state(shifted, MANIFEST).kv, make_state().kv)
    assert torch.equal(decode_state(np.repeat(blob, 2)[::2], MANIFEST).kv, make_state().kv)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Manifest)])
def test_another_manifest_is_refused_and_both_sides_are_named(field: str) -> None:
    ours = getattr(MANIFEST, field)
    other = {"dtype": "bfloat16", "logprobs_mode": "processed_logprobs"}.get(
        field, f"{ours}x" if isinstance(ours, str) else ours + 1
    )
    blob = encode_state(make_state(), MANIFEST)
    error = refusal(blob, dataclasses.replace(MANIFEST, **{field: other}))
    assert error.reason == "manifest"
    assert field in str(error)
    assert repr(ours) in str(error)
    assert repr(other) in str(error)


@pytest.mark.parametrize("change", [None, {}, [], "x", 3, {"extra": 1}])
def test_a_manifest_of_another_shape_is_refused(change: Any) -> None:
    theirs = {**dataclasses.asdict(MANIFEST), **change} if change == {"extra": 1} else change
    assert refusal(resealed(encode_state(make_state(), MANIFEST), manifest=theirs)).reason == "manifest"


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_version_is_refused(version: int) -> None:
    blob = encode_state(make_state(), MANIFEST)
    blob[4:6] = np.frombuffer(struct.pack("<H", version), np.uint8)
    error = refusal(blob)
    assert error.reason == "version"
    assert str(version) in str(error)


def test_every_truncation_is_refused() -> None:
    blob = encode_state(make_state(3), MANIFEST)
    for length in range(blob.size):
        assert refusal(blob[:length]).reason == "damaged"


def test_every_bit_flip_is_refused() -> None:
    blob = encode_state(make_state(2), MANIFEST)
    for position in range(blob.size):
        for bit in range(8):
            damaged = blob.copy()
            damaged[position] ^= 1 << bit
            refusal(damaged)


def test_random_mutations_are_refused() -> None:
    """Bytes replaced, removed, added, moved: never anything but a refusal."""
    generator = np.random.default_rng(0)
    blob = encode_state(make_state(9), MANIFEST)
    for _ in range(2000):
        at, length = generator.integers(0, blob.size - 8), int(generator.integers(1, 9))
        noise = generator.integers(0, 256, length, np.uint8)
        mutations = (
            lambda at=at, length=length, noise=noise: np.concatenate([blob[:at], noise, blob[at + length :]]),
            lambda at=at, length=length: np.delete(blob, slice(at, at + length)),
            lambda at=at, noise=noise: np.insert(blob, at, noise),
            lambda at=at: np.roll(blob, at + 1),
            lambda noise=noise: np.concatenate([blob, noise]),
        )
        mutated = mutations[generator.integers(len(mutations))]()
        if mutated.tobytes() != blob.tobytes():
            assert refusal(mutated).reason in ("damaged", "version")


@pytest.mark.parametrize(
    "thing", [b"", b"TSPC", np.zeros(0, np.uint8), np.zeros(500, np.uint8), np.zeros(80, np.float32)]
)
def test_what_is_no_handoff_is_refused(thing: Any) -> None:
    assert refusal(thing).reason == "damaged"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prompt": 0},
        {"num_prompt": -1},
        {"num_prompt": 7},
        {"num_prompt": 2.0},
        {"num_prompt": True},
        {"num_prompt": "3"},
        {"num_cached": -1},
        {"num_cached": 6},
        {"num_cached": []},
        {"token_ids": []},
        {"token_ids": [1, 2, 3]},
        {"token_ids": [1] * 7},
        {"token_ids": [1, 2, 3, 4, 5, -6]},
        {"token_ids": [1, 2, 3, 4, 5, 6.0]},
        {"token_ids": [1, 2, 3, 4, 5, True]},
        {"token_ids": "123456"},
        {"token_ids": {"0": 1}},
        *({name: None} for name in ("num_prompt", "num_cached", "token_ids")),
    ],
    ids=str,
)
def test_counts_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    assert refusal(resealed(encode_state(make_state(), MANIFEST), **changes)).reason == "damaged"


@pytest.mark.parametrize(
    "header", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": 1' + b"0" * 9999]
)
def test_a_header_that_is_no_object_is_refused(header: bytes) -> None:
    assert refusal(with_header(encode_state(make_state(), MANIFEST), header)).reason == "damaged"


@pytest.mark.parametrize("claimed", [0, 1, 10**6, 2**40, 2**64 - 1])
def test_a_header_of_a_wrong_length_is_refused(claimed: int) -> None:
    header = json.dumps({"manifest": dataclasses.asdict(MANIFEST)}).encode()
    assert refusal(with_header(encode_state(make_state(), MANIFEST), header, claimed)).reason == "damaged"


# -- at the engine's door -------------------------------------------------------------------------------------------

CYCLE = [(token + 1) % 16 for token in range(16)]


def exported(prompt: tuple[int, ...] = (1, 2, 3, 4, 5), prefill_only_after: int = 0, **engine: Any) -> np.ndarray:
    core = markov_engine(CYCLE, **engine)
    core.add(Request("a", prompt, SamplingParams(max_tokens=9)), prefill_only_after=prefill_only_after)
    while core.has_work:
        core.step()
    return core.export("a")


@pytest.mark.parametrize("prompt", [(1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6), (9,)])
def test_a_handoff_of_another_prompt_is_refused(prompt: tuple[int, ...]) -> None:
    engine = markov_engine(CYCLE)
    with pytest.raises(HandoffRefused) as caught:
        engine.insert(Request("b", prompt), exported())
    assert caught.value.reason == "request"
    assert not engine.has_work


def test_a_handoff_of_another_type_is_refused() -> None:
    engine = markov_engine(CYCLE, logprobs_mode="processed_logprobs")
    with pytest.raises(HandoffRefused, match="logprobs_mode"):
        engine.insert(Request("b", (1, 2, 3, 4, 5)), exported())


def test_a_handoff_that_leaves_no_room_is_no_valid_request() -> None:
    request = Request("b", (1, 2, 3, 4, 5), SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="max_tokens"):
        markov_engine(CYCLE).insert(request, exported(prefill_only_after=1))
    with pytest.raises(InvalidRequest) as caught:
        markov_engine(CYCLE, max_model_len=6).insert(Request("b", (1, 2, 3, 4, 5)), exported(prefill_only_after=1))
    assert caught.value.field == "prompt"


def test_token_ids_that_the_model_does_not_have_are_refused() -> None:
    blob = resealed(exported(prefill_only_after=1), token_ids=[1, 2, 3, 4, 5, 10**30])
    engine = markov_engine(CYCLE)
    with pytest.raises(InvalidRequest):
        engine.insert(Request("b", (1, 2, 3, 4, 5)), blob)
    assert not engine.has_work


def test_a_request_that_runs_already_is_not_inserted_twice() -> None:
    engine, request = markov_engine(CYCLE), Request("b", (1, 2, 3, 4, 5))
    engine.insert(request, exported())
    with pytest.raises(InvalidRequest, match="already running"):
        engine.insert(request, exported())


def test_only_what_is_held_is_exported() -> None:
    engine = markov_engine(CYCLE)
    engine.add(Request("a", (1, 2, 3)))
    for name in ("a", "unknown"):
        with pytest.raises(KeyError):
            engine.export(name)


def test_what_is_no_number_early_in_the_last_layer_is_not_handed_off() -> None:
    engine = markov_engine([(token + 1) % 16 for token in range(16)])
    engine.add(Request("r", tuple(range(1, 12)), SamplingParams(max_tokens=4)), prefill_only_after=0)
    while "r" not in engine.held_ids:
        engine.step()
    sequence = engine.scheduler.find("r")
    assert sequence is not None
    engine.cache.data[-1, 0, engine._slots(sequence, 1, 2)] = torch.nan
    with pytest.raises(EngineFault, match="not finite"):
        engine.export("r")


def test_what_is_no_number_is_not_handed_off_and_not_found_again() -> None:
    engine = markov_engine([(token + 1) % 16 for token in range(16)])
    prompt = tuple(range(1, 12))
    for name, damaged in (("bad", True), ("good", False)):
        engine.add(Request(name, prompt, SamplingParams(max_tokens=4)), prefill_only_after=0)
        while name not in engine.held_ids:
            engine.step()
        sequence = engine.scheduler.find(name)
        assert sequence is not None
        assert sequence.reply.num_cached == 0  # nothing of the damaged prompt may be shared
        if damaged:
            engine.cache.data[:, :, engine._slots(sequence, 0, sequence.num_computed)] = torch.nan
            with pytest.raises(EngineFault, match="not finite"):
                engine.export(name)
        else:
            engine.cache.data[engine.cache.data.isnan()] = 0
            assert decode_state(engine.export(name), engine.manifest).num_computed == len(prompt) - 1
        assert engine.usage().num_free_blocks == engine.usage().num_blocks
