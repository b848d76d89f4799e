"""Which tokens of which sequences the next step computes.

Knows: one rule. Every sequence's computed tokens catch up with its tokens, under one budget of tokens a
step: first each running sequence that lacks one token (a decode), then those that lack many (prefills), whether
they run or wait, in the fair order of their tenants (`fairness`); a long one is cut to what is left of the budget
(chunked). A step that brings the first token of a tenant who waits for nothing else is not filled up with the
prompts of one who waits for more than fits: so it is over the sooner. There are never more running sequences than
a budget has tokens for, so every decode is in every step.
Does not know: torch, clocks, text, why a sequence ends.

Of one tenant, running sequences go first, then those that ran before, then new ones, first come first served. A
waiting sequence comes in when there is a slot for it and blocks for all its tokens; nobody passes one that waits for
blocks. If there is no room, the tenant that holds the most for its weight gives up its youngest sequence, provided
that it will still hold no less than the one that comes in: so two never take from each other in turns, and a flood
that holds every slot stops nobody.

Preemption is by recompute: blocks are freed, tokens kept, and computed again later, at our cost. When a running
sequence finds no block, the youngest sequence of the tenant that holds the most blocks for its weight is preempted,
which may be itself, but never the oldest of all that may run: that one goes on to its end, and since no sequence is
taken in that could not fit the pool alone, work never stops.

A request at its token ceiling is paused: it keeps its blocks, but they are the first to be taken.
Choices after the first wait until the first has computed the prompt, then share its full blocks and copy
the partly filled one.

A step computes no more adapters than there are slots (`adapterslots`): a sequence whose adapter has none steps aside
for those behind it, up to `LOOKAHEAD` of them.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from engine.adapterslots import AdapterSlots
from engine.blocks import BlockPool, IntegrityError, block_key
from engine.fairness import FairOrder, Tenant
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


@dataclass(slots=True)
class _Draft:
    """A step while it is planned."""

    budget: int
    plan: StepPlan = field(default_factory=StepPlan)
    drawn: dict[str, int] = field(default_factory=dict)  # tokens to be sampled, of requests under a ceiling
    looks: int = LOOKAHEAD
    closed: bool = False  # one waits for blocks: nobody else comes in
    spared: bool = False  # the first token of one that waits for no more comes with it: no flood makes it longer


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class Scheduler:
    """Owns the sequences from `add` to their end, and the blocks they hold.

    A step is `schedule` → the caller computes → `commit`, then `finish` for every choice that ended. Between
    steps `finish` and `set_ceiling` may be called; they take effect at once. `burst`: prompt tokens with which a
    tenant may go before a flood of another (`fairness`); a context's length, so that no prompt is longer.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_waiting: int,
        burst: int | None = None,  # None: as many as the pool holds
        adapters: AdapterSlots | None = None,  # None: whatever a sequence names is there
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError("a step needs room for one sequence and one token")
        self.pool = pool
        self.stats = SchedulerStats()
        self.now_us = 0  # told by whoever has a clock, before a call; only `kv_block_us` is reckoned with it
        self._max_num_seqs = running_limit(max_num_seqs, max_num_batched_tokens)
        self._budget = max_num_batched_tokens
        self._max_waiting = max_waiting
        self._adapters = adapters
        self._fair = FairOrder(pool.num_blocks * pool.block_size if burst is None else burst)
        self._groups: dict[str, SequenceGroup] = {}
        self._running: list[Sequence] = []  # oldest first; the paused among them hold blocks and do nothing
        self._refused: dict[
            Tenant, None
        ] = {}  # those to whom no slot is owed, until somebody's number of slots changes
        self._num_new = 0  # waiting sequences of requests never begun
        self._num_resumed = 0  # those that ran before, and later choices

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return self._num_new + self._num_resumed

    @property
    def groups(self) -> dict[str, SequenceGroup]:
        """The open requests by id, oldest first. Not to be changed by the caller."""
        return self._groups

    def add(self, group: SequenceGroup) -> None:
        """Queue a request. Raises `EngineBusy` at the queue's limit, which does not count what has a free slot."""
        request = group.request
        if request.id in self._groups:
            raise ValueError(f"request {request.id} is open already")
        known = self._fair.tenants.get(request.tenant)
        free_slots = max(0, self._max_num_seqs - len(self._running))
        if queue_full(self._max_waiting, free_slots, self._num_new, len(known.waiting) if known else 0):
            raise EngineBusy("the engine's queue is full")
        computed = (sequence.group.tenant for sequence in self._running if not sequence.group.at_ceiling)
        tenant = group.tenant = self._fair.enter(request.tenant, request.weight, computed)
        self._groups[request.id] = group
        tenant.waiting[request.id] = group.sequences[0]
        group.backlog = len(request.prompt)
        tenant.backlog += group.backlog
        self._num_new += 1
        self._fair.offer(tenant)

    def schedule(self) -> StepPlan:
        """The next step; empty when nothing can run. Takes the blocks that it needs."""
        while True:
            preemptions = self.stats.preemptions
            plan = self._plan()
            if plan.scheduled or self.stats.preemptions == preemptions:
                return plan
            # All that could go on gave way to one that lacks its adapter: with theirs gone, there is a slot for it.

    def _plan(self) -> StepPlan:
        draft = _Draft(self._budget)
        if self._adapters is not None:
            going_on = (sequence for sequence in self._running if not sequence.group.at_ceiling)
            self._adapters.begin(sequence.adapter_id for sequence in going_on if sequence.adapter_id is not None)
        prefilling: list[Tenant] = []
        for sequence in tuple(self._running):
            if sequence.status is not Status.RUNNING:  # preempted a moment ago
                continue
            if len(sequence.tokens) - sequence.num_computed == 1:
                self._continue(draft, sequence)
            else:
                prefilling.append(sequence.group.tenant)
                sequence.group.tenant.prefills.append(sequence)
        for tenant in prefilling:
            self._fair.offer(tenant)
        if not draft.plan.scheduled:  # all that run may be paused, and then their slots are to be had
            self._ask_again()
        self._prefill(draft, prefilling)
        for tenant in prefilling:
            tenant.prefills.clear()
        return draft.plan

    def commit(self, plan: StepPlan, sampled: list[int | None]) -> None:
        """Book a computed step: counts, shareable blocks, sampled tokens. `sampled` has an entry per scheduled."""
        forked: dict[str, SequenceGroup] = {}
        for entry, token in zip(plan.scheduled, sampled, strict=True):
            sequence = entry.sequence
            group = sequence.group
            self._book(sequence, group, entry.start, entry.start + entry.count)
            if token is not None:
                sequence.tokens.append(token)
                group.completion += 1
            if len(group.sequences) > 1:
                forked[group.request.id] = group
        for group in forked.values():
            self._wake_or_park(group)

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """End one choice and free what it holds; with the last one the request is gone."""
        self._withdraw(sequence)
        sequence.status = Status.FINISHED
        sequence.finish = finish
        group = sequence.group
        group.num_open -= 1
        if group.num_open == 0:
            del self._groups[group.request.id]
            group.tenant.backlog -= group.backlog
            group.backlog = 0
            self._fair.offer(group.tenant)
            self._fair.leave(group.tenant)

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
        """Raise `IntegrityError` where blocks, lists and statuses disagree."""
        for _ in self.checked_slices():
            pass

    def checked_slices(self) -> Iterator[None]:
        """The same a few thousand blocks at a time, to be dropped before anything changes."""
        self._check_lists()
        self._check_sums()
        yield from self.pool.checked_slices(sequence.block_table for sequence in self._running)

    def _check_lists(self) -> None:
        unfinished = [sequence for group in self._groups.values() for sequence in group.unfinished]
        by_status = {status: [s for s in unfinished if s.status is status] for status in Status}
        tenants = self._fair.tenants.values()
        new = [sequence for tenant in tenants for sequence in tenant.waiting.values()]
        resumed = [sequence for tenant in tenants for sequence in tenant.resumed]
        if sorted(map(id, by_status[Status.RUNNING])) != sorted(map(id, self._running)):
            raise IntegrityError("the running list is not the running sequences")
        if len(self._running) > self._max_num_seqs or (len(new), len(resumed)) != (self._num_new, self._num_resumed):
            raise IntegrityError("a count of sequences is wrong")
        if sorted(map(id, by_status[Status.WAITING])) != sorted(map(id, [*new, *resumed])):
            raise IntegrityError("the waiting lists are not the waiting sequences")
        if by_status[Status.FINISHED] or any(s.block_table for s in unfinished if s.status is not Status.RUNNING):
            raise IntegrityError("a sequence that does not run holds blocks, or is finished and unfinished")

    def _check_sums(self) -> None:
        open_, backlog, running, blocks = (Counter[Tenant]() for _ in range(4))
        for group in self._groups.values():
            open_[group.tenant] += 1
            backlog[group.tenant] += group.backlog
        for sequence in self._running:
            running[sequence.group.tenant] += 1
            blocks[sequence.group.tenant] += len(sequence.block_table)
        for tenant in self._fair.tenants.values():
            sums = (open_[tenant], backlog[tenant], running[tenant], blocks[tenant])
            if sums != (tenant.open, tenant.backlog, tenant.running, tenant.blocks):
                raise IntegrityError("a tenant's sums are not those of its sequences")

    # Running sequences

    def _continue(self, draft: _Draft, sequence: Sequence) -> bool:
        """Schedule a running sequence; False when it cannot go on now."""
        if (
            sequence.adapter_id is not None
            and self._adapters is not None
            and not self._adapters.runs(sequence.adapter_id)
        ):
            return False  # it was paused, and its adapter had to leave
        count = self._count(draft, sequence, sequence.num_computed)
        if count == 0:
            return False
        missing = self._missing(sequence, count)
        if missing > 0:
            while self.pool.num_free < missing:
                victim = self._victim()
                self._preempt(draft, victim)
                if victim is sequence:
                    return False
            self._grow(sequence, missing)
        self._append(draft, sequence, count)
        return True

    def _count(self, draft: _Draft, sequence: Sequence, computed: int) -> int:
        """How many tokens after `computed` may be computed now: at the ceiling, none that a token is drawn from."""
        missing = len(sequence.tokens) - computed
        group = sequence.group
        if group.ceiling is not None:
            allowance = group.ceiling - group.completion
            if allowance <= 0:
                return 0
            if draft.drawn and draft.drawn.get(sequence.request.id, 0) >= allowance:
                missing -= 1
        return min(missing, draft.budget)

    def _append(self, draft: _Draft, sequence: Sequence, count: int) -> None:
        """Plan it, and charge its tenant: what a step computes counts at once, so that its rest is shared fairly."""
        start = sequence.num_computed
        sample = start + count == len(sequence.tokens)
        draft.plan.scheduled.append(Scheduled(sequence, start, count, sample))
        draft.budget -= count
        group = sequence.group
        tenant = group.tenant
        if start < sequence.num_prompt:
            fresh = _fresh(sequence, start, count)
            tenant.served += fresh * tenant.prompt_cost
            tenant.backlog -= fresh
            group.backlog -= fresh
        if sample:
            tenant.served += tenant.completion_cost
            draft.spared = draft.spared or (group.completion == 0 and tenant.backlog == 0)
            if group.ceiling is not None and len(group.sequences) > 1:
                draft.drawn[group.request.id] = draft.drawn.get(group.request.id, 0) + 1

    def _strike(self, draft: _Draft, sequence: Sequence) -> None:
        """Take it out of the step again, if it is in it: as if `_append` had not been."""
        scheduled = draft.plan.scheduled
        place = next((i for i, entry in enumerate(scheduled) if entry.sequence is sequence), None)
        if place is None:
            return
        entry = scheduled.pop(place)
        draft.budget += entry.count
        group = sequence.group
        tenant = group.tenant
        fresh = _fresh(sequence, entry.start, entry.count)
        tenant.served -= fresh * tenant.prompt_cost + entry.sample * tenant.completion_cost
        tenant.backlog += fresh
        group.backlog += fresh
        if entry.sample and group.request.id in draft.drawn:
            draft.drawn[group.request.id] -= 1
        mine = set(sequence.block_table)
        draft.plan.copies = [copy for copy in draft.plan.copies if copy[1] not in mine]

    def _victim(self) -> Sequence:
        """Whom to preempt when a running sequence finds no block; it may be that one."""
        paused = next((other for other in reversed(self._running) if other.group.at_ceiling), None)
        if paused is not None:
            return paused
        richest = self._running[0]
        for other in self._running[1:]:  # the oldest goes on, whatever its tenant holds
            if _held(other.group.tenant) >= _held(richest.group.tenant) or richest is self._running[0]:
                richest = other  # of one tenant's, the youngest
        return richest

    def _preempt(self, draft: _Draft, sequence: Sequence) -> None:
        self.stats.preemptions += 1
        sequence.group.preemptions += 1
        self._strike(draft, sequence)
        self._withdraw(sequence)
        if sequence.group.at_ceiling:
            sequence.status = Status.PARKED
        else:
            self._enqueue(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        """Take it off its list and free its blocks; it keeps its tokens."""
        tenant = sequence.group.tenant
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self._change_slots(tenant, -1)
            self._hold(sequence, -len(sequence.block_table))
            self.pool.release(sequence.block_table)
            sequence.block_table = []
            sequence.num_computed = 0
        elif sequence.status is Status.WAITING:
            self._unlist(sequence)

    # Prefills: those of running sequences, and waiting ones that come in

    def _prefill(self, draft: _Draft, prefilling: list[Tenant]) -> None:
        """Spend what the decodes have left, in fair order. `prefilling`: the tenants of running prefills."""
        aside: list[Tenant] = []
        while draft.budget > 0 and not draft.closed and (tenant := self._fair.take()) is not None:
            if draft.spared and _floods(tenant, draft.budget):
                aside.append(tenant)
                break
            if self._go_on(draft, tenant) or self._come_in(draft, tenant):
                self._fair.note_turn(tenant)
                self._fair.offer(tenant)
            elif tenant not in self._refused:
                aside.append(tenant)
        for tenant in aside:
            self._fair.offer(tenant)
        while draft.budget > 0 and (left := [tenant for tenant in prefilling if tenant.prefills]):
            tenant = min(left, key=self._fair.rank)
            if draft.spared and _floods(tenant, draft.budget):
                break
            self._go_on(draft, tenant)

    def _go_on(self, draft: _Draft, tenant: Tenant) -> bool:
        """Compute more of its oldest running prefill that can; False when there is none."""
        while tenant.prefills:
            sequence = tenant.prefills.pop(0)
            if sequence.status is Status.RUNNING and self._continue(draft, sequence):
                return True
        return False

    def _come_in(self, draft: _Draft, tenant: Tenant) -> bool:
        """Let the first that waits of it run, from now on; False when it has to wait."""
        for sequence in chain(tenant.resumed, tenant.waiting.values()):
            if sequence.adapter_id is None or self._adapters is None or self._adapters.admits(sequence.adapter_id):
                return self._admit(draft, tenant, sequence)
            draft.looks -= 1
            if draft.looks == 0:
                draft.closed = True
                break
        return False

    def _admit(self, draft: _Draft, tenant: Tenant, sequence: Sequence) -> bool:
        """Let a waiting sequence run if there is, or can be made, room for all its tokens."""
        while (room := self._room(draft, tenant, sequence)) is None:
            if any(not other.group.at_ceiling for other in self._running):
                return False
            self._preempt(draft, self._running[-1])  # all that run are paused: they must not stop the others
            draft.closed = False
        victims, shared = room
        source = self._copy_source(sequence, len(shared))
        computed = len(sequence.tokens) - 1 if source is not None else len(shared) * self.pool.block_size
        count = self._count(draft, sequence, computed)
        if count == 0:  # its request's last allowed token is drawn for another choice in this step
            return False
        for victim in victims:
            self._preempt(draft, victim)
        self._place(sequence, shared, computed)
        self._grow(sequence, self._missing(sequence, count))
        if source is not None:
            draft.plan.copies.append((source, sequence.block_table[len(shared)]))
        self._append(draft, sequence, count)
        return True

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The longest run of cached blocks it may reuse. Never its last token's: that one is always computed.

        Once begun, it reuses no more than it had, so that a preempted request's counts equal those of an
        undisturbed one. None at all where the logits of its prompt are wanted: a cache holds none.
        """
        if sequence.needs_prompt_logits:
            return []
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
        tenant = group.tenant
        self._unlist(sequence)
        if not group.started:
            group.started = True
            group.prompt = group.cached = sequence.high_water = computed
            group.backlog -= computed
            tenant.backlog -= computed
            self.stats.prefix_queries += sequence.num_prompt
            self.stats.prefix_hits += computed
        self.pool.share(shared)
        sequence.block_table = list(shared)
        self._hold(sequence, len(shared))
        sequence.num_computed = computed
        sequence.num_published = len(shared)
        sequence.status = Status.RUNNING
        self._change_slots(tenant, 1)
        insort(self._running, sequence, key=_order)

    def _enqueue(self, sequence: Sequence) -> None:
        tenant = sequence.group.tenant
        sequence.status = Status.WAITING
        insort(tenant.resumed, sequence, key=_order)
        self._num_resumed += 1
        self._fair.offer(tenant)

    def _unlist(self, sequence: Sequence) -> None:
        """Take a waiting sequence off its list."""
        tenant = sequence.group.tenant
        if sequence.group.started:
            tenant.resumed.remove(sequence)
            self._num_resumed -= 1
        else:
            del tenant.waiting[sequence.request.id]
            self._num_new -= 1

    def _change_slots(self, tenant: Tenant, by: int) -> None:
        tenant.running += by
        self._ask_again()

    def _ask_again(self) -> None:
        for refused in self._refused:
            self._fair.offer(refused)
        self._refused.clear()

    # Room: who gives up a slot and blocks for one that comes in

    def _room(self, draft: _Draft, tenant: Tenant, sequence: Sequence) -> tuple[list[Sequence], list[int]] | None:
        """Who must go for it to come in, mostly nobody, and the cached blocks that it reuses; None: it has no room."""
        victims: list[Sequence] = []
        if len(self._running) >= self._max_num_seqs:
            giver = self._slot_giver(tenant)
            if giver is None:
                self._refused[tenant] = None
                draft.closed = tenant.running == 0  # else it may be passed by one that is owed a slot
                return None
            victims.append(giver)
        shared = self._cached_blocks(sequence)
        needed = self._blocks_for(len(sequence.tokens)) - len(shared)
        revived = sum(self.pool.is_free(block) for block in shared)
        missing = needed + revived - self.pool.num_free
        kept = set(shared)
        missing -= sum(self._freed_by(victim, kept) for victim in victims)
        if missing > 0:
            givers = self._block_givers(tenant, needed, missing, kept, victims)
            if givers is None:
                draft.closed = True  # what it waits for, nobody takes away
                return None
            victims += givers
        return victims, shared

    def _slot_giver(self, tenant: Tenant) -> Sequence | None:
        """The youngest of whoever has the most for his weight, if without it that is no less than ours with one."""
        least = (tenant.running + 1) / tenant.weight
        richest: Sequence | None = None
        for other in self._running:
            owner = other.group.tenant
            share = (owner.running - 1) / owner.weight
            if share >= least:
                least, richest = share, other
        return richest

    def _block_givers(
        self, tenant: Tenant, needed: int, missing: int, kept: set[int], gone: list[Sequence]
    ) -> list[Sequence] | None:
        """The same of blocks, as many sequences as it takes; None when that would leave someone less than ours."""
        own = (tenant.blocks + needed) / tenant.weight
        held: dict[Tenant, int] = {}
        sequences: dict[Tenant, list[Sequence]] = {}
        for other in self._running:
            owner = other.group.tenant
            if other not in gone:
                held[owner] = held.get(owner, 0) + len(other.block_table)
                sequences.setdefault(owner, []).append(other)
        givers: list[Sequence] = []
        while missing > 0 and held:
            richest = max(held, key=lambda owner: held[owner] / owner.weight)
            victim = sequences[richest].pop()
            held[richest] -= len(victim.block_table)
            if held[richest] / richest.weight < own:
                return None
            givers.append(victim)
            missing -= self._freed_by(victim, kept)
        return givers if missing <= 0 else None

    def _freed_by(self, victim: Sequence, kept: set[int]) -> int:
        """Blocks that its preemption frees for another use."""
        return sum(self.pool.is_sole(block) and block not in kept for block in victim.block_table)

    # After the step

    def _book(self, sequence: Sequence, group: SequenceGroup, start: int, end: int) -> None:
        if start < sequence.high_water:
            group.recomputed += min(end, sequence.high_water) - start
        if group.prompt < sequence.num_prompt:
            group.prompt = max(group.prompt, min(end, sequence.num_prompt))
        if end > sequence.high_water:
            sequence.high_water = end
        sequence.num_computed = end
        size = self.pool.block_size
        if end // size > sequence.num_published:
            self._publish(sequence, end // size)

    def _publish(self, sequence: Sequence, end: int) -> None:
        """Let others find its blocks up to `end`, which are full and computed."""
        size = self.pool.block_size
        for number in range(sequence.num_published, end):
            key, parent = self._key(sequence, number), self._key(sequence, number - 1)
            tokens = sequence.tokens[number * size : (number + 1) * size]
            self.pool.publish(sequence.block_table[number], key, parent, tokens)
        sequence.num_published = end

    def _wake_or_park(self, group: SequenceGroup) -> None:
        """Let the later choices start once the prompt is computed; take off the queue what may not sample."""
        if group.prompt < len(group.request.prompt):
            return
        for sequence in group.sequences:
            if group.at_ceiling and sequence.status in (Status.UNBORN, Status.WAITING):
                if sequence.status is Status.WAITING:
                    self._unlist(sequence)
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

    def _grow(self, sequence: Sequence, blocks: int) -> None:
        sequence.block_table += self.pool.allocate(blocks)
        self._hold(sequence, blocks)

    def _hold(self, sequence: Sequence, blocks: int) -> None:
        """Its table has grown by so many blocks, or shrunk: reckon with how long the request has held its others."""
        group = sequence.group
        group.kv_block_us += group.blocks * (self.now_us - group.blocks_since_us)
        group.blocks_since_us = self.now_us
        group.blocks += blocks
        group.tenant.blocks += blocks


def running_limit(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """How many sequences may run: a step has a token for each, and one more, so that a prompt gets on too."""
    return min(max_num_seqs, max(1, max_num_batched_tokens - 1))


def queue_full(max_waiting: int, free_slots: int, waiting: int, own: int) -> bool:
    """Whether a tenant with `own` of all `waiting` requests may queue no more.

    The last eighth is for those with few, so that floods, be they of one tenant or of ten, refuse nobody else.
    """
    few = max(2, max_waiting // 64)
    return waiting >= max_waiting + free_slots - (max_waiting // 8 if own >= few else 0)


def _fresh(sequence: Sequence, start: int, count: int) -> int:
    """How many of these tokens are of the prompt and computed for the first time."""
    return max(0, min(start + count, sequence.num_prompt) - max(start, sequence.high_water))


def _floods(tenant: Tenant, budget: int) -> bool:
    """Whether what it waits for is more than that."""
    head = tenant.head
    return tenant.backlog > budget or (head is not None and head.num_uncomputed > budget)


def _held(tenant: Tenant) -> float:
    return tenant.blocks / tenant.weight
