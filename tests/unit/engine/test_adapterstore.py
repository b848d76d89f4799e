"""Adapters known, on the host, in a slot: what is read when, and what becomes of requests when a disk fails them.

The runner is the scripted one: it fails the test when a sequence is computed whose adapter is not resident.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.adaptercache import HostAdapter, HostCache
from engine.core import EngineCore
from engine.types import (
    AdapterInfo,
    AdapterRef,
    AdapterRejected,
    AdapterUnknown,
    EngineConfig,
    Finish,
    Request,
    SamplingParams,
    TokenCounts,
    Update,
)
from tests.fixtures.scripted import FakeTokenizer, ScriptedRunner

PROMPT = list(b"a prompt of some tokens")


class Disk(ScriptedRunner):
    """A runner whose reads can be held back, and whose device can be full."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.free = threading.Event()
        self.free.set()
        self.read: list[str] = []
        self.full = False

    def read_adapter(self, ref: AdapterRef) -> HostAdapter:
        assert self.free.wait(20), "nobody lets it go on"
        self.read.append(ref.id)
        return super().read_adapter(ref)

    def place_adapter(self, adapter_id: str, adapter: HostAdapter) -> None:
        if self.full:
            raise AdapterRejected("there is no memory left for the adapter")
        super().place_adapter(adapter_id, adapter)


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.free.set()  # no thread outlives its test


def make(disk: Disk, **config: int) -> EngineCore:
    sizes = {"adapter_slots": 2, "adapter_cache_bytes": 0} | config
    return EngineCore(disk, FakeTokenizer(), EngineConfig(model="scripted", **sizes))


def write(folder: Path, content: bytes = b"", *, pinned: bool = False) -> AdapterRef:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content or folder.name.encode() * 10)
    return AdapterRef(id=folder.name, name="pirate", path=str(folder), pinned=pinned)


def load(core: EngineCore, folder: Path, names: str) -> dict[str, AdapterRef]:
    refs = {name: write(folder / name) for name in names}
    for ref in refs.values():
        core.load_adapter(ref)
    return refs


def ask(id_: str, adapter: AdapterRef | None = None, max_tokens: int = 4, **fields: Any) -> Request:
    return Request(id=id_, prompt=PROMPT, sampling=SamplingParams(max_tokens=max_tokens), adapter=adapter, **fields)


def drain(core: EngineCore, *, wait: bool = True) -> dict[str, list[Update]]:
    said: dict[str, list[Update]] = {}
    while (output := core.step()) is not None or (wait and core.wait_for_adapter()):
        core.check_integrity()
        for update in output.updates if output else ():
            said.setdefault(update.request_id, []).append(update)
    return said


def ends(said: dict[str, list[Update]]) -> dict[str, Finish | None]:
    return {id_: updates[-1].finish for id_, updates in said.items()}


# ---- reading never stops a step ----


def test_a_load_is_answered_while_others_run(disk: Disk, tmp_path: Path) -> None:
    core = make(disk)
    disk.free.clear()
    core.add(ask("r", max_tokens=6))
    core.adapters.begin_load(write(tmp_path / "a"))
    core.adapters.begin_load(write(tmp_path / "a"))  # asked twice, answered once
    assert ends(drain(core, wait=False)) == {"r": Finish.LENGTH}
    assert core.adapters.take_loaded() == []
    with pytest.raises(AdapterUnknown):
        core.add(ask("early", write(tmp_path / "a")))
    disk.free.set()
    assert core.wait_for_adapter()
    [(id_, info)] = core.adapters.take_loaded()
    assert isinstance(info, AdapterInfo)
    assert (id_, info.id, len(info.digest)) == ("a", "a", 64)
    assert not core.wait_for_adapter()
    core.adapters.begin_load(write(tmp_path / "a"))
    assert core.adapters.take_loaded() == [("a", info)]
    assert disk.read == ["a"]


def test_whoever_waits_is_woken(disk: Disk, tmp_path: Path) -> None:
    core = make(disk)
    woken = threading.Event()
    core.adapters.wake_with(woken.set)
    core.adapters.begin_load(write(tmp_path / "a"))
    assert woken.wait(20)
    assert core.step() is None
    assert [id_ for id_, _ in core.adapters.take_loaded()] == ["a"]


