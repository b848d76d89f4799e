"""What a server does again and again beside serving, each on a thread of its own: look, do what is due, sleep.

Knows: one piece of work, how often, how to stop. Does not know what the work is. Work that fails is logged once, and
again when it works; the next round tries anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)


class Round:
    """`start` begins, `stop` returns when no round is under way. `wake` begins the next round at once."""

    def __init__(self, name: str, work: Callable[[], object], every_s: float, *, first_s: float = 0.0) -> None:
        self.name = name
        self.rounds_total = self.failures_total = 0
        self.fault: str | None = None
        self._work = work
        self._every_s = every_s
        self._first_s = first_s
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"round-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def end(self) -> None:
        """No round begins any more."""
        self._stopping.set()
        self._wake.set()

    def stop(self) -> None:
        """`end`, and wait for the round that is under way; again does nothing."""
        self.end()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        self._wake.wait(self._first_s)
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                self._work()
            except Exception as error:  # whatever it is, the next round may do better
                self._failed(str(error) or type(error).__name__)
            else:
                if self.fault is not None:
                    log.info("round_again", name=self.name)
                self.fault = None
            self.rounds_total += 1
            self._wake.wait(self._every_s)

    def _failed(self, fault: str) -> None:
        self.failures_total += 1
        if fault != self.fault:
            log.error("round_failed", name=self.name, reason=fault)
        self.fault = fault
