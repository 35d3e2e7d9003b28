"""The handoff: what goes in comes out bit for bit, and what is damaged or foreign is refused."""

import dataclasses
import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.errors import EngineFault, HandoffRefused, InvalidRequest
from speculative.request import Request, SamplingParams
from speculative.state.handoff import Blob, ComputedTokenState, Manifest, decode_state
from tests.support.engines import encode_state, insert, markov_engine, tiny_engine
from tests.support.engines import exported as hand_off
from tests.support.tiny_models import write_tiny_model

MANIFEST = Manifest(
    fingerprint="a1b2",
    dtype="float32",
    num_layers=2,
    num_kv_heads=3,
    head_dim=4,
    logprobs_mode="raw_logprobs",
    drafter_state="none",
)
VALUES_AT = 64  # behind magic, version, zero, header length


def make_state(num_tokens: int = 6, dtype: torch.dtype = torch.float32, **changes: Any) -> ComputedTokenState:
    kv = torch.randn(num_tokens - 1, 2, 2, 3, 4, generator=torch.Generator().manual_seed(num_tokens)).to(dtype)
    state = ComputedTokenState(
        MANIFEST, tuple(range(100, 100 + num_tokens)), num_prompt=max(1, num_tokens - 1), num_cached=0, kv=kv
    )
    return dataclasses.replace(state, **changes)


def parts(blob: bytes) -> tuple[bytes, bytes]:
    """The header, and the keys and values (with what the drafter keeps)."""
    (length,) = struct.unpack_from("<Q", blob, 8)
    return blob[-8 - length : -8], blob[VALUES_AT : -8 - length]


def sealed(header: bytes, values: bytes, claimed: int | None = None) -> bytes:
    """With a checksum that holds, and perhaps a wrong length of the header."""
    start = (b"TSPC" + struct.pack("<HHQ", 2, 0, len(header) if claimed is None else claimed)).ljust(VALUES_AT, b"\0")
    body = values + header
    return start + body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body + start))


def resealed(blob: np.ndarray, **changes: Any) -> np.ndarray:
    """A blob whose sender meant other things: header fields replaced (None: dropped), and a checksum that holds."""
    header, values = parts(blob.tobytes())
    fields = {name: value for name, value in (json.loads(header) | changes).items() if value is not None}
    return np.frombuffer(sealed(json.dumps(fields).encode(), values), np.uint8)


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


def test_an_array_at_any_address_or_stride_is_taken_and_one_that_is_read_only_without_a_warning() -> None:
    """Arrays out of an object store are read-only; warnings are errors here."""
    blob = encode_state(make_state(), MANIFEST)
    shifted = np.empty(blob.size + 1, np.uint8)[1:]
    shifted[:] = blob
    blob.flags.writeable = False
    for given in (blob, np.frombuffer(blob.tobytes(), np.uint8), shifted, np.repeat(blob, 2)[::2]):
        assert torch.equal(decode_state(given, MANIFEST).kv, make_state().kv)


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


@pytest.mark.parametrize("version", [0, 1, 65535])
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


@pytest.mark.parametrize(
    "thing", [b"", b"TSPC", np.zeros(0, np.uint8), np.zeros(500, np.uint8), np.zeros(80, np.float32)]
)
def test_what_is_no_handoff_is_refused(thing: Any) -> None:
    assert refusal(thing).reason == "damaged"


CONTRADICTIONS: dict[str, tuple[Any, ...]] = {  # None: dropped
    "num_prompt": (0, -1, 7, 2.0, True, "3", None),
    "num_cached": (-1, 6, [], None),
    "token_ids": ([], [1, 2, 3], [1] * 7, [1, 2, 3, 4, 5, -6], [1, 2, 3, 4, 5, 6.0], [1, 2, 3, 4, 5, True], "123456"),
}


@pytest.mark.parametrize(
    "changes",
    [{name: value} for name, values in CONTRADICTIONS.items() for value in values]
    + [{"token_ids": {"0": 1}}, {"token_ids": None}],
    ids=str,
)
def test_counts_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    assert refusal(resealed(encode_state(make_state(), MANIFEST), **changes)).reason == "damaged"