def test_a_load_that_fails_is_answered_with_the_reason(disk: Disk, tmp_path: Path) -> None:
    core = make(disk, max_adapters=1)
    core.adapters.begin_load(AdapterRef(id="x", name="x", path=str(tmp_path / "nowhere")))
    core.wait_for_adapter()
    [(_, missing)] = core.adapters.take_loaded()
    assert isinstance(missing, AdapterRejected)
    load(core, tmp_path, "a")
    core.adapters.begin_load(write(tmp_path / "b"))
    [(_, many)] = core.adapters.take_loaded()
    assert "limit of 1" in str(many)
    core.unload_adapter("a")
    core.adapters.begin_load(write(tmp_path / "b"))
    core.wait_for_adapter()
    [(_, found)] = core.adapters.take_loaded()
    assert isinstance(found, AdapterInfo)


def test_a_reader_that_breaks_rejects_the_adapter_and_nothing_else(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(disk)
    for error, words in ((KeyError("a fault of ours"), "could not be read"), (MemoryError(), "no memory")):
        with monkeypatch.context() as patch:
            patch.setattr(ScriptedRunner, "read_adapter", _raise(error))
            core.adapters.begin_load(write(tmp_path / "a"))
            core.wait_for_adapter()
        [(_, answer)] = core.adapters.take_loaded()
        assert isinstance(answer, AdapterRejected)
        assert words in str(answer)


def _raise(error: Exception) -> Any:
    def read(self: Disk, ref: AdapterRef) -> HostAdapter:
        raise error

    return read


def test_a_request_waits_for_its_adapter_while_others_run(disk: Disk, tmp_path: Path) -> None:
    core = make(disk)
    refs = load(core, tmp_path, "a")
    disk.free.clear()
    core.add(ask("cold", refs["a"]))
    core.add(ask("base"))
    assert ends(drain(core, wait=False)) == {"base": Finish.LENGTH}
    disk.free.set()
    assert ends(drain(core)) == {"cold": Finish.LENGTH}
    assert disk.read == ["a", "a"]
    assert core.adapters.slots.resident == 1


def test_a_request_that_goes_while_its_adapter_is_read_leaves_nothing(disk: Disk, tmp_path: Path) -> None:
    core = make(disk)
    refs = load(core, tmp_path, "ab")
    disk.free.clear()
    for name in "ab":
        core.add(ask(name, refs[name]))
    core.step()
    core.abort("a")
    core.abort("b")
    core.unload_adapter("b")
    assert core.take_unloaded() == ["b"]
    assert ends(drain(core, wait=False)) == {"a": Finish.ABORT, "b": Finish.ABORT}
    disk.free.set()
    while core.wait_for_adapter():
        pass
    assert set(disk.resident) == {"a"}
    core.add(ask("again", refs["a"]))
    assert ends(drain(core, wait=False)) == {"again": Finish.LENGTH}
    assert sorted(disk.read) == ["a", "a", "b", "b"]


# ---- what is kept where ----


def test_the_host_keeps_what_the_budget_is_for(disk: Disk, tmp_path: Path) -> None:
    core = make(disk, adapter_slots=1, adapter_cache_bytes=20)  # two adapters of ten bytes
    refs = load(core, tmp_path, "abc")
    assert disk.read == ["a", "b", "c"]
    for name in "cba":
        core.add(ask(name, refs[name]))
        drain(core)
    assert disk.read == ["a", "b", "c", "a"]
    core.add(ask("b", refs["b"]))
    assert core.step() is not None  # at hand: it runs in the step that it comes in
    assert disk.read == ["a", "b", "c", "a"]
    drain(core)
    stats = core.adapters.slots
    assert (stats.loads, stats.evictions, stats.resident, core.adapters.reads) == (4, 3, 1, 1)


def test_the_cache_forgets_the_least_recently_used() -> None:
    cache = HostCache(100)
    for name in "abcd":
        cache.put(_sized(name, 25))
    cache.take("a")
    cache.put(_sized("e", 40))
    assert [name for name in "abcde" if name in cache] == ["a", "d", "e"]
    assert (len(cache), cache.bytes_used) == (3, 90)
    cache.put(_sized("huge", 101))
    assert "huge" not in cache
    assert len(cache) == 3
    cache.put(_sized("a", 50))  # once more, in another size
    assert (sorted(name for name in "ade" if name in cache), cache.bytes_used) == (["a", "e"], 90)
    cache.drop("a")
    cache.drop("a")
    assert cache.bytes_used == 40
    with pytest.raises(KeyError):
        cache.take("a")


def _sized(name: str, nbytes: int) -> HostAdapter:
    return HostAdapter(AdapterInfo(id=name, digest=name, rank=1, targets=(), nbytes=1), None, nbytes)


def test_an_adapter_is_known_unread_when_it_was_checked_before(disk: Disk, tmp_path: Path) -> None:
    ref = write(tmp_path / "a")
    digest = make(disk).load_adapter(ref).digest
    core = make(disk)
    with pytest.raises(ValueError, match="digest"):
        core.adapters.restore(ref)
    restored = AdapterRef(id="a", name="n", path=ref.path, digest=digest)
    core.adapters.restore(restored)
    assert disk.read == ["a"]
    core.add(ask("r", restored))
    assert ends(drain(core)) == {"r": Finish.LENGTH}
    assert disk.read == ["a", "a"]
    assert core.load_adapter(restored).digest == digest


# ---- what a disk can do to a request ----


def test_an_adapter_that_is_gone_or_another_ends_its_requests_and_no_other(disk: Disk, tmp_path: Path) -> None:
    core = make(disk)
    refs = load(core, tmp_path, "abc")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    write(tmp_path / "b", b"other weights")
    for name in "abcab":
        core.add(ask(f"{name} {len(core.scheduler.groups)}", refs[name], n=2))
    core.add(ask("base"))
    said = drain(core)
    finished = {Finish.LENGTH: {"c 2", "base"}, Finish.ERROR: {"a 0", "b 1", "a 3", "b 4"}}
    assert {finish: {id_ for id_, end in ends(said).items() if end is finish} for finish in finished} == finished
    for id_ in finished[Finish.ERROR]:
        [only] = said[id_]
        assert only.counts == TokenCounts()
        assert only.adapter_lost
        assert only.error == ("the adapter has no weights" if id_[0] == "a" else "the adapter's content has changed")
    assert (len(core.adapters), core.adapters.slots.resident) == (3, 1)
    write(tmp_path / "a")  # it is there again
    core.add(ask("later", refs["a"]))
    assert ends(drain(core)) == {"later": Finish.LENGTH}


def test_a_paused_request_whose_adapter_is_lost_ends_with_what_it_had(disk: Disk, tmp_path: Path) -> None:
    core = make(disk, adapter_slots=1)
    refs = load(core, tmp_path, "ab")
    core.add(ask("paused", refs["a"], token_ceiling=2))
    assert drain(core)["paused"][-1].paused
    core.add(ask("other", refs["b"]))
    assert ends(drain(core)) == {"other": Finish.LENGTH}
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    core.set_ceiling("paused", 9, final=False)
    [last] = drain(core)["paused"]
    assert (last.finish, last.counts.completion, last.error) == (Finish.ERROR, 2, "the adapter has no weights")
    assert core.scheduler.pool.num_used == 0


def test_a_paused_request_goes_on_where_it_was_when_its_adapter_is_back(disk: Disk, tmp_path: Path) -> None:
    core = make(disk, adapter_slots=1)
    refs = load(core, tmp_path, "ab")
    core.add(ask("r", refs["a"], token_ceiling=2))
    first = drain(core)["r"]
    core.add(ask("other", refs["b"], max_tokens=30))
    core.step()
    core.set_ceiling("r", 4, final=False)
    said = drain(core)
    assert ends(said) == {"other": Finish.LENGTH, "r": Finish.LENGTH}
    last = said["r"][-1].counts
    assert (first[-1].counts.completion, last.completion, last.recomputed) == (2, 4, 0)


@pytest.mark.parametrize("cache_bytes", [0, 1000])
def test_a_device_without_memory_ends_the_requests_of_the_adapter_that_found_none(
    disk: Disk, tmp_path: Path, cache_bytes: int
) -> None:
    core = make(disk, adapter_cache_bytes=cache_bytes)
    refs = load(core, tmp_path, "ab")
    core.add(ask("a", refs["a"], max_tokens=9))
    for _ in range(2):
        core.step() or core.wait_for_adapter()
    disk.full = True
    core.add(ask("b", refs["b"]))
    said = drain(core)
    assert ends(said) == {"a": Finish.LENGTH, "b": Finish.ERROR}
    assert said["b"][-1].error == "there is no memory left for the adapter"
    disk.full = False
    core.add(ask("b", refs["b"]))
    assert ends(drain(core)) == {"b": Finish.LENGTH}


# ---- pinned ----


def test_a_pinned_adapter_is_there_before_it_is_asked_for_and_stays(disk: Disk, tmp_path: Path) -> None:
    core = make(disk)
    pinned = write(tmp_path / "p", pinned=True)
    core.load_adapter(pinned)
    with pytest.raises(AdapterRejected, match="pinned"):
        core.load_adapter(write(tmp_path / "q", pinned=True))
    with pytest.raises(AdapterUnknown):
        core.add(ask("q", write(tmp_path / "q")))
    refs = load(core, tmp_path, "abc")
    for name in "abcab":
        core.add(ask(name, refs[name]))
        drain(core)
    assert "p" in disk.resident
    assert "p" not in disk.removed
    assert disk.read.count("p") == 2
    core.add(ask("p", pinned))
    assert ends(drain(core, wait=False)) == {"p": Finish.LENGTH}
    core.unload_adapter("p")
    assert "p" not in disk.resident
    core.load_adapter(write(tmp_path / "q", pinned=True))


# ---- any order of things ----


@pytest.mark.parametrize(("slots", "cache_bytes"), [(1, 0), (2, 30), (4, 10_000)])
def test_a_random_day_leaves_nothing_behind(disk: Disk, tmp_path: Path, slots: int, cache_bytes: int) -> None:
    """Loads, unloads, replacements, aborts, ceilings and broken files, and every request ends in one way."""
    draw = random.Random(slots)
    core = make(disk, adapter_slots=slots, adapter_cache_bytes=cache_bytes, max_num_seqs=6, max_num_batched_tokens=32)
    known: dict[str, AdapterRef] = {}
    open_: set[str] = set()
    ended: dict[str, Finish | None] = {}
    loads = 0

    def event(number: int) -> None:
        nonlocal loads
        match draw.randrange(8):
            case 0 if len(known) < 8:
                loads += 1
                core.adapters.begin_load(write(tmp_path / f"load {loads}"))
            case 1 if known and draw.random() < 0.3:
                core.unload_adapter(known.pop(draw.choice(list(known))).id)
            case 2 if known and draw.random() < 0.2:
                (tmp_path / draw.choice(list(known)) / "adapter_model.safetensors").write_bytes(b"broken")
            case 3 if open_:
                core.abort(draw.choice(sorted(open_)))
            case _ if len(open_) < 20:
                adapter = draw.choice([None, *known.values()])
                core.add(ask(f"r{number}", adapter, max_tokens=draw.randrange(1, 9)))
                open_.add(f"r{number}")

    def step() -> None:
        output = core.step()
        core.check_integrity()
        assert len(disk.resident) <= slots
        for id_, answer in core.adapters.take_loaded():
            assert isinstance(answer, AdapterInfo)
            known[id_] = AdapterRef(id=id_, name=id_, path=str(tmp_path / id_), digest=answer.digest)
        for update in output.updates if output else ():
            assert update.request_id in open_
            if update.finished:
                ended[update.request_id] = update.finish
                open_.remove(update.request_id)
        if output is None:
            core.wait_for_adapter()

    for number in range(1500):
        event(number)
        step()
    for _ in range(2000):
        if not open_:
            break
        step()
    assert not open_
    assert set(ended.values()) >= {Finish.LENGTH, Finish.ABORT} | ({Finish.ERROR} if slots < 4 else set())
    assert core.adapters.slots.evictions > (50 if slots < 4 else 0)
    for name in list(known):
        core.unload_adapter(name)
    while core.wait_for_adapter():
        pass
    assert (len(core.adapters), core.adapters.slots.resident, disk.resident) == (0, 0, {})
    assert core.scheduler.pool.num_used == 0
    assert len(core.take_unloaded()) == loads


def test_a_step_does_not_look_at_who_is_known(disk: Disk, tmp_path: Path) -> None:
    core = make(disk, adapter_cache_bytes=10_000)
    refs = load(core, tmp_path, "abc")

    class Unlooked(dict[str, AdapterRef]):
        def __iter__(self) -> Any:
            raise AssertionError("a step went through all the adapters")

        keys = values = items = __iter__

    core.adapters._known = Unlooked(core.adapters._known)
    for name in "abcabc":
        core.add(ask(f"{name} {len(core.scheduler.groups)}", refs[name]))
    while core.step() is not None:
        pass
    assert not core.scheduler.groups
