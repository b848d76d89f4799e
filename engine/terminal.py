"""What the offline door does with its caller's terminal: shows how far a batch is, and takes Ctrl-C between two steps.

Knows: standard error and SIGINT. Does not know: what is computed.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType, TracebackType

from tqdm import tqdm


def on_terminal() -> bool:
    """Whether a person watches standard error. A notebook is no terminal: there a bar is asked for."""
    return sys.stderr is not None and sys.stderr.isatty()


class Stages:
    """Tells what a start is busy with, one line a stage; an `engine.modelcache.Progress`."""

    def __init__(self, shown: bool) -> None:
        self._shown = shown
        self._last = ""

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        if self._shown and stage != self._last:
            self._last = stage
            sys.stderr.write(f"{stage}\n")


class Bar:
    """A bar of `total` prompts with output tokens per second; silent unless `shown`."""

    def __init__(self, total: int, shown: bool) -> None:
        # The bar is drawn by the caller's thread at most ten times a second: it starts no thread of its own.
        self._bar = tqdm(total=total, unit="prompt", disable=not shown, dynamic_ncols=True, mininterval=0.1)
        self._began = time.perf_counter()
        self._tokens = 0

    def add(self, *, prompts: int, tokens: int) -> None:
        """So many prompts ended and so many tokens were sampled since the last call."""
        if self._bar.disable:
            return
        self._tokens += tokens
        rate = self._tokens / max(time.perf_counter() - self._began, 1e-9)
        self._bar.set_postfix_str(f"{rate:.0f} output tok/s", refresh=False)
        self._bar.update(prompts)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


class Interrupt:
    """Holds a Ctrl-C back until `check` is called, so that no step is cut in its middle. A second one is not held back.

    Only in the main thread, and only where Ctrl-C does what Python has it do; elsewhere nothing is changed.
    """

    def __init__(self) -> None:
        self._came = False
        self._held = False

    def check(self) -> None:
        """Raise the `KeyboardInterrupt` that came, if one did."""
        if self._came:
            self._came = False
            raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._held = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._held:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if error is None:
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            signal.default_int_handler(number, frame)
        self._came = True
