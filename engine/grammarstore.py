"""The grammars of one engine: compiled beside the steps, kept for who asks again.

Knows: which requests wait for which grammar, in which order grammars are compiled, which are kept. Does not know: how
a grammar is compiled (`grammar`) or why one is refused (`grammartrial`), the scheduler, tokens.

One thread compiles, each grammar once for all that wait for it; the tenants take turns, so a heap of slow ones makes
nobody wait for more than one of them. It is kept for its tenant alone: how long a compilation takes tells nothing of
what others ask for. A grammar that was refused is kept too, as the refusal.

    admit ──kept──► runs                          ┌─► kept, takes memory: the longest unused go
      └─new─► held ─► queue of its tenant ─► trial ─► compiled ─► `take_ready` ─► runs
                                               └─► refused ────► `take_ready` ─► ends
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from engine.sequence import SequenceGroup
from engine.tokens import Tokenizer
from engine.types import EngineBusy, EngineError, GrammarRejected, Guide

if TYPE_CHECKING:
    from engine.grammar import Grammar

log = logging.getLogger(__name__)

KEPT_MAX = 512
KEPT_BYTES_MAX = 256 << 20
OPEN_BYTES_MAX = 512 << 20
"""Of all grammars, kept or in use by requests that wait or run: at this, the next is not compiled yet."""

_PRESSED_S = 0.05

Key = tuple[str, Guide]  # tenant and what it asks for


class GrammarCompiler(Protocol):
    """Made and used in the compiling thread."""

    def compile(self, guide: Guide) -> Grammar:
        """Raises `GrammarRejected`."""
        ...

    def close(self) -> None: ...


class GrammarStore:
    """Used by the thread of the steps alone, between two steps."""

    def __init__(
        self, tokenizer: Tokenizer, *, held_max: int, compiler: Callable[[], GrammarCompiler] | None = None
    ) -> None:
        """`compiler` makes what compiles, in the compiling thread, at `prepare` or the first guided request."""
        self._ends_texts = bool(tokenizer.eos_token_ids)
        self._held_max = held_max
        self._held: dict[str, SequenceGroup] = {}
        self._desk = _Desk(compiler or (lambda: _real_compiler(tokenizer)))
        self._waiting: dict[Key, dict[str, SequenceGroup]] = {}
        self._kept: OrderedDict[Key, Grammar | GrammarRejected] = OrderedDict()
        self._kept_bytes = 0
        self._ready: list[tuple[SequenceGroup, EngineError | None]] = []
        weakref.finalize(self, self._desk.stop)

    @property
    def held(self) -> dict[str, SequenceGroup]:
        """The requests that wait for their grammar, by id. Not to be changed by the caller."""
        return self._held

    def wake_with(self, woken: Callable[[], None]) -> None:
        """Call `woken`, in another thread, whenever there is something for `take_ready`."""
        self._desk.woken = woken

    def prepare(self) -> None:
        """Make what compiles now, beside other work: it holds the interpreter for a quarter of a second."""
        if self._ends_texts:
            self._desk.begin()

    def admit(self, group: SequenceGroup) -> bool:
        """Whether it may be scheduled now; else it is held until `take_ready` gives it out.

        Raises `EngineBusy` when too many are held.
        """
        guide = group.request.sampling.guided
        if guide is None:
            return True
        key = (group.request.tenant, guide)
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        if found is not None and not isinstance(found, GrammarRejected):
            _guide(group, found)
            return True
        if len(self._held) >= self._held_max:
            raise EngineBusy("the engine's queue is full")
        if not self._ends_texts:
            found = GrammarRejected("this model has no end-of-sequence token, which a guided completion needs")
        self._held[group.request.id] = group
        if found is not None:
            self._ready.append((group, found))
        elif key in self._waiting:
            self._waiting[key][group.request.id] = group
        else:
            self._waiting[key] = {group.request.id: group}
            self._desk.ask(key)
        return False

    def take_ready(self, *, block: bool = False) -> list[tuple[SequenceGroup, EngineError | None]]:
        """The held requests that wait no more, each with the reason if it cannot be served; they are held no more.

        `block`: wait until there is one.
        """
        while True:
            for key, outcome in self._desk.take():
                self._learn(key, outcome)
            ready = [(group, error) for group, error in self._ready if self._held.pop(group.request.id, None)]
            self._ready = []
            if ready or not block or not self._held:
                return ready
            self._desk.wait()

    def drop(self, group: SequenceGroup) -> None:
        """A held request has ended: its grammar is not compiled, if nobody else waits for it."""
        if self._held.pop(group.request.id, None) is None:
            return
        guide = group.request.sampling.guided
        assert guide is not None
        key = (group.request.tenant, guide)
        if key in self._waiting:
            self._waiting[key].pop(group.request.id, None)
            if not self._waiting[key] and self._desk.recall(key):
                del self._waiting[key]

    def _learn(self, key: Key, outcome: Grammar | EngineError) -> None:
        groups = self._waiting.pop(key, {})
        for group in groups.values():
            if isinstance(outcome, EngineError):
                self._ready.append((group, outcome))
            else:
                _guide(group, outcome)
                self._ready.append((group, None))
        if isinstance(outcome, GrammarRejected) or not isinstance(outcome, EngineError):
            self._keep(key, outcome)

    def _keep(self, key: Key, found: Grammar | GrammarRejected) -> None:
        self._kept[key] = found
        self._kept_bytes += _nbytes(key, found)
        while len(self._kept) > KEPT_MAX or self._kept_bytes > KEPT_BYTES_MAX:
            self._kept_bytes -= _nbytes(*self._kept.popitem(last=False))


class _Desk:
    """The compiling thread and its queues. Knows nothing of the store, so it ends when nobody has that any more."""

    def __init__(self, compiler: Callable[[], GrammarCompiler]) -> None:
        self.woken: Callable[[], None] = lambda: None
        self._compiler = compiler
        self._changed = threading.Condition()
        self._queues: OrderedDict[str, deque[Key]] = OrderedDict()  # by tenant; whose turn it is stands first
        self._done: list[tuple[Key, Grammar | EngineError]] = []
        self._open: weakref.WeakSet[Grammar] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._stopped = False

    # The thread of the steps

    def begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()

    def ask(self, key: Key) -> None:
        with self._changed:
            self._queues.setdefault(key[0], deque()).append(key)
            self._changed.notify_all()
        self.begin()

    def recall(self, key: Key) -> bool:
        """Take it off the queue; False: it is being compiled, and will be among what is done."""
        with self._changed:
            queue = self._queues.get(key[0], deque())
            if key not in queue:
                return False
            queue.remove(key)
            if not queue:
                del self._queues[key[0]]
            return True

    def take(self) -> list[tuple[Key, Grammar | EngineError]]:
        if not self._done:
            return []
        with self._changed:
            done, self._done = self._done, []
            return done

    def wait(self) -> None:
        """Until there is something to take."""
        with self._changed:
            self._changed.wait_for(lambda: self._done)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # The compiling thread

    def _run(self) -> None:
        compiler = self._made()
        while (key := self._next()) is not None:
            compiler = compiler or self._made()
            outcome = self._compiled(compiler, key[1])
            with self._changed:
                self._done.append((key, outcome))
                self._changed.notify_all()
            del outcome
            self.woken()
        if compiler is not None:
            compiler.close()

    def _made(self) -> GrammarCompiler | None:
        try:
            return self._compiler()
        except Exception:
            log.exception("no grammar can be compiled")
            return None

    def _compiled(self, compiler: GrammarCompiler | None, guide: Guide) -> Grammar | EngineError:
        try:
            if compiler is not None:
                grammar = compiler.compile(guide)
                self._open.add(grammar)
                return grammar
        except EngineError as error:
            return error
        except Exception:
            log.exception("a grammar could not be compiled")
        return EngineError("grammars cannot be compiled now")

    def _next(self) -> Key | None:
        """The next to be compiled; None: no more."""
        with self._changed:
            while not self._stopped:
                if not self._queues:
                    self._changed.wait()
                elif sum(grammar.nbytes for grammar in self._open) > OPEN_BYTES_MAX:
                    self._changed.wait(_PRESSED_S)
                else:
                    tenant, queue = self._queues.popitem(last=False)
                    key = queue.popleft()
                    if queue:
                        self._queues[tenant] = queue
                    return key
        return None


def _guide(group: SequenceGroup, grammar: Grammar) -> None:
    for sequence in group.sequences:
        sequence.matcher = grammar.matcher()


def _nbytes(key: Key, found: Grammar | GrammarRejected) -> int:
    texts = sum(map(len, key[1].value))
    return 4 * texts + 256 + (0 if isinstance(found, GrammarRejected) else found.nbytes)


def _real_compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    from engine.grammartrial import TrialCompiler  # imports the grammar library, which few engines are asked for

    return TrialCompiler(tokenizer)
