"""The native library: `kernels/cpu/*.cpp` compiled for this very machine, once, and loaded.

Knows: how the library gets into the cache whole or not at all, and which of its forms this machine can be trusted with.
Does not know: what the library computes (`kernels/cpu/`, and the wrappers beside this file, do).

A cache entry is named by a digest of everything that makes it: sources, flags, compiler, processor. It is built in a
folder beside its place under a file lock and renamed: two processes build it once, and what a killed builder left
is removed by the next one. Before that, each form of the matrix product is checked in a process of its own: one that
computes something wrong, or that this processor refuses, is left out. `python -m kernels.native` builds and says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno")
# GCC 12 takes the undefined lanes in its own AVX-512 headers for a mistake of ours.
WARNINGS = ("-Wall", "-Wextra", "-Wno-psabi", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
FORMS = {1: "generic", 2: "avx512", 4: "amx"}  # bit → name, as in cpu/matmul_forms.h
_KEEP_S = 30 * 86400  # how long an entry of other sources or flags is kept
_COMPILE_TIMEOUT_S = 300
_CHECK_TIMEOUT_S = 60
_AVAILABLE = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).meterhouse_available_forms())"
_CHECK = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).meterhouse_check_forms(int(sys.argv[2])))"

Progress = Callable[[str], None]


class NativeError(Exception):
    """Why there is no native library; one sentence."""


@functools.cache
def library(cache_dir: Path | None = None) -> ctypes.CDLL | None:
    """The library, built if it must be; None, and one line in the log that says why, where there can be none."""
    try:
        return opened(cache_dir or default_cache_dir())
    except NativeError as error:
        log.warning("the native CPU kernels are not used: %s", error)
        return None


def opened(cache_dir: Path) -> ctypes.CDLL:
    """The library, built if it must be, and once more if what is in the cache is damaged. Raises `NativeError`."""
    built = build(cache_dir)
    try:
        return load(built)
    except NativeError:
        try:
            built.unlink(missing_ok=True)
        except OSError as error:
            raise NativeError(
                f"the library in the cache is damaged and cannot be replaced ({error.strerror})"
            ) from None
        return load(build(cache_dir))


def default_cache_dir() -> Path:
    """Where converted models are kept as well: METERHOUSE_CACHE_DIR, else a folder in the home."""
    return Path(os.environ.get("METERHOUSE_CACHE_DIR") or "~/.cache/meterhouse").expanduser()


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load(path: Path) -> ctypes.CDLL:
    """The library at `path`, with the forms that passed their checks. Raises `NativeError`."""
    try:
        forms, fingerprint = path.with_suffix(".forms").read_text().split()
        if fingerprint != _fingerprint(path):
            raise NativeError("the built library is damaged")
        loaded = ctypes.CDLL(str(path))
        loaded.meterhouse_use_forms(int(forms))
    except (OSError, ValueError, AttributeError) as error:
        raise NativeError(f"the built library cannot be loaded ({error})") from None
    return loaded


def build(
    cache_dir: Path,
    *,
    sources: Path = SOURCES,
    extra_flags: Sequence[str] = (),
    progress: Progress = lambda stage: None,
) -> Path:
    """The library compiled from `sources`, from the cache if it is there. `progress` is told stages in words.

    `$CXX` names another compiler than g++. Raises `NativeError`.
    """
    compiler = _compiler()
    flags = (*FLAGS, *extra_flags)
    folder = cache_dir / "native"
    built = folder / f"meterhouse-{_digest(sources, compiler, flags)}.so"
    if built.exists():
        return built
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock"):
            if not built.exists():  # another process may have made it while we waited
                _build(built, sources, compiler, flags, progress)
    except OSError as error:
        raise NativeError(f"it cannot be built ({error.strerror or error})") from None
    return built


# ---- what an entry depends on ----


def _compiler() -> list[str]:
    try:
        command = shlex.split(os.environ.get("CXX") or "g++") or ["g++"]
    except ValueError as error:
        raise NativeError(f"$CXX is no command ({error})") from None
    if shutil.which(command[0]) is None:
        raise NativeError(f"there is no C++ compiler ({command[0]}); install g++ and start again")
    return command


def _digest(sources: Path, compiler: list[str], flags: Sequence[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256(repr((compiler, version, flags, _processor())).encode())
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        digest.update(repr((path.name, path.read_bytes())).encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """The instructions this processor has: `-march=native` compiles for them, and a cache may be shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    told = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(told)}))


