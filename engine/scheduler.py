"""Which tokens of which sequences the next step computes.

Knows: one rule. Every sequence's computed tokens catch up with its tokens, under one budget of tokens a
step; running sequences first, oldest first, then waiting ones, first come first served. A decode is a
sequence that lacks one token, a prefill one that lacks many; a long one is cut to the budget (chunked).
Does not know: torch, clocks, text, why a sequence ends.

Out of blocks, the youngest running sequence is preempted: its blocks are freed, its tokens kept, and it
computes them again later, at our cost. The oldest that may run can therefore always run, and since no
sequence is taken in that could not fit the pool alone, work never stops. A waiting sequence comes in when all
its tokens fit, so one just preempted never comes straight back: less is free than it held.

A request at its token ceiling is paused: it keeps its blocks, but they are the first to be taken.
Choices after the first wait until the first has computed the prompt, then share its full blocks and copy
the partly filled one.

A step computes no more adapters than there are slots (`adapterslots`): a sequence whose adapter has none steps aside
for those behind it, up to `LOOKAHEAD` of them.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import chain, islice

from engine.adapterslots import AdapterSlots
from engine.blocks import BlockPool, block_key
from engine.sequence import Sequence, SequenceGroup, Status
from engine.types import EngineBusy, Finish

LOOKAHEAD = 256
"""Waiting sequences that are looked at in a step, when those before them wait for a slot of their adapter."""


@dataclass(slots=True)
class Scheduled:
    """Compute `sequence.tokens[start : start + count]`; `sample`: and draw a token from the last position."""

    sequence: Sequence
    start: int
    count: int
    sample: bool


@dataclass(slots=True)
class StepPlan:
    """One step. `copies` are (source, destination) blocks to be copied before anything is computed."""

    scheduled: list[Scheduled] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerStats:
    """Counters that only grow."""

    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up at a request's first admission
    prefix_hits: int = 0  # of these, found


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class Scheduler:
    """Owns the sequences from `add` to their end, and the blocks they hold.

    A step is `schedule` → the caller computes → `commit`, then `finish` for every choice that ended. Between
    steps `abort` and `set_ceiling` may be called; they take effect at once.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_waiting: int,
        adapters: AdapterSlots | None = None,  # None: whatever a sequence names is there
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError("a step needs room for one sequence and one token")
        self.pool = pool
        self.stats = SchedulerStats()
        self._max_num_seqs = max_num_seqs
        self._budget = max_num_batched_tokens
        self._max_waiting = max_waiting
        self._adapters = adapters
        self._groups: dict[str, SequenceGroup] = {}
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()  # first choices of requests never admitted
        self._resumed: list[Sequence] = []  # preempted ones and later choices, oldest first; older than all `_waiting`
        self._running: list[Sequence] = []  # oldest first; the paused among them hold blocks and do nothing

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._resumed)

    @property
    def groups(self) -> dict[str, SequenceGroup]:
        """The open requests by id, oldest first. Not to be changed by the caller."""
        return self._groups

    def add(self, group: SequenceGroup) -> None:
        """Queue a request. Raises `EngineBusy` at the queue's limit, which does not count what has a free slot."""
        if group.request.id in self._groups:
            raise ValueError(f"request {group.request.id} is open already")
        if len(self._waiting) >= self._max_waiting + max(0, self._max_num_seqs - len(self._running)):
            raise EngineBusy("the engine's queue is full")
        self._groups[group.request.id] = group
        self._waiting[group.request.id] = group.sequences[0]

    def schedule(self) -> StepPlan:
        """The next step; empty when nothing can run. Takes the blocks that it needs."""
        plan = StepPlan()
        budget = self._budget
        planned: dict[str, int] = {}  # tokens to be sampled in this step, of requests under a ceiling
        if self._adapters is not None:
            going_on = (sequence for sequence in self._running if not sequence.group.at_ceiling)
            self._adapters.begin(sequence.adapter_id for sequence in going_on if sequence.adapter_id is not None)
        for sequence in list(self._running):
            if sequence.status is Status.RUNNING:  # an older one may have preempted it a moment ago
                budget -= self._continue(plan, sequence, budget, planned)
        for sequence in self._candidates():
            if budget == 0:
                break
            if not self._may_begin(sequence):
                continue
            taken = self._admit(plan, sequence, budget, planned)
            if taken == 0:
                break
            budget -= taken
        return plan

    def commit(self, plan: StepPlan, sampled: list[int | None]) -> None:
        """Book a computed step: counts, shareable blocks, sampled tokens. `sampled` has an entry per scheduled."""
        for entry, token in zip(plan.scheduled, sampled, strict=True):
            self._book(entry)
            if token is not None:
                entry.sequence.tokens.append(token)
                entry.sequence.group.completion += 1
        for entry in plan.scheduled:
            self._wake_or_park(entry.sequence.group)

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """End one choice and free what it holds; with the last one the request is gone."""
        self._withdraw(sequence)
        sequence.status = Status.FINISHED
        sequence.finish = finish
        group = sequence.group
        if not group.unfinished:
            del self._groups[group.request.id]

    def set_ceiling(self, group: SequenceGroup, tokens: int, *, final: bool) -> None:
        """Raise the ceiling (never lower it); `final`: it will not be raised again. Ignored once final."""
        if group.ceiling is None or group.ceiling_final:
            return
        group.ceiling = max(group.ceiling, tokens)
        group.ceiling_final = final
        if group.at_ceiling:
            return
        for sequence in group.sequences:
            if sequence.status is Status.PARKED:
                self._enqueue(sequence)

    def check_integrity(self) -> None:
        """Raise where blocks, lists and statuses disagree."""
        self.pool.check_integrity(sequence.block_table for sequence in self._running)
        unfinished = [sequence for group in self._groups.values() for sequence in group.unfinished]
        by_status = {status: [s for s in unfinished if s.status is status] for status in Status}
        listed = [*self._resumed, *self._waiting.values()]
        if sorted(map(id, by_status[Status.RUNNING])) != sorted(map(id, self._running)):
            raise RuntimeError("the running list is not the running sequences")
        if sorted(map(id, by_status[Status.WAITING])) != sorted(map(id, listed)):
            raise RuntimeError("the waiting lists are not the waiting sequences")
        if by_status[Status.FINISHED] or any(s.block_table for s in unfinished if s.status is not Status.RUNNING):
            raise RuntimeError("a sequence that does not run holds blocks, or is finished and unfinished")

    # Running sequences

    def _continue(self, plan: StepPlan, sequence: Sequence, budget: int, planned: dict[str, int]) -> int:
        """Schedule a running sequence; returns the tokens it takes of the budget."""
        if (
            sequence.adapter_id is not None
            and self._adapters is not None
            and not self._adapters.runs(sequence.adapter_id)
        ):
            return 0  # it was paused, and its adapter had to leave
        count = self._count(sequence, sequence.num_computed, budget, planned)
        if count == 0:
            return 0
        while self.pool.num_free < self._missing(sequence, count):
            victim = self._victim()
            self._preempt(victim)
            if victim is sequence:
                return 0
        self._grow(sequence, count)
        self._append(plan, sequence, count, planned)
        return count

    def _count(self, sequence: Sequence, computed: int, budget: int, planned: dict[str, int]) -> int:
        """How many tokens after `computed` may be computed now: at the ceiling, none that a token is drawn from."""
        allowance = sequence.group.allowance
        if allowance == 0:
            return 0
        missing = len(sequence.tokens) - computed
        if allowance is not None and planned.get(sequence.request.id, 0) >= allowance:
            missing -= 1
        return min(missing, budget)

    def _append(self, plan: StepPlan, sequence: Sequence, count: int, planned: dict[str, int]) -> None:
        sample = count == sequence.num_uncomputed
        if sample and sequence.group.ceiling is not None:
            planned[sequence.request.id] = planned.get(sequence.request.id, 0) + 1
        plan.scheduled.append(Scheduled(sequence, sequence.num_computed, count, sample))

    def _victim(self) -> Sequence:
        """Whom to preempt: the youngest paused one, else the youngest of all, which may be the one in need."""
        paused = (other for other in reversed(self._running) if other.group.at_ceiling)
        return next(paused, self._running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        self.stats.preemptions += 1
        self._withdraw(sequence)
        if sequence.group.at_ceiling:
            sequence.status = Status.PARKED
        else:
            self._enqueue(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        """Take it off its list and free its blocks; it keeps its tokens."""
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is Status.WAITING and not sequence.group.started:
            del self._waiting[sequence.request.id]
        elif sequence.status is Status.WAITING:
            self._resumed.remove(sequence)
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0

    # Waiting sequences

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        insort(self._resumed, sequence, key=_order)

    def _candidates(self) -> list[Sequence]:
        """Those that wait, in order, as far as a step looks."""
        return list(islice(chain(self._resumed, self._waiting.values()), LOOKAHEAD))

    def _may_begin(self, sequence: Sequence) -> bool:
        """Whether its adapter has a slot; asking makes it come."""
        return sequence.adapter_id is None or self._adapters is None or self._adapters.admits(sequence.adapter_id)

    def _admit(self, plan: StepPlan, sequence: Sequence, budget: int, planned: dict[str, int]) -> int:
        """Let a waiting sequence run if all its tokens find room; returns the tokens taken, 0: it waits on."""
        shared = self._cached_blocks(sequence)
        while not self._fits(sequence, shared):
            if not self._running or any(not other.group.at_ceiling for other in self._running):
                return 0
            self._preempt(self._running[-1])  # all that run are paused: they must not stop the others
        source = self._copy_source(sequence, len(shared))
        computed = len(sequence.tokens) - 1 if source is not None else len(shared) * self.pool.block_size
        count = self._count(sequence, computed, budget, planned)
        if count == 0:  # its request's last allowed token is drawn for another choice in this step
            return 0
        self._place(sequence, shared, computed)
        self._grow(sequence, count)
        if source is not None:
            plan.copies.append((source, sequence.block_table[len(shared)]))
        self._append(plan, sequence, count, planned)
        return count

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The longest run of cached blocks it may reuse. Never its last token's: that one is always computed.

        Once begun, it reuses no more than it had, so that a preempted request's counts equal those of an
        undisturbed one.
        """
        limit = len(sequence.tokens) - 1
        if sequence.group.started:
            limit = min(limit, sequence.high_water)
        size = self.pool.block_size
        found: list[int] = []
        for number in range(limit // size):
            key = self._key(sequence, number)
            parent = self._key(sequence, number - 1)
            block = self.pool.find(key, parent, sequence.tokens[number * size : (number + 1) * size])
            if block is None:
                break
            found.append(block)
        return found

    def _fits(self, sequence: Sequence, shared: list[int]) -> bool:
        needed = self._blocks_for(len(sequence.tokens)) - len(shared)
        revived = sum(self.pool.is_free(block) for block in shared)
        return len(self._running) < self._max_num_seqs and needed + revived <= self.pool.num_free

    def _copy_source(self, sequence: Sequence, num_shared: int) -> int | None:
        """The block of a sibling that holds the rest of the prompt, when only the last token need be computed."""
        rest = len(sequence.tokens) - 1 - num_shared * self.pool.block_size
        if sequence.index == 0 or sequence.num_sampled or not 0 < rest < self.pool.block_size:
            return None
        siblings = (
            other.block_table[num_shared]
            for other in sequence.group.sequences
            if other.status is Status.RUNNING and other.num_computed >= sequence.num_prompt
        )
        return next(siblings, None)

    def _place(self, sequence: Sequence, shared: list[int], computed: int) -> None:
        """Make it run, with what is reused as its first blocks."""
        group = sequence.group
        if group.started:
            self._resumed.remove(sequence)
        else:
            del self._waiting[group.request.id]
            group.started = True
            group.prompt = group.cached = sequence.high_water = computed
            self.stats.prefix_queries += sequence.num_prompt
            self.stats.prefix_hits += computed
        self.pool.share(shared)
        sequence.block_table = list(shared)
        sequence.num_computed = computed
        sequence.num_published = len(shared)
        sequence.status = Status.RUNNING
        insort(self._running, sequence, key=_order)

    # After the step

    def _book(self, entry: Scheduled) -> None:
        sequence, end = entry.sequence, entry.start + entry.count
        group = sequence.group
        group.recomputed += max(0, min(end, sequence.high_water) - entry.start)
        group.prompt = max(group.prompt, min(end, sequence.num_prompt))
        sequence.high_water = max(sequence.high_water, end)
        sequence.num_computed = end
        size = self.pool.block_size
        for number in range(sequence.num_published, end // size):
            key, parent = self._key(sequence, number), self._key(sequence, number - 1)
            tokens = sequence.tokens[number * size : (number + 1) * size]
            self.pool.publish(sequence.block_table[number], key, parent, tokens)
        sequence.num_published = end // size

    def _wake_or_park(self, group: SequenceGroup) -> None:
        """Let the later choices start once the prompt is computed; take off the queue what may not sample."""
        if group.prompt < len(group.request.prompt):
            return
        for sequence in group.sequences:
            if group.at_ceiling and sequence.status in (Status.UNBORN, Status.WAITING):
                if sequence.status is Status.WAITING:
                    self._resumed.remove(sequence)
                sequence.status = Status.PARKED
            elif sequence.status is Status.UNBORN:
                self._enqueue(sequence)

    # Blocks

    def _key(self, sequence: Sequence, number: int) -> bytes:
        """Cache key of its block `number`; of -1 the root. Computed once."""
        size, keys = self.pool.block_size, sequence.block_keys
        while len(keys) <= number:
            parent = keys[-1] if keys else sequence.group.cache_root
            keys.append(block_key(parent, sequence.tokens[len(keys) * size : (len(keys) + 1) * size]))
        return keys[number] if number >= 0 else sequence.group.cache_root

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _missing(self, sequence: Sequence, count: int) -> int:
        """Blocks it lacks to compute `count` more tokens."""
        return self._blocks_for(sequence.num_computed + count) - len(sequence.block_table)

    def _grow(self, sequence: Sequence, count: int) -> None:
        sequence.block_table += self.pool.allocate(self._missing(sequence, count))
