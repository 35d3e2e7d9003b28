"""Handoffs beside a GPU's steps, on a pretended device whose copies are made as late as they may be."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_app.backends.base import DeviceHandoff
from serve_app.backends.torch_backend import TorchBackend
from speculative.config import DrafterConfig
from speculative.drafting.weights import load_weights
from speculative.engine import EngineCore
from speculative.errors import EngineFault, HandoffRefused
from speculative.gpu import device_handoff, handoff_copies, memory
from speculative.gpu.device_handoff import DeviceExport, compared
from speculative.gpu.handoff_copies import ArrivingRows, HandoffCopies, Piece
from speculative.request import Request
from speculative.state.handoff import Blob, ComputedTokenState, Export, decode_state
from speculative.state.sequence import Phase
from tests.support.engines import NO_DRAFTS, Answer, assert_idle, exported, insert, run, take, tiny_engine
from tests.support.graph_scenes import PLAIN, PROMPTS, add_all, assert_same
from tests.support.pretended_cuda import DeviceTensor, PretendedCuda
from tests.support.tiny_models import write_tiny_model
from tests.support.triton_interpreter import needs_triton

pytestmark = [pytest.mark.slow, needs_triton]
ROWS, NUM_PIECES = 8, 3  # of a piece; a prompt of 46 tokens needs 6
SHORT = [replace(one, max_tokens=8) for one in PLAIN]
PROMPT = PROMPTS[5]

Load = Callable[..., EngineCore]


@pytest.fixture
def load(target: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Engines with small pieces, and caches in which three such prompts fit."""
    monkeypatch.setattr(handoff_copies, "PIECE_BYTES", ROWS * 1024)
    monkeypatch.setattr(handoff_copies, "NUM_PIECES", NUM_PIECES)

    def load(**changes: Any) -> EngineCore:
        own: dict[str, Any] = {"kv_cache_tokens": 208, "max_model_len": 96, "drafter": NO_DRAFTS} | changes
        engine = tiny_engine(target, **own)
        assert engine.cache.shape.num_values * 4 * ROWS == handoff_copies.PIECE_BYTES
        return engine

    return load


def request_of(index: int) -> Request:
    return Request(f"r{index}", tuple((own + 5 * index) % 61 + 3 for own in PROMPT), SHORT[index % 6], seed=index)


def copies_of(engine: EngineCore) -> HandoffCopies:
    assert engine.copies is not None
    return engine.copies


def blob_of(engine: EngineCore, index: int = 0) -> Blob:
    """The handoff of a prompt."""
    engine.add(request_of(index), prefill_only_after=1)
    run(engine)
    return exported(engine, f"r{index}")


def unpacked(engine: EngineCore, export: Export) -> ComputedTokenState:
    """A handoff as this engine's backend reads it, from the device if it stayed there."""
    backend = TorchBackend("", "", engine.config)
    backend._engine = engine
    sealed, values = export.finish(), export.on_device
    return backend._unpack(sealed if values is None else DeviceHandoff(values, sealed))


def assert_nothing_left(device: PretendedCuda, *engines: EngineCore) -> None:
    """Blocks and pieces are free, and the device has done all that it was given."""
    torch.cuda.synchronize()
    for engine in engines:
        assert_idle(engine)
        copies = copies_of(engine)
        assert len(copies.pieces) in (0, handoff_copies.NUM_PIECES) and not copies._leaving
        assert all(piece.used.query() for piece in copies.pieces)
    assert not any(worker.work() for worker in device.workers)


def crowd(load: Load) -> dict[str, Answer]:
    """Handoffs between two engines whose caches they fill, beside streams; one of them is aborted on its way."""
    prefill, decode = load(max_batched_tokens=20, max_num_seqs=2), load(max_num_seqs=6)
    add_all(decode, SHORT[:2], prefix="own")
    found, wanted = defaultdict[str, Answer](Answer), [request_of(index) for index in range(6)]
    for request in wanted:
        prefill.add(request, prefill_only_after=1)
    exports = dict[str, Export]()
    while prefill.has_work or decode.has_work or exports:
        take(found, prefill.step())
        for name in prefill.held_ids:
            exports[name] = prefill.export(name)
        take(found, decode.step())
        if (exports and not prefill.has_work) or len(exports) > 1:
            name = next(iter(exports))
            decode.insert(wanted[int(name[1:])], unpacked(decode, exports.pop(name)))
            take(found, decode.step())
            if name == "r1":
                assert decode.abort(name)
                del found[name]
    if (device := PretendedCuda.current) is not None:
        assert_nothing_left(device, prefill, decode)
    return found


