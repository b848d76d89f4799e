"""The adapters of one engine: known by id, kept on the host, resident in a slot on the device.

Knows: who is known and who uses it, what is read when, and in which order the runner is told to let one adapter go
and take another. Does not know: who should have a slot (`adapterslots`), requests, tensors.

Known ⊇ kept on the host; what is in neither place is read from disk again when a request wants it, and must then be
what it was when it was loaded, by its digest. On a CPU a resident adapter and its copy on the host are one memory.
Nothing here waits for a disk: reads are begun, and taken in by `collect` between two steps.

    load → known, on the host ──wanted──► slot ──idle and another wanted──► on the host ──budget──► on disk
                                  ▲                                                                  │
                                  └────────────── read and checked again ◄───────wanted─────────────┘
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine.adaptercache import AdapterReader, HostAdapter, HostCache
from engine.adapterslots import AdapterSlots
from engine.types import AdapterInfo, AdapterRef, AdapterRejected, AdapterUnknown

log = logging.getLogger(__name__)


class AdapterRunner(Protocol):
    """What the store needs of the engine's runner."""

    def read_adapter(self, ref: AdapterRef) -> HostAdapter:
        """Read and check its files; raises `AdapterRejected`. Called in a thread, while steps are computed."""
        ...

    def place_adapter(self, adapter_id: str, adapter: HostAdapter) -> None:
        """Make it resident, between two steps. Raises `AdapterRejected` when there is no memory for it."""
        ...

    def remove_adapter(self, adapter_id: str) -> None:
        """Nothing of the next step uses it; one that is not resident is no error."""
        ...


