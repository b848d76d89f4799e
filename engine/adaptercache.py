"""Adapters on the host: read from disk in threads of their own, and kept in memory as far as a budget goes.

Knows: how many bytes are kept, who was used last, and which files are being read. Does not know: what is in an
adapter, who may use it, or the device. A read may take as long as a disk likes: nobody waits for it but `wait`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from engine.types import AdapterInfo, AdapterRef, AdapterRejected

log = logging.getLogger(__name__)

READERS = 2
"""Threads, so that one folder on a disk that hangs does not keep back the others."""


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter that was read and checked; `content` is for the runner that read it, and takes `nbytes`."""

    info: AdapterInfo
    content: Any
    nbytes: int


class HostCache:
    """At most so many bytes of adapters; the least recently used go first."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_used = 0
        self._bytes_max = bytes_max
        self._kept: OrderedDict[str, HostAdapter] = OrderedDict()

    def __contains__(self, adapter_id: str) -> bool:
        return adapter_id in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, adapter_id: str) -> HostAdapter:
        """It is kept on, as the last one used. Raises `KeyError`."""
        self._kept.move_to_end(adapter_id)
        return self._kept[adapter_id]

    def put(self, adapter: HostAdapter) -> None:
        """Keep it, if the budget is for so much at all, and let others go for it."""
        self.drop(adapter.info.id)
        if adapter.nbytes > self._bytes_max:
            return
        while self.bytes_used + adapter.nbytes > self._bytes_max:
            self.drop(next(iter(self._kept)))
        self._kept[adapter.info.id] = adapter
        self.bytes_used += adapter.nbytes

    def drop(self, adapter_id: str) -> None:
        dropped = self._kept.pop(adapter_id, None)
        if dropped is not None:
            self.bytes_used -= dropped.nbytes


class AdapterReader:
    """Reads adapters in threads. All methods are for one thread, that of the steps; `woken` is called in a reader's."""

    def __init__(self, read: Callable[[AdapterRef], HostAdapter]) -> None:
        self.woken: Callable[[], None] = lambda: None
        self._read = read
        self._threads: ThreadPoolExecutor | None = None  # made with the first read
        self._pending: set[str] = set()
        self._done: SimpleQueue[tuple[str, HostAdapter | AdapterRejected]] = SimpleQueue()

    def __len__(self) -> int:
        """How many were begun and not taken yet."""
        return len(self._pending)

    def begin(self, ref: AdapterRef) -> None:
        """Read it; one that is being read is not read twice."""
        if ref.id in self._pending:
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="adapter-reader")
        self._pending.add(ref.id)
        self._threads.submit(self._run, ref)

    def take(self, *, block: bool = False) -> list[tuple[str, HostAdapter | AdapterRejected]]:
        """What has been read, or why not; `block`: wait for one, if there is one to wait for."""
        taken: list[tuple[str, HostAdapter | AdapterRejected]] = []
        while self._pending:
            try:
                result = self._done.get(block=block and not taken)
            except Empty:
                break
            self._pending.remove(result[0])
            taken.append(result)
        return taken

    def _run(self, ref: AdapterRef) -> None:
        try:
            result: HostAdapter | AdapterRejected = self._read(ref)
        except AdapterRejected as error:
            result = error
        except MemoryError:
            result = AdapterRejected("there is no memory left for the adapter")
        except Exception:
            log.exception("adapter %s could not be read", ref.id)
            result = AdapterRejected("the adapter could not be read")
        self._done.put((ref.id, result))
        self.woken()