NO_OBJECTS = (b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": 1' + b"0" * 9999)
HEADER = json.dumps({"manifest": dataclasses.asdict(MANIFEST)}).encode()


@pytest.mark.parametrize(
    ("header", "claimed"),
    [*((header, None) for header in NO_OBJECTS), *((HEADER, length) for length in (0, 1, 10**6, 2**40, 2**64 - 1))],
)
def test_a_header_that_is_no_object_or_of_a_wrong_length_is_refused(header: bytes, claimed: int | None) -> None:
    values = parts(encode_state(make_state(), MANIFEST).tobytes())[1]
    assert refusal(np.frombuffer(sealed(header, values, claimed), np.uint8)).reason == "damaged"


# -- at the engine's door -------------------------------------------------------------------------------------------

CYCLE = [(token + 1) % 16 for token in range(16)]


def exported(prompt: tuple[int, ...] = (1, 2, 3, 4, 5), prefill_only_after: int = 0, **engine: Any) -> np.ndarray:
    core = markov_engine(CYCLE, **engine)
    core.add(Request("a", prompt, SamplingParams(max_tokens=9)), prefill_only_after=prefill_only_after)
    while core.has_work:
        core.step()
    return hand_off(core, "a")


@pytest.mark.parametrize("prompt", [(1, 2, 3, 4), (1, 2, 3, 4, 6), (1, 2, 3, 4, 5, 6), (9,)])
def test_a_handoff_of_another_prompt_is_refused(prompt: tuple[int, ...]) -> None:
    engine = markov_engine(CYCLE)
    with pytest.raises(HandoffRefused) as caught:
        insert(engine, Request("b", prompt), exported())
    assert caught.value.reason == "request"
    assert not engine.has_work


def test_a_handoff_that_leaves_no_room_is_no_valid_request() -> None:
    request = Request("b", (1, 2, 3, 4, 5), SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="max_tokens"):
        insert(markov_engine(CYCLE), request, exported(prefill_only_after=1))
    with pytest.raises(InvalidRequest) as caught:
        insert(markov_engine(CYCLE, max_model_len=6), Request("b", (1, 2, 3, 4, 5)), exported(prefill_only_after=1))
    assert caught.value.field == "prompt"


def test_token_ids_that_the_model_does_not_have_are_refused() -> None:
    blob = resealed(exported(prefill_only_after=1), token_ids=[1, 2, 3, 4, 5, 10**30])
    engine = markov_engine(CYCLE)
    with pytest.raises(InvalidRequest):
        insert(engine, Request("b", (1, 2, 3, 4, 5)), blob)
    assert not engine.has_work


def test_a_request_that_runs_already_is_not_inserted_twice() -> None:
    engine, request = markov_engine(CYCLE), Request("b", (1, 2, 3, 4, 5))
    insert(engine, request, exported())
    with pytest.raises(InvalidRequest, match="already running"):
        insert(engine, request, exported())


def test_only_what_is_held_is_exported() -> None:
    engine = markov_engine(CYCLE)
    engine.add(Request("a", (1, 2, 3)))
    for name in ("a", "unknown"):
        with pytest.raises(KeyError):
            hand_off(engine, name)


def test_what_is_no_number_is_not_handed_off_and_not_found_again() -> None:
    """In all that is computed, or early in the last layer only."""
    engine, prompt = markov_engine(CYCLE), tuple(range(1, 12))
    for name in ("all", "early", "good"):
        engine.add(Request(name, prompt, SamplingParams(max_tokens=4)), prefill_only_after=0)
        while name not in engine.held_ids:
            engine.step()
        sequence = engine.scheduler.find(name)
        assert sequence is not None
        assert sequence.reply.num_cached == 0  # nothing of the damaged prompt may be shared
        if name != "good":
            if name == "all":
                engine.cache.data[:, :, engine._slots(sequence, 0, sequence.num_computed)] = torch.nan
            else:
                engine.cache.data[-1, 0, engine._slots(sequence, 1, 2)] = torch.nan
            export = engine.export(name)
            with pytest.raises(EngineFault, match="not finite"):
                export.finish()
            engine.withdraw(export)
            engine.cache.data[engine.cache.data.isnan()] = 0
        else:
            assert decode_state(hand_off(engine, name), engine.manifest).num_computed == len(prompt) - 1
        assert engine.usage().num_free_blocks == engine.usage().num_blocks


# -- any damage -----------------------------------------------------------------------------------------------------
#
# Thousands of handoffs at an engine's door whose senders meant what they say: with a checksum that holds. Each is
# refused, or taken in and answered as the undisturbed one. (Without the checksum all is refused, see above.)

NUM_CASES = 2_500
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1)
REQUEST = Request("fuzz", (5, 9, 9, 300, 41, 7, 5, 9, 9), PARAMS, seed=4)
REFUSALS = {"damaged", "manifest", "request"}

Rng = np.random.Generator