class AdapterStore:
    """Used by the thread of the steps alone, between two steps."""

    def __init__(self, runner: AdapterRunner, *, known_max: int, slots: int, cache_bytes: int) -> None:
        self._runner = runner
        self._known_max = known_max
        self._cache = HostCache(cache_bytes)
        self._reader = AdapterReader(runner.read_adapter)
        self.slots = AdapterSlots(slots, at_hand=self._cache.__contains__)
        self._known: dict[str, AdapterRef] = {}  # with the digest of what was checked
        self._infos: dict[str, AdapterInfo] = {}  # of those that this process has read
        self._loading: dict[str, AdapterRef] = {}  # asked for, and not answered
        self._loaded: list[tuple[str, AdapterInfo | AdapterRejected]] = []
        self._users: Counter[str] = Counter()  # open requests
        self._unloading: set[str] = set()
        self._unloaded: list[str] = []
        self.reads = 0

    def __len__(self) -> int:
        """How many are known."""
        return len(self._known)

    @property
    def reading(self) -> bool:
        """Whether something is read from disk."""
        return len(self._reader) > 0

    def wake_with(self, woken: Callable[[], None]) -> None:
        """Call `woken`, in another thread, whenever there is something for `collect`."""
        self._reader.woken = woken

    # Known or not

    def load(self, ref: AdapterRef) -> AdapterInfo:
        """Read it here and now and make it known; raises `AdapterRejected`. The same load again is answered at once."""
        if ref.id not in self._infos:
            self._check_room(ref)
            self._learn(ref, self._runner.read_adapter(ref))
        return self._infos[ref.id]

    def begin_load(self, ref: AdapterRef) -> None:
        """The same without waiting: `take_loaded` has the answer once `collect` has taken it in."""
        if ref.id in self._loading:
            return
        if ref.id in self._infos:
            self._loaded.append((ref.id, self._infos[ref.id]))
            return
        try:
            self._check_room(ref)
        except AdapterRejected as error:
            self._loaded.append((ref.id, error))
            return
        self._loading[ref.id] = ref
        self._reader.begin(ref)

    def restore(self, ref: AdapterRef) -> None:
        """Make one known that was checked before, by an engine of the same kind: it is read when it is wanted."""
        if not ref.digest:
            raise ValueError("only the digest tells that its files are the same")
        self._known[ref.id] = ref
        if ref.pinned and not self.slots.pin(ref.id):
            log.warning("adapter %s cannot be pinned: there are not enough slots", ref.id)

    def take_loaded(self) -> list[tuple[str, AdapterInfo | AdapterRejected]]:
        loaded, self._loaded = self._loaded, []
        return loaded

    def unload(self, adapter_id: str) -> None:
        """Refuse it from now on; `take_unloaded` names it once its last request has ended."""
        if self._loading.pop(adapter_id, None) is not None:
            self._loaded.append((adapter_id, AdapterRejected("the adapter was unloaded before it was loaded")))
        if adapter_id not in self._known:
            self._unloaded.append(adapter_id)
            return
        self._unloading.add(adapter_id)
        self._forget_unused(adapter_id)

    def take_unloaded(self) -> list[str]:
        unloaded, self._unloaded = self._unloaded, []
        return unloaded

    # Requests

    def digest(self, adapter_id: str) -> str:
        """Of its content. Raises `AdapterUnknown` when no request may begin with it."""
        if adapter_id not in self._known or adapter_id in self._unloading:
            raise AdapterUnknown("the adapter is not loaded")
        return self._known[adapter_id].digest

    def use(self, adapter_id: str) -> None:
        """A request has begun; `release` must follow."""
        self._users[adapter_id] += 1

    def release(self, adapter_id: str) -> None:
        """A request that used it has ended."""
        self._users[adapter_id] -= 1
        if not self._users[adapter_id]:
            del self._users[adapter_id]
            self._forget_unused(adapter_id)

    # Between two steps

    def collect(self, *, block: bool = False) -> dict[str, str]:
        """Take in what has been read; `block`: wait for something, if there is something to wait for.

        Returns the adapters whose requests cannot go on, with the reason: they were to come into a slot and did not.
        """
        lost: dict[str, str] = {}
        for adapter_id, result in self._reader.take(block=block):
            self.reads += 1
            if adapter_id in self._loading:
                self._answer(self._loading.pop(adapter_id), result)
            if adapter_id not in self._known:
                continue  # unloaded meanwhile, or never taken
            if isinstance(result, HostAdapter):
                self._keep(result)
            reason = self._arrive(adapter_id, result) if adapter_id in self.slots else None
            if reason is not None:
                lost[adapter_id] = reason
        return lost

    def swap(self) -> dict[str, str]:
        """Carry out what the slots decided while a step was planned, before it is computed. Returns as `collect`."""
        lost: dict[str, str] = {}
        for adapter_id, enters in self.slots.take_swaps():
            if not enters:
                self._runner.remove_adapter(adapter_id)
            elif adapter_id not in self._cache:
                self._reader.begin(self._known[adapter_id])
            elif (reason := self._place(adapter_id, self._cache.take(adapter_id))) is not None:
                lost[adapter_id] = reason
        return lost

    def check_integrity(self) -> None:
        """Raise where the counts and the slots contradict each other."""
        self.slots.check_integrity()
        if not self._users.keys() | self._unloading <= self._known.keys():
            raise RuntimeError("an adapter is used, or waits to be unloaded, that is not known")

    def _answer(self, ref: AdapterRef, result: HostAdapter | AdapterRejected) -> None:
        try:
            if isinstance(result, AdapterRejected):
                raise result
            self._learn(ref, result)
        except AdapterRejected as error:
            self._loaded.append((ref.id, error))
        else:
            self._loaded.append((ref.id, result.info))

    def _learn(self, ref: AdapterRef, adapter: HostAdapter) -> None:
        """Make it known; raises `AdapterRejected` with nothing changed."""
        if ref.pinned and not self.slots.pin(ref.id):
            raise AdapterRejected("the adapter cannot be pinned: a slot must be left for those that are not")
        self._known[ref.id] = msgspec.structs.replace(ref, digest=adapter.info.digest)
        self._keep(adapter)

    def _keep(self, adapter: HostAdapter) -> None:
        self._infos[adapter.info.id] = adapter.info
        self._cache.put(adapter)

    def _arrive(self, adapter_id: str, result: HostAdapter | AdapterRejected) -> str | None:
        """Why it could not come into the slot that waits for it; None: it is there."""
        if self.slots.runs(adapter_id):
            return None
        if isinstance(result, HostAdapter):
            return self._place(adapter_id, result)
        log.error("adapter %s is lost: %s", adapter_id, result)
        self.slots.vacate(adapter_id)
        return str(result)

    def _place(self, adapter_id: str, adapter: HostAdapter) -> str | None:
        try:
            self._runner.place_adapter(adapter_id, adapter)
        except AdapterRejected as error:
            log.error("adapter %s does not come in: %s", adapter_id, error)
            self.slots.vacate(adapter_id)
            return str(error)
        self.slots.arrived(adapter_id)
        return None

    def _check_room(self, ref: AdapterRef) -> None:
        if ref.id not in self._known and len(self._known) + len(self._loading) >= self._known_max:
            raise AdapterRejected(f"the engine holds its limit of {self._known_max} adapters")

    def _forget_unused(self, adapter_id: str) -> None:
        if adapter_id not in self._unloading or adapter_id in self._users:
            return
        if adapter_id in self.slots:
            self._runner.remove_adapter(adapter_id)
        self.slots.vacate(adapter_id)
        self._cache.drop(adapter_id)
        self._unloading.discard(adapter_id)
        self._known.pop(adapter_id)
        self._infos.pop(adapter_id, None)
        self._unloaded.append(adapter_id)
