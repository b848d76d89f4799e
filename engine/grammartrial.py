"""A process of its own in which each new grammar is compiled first, so that a hostile one harms nobody.

Knows: the pipe between `Trial` (the engine's end) and `main` (the process), and the limits on time, memory and stack.
Does not know: what is done with a grammar that passed.

The library bounds most of its work, but not all of it: a schema of 43 bytes (`multipleOf` a large prime) computes for
minutes and fills the memory, a chain of 3,000 rules overflows the stack and ends the process. Neither can be stopped
within a process. Here it is killed, and the engine compiles only what has passed, on more stack than it had here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from engine.grammar import Compiler, Grammar, Masks, Matcher, Vocabulary, source_of
from engine.types import GrammarRejected, Guide

if TYPE_CHECKING:
    from engine.tokens import Tokenizer

TIMEOUT_S = 5.0
START_TIMEOUT_S = 60.0
MEMORY_BYTES = 512 << 20  # of address space, for one compilation
GRAMMAR_BYTES_MAX = 24 << 20  # that stay taken by one grammar
STACK_BYTES = 2 << 20  # a quarter of what a thread of the engine has
_STEPS = 4
_PR_SET_PDEATHSIG = 1

SLOW = "the grammar takes too long to compile"
LARGE = "the grammar is too large or nested too deeply"


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """A grammar that passed, in the library's notation, with the bytes it holds; or why it did not."""

    source: str = ""
    nbytes: int = 0
    reason: str | None = None


_encoder = msgspec.msgpack.Encoder()
_guides = msgspec.msgpack.Decoder(Guide)
_verdicts = msgspec.msgpack.Decoder(Verdict)
_vocabularies = msgspec.msgpack.Decoder(Vocabulary)


class Trial:
    """The engine's end: starts the process when a grammar is to be tried, and again after it was killed."""

    def __init__(self, vocabulary: Vocabulary, *, timeout_s: float = TIMEOUT_S) -> None:
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def judge(self, guide: Guide) -> Verdict:
        """Try one grammar. Raises `GrammarRejected` for one that does not pass, `OSError` when none can be tried."""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it was ended while it had nothing to do: no fault of this grammar
        process = self._process = self._process or self._start()
        assert process.stdin is not None  # it was started with pipes
        assert process.stdout is not None
        try:
            _write(process.stdin, _encoder.encode(guide))
            answer = _read(process.stdout, time.monotonic() + self._timeout_s)
        except TimeoutError:
            self.close()
            raise GrammarRejected(SLOW) from None
        except (EOFError, BrokenPipeError):
            self.close()
            raise GrammarRejected(LARGE) from None
        verdict = _verdicts.decode(answer)
        if verdict.reason is not None:
            raise GrammarRejected(verdict.reason)
        return verdict

    def close(self) -> None:
        """End the process; the next grammar starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(BrokenPipeError):  # it had more to be told
                    pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.grammartrial", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what the library says as it panics
            start_new_session=True,
        )
        assert process.stdin is not None  # it was started with pipes
        assert process.stdout is not None
        try:
            _write(process.stdin, _encoder.encode(self._vocabulary))
            _read(process.stdout, time.monotonic() + START_TIMEOUT_S)
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            self._process = process
            self.close()
            raise OSError("the process that tries grammars does not start") from error
        return process


class TrialCompiler:
    """Compiles what passed its trial (`grammarstore.GrammarCompiler`)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = Vocabulary.of(tokenizer)
        self._trial = Trial(vocabulary)
        self._compiler = Compiler(vocabulary)

    def compile(self, guide: Guide) -> Grammar:
        verdict = self._trial.judge(guide)
        grammar = self._compiler.compile(verdict.source)
        grammar.nbytes = verdict.nbytes
        return grammar

    def close(self) -> None:
        self._trial.close()


def _write(pipe: IO[bytes], payload: bytes) -> None:
    pipe.write(len(payload).to_bytes(4, "little") + payload)
    pipe.flush()


def _read(pipe: IO[bytes], deadline_s: float | None = None) -> bytes:
    """One payload; raises `TimeoutError`, and `EOFError` when the other end is gone."""
    head = _read_bytes(pipe, 4, deadline_s)
    return _read_bytes(pipe, int.from_bytes(head, "little"), deadline_s)


def _read_bytes(pipe: IO[bytes], count: int, deadline_s: float | None) -> bytes:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    parts: list[bytes] = []
    while count:
        left_ms = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) * 1000
        if not poll.poll(left_ms):
            raise TimeoutError
        part = os.read(pipe.fileno(), count)
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# ---- the process ----


def try_out(compiler: Compiler, masks: Masks, guide: Guide, eos_token_ids: tuple[int, ...]) -> Verdict:
    """Compile it and take some steps, as the engine will; raises `GrammarRejected`."""
    gc.collect()
    before = _resident_bytes()
    source = source_of(guide)
    grammar = compiler.compile(source)
    matcher = grammar.matcher()
    for _ in range(_STEPS):
        bits = masks.fill([matcher])[0]
        _check(matcher)
        byte = int(bits.nonzero()[0][-1])
        token = 8 * byte + int(bits[byte]).bit_length() - 1
        if token in eos_token_ids:
            break
        matcher.accept(token)
        _check(matcher)
        if matcher.ended:
            break
    nbytes = max(_resident_bytes() - before, 4 * len(source) + (32 << 10))
    if nbytes > GRAMMAR_BYTES_MAX:
        raise GrammarRejected(LARGE)
    return Verdict(source, nbytes)


def _check(matcher: Matcher) -> None:
    if matcher.stuck is not None:
        raise GrammarRejected(matcher.stuck)


def _resident_bytes() -> int:
    return _memory_bytes()[1]


def _memory_bytes() -> tuple[int, int]:
    """(address space, resident) of this process; zeros where nothing tells."""
    file = Path("/proc/self/statm")
    if not file.exists():
        return 0, 0
    pages = file.read_text().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def _limit_memory() -> None:
    if now := _memory_bytes()[0]:
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(source: IO[bytes], sink: IO[bytes]) -> None:
    vocabulary = _vocabularies.decode(_read(source))
    compiler = Compiler(vocabulary)
    masks = Masks(len(vocabulary.words), vocabulary.eos_token_ids)
    _limit_memory()
    _write(sink, b"ready")
    while True:
        guide = _guides.decode(_read(source))
        try:
            verdict = try_out(compiler, masks, guide, vocabulary.eos_token_ids)
        except GrammarRejected as error:
            verdict = Verdict(reason=str(error))
        except (MemoryError, RecursionError):
            verdict = Verdict(reason=LARGE)
        _write(sink, _encoder.encode(verdict))


def main(parent_pid: int) -> None:
    """Answer until the other end is closed. Work is done on a small stack, so what passes fits a larger one."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the kernel was told
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(5)
    threading.stack_size(STACK_BYTES)
    ended: list[EOFError] = []

    def work() -> None:
        try:
            _serve(sys.stdin.buffer, sys.stdout.buffer)
        except EOFError as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(int(sys.argv[1]))