def swapped_header(own: bytes, other: bytes, rng: Rng) -> bytes:
    """One handoff's header before another's keys and values, as when buffers are mixed up."""
    (header, _), (_, values) = parts(other), parts(own)
    return sealed(header, values)


def other_meaning(own: bytes, other: bytes, rng: Rng) -> bytes:
    """A field of the header with another value."""
    header, values = parts(own)
    reported = json.loads(header)
    strange: list[Any] = [None, -1, 0, 1, 2**31, 2**70, 1.5, True, "", "x", [], {}, [0], {"a": [1]}]
    value = strange[rng.integers(len(strange))]
    section = reported["manifest"] if rng.random() < 0.5 else reported
    name = list(section)[rng.integers(len(section))]
    if isinstance(section[name], list) and section[name] and rng.random() < 0.7:
        section[name][int(rng.integers(len(section[name])))] = value
    elif isinstance(section[name], dict) and section[name] and rng.random() < 0.7:
        section[name][list(section[name])[rng.integers(len(section[name]))]] = value
    else:
        section[name] = value
    return sealed(json.dumps(reported).encode(), values)


def noisy_header(own: bytes, other: bytes, rng: Rng) -> bytes:
    """Bytes of the header replaced."""
    header, values = parts(own)
    noisy = bytearray(header)
    for _ in range(int(rng.integers(1, 4))):
        noisy[rng.integers(len(noisy))] = int(rng.choice(np.frombuffer(b'0123456789 ,:"[]{}-\\\x00\xff', np.uint8)))
    return sealed(bytes(noisy), values)


MUTATIONS = (swapped_header, other_meaning, noisy_header)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("fuzzed")
    return write_tiny_model(root / "own"), write_tiny_model(root / "foreign", seed=1)


def handed_off(engine: EngineCore, request: Request) -> bytes:
    """Its last prompt token pending, so that every token of the handoff is the request's own."""
    engine.add(request, prefill_only_after=0)
    while request.request_id not in engine.held_ids:
        engine.step()
    return hand_off(engine, request.request_id).tobytes()


def answer(engine: EngineCore, blob: Blob) -> list[tuple[int, float]]:
    """Tokens and logprobs, nats."""
    insert(engine, REQUEST, blob)
    reported = []
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            reported += [(entry.token_id, round(entry.logprob, 4)) for entry in delta.logprobs or ()]
    return reported


def outcome(engine: EngineCore, mutated: bytes) -> str | list[tuple[int, float]]:
    """Why it was refused (or the field that would not fit the model), else the answer that came of it."""
    try:
        return answer(engine, np.frombuffer(mutated, np.uint8))
    except HandoffRefused as error:
        return error.reason
    except InvalidRequest as error:
        return error.field


@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_no_mutation_breaks_the_engine_or_the_answer(folders: tuple[Path, Path], drafter: str) -> None:
    rng = np.random.default_rng(20)
    changes: dict[str, Any] = {}
    if drafter == "draft_model":  # its state travels in sections of its own
        changes["drafter"] = DrafterConfig(kind="draft_model", model=str(folders[0]), num_draft_tokens=2)
    engine = tiny_engine(folders[0], **changes)
    foreign = tiny_engine(folders[1])
    prompts = (REQUEST.prompt_token_ids[:-1], (*REQUEST.prompt_token_ids, 8), (5, 9, 9, 301, 41, 7, 5, 9, 9))
    others = tuple(handed_off(engine, Request("other", prompt, PARAMS, seed=1)) for prompt in prompts)
    own, others = handed_off(engine, REQUEST), (*others, handed_off(foreign, REQUEST))
    undisturbed = answer(engine, np.frombuffer(own, np.uint8))
    assert len(undisturbed) == PARAMS.max_tokens
    outcomes: Counter[str] = Counter()
    for number in range(NUM_CASES):
        mutate = MUTATIONS[number % len(MUTATIONS)]
        reported = outcome(engine, mutate(own, others[rng.integers(len(others))], rng))
        assert isinstance(reported, str) or reported == undisturbed, mutate.__name__
        outcomes[reported if isinstance(reported, str) else "taken in"] += 1
        assert not engine.has_work
    assert REFUSALS <= set(outcomes) <= REFUSALS | {"drafter", "prompt", "max_tokens", "taken in"}
    assert outcomes["taken in"] < NUM_CASES // 5
    usage = engine.usage()
    assert (usage.num_running, usage.num_waiting, usage.num_free_blocks) == (0, 0, usage.num_blocks)
    assert answer(engine, np.frombuffer(own, np.uint8)) == undisturbed
