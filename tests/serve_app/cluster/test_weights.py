"""New weights for a running service: all replicas or none, and what a replica does about it."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.rl import shards
from serve_app.backends.base import ModelInfo, PauseMode, ServedWeights, Shard
from serve_app.cluster.desired_state import CONFIGURED, DesiredState, Outcome, WeightsRef, WeightsStatus
from serve_app.cluster.weight_coordinator import WeightCoordinator
from serve_app.cluster.weight_transfer import Transfers, digest_of, fetched
from serve_app.cluster.weight_updater import WeightUpdater
from serve_app.errors import UpdateRefused
from serve_app.telemetry.metrics import BufferSink, Metrics
from speculative.errors import EngineFault
from tests.support.clock import Clock
from tests.support.fake_backend import FakeBackend, FakeConfig
from tests.support.waiting import until

NEW = WeightsRef(0, "v1", path="/models/v1")
LOADED = {"loaded": 1, "loaded_fingerprint": "f1"}


class App:
    """A coordinator and what its replicas report to it."""

    def __init__(self, *names: str) -> None:
        self.clock = Clock(100.0)
        self.coordinator = WeightCoordinator(self.clock)
        self.clock.now += 10
        self.stands = {name: WeightsStatus(CONFIGURED, "f0") for name in names}
        for name in names:
            self.report(name)

    def report(self, name: str, **changes: object) -> DesiredState:
        self.stands[name] = dataclasses.replace(self.stands[name], **changes)  # type: ignore[arg-type]
        return self.coordinator.on_heartbeat(name, self.stands[name])

    def restarted(self) -> "App":
        self.coordinator = WeightCoordinator(self.clock)
        return self

    def all_report(self, **changes: object) -> None:
        for name in self.stands:
            self.report(name, **changes)

    async def resumed(self) -> None:
        resume = asyncio.create_task(self.coordinator.resume())
        await until(lambda: self.coordinator.wanted.paused is None)
        assert self.report("p").paused is None, "a replica that is still paused does not bring the pause back"
        self.all_report(paused=None)
        assert (await resume).complete

    def update(self, ref: WeightsRef = NEW, **options: object) -> "asyncio.Task[Outcome]":
        return asyncio.create_task(self.coordinator.update(ref, **options))  # type: ignore[arg-type]


async def begun(app: App) -> WeightsRef:
    await until(lambda: app.coordinator.wanted.load is not None)
    load = app.coordinator.wanted.load
    assert load is not None
    return load


async def test_nobody_serves_new_weights_before_everybody_has_them() -> None:
    app = App("p", "d1", "d2")
    update = app.update()
    load = await begun(app)
    assert (load.version, load.path, load.number) == ("v1", "/models/v1", 1)
    for name in ("p", "d1"):
        assert app.report(name, **LOADED).serve is CONFIGURED
    assert not update.done()
    assert app.report("d2", **LOADED).serve == load
    for name in app.stands:
        assert app.report(name).serve == load
        assert not update.done(), "reported before all replicas serve them"
        app.report(name, serving=load, fingerprint="f1", loaded=None)
    outcome = await update
    assert outcome.complete
    assert {one["replica"]: (one["weight_version"], one["fingerprint"]) for one in outcome.replicas} == dict.fromkeys(
        app.stands, ("v1", "f1")
    )


async def test_one_replica_that_cannot_load_them_calls_it_off_for_all() -> None:
    app = App("p", "d1")
    update = app.update()
    await begun(app)
    app.report("p", **LOADED)
    app.report("d1", failed=1, reason="no such folder")
    with pytest.raises(UpdateRefused, match=r"Nothing changed; the weights are still 'default': d1: no such folder"):
        await update
    assert app.report("p") == DesiredState(CONFIGURED), "what was loaded is to be dropped"
    app.report("p", loaded=None)
    again = app.update(dataclasses.replace(NEW, version="v2"))
    assert (await begun(app)).number == 2, "the number of a failed update was used again"
    app.all_report(loaded=2, loaded_fingerprint="f2")
    app.all_report(serving=app.coordinator.wanted.serve)
    assert (await again).complete


@pytest.mark.parametrize(
    ("fingerprint", "reported"),
    [("other", r"different weights there \(fingerprints f1, other\)"), (None, "d2 did not load them within 30 s")],
)
async def test_replicas_that_read_other_files_or_take_too_long_are_named(
    fingerprint: str | None, reported: str
) -> None:
    app = App("d1", "d2")
    update = app.update(timeout_s=30)
    await begun(app)
    app.report("d1", **LOADED)
    if fingerprint is not None:
        app.report("d2", loaded=1, loaded_fingerprint=fingerprint)
    for _ in range(4 if fingerprint is None else 0):
        app.clock.now += 10
        app.all_report()
    with pytest.raises(UpdateRefused, match=reported):
        await update


async def test_a_dead_replica_does_not_hold_up_the_others() -> None:
    app = App("d1", "d2")
    update = app.update()
    load = await begun(app)
    app.report("d1", **LOADED)
    app.clock.now += 16  # d2 says nothing
    app.report("d1")
    await until(lambda: app.coordinator.wanted.serve == load)
    app.report("d1", serving=load, loaded=None)
    outcome = await update
    assert outcome.complete and [one["replica"] for one in outcome.replicas] == ["d1"]
    assert app.report("d2").serve == load, "it lives after all, and is to follow"


async def test_a_replica_that_starts_in_the_middle_is_waited_for() -> None:
    app = App("d1")
    update = app.update()
    load = await begun(app)
    app.stands["late"] = WeightsStatus(CONFIGURED, "f0")
    assert app.report("late").load == load
    app.report("d1", **LOADED)
    assert app.coordinator.wanted.serve is CONFIGURED
    app.report("late", **LOADED)
    app.all_report(serving=load)
    assert (await update).complete


async def test_after_the_decision_there_is_no_way_back_only_a_word_that_it_is_not_over() -> None:
    app = App("d1", "d2")
    update = app.update(timeout_s=30)
    load = await begun(app)
    app.all_report(**LOADED)
    app.report("d1", serving=load)
    await until(lambda: app.coordinator.wanted.load is None)
    for _ in range(4):
        await asyncio.sleep(0.15)
        app.clock.now += 10
        app.all_report()
    assert not (await update).complete
    assert app.report("d2").serve == load


async def test_a_replica_that_cannot_switch_is_named_as_soon_as_it_says_so() -> None:
    app = App("d1", "d2")
    update = app.update()
    load = await begun(app)
    app.all_report(**LOADED)
    app.report("d1", serving=load)
    app.report("d2", failed=1, reason="other weights than were loaded: model lm_head.panels.")
    with pytest.raises(UpdateRefused, match=r"'v1' are served .* everywhere: d2: other .* lm_head[.]panels[.] Who"):
        await update


async def test_two_updates_at_once_and_an_old_name_are_refused() -> None:
    app = App("d1")
    update = app.update()
    await begun(app)
    with pytest.raises(UpdateRefused, match="'v1' is in progress"):
        await app.coordinator.update(dataclasses.replace(NEW, version="v2"))
    update.cancel()
    with pytest.raises(UpdateRefused, match="'default' is already served"):
        await App("d1").coordinator.update(dataclasses.replace(NEW, version="default"))


async def test_a_new_desk_learns_from_the_replicas_what_the_last_one_decided() -> None:
    app = App("d1")
    decided = WeightsRef(7, "v7", path="/models/v7")
    app.report("d1", serving=decided, fingerprint="f7")
    app.stands["new"] = WeightsStatus(CONFIGURED, "f0")
    assert app.report("new").serve == decided
    app.report("d1", failed=9, loaded=12)
    update = app.update()
    assert (await begun(app)).number == 13, "above all that replicas report"
    update.cancel()


async def test_a_desk_that_has_just_begun_waits_for_what_the_last_one_decided() -> None:
    app = App("p", "d1").restarted()
    decided = WeightsRef(3, "v3", path="/models/v3")
    update, same = app.update(), app.update(dataclasses.replace(NEW, version="v3"))
    await asyncio.sleep(0.02)
    for name in app.stands:
        wanted = app.report(name, serving=decided, fingerprint="f3")
        assert wanted == DesiredState(decided), "a number was given before all replicas reported theirs"
    app.clock.now += 4
    load = await begun(app)
    assert (load.version, load.number) == ("v1", 4)
    with pytest.raises(UpdateRefused, match="The update to 'v1' is in progress"):
        await same
    app.all_report(loaded=4, loaded_fingerprint="f4")
    for name in app.stands:
        assert not update.done(), "reported before all replicas serve them"
        assert app.report(name, serving=load, fingerprint="f4", loaded=None).serve == load
    assert (await update).complete


async def test_a_replica_that_reports_late_what_is_served_calls_the_update_off() -> None:
    app = App("d1", "d2").restarted()
    app.report("d1")
    app.clock.now += 4
    update = app.update()
    assert (await begun(app)).number == 1
    decided = WeightsRef(3, "v3", path="/models/v3")
    assert app.report("d2", serving=decided, fingerprint="f3").serve == decided
    assert app.report("d1", **LOADED).serve == decided
    with pytest.raises(UpdateRefused, match=r"the weights are still 'v3': d2 says only now .*; ask again"):
        await update
    again = app.update()
    assert (await begun(app)).number == 4
    again.cancel()


async def test_pause_and_resume_wait_for_all_replicas() -> None:
    app = App("p", "d1")
    pause = asyncio.create_task(app.coordinator.pause(PauseMode.ABORT))
    await until(lambda: app.coordinator.wanted.paused is PauseMode.ABORT)
    app.report("p", paused=PauseMode.ABORT)
    await asyncio.sleep(0.25)
    assert not pause.done()
    app.report("d1", paused=PauseMode.ABORT)
    assert (await pause).complete
    assert all(one["paused"] is True for one in app.coordinator.statuses())
    await app.resumed()
    assert all(one["paused"] is False for one in app.coordinator.statuses())


async def test_a_pause_of_another_kind_is_complete_when_that_is_reached() -> None:
    app = App("d1")
    app.report("d1", paused=PauseMode.KEEP)
    pause = asyncio.create_task(app.coordinator.pause(PauseMode.WAIT))
    for reached in (PauseMode.KEEP, None):
        app.report("d1", paused=reached)
        await asyncio.sleep(0.25)
        assert not pause.done(), "where it stands still it has requests to finish"
    app.report("d1", paused=PauseMode.WAIT)
    assert (await pause).complete


@pytest.mark.parametrize("resumed", [True, False])
async def test_a_pause_is_over_when_something_else_is_wanted(resumed: bool) -> None:
    app = App("d1")
    pause = asyncio.create_task(app.coordinator.pause(PauseMode.WAIT))
    await until(lambda: app.coordinator.wanted.paused is PauseMode.WAIT)
    other = asyncio.create_task(app.coordinator.resume() if resumed else app.coordinator.pause(PauseMode.KEEP))
    assert not (await asyncio.wait_for(pause, 300)).complete
    other.cancel()


class Replica:
    def __init__(self, backend: FakeBackend | None = None) -> None:
        self.backend = backend or FakeBackend(FakeConfig(fingerprint="f0"))
        self.switched: list[ModelInfo] = []
        metrics = Metrics(BufferSink("r"), model_name="m", pool="decode")

        @asynccontextmanager
        async def folders(ref: WeightsRef) -> AsyncIterator[tuple[str, str | None]]:
            assert ref.path is not None
            yield ref.path, ref.drafter_path

        self.updater = WeightUpdater(self.backend, self.backend.info, folders, self.switched.append, metrics)

    async def come_to(self, wanted: DesiredState) -> WeightsStatus:
        self.updater.apply(wanted)
        await self.updater.wait_converged()
        return self.updater.status


async def test_a_replica_loads_beside_then_switches() -> None:
    replica = Replica()
    ref = WeightsRef(1, "v1", path="one", drafter_path="head")
    status = await replica.come_to(DesiredState(CONFIGURED, load=ref))
    assert (status.serving, status.loaded, status.loaded_fingerprint) == (CONFIGURED, 1, "one with head")
    assert replica.backend.weight_version == "default" and not replica.switched
    status = await replica.come_to(DesiredState(ref, mode=PauseMode.ABORT))
    assert (status.serving, status.fingerprint, status.loaded, status.paused) == (ref, "one with head", None, None)
    assert replica.backend.weight_version == "v1" and replica.backend.paused is None
    assert [info.fingerprint for info in replica.switched] == ["one with head"]
    assert not replica.updater.behind
    await replica.come_to(DesiredState(ref, load=WeightsRef(2, "v2", path="two")))
    assert (await replica.come_to(DesiredState(ref))).loaded is None and replica.backend.loaded is None, "called off"
    others = WeightsRef(3, "v3", path="three")
    assert (await replica.come_to(DesiredState(others))).serving == others


async def test_a_replica_says_where_the_weights_lie_that_it_serves() -> None:
    replica = Replica()
    info = replica.updater.info
    assert replica.updater.served == ServedWeights(info.folder, info.folder, info.computing.weights, "f0", "default")
    await replica.come_to(DesiredState(WeightsRef(1, "v1", path="one")))
    assert replica.updater.served == ServedWeights("one", info.folder, info.computing.weights, "one", "v1")
    replica.updater._serving = WeightsRef(2, "v2", shards=(Shard(None, "", 1),))
    assert replica.updater.served.source is None


async def test_a_replica_that_cannot_load_tries_once_and_is_replaced_only_where_the_others_could(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, tried = Replica(), []

    async def load_weights(source: str, drafter: str | None = None) -> str:
        tried.append(source)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(replica.backend, "load_weights", load_weights)
    large = WeightsRef(1, "v1", path="large")
    for _ in range(3):
        status = await replica.come_to(DesiredState(CONFIGURED, load=large))
    assert (status.failed, status.reason, tried) == (1, "CUDA out of memory", ["large"])
    assert status.serving is CONFIGURED
    replica.updater.check_health()
    await replica.come_to(DesiredState(large))
    with pytest.raises(EngineFault, match="could not be loaded here"):
        replica.updater.check_health()


class Draining(FakeBackend):
    """Has a request that ends when the test says so, and cannot switch in the middle of it."""

    def __init__(self) -> None:
        super().__init__(FakeConfig(fingerprint="f0"))
        self.drained = asyncio.Event()

    async def pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.WAIT:
            await self.drained.wait()
        await super().pause(mode)

    async def switch_weights(self, version: str) -> ModelInfo:
        assert self.paused is not None
        return await super().switch_weights(version)


async def test_a_pause_that_takes_long_holds_up_no_loading() -> None:
    backend = Draining()
    replica = Replica(backend)
    updater, ref = replica.updater, WeightsRef(1, "v1", path="one")
    assert (await replica.come_to(DesiredState(CONFIGURED, paused=PauseMode.KEEP))).paused is PauseMode.KEEP
    updater.apply(DesiredState(CONFIGURED, paused=PauseMode.WAIT))
    await asyncio.sleep(0.02)
    assert updater.status.paused is None and updater.behind
    updater.apply(DesiredState(CONFIGURED, load=ref, paused=PauseMode.WAIT))
    await until(lambda: updater.status.loaded == 1)
    updater.apply(DesiredState(ref, mode=PauseMode.ABORT, paused=PauseMode.WAIT))
    await asyncio.sleep(0.02)
    assert updater.status.serving == CONFIGURED, "two hands were on the pause"
    backend.drained.set()
    await updater.wait_converged()
    assert (updater.status.serving, updater.status.paused, backend.paused) == (ref, PauseMode.WAIT, PauseMode.WAIT)


async def test_a_pause_that_takes_long_can_be_called_off() -> None:
    replica = Replica(Draining())
    replica.updater.apply(DesiredState(CONFIGURED, paused=PauseMode.WAIT))
    await asyncio.sleep(0.02)
    ref = WeightsRef(1, "v1", path="one")
    status = await replica.come_to(DesiredState(ref, mode=PauseMode.KEEP))
    assert (status.serving, status.paused, replica.updater.behind) == (ref, None, False)


class HalfSwitching(FakeBackend):
    num_switches = 0

    async def switch_weights(self, version: str) -> ModelInfo:
        self.num_switches += 1
        raise torch.OutOfMemoryError("CUDA out of memory")


async def test_a_switch_that_fails_is_not_tried_again() -> None:
    backend = HalfSwitching(FakeConfig(fingerprint="f0"))
    replica, ref = Replica(backend), WeightsRef(1, "v1", path="one")
    for _ in range(3):
        status = await replica.come_to(DesiredState(ref))
        assert (status.serving, status.loaded, status.failed) == (CONFIGURED, None, 1)
        with pytest.raises(EngineFault, match="could not be loaded here: CUDA out of memory"):
            replica.updater.check_health()
    assert backend.num_switches == 1 and not replica.switched


def tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{index}": torch.arange(100.0) + index for index in range(5)}


async def whole(content: bytes) -> bytes:
    """What comes over a wire that damages nothing."""
    return content


class Updates:
    def __init__(self) -> None:
        self.asked: list[tuple[WeightsRef, PauseMode, float]] = []

    async def update(self, ref: WeightsRef, mode: PauseMode, timeout_s: float) -> Outcome:
        self.asked.append((ref, mode, timeout_s))
        return Outcome(True, [])


async def test_weights_over_the_wire_arrive_as_a_checkpoint(tmp_path: Path) -> None:
    updates = Updates()
    transfers = Transfers(bytes, updates.update)
    number = transfers.begin()
    parts = list(shards(tensors().items(), most_bytes=900))
    assert len(parts) == 3, "two tensors of 400 bytes fit into a shard"
    for index, part in enumerate(parts):
        transfers.put(number, index, part, digest_of(part))
    assert (await transfers.end(number, "v1", len(parts), 0, PauseMode.KEEP, 5.0)).complete
    ((ref, *how),) = updates.asked
    assert how == [PauseMode.KEEP, 5.0]
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    save_file(tensors(), base / "model.safetensors")

    info = ModelInfo("m", 1, 1, "f", str(base), ())
    async with fetched(ref, info, whole) as (folder, drafter):
        found = {name: value for file in Path(folder).glob("*.safetensors") for name, value in load_file(file).items()}
        index = json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
        assert drafter is None and (Path(folder) / "config.json").is_file()
    assert not Path(folder).exists()
    assert set(index) == set(found) == set(tensors())
    assert all(torch.equal(found[name], value) for name, value in tensors().items())


async def test_what_is_damaged_or_missing_on_the_wire_is_refused(tmp_path: Path) -> None:
    updates = Updates()
    transfers = Transfers(bytes, updates.update)
    number = transfers.begin()
    (part,) = shards(tensors().items())
    with pytest.raises(UpdateRefused, match="Shard 0 was damaged"):
        transfers.put(number, 0, part[:-1] + b"x", digest_of(part))
    with pytest.raises(UpdateRefused, match="0 of 1 shards came"):
        await transfers.end(number, "v1", 1)
    transfers.put(number, 0, part, digest_of(part))
    with pytest.raises(UpdateRefused, match="1 of 2 shards came"):
        await transfers.end(number, "v1", 2)
    assert updates.asked == []
    await transfers.end(number, "v1", 1)
    ((ref, _, _),) = updates.asked

    async def damaged(content: bytes) -> bytes:
        return content[:-1] + bytes([content[-1] ^ 1])

    with pytest.raises(UpdateRefused, match="damaged on its way"):
        async with fetched(ref, ModelInfo("m", 1, 1, "f", str(tmp_path), ()), damaged):
            pass

    twice = WeightsRef(1, "v1", shards=ref.shards * 2)
    with pytest.raises(
        UpdateRefused, match=r"00002-of-00002.* contains layer\.0, which is also in .*00001-of-00002.*; send"
    ):
        async with fetched(twice, ModelInfo("m", 1, 1, "f", str(tmp_path), ()), whole):
            pass
    transfers.begin()
    with pytest.raises(UpdateRefused, match="another one has begun"):
        transfers.put(number, 0, part, digest_of(part))


async def test_staged_weights_are_brought_when_they_are_finished() -> None:
    app = App("p")
    with pytest.raises(UpdateRefused, match="POST /update_weights before"):
        await app.coordinator.finish("")
    app.coordinator.stage(WeightsRef(0, "", path="/models/step"))
    finished = asyncio.create_task(app.coordinator.finish(""))
    load = await begun(app)
    assert (load.path, load.version) == ("/models/step", "update-1"), "a trainer that names no version gets one"
    app.report("p", **LOADED)
    app.report("p", serving=app.coordinator.wanted.serve)
    assert (await finished).complete
    with pytest.raises(UpdateRefused):
        await app.coordinator.finish("")
    app.coordinator.stage(WeightsRef(0, "update-1", path="/models/step"))
    with pytest.raises(UpdateRefused, match="give new weights a new name"):
        await app.coordinator.finish("")
    again = asyncio.create_task(app.coordinator.finish("mine"))
    assert (await begun(app)).version == "mine"
    again.cancel()


async def test_every_cache_is_emptied_once_more_than_the_last_coordinator_had_it_emptied() -> None:
    app = App("p", "d").restarted()
    reset = asyncio.create_task(app.coordinator.reset_caches())
    await asyncio.sleep(0.02)
    app.all_report(cache_resets=5)
    app.clock.now += 10
    await until(lambda: app.coordinator.wanted.cache_resets == 6)
    app.report("p", cache_resets=6)
    await asyncio.sleep(0.15)
    assert not reset.done(), "the other has done what the last coordinator wanted, and not yet this"
    app.report("d", cache_resets=6)
    assert (await reset).complete


async def test_a_replica_empties_its_cache_as_often_as_it_is_told_to() -> None:
    replica = Replica()
    for resets in (1, 1, 1, 2):
        replica.updater.apply(DesiredState(CONFIGURED, cache_resets=resets))
    await replica.updater.wait_converged()
    assert replica.backend.num_cache_resets == 2 and replica.updater.status.cache_resets == 2


async def test_a_coordinator_that_starts_later_keeps_a_pause_until_it_is_told_to_end_it() -> None:
    app = App("p", "d")
    for name in app.stands:
        app.stands[name] = dataclasses.replace(app.stands[name], paused=PauseMode.KEEP)
    app.restarted()
    assert app.report("p").paused is PauseMode.KEEP
    await app.resumed()