@contextmanager
def _beside_at_once(copies: HandoffCopies) -> Iterator[Any]:
    with torch.cuda.stream(copies.stream):
        yield torch.cuda.current_stream(torch.device("cuda:0"))


def _keep_at_once(copies: HandoffCopies, piece: Piece, export: Export, values: Tensor, *, of_target: bool) -> None:
    values.reshape(-1).view(torch.uint8).copy_(piece.on_host[: values.nbytes])
    export.take(values, of_target=of_target)
    copies.pieces.append(piece)


def _proceed_unseen(rows: ArrivingRows, proceed: Any = ArrivingRows.proceed) -> bool:
    return proceed(rows) or not (rows._left or rows._filled)


def _bring_and_let_go(rows: ArrivingRows, *given: Any, bring: Any = ArrivingRows.bring) -> None:
    bring(rows, *given)
    rows._slots.clear()


FAULTS: dict[str, tuple[type, str, Any]] = {
    "": (HandoffCopies, "beside", HandoffCopies.beside),
    "copies do not wait for the steps": (HandoffCopies, "beside", _beside_at_once),
    "what was not copied yet is hashed": (HandoffCopies, "_keep", _keep_at_once),
    "where rows go is forgotten before they went": (ArrivingRows, "bring", _bring_and_let_go),
    "what did not arrive yet is read": (ArrivingRows, "proceed", _proceed_unseen),
    "a piece is filled again before it was copied": (
        HandoffCopies, "take", lambda copies, _=0: copies.pieces.popleft() if copies.pieces else copies._make_pieces()
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_handoffs_in_full_caches_beside_streams(load: Load, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = crowd(load)
    monkeypatch.setattr(*FAULTS[fault])
    with PretendedCuda(memory=2**40), pytest.raises((AssertionError, EngineFault)) if fault else nullcontext():
        assert_same(crowd(lambda **changes: load(device="cuda", **changes)), expected)


@pytest.mark.parametrize("name", ["ngram", "draft_model", "eagle3"])
def test_every_drafters_handoffs(load: Load, drafters: dict[str, DrafterConfig], name: str) -> None:
    own = {"drafter": drafters[name], "kv_cache_tokens": 1024}
    expected = crowd(lambda **changes: load(**own, **changes))
    with PretendedCuda(memory=2**40):
        assert_same(crowd(lambda **changes: load(device="cuda", **own, **changes)), expected)


# -- leaving --------------------------------------------------------------------------------------------------------


def _rows_beside(copies: HandoffCopies, cache: Any, slots: Any, rows: Any = HandoffCopies._rows) -> Any:
    shape, read = rows(copies, cache, slots)

    def read_beside(*given: Any) -> None:
        with copies.beside():
            read(*given)

    return shape, read_beside


@pytest.mark.parametrize("fault", ["", "rows are gathered beside the steps"])
def test_blocks_are_anothers_before_their_rows_are_on_the_host(
    load: Load, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_copies, "NUM_PIECES", 8)
    with PretendedCuda() as device:
        engine = load(device="cuda", kv_cache_tokens=52, max_model_len=52, prefix_caching=False)
        expected = [blob_of(engine, index) for index in range(2)]
        if fault:
            monkeypatch.setattr(HandoffCopies, "_rows", _rows_beside)
        (worker,), exports = device.workers, list[Export]()
        worker.by_hand = True
        for index in range(2):
            engine.add(request_of(index), prefill_only_after=1)
            for _ in range(3):
                engine.step()
            exports += [engine.export(name) for name in engine.held_ids]
        worker.by_hand = False
        worker.work()
        engine.step()
        exports += [engine.export(name) for name in engine.held_ids]
        same = [bool((one.finish() == own).all()) for one, own in zip(exports, expected, strict=True)]
        assert same[0] == (not fault) and same[1]


def test_a_chunk_leaves_while_the_next_is_computed_and_the_engine_waits_for_nothing(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_copies, "NUM_PIECES", 6)
    with PretendedCuda(memory=2**40) as device:
        engine = load(device="cuda", max_batched_tokens=2 * ROWS)
        blob_of(engine, 1)
        (worker,) = device.workers
        worker.by_hand = True
        device.clear()
        engine.add(request_of(0), prefill_only_after=1)
        left = list[int]()
        while not engine.held_ids:
            left.append(worker.work())  # of the chunk before, beside this one
            engine.step()
        export = engine.export("r0")
        assert left == [0, 2, 2] and len(export.left) == device.num_beside == 6, "one copy a piece"
        assert not [where for _, where in device.waits if "engine" in where or "_send" in where]
        assert worker.work() == 2, "the last chunk is all that is left"
        assert len(export.finish()) > 46 * 1024
        assert_nothing_left(device, engine)


def test_what_finds_no_piece_is_sent_later(load: Load) -> None:
    with PretendedCuda(memory=2**40) as device:
        engine = load(device="cuda")
        expected = blob_of(engine, 0)
        (worker,) = device.workers
        worker.by_hand = True
        engine.scheduler.pool.drop_prefixes()
        engine.add(request_of(0), prefill_only_after=1)
        for _ in range(4):
            engine.step()
        assert not engine.held_ids and engine.has_work, "half of it is on its way"
        assert worker.work() == NUM_PIECES
        engine.step()
        export = engine.export("r0")
        assert worker.work() == NUM_PIECES
        assert (export.finish() == expected).all()


def test_held_prompts_leave_while_others_are_computed(
    load: Load, drafters: dict[str, DrafterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff_copies, "NUM_PIECES", 8)  # each step computes rows for 12
    with PretendedCuda(memory=2**40) as device:
        own = {"drafter": drafters["draft_model"], "kv_cache_tokens": 2048, "max_batched_tokens": 96}
        engine = load(device="cuda", **own)
        blob_of(engine, 24)
        (worker,), left = device.workers, list[str]()
        worker.by_hand = True
        for index in range(24):
            engine.add(request_of(index), prefill_only_after=1)
        while engine.scheduler.has_work:
            worker.work()  # beside the step
            engine.step()
            for name in engine.held_ids:
                engine.export(name)
                left.append(name)
        assert left[:4] == ["r0", "r1", "r2", "r3"], "the pieces went to prompts that were still computed"


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_a_prompt_of_one_token_has_no_rows(load: Load, drafters: dict[str, DrafterConfig], name: str) -> None:
    request = Request("r0", PROMPTS[0], SHORT[0])
    with PretendedCuda() as device:
        prefill, decode = (load(device="cuda", drafter=drafters[name]) for _ in range(2))
        prefill.add(request, prefill_only_after=0)
        prefill.step()
        insert(decode, request, exported(prefill, "r0"))
        prefill.add(request)
        assert run(decode)["r0"].token_ids == run(prefill)["r0"].token_ids
        assert_nothing_left(device, prefill, decode)


def assert_refuses_what_is_no_number(engine: EngineCore) -> None:
    """Its cache is spoiled in the middle of a prompt, which then cannot be handed off."""
    engine.add(request_of(0), prefill_only_after=0)
    engine.step()
    engine.cache.data.fill_(torch.nan)
    run(engine)
    with pytest.raises(EngineFault, match="not finite"):
        exported(engine, "r0")


def test_what_is_no_number_is_not_handed_off(load: Load) -> None:
    with PretendedCuda(memory=2**40) as device:
        engine = load(device="cuda", max_batched_tokens=20)
        assert_refuses_what_is_no_number(engine)
        assert_nothing_left(device, engine)


# -- arriving -------------------------------------------------------------------------------------------------------


def begin_arrival(load: Load, num_steps: int = 2) -> tuple[EngineCore, Answer]:
    """An engine with some rows of a handoff in its cache (after 1 step: launched), some on their way there, and others
    not begun; and what the request gets in the end."""
    prefill, undisturbed, decode = (load(device="cuda") for _ in range(3))
    blob = blob_of(prefill)
    insert(undisturbed, request_of(0), blob)
    expected = run(undisturbed)["r0"]
    decode.add(request_of(8))
    run(decode)  # which captures graphs, and so waits for the whole device
    insert(decode, request_of(0), blob)
    assert PretendedCuda.current is not None
    decode.step()
    PretendedCuda.current.workers[-1].by_hand = True
    for _ in range(num_steps):
        decode.step()
    sequence = decode.scheduler.find("r0")
    assert sequence is not None and sequence.phase is Phase.ARRIVING and decode.usage().num_running == 1
    return decode, expected


def _cancel_alone(rows: ArrivingRows, cancel: Any = ArrivingRows.cancel) -> None:
    rows._copies.stream.late, late = [], rows._copies.stream.late
    cancel(rows)
    rows._copies.stream.late = late


@pytest.mark.parametrize("fault", ["", "steps do not wait for what is cancelled"])
def test_an_aborted_handoff_does_not_write_into_blocks_of_others(
    load: Load, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PretendedCuda():
        one_at_a_time = partial(load, kv_cache_tokens=56, max_model_len=56)
        decode, _ = begin_arrival(one_at_a_time, num_steps=1)
        if fault:
            monkeypatch.setattr(ArrivingRows, "cancel", _cancel_alone)
        decode.abort("r0")
        found = list[Answer]()
        for engine in (decode, one_at_a_time(device="cuda")):
            engine.add(request_of(9))
            found.append(Answer())
            take({"r9": found[-1]}, engine.step())
            torch.cuda.synchronize()  # the device has come to it
            run(engine, {"r9": found[-1]})
        assert (found[0].token_ids == found[1].token_ids) == (not fault)


@pytest.mark.parametrize("how", ["abort", "preempt", "invalidate", "switch"])
def test_a_handoff_that_is_cancelled_on_its_way(load: Load, target: Path, how: str) -> None:
    with PretendedCuda(memory=2**40) as device:
        decode, expected = begin_arrival(load)
        if how == "abort":
            decode.abort("r0")
        elif how == "preempt":
            decode.scheduler._preempt(decode.scheduler._arriving[0])
        elif how == "invalidate":
            decode.scheduler.invalidate_cache()
        else:
            decode.switch(
                load_weights(target, decode.config, decode.device, replaced=decode.parts.weights.networks), "2"
            )
        device.workers[-1].by_hand = False
        device.workers[-1].work()
        found = run(decode)
        assert [one.token_ids for one in found.values()] == ([] if how == "abort" else [expected.token_ids])
        assert_nothing_left(device, decode)


def test_a_handoff_whose_copy_fails_is_computed_from_its_tokens(load: Load) -> None:
    with PretendedCuda(memory=2**40) as device:
        decode, expected = begin_arrival(load)
        worker = device.workers[-1]
        future, _ = worker.given[0]
        worker.given[0] = future, lambda: (_ for _ in ()).throw(OSError("the memory is gone"))
        worker.by_hand = False
        worker.work()
        assert run(decode)["r0"].token_ids == expected.token_ids
        assert decode.take_stats().num_preemptions == 1
        assert_nothing_left(device, decode)


def test_a_receiver_that_dies_in_mid_copy_keeps_nothing(load: Load) -> None:
    with PretendedCuda(memory=2**40):
        decode, _ = begin_arrival(load)
        held = [weakref.ref(piece) for piece in copies_of(decode).pieces] + [weakref.ref(copies_of(decode))]
        del decode
        gc.collect()
        assert len(held) > 1 and not any(one() for one in held)


def test_nothing_is_begun_for_a_handoff_of_other_weights(load: Load, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", vocab_size=64, num_hidden_layers=4, seed=9)
    with PretendedCuda(memory=2**40) as device:
        prefill, decode = (load(device="cuda") for _ in range(2))
        state = decode.unpack(blob_of(prefill))
        decode.switch(load_weights(other, decode.config, decode.device, replaced=decode.parts.weights.networks), "2")
        device.clear()
        with pytest.raises(HandoffRefused, match="other settings"):
            decode.insert(request_of(0), state)
        assert not decode.has_work and device.num_beside == 0 and not copies_of(decode).pieces


def test_what_arrives_costs_the_engine_two_launches_a_piece_and_no_wait(load: Load) -> None:
    with PretendedCuda(memory=2**40) as device:
        prefill, decode = (load(device="cuda") for _ in range(2))
        state = decode.unpack(blob_of(prefill))
        device.clear()
        decode.insert(request_of(0), state)
        while not decode.step():
            pass
        assert device.num_beside == 2 * 6
        assert not any("handoff" in where or "engine" in where for _, where in device.waits)


# -- on the device alone --------------------------------------------------------------------------------------------


def staying(load: Load, **changes: Any) -> EngineCore:
    return load(device="cuda", handoffs_on_device=True, **changes)


def left_on_device(engine: EngineCore) -> Export:
    """The handoff of a prompt that stayed on the device."""
    engine.add(request_of(0), prefill_only_after=1)
    run(engine)
    export = engine.export("r0")
    assert isinstance(export, DeviceExport)
    return export


@pytest.mark.parametrize("name", ["", "draft_model", "eagle3"])
def test_what_stays_on_the_device_gives_the_same_answers(
    load: Load, drafters: dict[str, DrafterConfig], name: str
) -> None:
    own = {"drafter": drafters[name], "kv_cache_tokens": 1024} if name else {}
    expected, engines = crowd(partial(load, **own)), list[EngineCore]()

    def load_staying(**changes: Any) -> EngineCore:
        engines.append(staying(load, **own, **changes))
        return engines[-1]

    with PretendedCuda(memory=2**40) as device:  # which sees what is let go too early
        assert_same(crowd(load_staying), expected)
        assert all(copies_of(one)._made is None for one in engines), "no pinned memory was ever made"
        assert not any("copy_" in what and "handoff" in where for what, where in device.waits)


def test_what_stays_on_the_device_is_byte_for_byte_what_would_have_left_it(load: Load) -> None:
    with PretendedCuda():
        expected = blob_of(load(device="cuda"))
        engine = staying(load, max_batched_tokens=20)
        export = left_on_device(engine)
        sealed, values = export.finish(), export.on_device
        assert values is not None and len(sealed) + len(values) == len(expected) + 8
        assert (values.held.numpy() == expected[64 : 64 + len(values)]).all()
        with pytest.raises(HandoffRefused, match="its header promises"):
            engine.unpack(sealed)
        on_host = values.held.clone()
    decode, whole = load(), load()  # which compute on the host
    decode.insert(request_of(0), decode_state(sealed, decode.manifest, partial(compared, on_host)))
    insert(whole, request_of(0), expected)
    assert_same(run(decode), run(whole))


@pytest.mark.parametrize("places", [(0,), (-1,), (5, 7), (1, 1025), (3, -3)])
def test_what_was_altered_on_its_way_from_device_to_device_is_refused(load: Load, places: tuple[int, ...]) -> None:
    with PretendedCuda():
        export = left_on_device(staying(load))
        decode = staying(load)
        assert isinstance(export.on_device, DeviceTensor)
        for place in places:
            export.on_device.held.numpy()[place] ^= 128
        with pytest.raises(HandoffRefused, match="not those that were sent"):
            unpacked(decode, export)
        assert not decode.has_work


def test_what_is_no_number_does_not_stay_on_the_device(load: Load) -> None:
    with PretendedCuda():
        engine = staying(load, max_batched_tokens=20)
        assert_refuses_what_is_no_number(engine)


def test_what_the_device_has_no_room_for_leaves_through_the_host(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = crowd(load)
    with PretendedCuda(memory=2**40) as device:
        engine = staying(load)
        held = left_on_device(engine)
        held.finish()
        assert held.on_device is not None
        ((_, claimed),) = memory._claims.values()
        device.memory = device.taken + claimed + held.on_device.untyped_storage().nbytes() - 1
        engine.add(request_of(1), prefill_only_after=1)
        run(engine)
        assert engine.export("r1").on_device is None
        del held
        engine.add(request_of(2), prefill_only_after=1)
        run(engine)
        assert engine.export("r2").on_device is not None
    monkeypatch.setattr(device_handoff, "room_on_device", lambda _: None)
    with PretendedCuda():
        assert_same(crowd(partial(staying, load)), expected)
