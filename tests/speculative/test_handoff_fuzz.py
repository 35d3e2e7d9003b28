"""Ten thousand damaged, cut, swapped and foreign handoffs at an engine's door: each is refused, or changes nothing.

Damage on the way keeps its old checksum. Where a case writes a new one ("resealed"), the sender meant what it says:
such a blob may be taken in only if the answer that follows is the undisturbed one.
"""

import json
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.errors import HandoffRefused, InvalidRequest
from speculative.handoff import Blob
from speculative.request import Request, SamplingParams
from tests.support.engines import tiny_engine
from tests.support.tiny_models import write_tiny_model

NUM_CASES = 10_000
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1)
REQUEST = Request("fuzz", (5, 9, 9, 300, 41, 7, 5, 9, 9), PARAMS, seed=4)
HEADER_AT = 16  # after magic, version, zero and header length
REFUSALS = {"damaged", "version", "manifest", "request"}

Rng = np.random.Generator


@dataclass(frozen=True)
class Blobs:
    """The handoff under attack, and others that parts are taken from."""

    own: bytes
    others: tuple[bytes, ...]

    def other(self, rng: Rng) -> bytes:
        return self.others[rng.integers(len(self.others))]


def flipped(blobs: Blobs, rng: Rng) -> bytes:
    data = np.frombuffer(blobs.own, np.uint8).copy()
    for _ in range(int(rng.integers(1, 9))):
        data[rng.integers(data.size)] ^= 1 << int(rng.integers(8))
    return data.tobytes()


def cut_or_grown(blobs: Blobs, rng: Rng) -> bytes:
    at, length = int(rng.integers(len(blobs.own))), int(rng.integers(1, 65))
    noise = rng.integers(0, 256, length, np.uint8).tobytes()
    kinds = (
        blobs.own[:at],
        blobs.own[at:],
        blobs.own[:at] + blobs.own[at + length :],
        blobs.own[:at] + noise + blobs.own[at:],
        blobs.own + noise,
        b"",
    )
    return kinds[rng.integers(len(kinds))]


def spliced(blobs: Blobs, rng: Rng) -> bytes:
    """A part of one handoff in the place of a part of another, as when buffers are mixed up."""
    other = blobs.other(rng)
    at, length = int(rng.integers(min(len(blobs.own), len(other)))), int(rng.integers(1, 2048))
    return blobs.own[:at] + other[at : at + length] + blobs.own[at + length :]


def swapped_header(blobs: Blobs, rng: Rng) -> bytes:
    """One handoff's header before another's keys and values, resealed."""
    (header, _), (_, values) = parts(blobs.other(rng)), parts(blobs.own)
    return sealed(header, values)


def other_version(blobs: Blobs, rng: Rng) -> bytes:
    """Another version, magic or header length, resealed."""
    start = bytearray(blobs.own[:HEADER_AT])
    field = int(rng.integers(3))
    noise = rng.integers(0, 256, 8, np.uint8).tobytes()
    place = ((0, 4), (4, 6), (8, 16))[field]
    start[place[0] : place[1]] = noise[: place[1] - place[0]]
    body = bytes(start) + blobs.own[HEADER_AT:-8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def other_meaning(blobs: Blobs, rng: Rng) -> bytes:
    """A field of the header with another value, resealed."""
    header, values = parts(blobs.own)
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


def noisy_header(blobs: Blobs, rng: Rng) -> bytes:
    """Bytes of the header replaced, resealed."""
    header, values = parts(blobs.own)
    noisy = bytearray(header)
    for _ in range(int(rng.integers(1, 4))):
        noisy[rng.integers(len(noisy))] = int(rng.choice(np.frombuffer(b'0123456789 ,:"[]{}-\\\x00\xff', np.uint8)))
    return sealed(bytes(noisy), values)


MUTATIONS: tuple[Callable[[Blobs, Rng], bytes], ...] = (
    flipped,
    cut_or_grown,
    spliced,
    swapped_header,
    other_version,
    other_meaning,
    noisy_header,
)


def parts(blob: bytes) -> tuple[bytes, bytes]:
    """The header, and the keys and values (with what the drafter keeps)."""
    (length,) = struct.unpack_from("<Q", blob, 8)
    start = -(-(HEADER_AT + length) // 64) * 64
    return blob[HEADER_AT : HEADER_AT + length], blob[start:-8]


def sealed(header: bytes, values: bytes) -> bytes:
    start = b"TSPC" + struct.pack("<HHQ", 1, 0, len(header)) + header
    body = start + bytes(-len(start) % 64) + values
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("fuzzed")
    return write_tiny_model(root / "own"), write_tiny_model(root / "foreign", seed=1)


def handed_off(engine: EngineCore, request: Request) -> bytes:
    """Its last prompt token pending, so that every token of the handoff is the request's own."""
    engine.add(request, prefill_only_after=0)
    while request.request_id not in engine.held_ids:
        engine.step()
    return engine.export(request.request_id).tobytes()


def answer(engine: EngineCore, blob: Blob) -> list[tuple[int, float]]:
    """Tokens and logprobs, nats."""
    engine.insert(REQUEST, blob)
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
    blobs = Blobs(handed_off(engine, REQUEST), (*others, handed_off(foreign, REQUEST)))
    undisturbed = answer(engine, np.frombuffer(blobs.own, np.uint8))
    assert len(undisturbed) == PARAMS.max_tokens
    outcomes: Counter[str] = Counter()
    for number in range(NUM_CASES // 2):
        mutate = MUTATIONS[number % len(MUTATIONS)]
        reported = outcome(engine, mutate(blobs, rng))
        assert isinstance(reported, str) or reported == undisturbed, mutate.__name__
        outcomes[reported if isinstance(reported, str) else "taken in"] += 1
        assert not engine.has_work
    assert REFUSALS <= set(outcomes) <= REFUSALS | {"drafter", "prompt", "max_tokens", "taken in"}
    assert outcomes["taken in"] < NUM_CASES // 20
    usage = engine.usage()
    assert (usage.num_running, usage.num_waiting, usage.num_free_blocks) == (0, 0, usage.num_blocks)
    assert answer(engine, np.frombuffer(blobs.own, np.uint8)) == undisturbed