# ---- building one ----


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(built: Path, sources: Path, compiler: list[str], flags: Sequence[str], progress: Progress) -> None:
    """Compile, check, and put both files of the entry in place; the caller holds the lock."""
    for stale in built.parent.glob(".building-*"):
        shutil.rmtree(stale, ignore_errors=True)
    for old in built.parent.glob("meterhouse-*"):
        if old.stat().st_mtime < time.time() - _KEEP_S:
            old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=built.parent) as temporary:
        library = Path(temporary) / "library.so"
        objects = _compile(sorted(sources.glob("*.cpp")), Path(temporary), [*compiler, *flags, *WARNINGS], progress)
        _wait(_start([*compiler, *flags, "-shared", "-o", str(library), *map(str, objects)]), "linking")
        forms = _checked_forms(library, progress)
        library.with_suffix(".forms").write_text(f"{forms} {_fingerprint(library)}")
        _sync(library)
        library.with_suffix(".forms").replace(built.with_suffix(".forms"))
        library.replace(built)


def _fingerprint(library: Path) -> str:
    """What tells a damaged library before it is mapped: one that was cut short ends the process with SIGBUS."""
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    """Whole on the disk before it gets its name: a power cut must not leave half a library to be loaded."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _compile(sources: list[Path], folder: Path, command: list[str], progress: Progress) -> list[Path]:
    """One compiler for each core, the largest file first. The object files."""
    cores = usable_cores()
    waiting = sorted(sources, key=lambda path: path.stat().st_size)
    running: list[tuple[Path, subprocess.Popen[str]]] = []
    objects: list[Path] = []
    deadline = time.monotonic() + _COMPILE_TIMEOUT_S
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                source = waiting.pop()
                objects.append(folder / f"{source.stem}.o")
                running.append((source, _start([*command, "-c", str(source), "-o", str(objects[-1])])))
            source, process = next(((s, p) for s, p in running if p.poll() is not None), running[0])
            try:
                _, errors = process.communicate(timeout=0.02)  # reads on: a full pipe would stop the compiler for ever
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise NativeError(f"the compiler did not end ({source.name})") from None
                continue
            running.remove((source, process))
            _judge(process, errors, source.name)
            done = len(objects) - len(running)
            progress(f"{source.name} ({done} of {len(sources)})")
    finally:
        for _, process in running:
            process.kill()
            process.communicate()
    return objects


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")


def _wait(process: subprocess.Popen[str], what: str) -> None:
    try:
        _, errors = process.communicate(timeout=_COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise NativeError(f"the compiler did not end ({what})") from None
    _judge(process, errors, what)


def _judge(process: subprocess.Popen[str], errors: str, what: str) -> None:
    if process.returncode:
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines() or ["no message"]
        raise NativeError(f"the compiler failed ({what}): {lines[0]}")


# ---- whether it can be trusted ----


def _checked_forms(library: Path, progress: Progress) -> int:
    """The bits of the forms that compute what a plain loop does. Raises `NativeError` when not even one does."""
    command = [sys.executable, "-c", _AVAILABLE, str(library)]
    try:
        available = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_CHECK_TIMEOUT_S
        ).stdout
    except subprocess.TimeoutExpired:
        raise NativeError("the built library does not say what this machine can run") from None
    passed = 0
    for bit, name in FORMS.items():
        if available.strip().isdigit() and int(available) & bit:
            fault = _fault(library, bit)
            passed |= 0 if fault else bit
            progress(f"check of the {name} form: {fault or 'passed'}")
    if not passed & 1:
        raise NativeError("the built library fails its check on this machine")
    return passed


def _fault(library: Path, form: int) -> str:
    """What is wrong with a form, or an empty string: in its own process, for it may stop with SIGILL."""
    command = [sys.executable, "-c", _CHECK, str(library), str(form | 1)]
    try:
        status = subprocess.run(command, capture_output=True, check=False, timeout=_CHECK_TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        return "it does not end"
    if status < 0:
        return f"stopped by {signal.Signals(-status).name}"
    return f"wrong results for weights of format {status - 1}" if status else ""


def main() -> int:
    """Build the library and say what is done; 1 when it could not be, which is no reason to stop."""
    began = time.monotonic()

    def say(stage: str) -> None:
        print(f"meterhouse: building the native kernels [{time.monotonic() - began:4.0f} s] {stage}", flush=True)  # noqa: T201

    try:
        build(default_cache_dir(), progress=say)
    except NativeError as error:
        say(f"failed, torch's own will be used: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
