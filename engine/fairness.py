"""Whose turn it is: weighted fair queueing between tenants.

Knows: what each tenant was given, and what it still waits for. Does not know: steps, slots, blocks, time.

Each tenant has a virtual token counter ("Fairness in Serving Large Language Models",
https://arxiv.org/abs/2401.00588): what was computed for it, a prompt token as 1 and a sampled one as 2, divided by
its weight. Tokens found in the cache are free, and so is what is computed again: that is the engine's doing. The next
prompt to be computed is one of the tenant with the lowest *rank*:

    served + min(prompt tokens it waits for / weight, burst)

A rank does not change while its prompt is computed, so that what was begun is finished first. A tenant with one
request ranks before every other that waits for more than `burst`, however long its prompt: a flood waits for it, it
does not wait for a flood. Between two floods the counters alone decide, chunk by chunk.

Whoever comes back from idling has its counter lifted to the highest that a tenant had after its turn, or to that of
the least served running one if that is more: idling earns nothing. Who comes later thus ranks later, and however
many newcomers there are, they get about a `burst` ahead of one that waits, and no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from engine.sequence import Sequence

PROMPT_COST = 1
COMPLETION_COST = 2


class Tenant:
    """One tenant's open work, and its share of the engine."""

    __slots__ = (
        "backlog",
        "blocks",
        "completion_cost",
        "kept",
        "listed",
        "name",
        "open",
        "prefills",
        "prompt_cost",
        "resumed",
        "running",
        "served",
        "waiting",
        "weight",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.served = 0.0  # the virtual token counter
        self.open = 0  # requests
        self.backlog = 0  # of their prompts' tokens, those neither planned nor found in the cache yet
        self.running = 0  # sequences that hold a slot
        self.blocks = 0  # in the block tables of these
        # What it waits for, in the order in which it is taken up; each oldest first.
        self.prefills: list[Sequence] = []  # running sequences that lack many tokens; known while a step is planned
        self.resumed: list[Sequence] = []  # preempted sequences and later choices
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()  # first choices of requests never begun
        self.listed: float | None = None  # the rank under which `FairOrder` has it
        self.kept = False  # `FairOrder` is to forget it some time
        self.weigh(1.0)

    def weigh(self, weight: float) -> None:
        self.weight = weight
        self.prompt_cost = PROMPT_COST / weight
        self.completion_cost = COMPLETION_COST / weight

    @property
    def head(self) -> Sequence | None:
        """Whom it would have computed next, decodes aside."""
        if self.prefills:
            return self.prefills[0]
        return self.resumed[0] if self.resumed else next(iter(self.waiting.values()), None)


class FairOrder:
    """The tenants with open requests, and those that wait among them by rank.

    A change costs O(log tenants): a rank that has grown since it was listed is noticed when its turn comes.
    """

    def __init__(self, burst: int) -> None:
        self.tenants: dict[str, Tenant] = {}
        self._burst = burst
        self._open = 0  # requests, of all
        self._virtual = 0.0  # the counter that newcomers are lifted to; does not fall while anything is open
        self._heap: list[tuple[float, int, int, Tenant]] = []  # (rank, arrival of its head, serial, tenant)
        self._serial = 0
        self._idle: list[tuple[float, str]] = []  # heap of (served, name): remembered while they are ahead

    def enter(self, name: str, weight: float, running: Iterable[Tenant]) -> Tenant:
        """Count one more request of this tenant. `running`: the tenants of the sequences that are being computed."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name)
        tenant.weigh(weight)
        tenant.open += 1
        self._open += 1
        if tenant.open == 1:
            self._lift(min((other.served for other in running), default=0.0))
            tenant.served = max(tenant.served, self._virtual)
        return tenant

    def leave(self, tenant: Tenant) -> None:
        """One request of it has ended."""
        tenant.open -= 1
        self._open -= 1
        if tenant.open == 0:
            self._keep(tenant)
        if self._open == 0:  # nobody waits, so nobody is behind
            self._virtual = 0.0
            for kept in (self.tenants, self._heap, self._idle):
                kept.clear()

    def rank(self, tenant: Tenant) -> float:
        """Lowest first; see the module."""
        return tenant.served + min(tenant.backlog / tenant.weight, self._burst)

    def offer(self, tenant: Tenant) -> None:
        """It has something to be computed, or its rank has fallen."""
        head = tenant.head
        rank = self.rank(tenant)
        if head is not None and (tenant.listed is None or rank < tenant.listed):
            tenant.listed = rank
            self._serial += 1
            heappush(self._heap, (rank, head.group.arrival, self._serial, tenant))
            if len(self._heap) > 2 * len(self.tenants) + 64:  # most were listed again under a lower rank
                self._heap = [entry for entry in self._heap if entry[3].listed == entry[0]]
                heapify(self._heap)

    def take(self) -> Tenant | None:
        """The tenant of the lowest rank, which is no longer listed; of equals the one whose head is older."""
        while self._heap:
            rank, _, _, tenant = heappop(self._heap)
            if tenant.listed != rank:
                continue  # listed under a lower rank since
            tenant.listed = None
            if tenant.head is None:
                continue
            if self.rank(tenant) > rank:
                self.offer(tenant)
                continue
            return tenant
        return None

    def note_turn(self, tenant: Tenant) -> None:
        """It had its turn: who comes from now on begins behind it."""
        self._lift(tenant.served)

    def _lift(self, served: float) -> None:
        """Raise what newcomers begin with, and forget the idle whom that makes like any newcomer."""
        self._virtual = max(self._virtual, served)
        while self._idle and self._idle[0][0] <= self._virtual:
            tenant = self.tenants[heappop(self._idle)[1]]
            tenant.kept = False
            if tenant.open == 0 and tenant.served > self._virtual:
                self._keep(tenant)
            elif tenant.open == 0:
                del self.tenants[tenant.name]

    def _keep(self, tenant: Tenant) -> None:
        """Remember an idle one for as long as it is ahead of newcomers."""
        if not tenant.kept:
            tenant.kept = True
            heappush(self._idle, (tenant.served, tenant.name))
