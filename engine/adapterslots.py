"""Which adapters have a place on the device, and so whose sequences may be computed in the next step.

Knows: a fixed number of slots, who is in them, who is wanted, who is pinned. Pure: no torch, no clock, no I/O. Does
not know: what an adapter is or where its numbers lie; what it decides is carried out by `engine.adapterstore`.

The scheduler asks in its own fair order. One whose adapter has no slot is noted and steps aside for those behind it;
an adapter comes in when a slot is free or held by one that nobody computes with, the least recently used first. Who
computes keeps his slot, so that an adapter is never changed under a running sequence; to let nobody starve, an
adapter that was wanted for `CLOSE_AFTER_STEPS` closes the slot with the fewest running sequences: they finish, others
that want the same adapter must wait behind it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

CLOSE_AFTER_STEPS = 8
"""Steps in which those behind may still join a resident adapter: a batch of many on few adapters is worth a short
wait, and no more than that."""


class AdapterSlots:
    """The slots. A step: `begin`, then `runs` and `admits` in the scheduler's order, then `take_swaps`."""

    def __init__(self, slots: int, *, at_hand: Callable[[str], bool] = lambda adapter_id: True) -> None:
        """`at_hand`: whether an adapter can come in at once; otherwise its slot waits for `arrived` or `vacate`."""
        if slots < 1:
            raise ValueError("there must be a slot")
        self.slots = slots
        self.loads = 0
        self.evictions = 0
        self._at_hand = at_hand
        self._held: OrderedDict[str, None] = OrderedDict()  # those with a slot, least recently used first
        self._coming: set[str] = set()  # of these, those that are not there yet
        self._pinned: set[str] = set()
        self._absent: dict[str, None] = {}  # pinned and in no slot
        self._swaps: list[tuple[str, bool]] = []
        self._wanted: dict[str, tuple[int, int]] = {}  # in no slot → the steps it was first and last asked for in
        self._closed: list[str] = []  # as many of them as there are adapters that have waited long
        # Of the step that is planned:
        self._step = 0
        self._running: Counter[str] = Counter()  # sequences that are to go on, by adapter
        self._used: set[str] = set()
        self._asked: set[str] = set()  # those that found no slot
        self._overdue = 0  # of these, those that have waited long
        self._overdue_at = 0  # the last step that had one

    def __contains__(self, adapter_id: str) -> bool:
        """Whether it has a slot, though it may still be on its way there."""
        return adapter_id in self._held

    @property
    def resident(self) -> int:
        """How many are there."""
        return len(self._held) - len(self._coming)

    # What the scheduler asks

    def begin(self, running: Iterable[str]) -> None:
        """Plan a step; `running` names the adapter of each sequence that is to go on, first come first."""
        self._step += 1
        self._asked.clear()
        self._overdue = 0
        if self._step - self._overdue_at > CLOSE_AFTER_STEPS:
            self._closed.clear()
        self._running = Counter(running)
        self._used = {adapter_id for adapter_id in self._running if self.runs(adapter_id)}
        for adapter_id in self._used:
            self._held.move_to_end(adapter_id)
        for adapter_id in [*self._absent, *self._running]:
            if adapter_id not in self._held and self._place(adapter_id) and self.runs(adapter_id):
                self._used.add(adapter_id)

    def runs(self, adapter_id: str) -> bool:
        """Whether a running sequence may go on: not if it was paused and its adapter had to leave meanwhile."""
        return adapter_id in self._held and adapter_id not in self._coming

    def admits(self, adapter_id: str) -> bool:
        """Whether a waiting sequence may begin now. Asking is what makes its adapter come."""
        if adapter_id not in self._held and not self._place(adapter_id):
            return False
        if adapter_id in self._coming or self._is_closed(adapter_id):
            return False
        self._used.add(adapter_id)
        self._held.move_to_end(adapter_id)
        return True

    # What the store does

    def take_swaps(self) -> list[tuple[str, bool]]:
        """What was decided since the last call, in order: (adapter, True: it gets a slot, False: it loses its slot)."""
        swaps, self._swaps = self._swaps, []
        return swaps

    def arrived(self, adapter_id: str) -> None:
        """One that was not at hand is there now."""
        if adapter_id in self._coming:
            self._coming.remove(adapter_id)
            self.loads += 1

    def vacate(self, adapter_id: str) -> None:
        """It is gone, or could not come; the caller has seen to it that nothing uses it."""
        self._held.pop(adapter_id, None)
        self._coming.discard(adapter_id)
        self._used.discard(adapter_id)
        self._pinned.discard(adapter_id)
        self._absent.pop(adapter_id, None)
        self._wanted.pop(adapter_id, None)
        self._reopen(adapter_id)

    def pin(self, adapter_id: str) -> bool:
        """Bring it in and never let it go; False when no slot would be left for all the others."""
        if adapter_id not in self._pinned and len(self._pinned) >= self.slots - 1:
            return False
        self._pinned.add(adapter_id)
        self._reopen(adapter_id)
        if adapter_id not in self._held:
            self._absent[adapter_id] = None
        return True

    def check_integrity(self) -> None:
        """Raise where the slots contradict themselves."""
        if len(self._held) > self.slots or not self._used <= self._held.keys() - self._coming:
            raise RuntimeError("more adapters have a slot than there are slots, or one is used that is not there")
        if self._absent.keys() & self._held.keys() or not self._absent.keys() <= self._pinned:
            raise RuntimeError("a pinned adapter is both in a slot and in none")
        if not self._coming | set(self._closed) <= self._held.keys() or self._wanted.keys() & self._held.keys():
            raise RuntimeError("an adapter is on its way to no slot, closes none, or wants the one it has")

    # How it is decided

    def _place(self, adapter_id: str) -> bool:
        """Give it a slot; if there is none for it, note that it wants one."""
        if adapter_id in self._asked:
            return False
        # Who is used stays so until the next step begins: when one could not be placed, nobody can.
        if len(self._held) >= self.slots and (self._asked or not self._evict()):
            self._want(adapter_id)
            return False
        self._held[adapter_id] = None
        if self._at_hand(adapter_id):
            self.loads += 1
        else:
            self._coming.add(adapter_id)
        self._absent.pop(adapter_id, None)
        self._wanted.pop(adapter_id, None)
        self._swaps.append((adapter_id, True))
        return True

    def _evict(self) -> bool:
        kept = self._used | self._pinned | self._coming
        victim = next((other for other in self._held if other not in kept), None)
        if victim is None:
            return False
        del self._held[victim]
        self._reopen(victim)
        self._swaps.append((victim, False))
        self.evictions += 1
        return True

    def _want(self, adapter_id: str) -> None:
        self._asked.add(adapter_id)
        since, last = self._wanted.get(adapter_id, (self._step, self._step))
        if self._step - last > CLOSE_AFTER_STEPS:  # whoever wanted it then has gone away
            since = self._step
        self._wanted[adapter_id] = (since, self._step)
        if self._step - since >= CLOSE_AFTER_STEPS:
            self._overdue += 1
            self._overdue_at = self._step

    def _is_closed(self, adapter_id: str) -> bool:
        """Whether those before it who have waited long need its slot more than one more sequence of it does."""
        while len(self._closed) < self._overdue:
            open_ = [other for other in self._held if other not in self._pinned and other not in self._closed]
            if not open_:
                break
            self._closed.append(min(open_, key=lambda other: self._running[other]))
        return adapter_id in self._closed[: self._overdue]

    def _reopen(self, adapter_id: str) -> None:
        if adapter_id in self._closed:
            self._closed.remove(adapter_id)
