"""How the native library gets into the cache: once, whole, checked; and what happens where it cannot be built."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernels import native

ROOT = Path(__file__).parents[2]
SOURCE = """
#include <csignal>
extern "C" int meterhouse_available_forms() { return 7; }
extern "C" void meterhouse_use_forms(int forms) { (void)forms; }
extern "C" int meterhouse_check_forms(int forms) {
    if (forms == 5) std::raise(SIGILL);
    return forms == 3 ? 2 : BROKEN;
}
"""
"""A library of three forms: the second computes something wrong, the third has instructions that nobody knows."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="nothing can be compiled on this machine")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "one.cpp").write_text(SOURCE.replace("BROKEN", "0"))
    (folder / "two.cpp").write_text('#include "two.h"\nint two() { return TWO; }\n')
    (folder / "two.h").write_text("#define TWO 2\n")
    return folder


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that writes down what it compiles, a line each."""
    written, compiler = tmp_path / "compiled", tmp_path / "a compiler"
    written.touch()
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo "$*" >> "{written}";; esac\nexec g++ "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", f"'{compiler}'")
    return written


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def names(cache: Path) -> set[str]:
    return {path.name for path in (cache / "native").iterdir()}


def test_built_once_and_anew_when_a_source_changes(sources: Path, compilations: Path, tmp_path: Path) -> None:
    cache, told = tmp_path / "cache", list[str]()
    first = native.build(cache, sources=sources, progress=told.append)
    assert {"one.cpp (1 of 2)", "two.cpp (2 of 2)"} <= set(told) or {"two.cpp (1 of 2)", "one.cpp (2 of 2)"} <= set(
        told
    )
    assert lines(compilations) == 2
    assert native.build(cache, sources=sources) == first
    assert lines(compilations) == 2
    (sources / "two.h").write_text("#define TWO 3\n")
    second = native.build(cache, sources=sources)
    assert second != first
    third = native.build(cache, sources=sources, extra_flags=["-DOTHER"])
    assert third not in (first, second)
    assert names(cache) == {".lock"} | {
        path.with_suffix(end).name for path in (first, second, third) for end in (".so", ".forms")
    }


def test_a_form_that_is_wrong_or_stops_is_left_out(sources: Path, tmp_path: Path) -> None:
    told = list[str]()
    built = native.build(tmp_path / "cache", sources=sources, progress=told.append)
    assert built.with_suffix(".forms").read_text().split()[0] == "1"
    assert told[-3:] == [
        "check of the generic form: passed",
        "check of the avx512 form: wrong results for weights of format 1",
        "check of the amx form: stopped by SIGILL",
    ]
    assert native.load(built).meterhouse_available_forms() == 7


def test_a_library_that_fails_its_check_is_not_kept(sources: Path, tmp_path: Path) -> None:
    (sources / "one.cpp").write_text(SOURCE.replace("BROKEN", "1"))
    with pytest.raises(native.NativeError, match="fails its check on this machine"):
        native.build(tmp_path / "cache", sources=sources)
    assert names(tmp_path / "cache") == {".lock"}


def test_what_does_not_compile_is_said_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    (sources / "two.h").write_text("#error too old\n")
    with pytest.raises(native.NativeError, match=r"the compiler failed \(two.cpp\): .*error: #error too old"):
        native.build(tmp_path / "cache", sources=sources)
    assert names(tmp_path / "cache") == {".lock"}


def test_two_processes_build_it_once(sources: Path, compilations: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    program = (
        "import sys; from pathlib import Path; from kernels import native\n"
        "print(native.build(Path(sys.argv[1]), sources=Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, str(cache), str(sources)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {process.communicate(timeout=120)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(printed) == 1
    built = Path(printed.pop())
    assert lines(compilations) == 2
    assert names(cache) == {".lock", built.name, built.with_suffix(".forms").name}


def test_what_a_killed_builder_and_old_versions_left_is_removed(sources: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache/native"
    (folder / ".building-abc").mkdir(parents=True)
    (folder / ".building-abc/one.o").touch()
    for name, age_s in (("meterhouse-old.so", 31 * 86400), ("meterhouse-new.so", 86400)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age_s,) * 2)
    built = native.build(tmp_path / "cache", sources=sources)
    assert names(tmp_path / "cache") == {".lock", "meterhouse-new.so", built.name, built.with_suffix(".forms").name}


def test_no_compiler_is_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with caplog.at_level(logging.DEBUG):
        assert native.library(tmp_path) is None
        assert native.library(tmp_path) is None
    assert [record.getMessage() for record in caplog.records] == [
        "the native CPU kernels are not used: there is no C++ compiler (no-such-compiler); install g++ and start again"
    ]


def test_a_compiler_that_is_no_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(native.NativeError, match=r"\$CXX is no command"):
        native.build(tmp_path)


def test_a_compiler_that_does_not_end_is_stopped(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *" -c "*) exec sleep 600;; esac\nexec g++ "$@"\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(native, "_COMPILE_TIMEOUT_S", 0.2)
    with pytest.raises(native.NativeError, match=r"did not end \(.*\.cpp\)"):
        native.build(tmp_path / "cache", sources=sources)
    assert names(tmp_path / "cache") == {".lock"}


def test_a_library_that_says_nothing_is_not_used(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "return 7; }"
    one = sources / "one.cpp"
    one.write_text("#include <unistd.h>\n" + one.read_text().replace(told, "sleep(600); return 7; }", 1))
    monkeypatch.setattr(native, "_CHECK_TIMEOUT_S", 0.5)
    with pytest.raises(native.NativeError, match="does not say"):
        native.build(tmp_path / "cache", sources=sources)
    assert names(tmp_path / "cache") == {".lock"}


def test_a_compiler_named_by_blanks_is_none_named(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "  ")
    assert native.build(tmp_path / "cache", sources=sources).exists()


def test_a_damaged_entry_in_a_cache_that_cannot_be_changed_is_told(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.build, "__kwdefaults__", {**(native.build.__kwdefaults__ or {}), "sources": sources})
    native.build(tmp_path).write_bytes(b"")

    def refuse(path: Path, *, missing_ok: bool) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(native.NativeError, match="is damaged and cannot be replaced"):
        native.opened(tmp_path)


def test_a_cache_that_cannot_be_written_is_one_line_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert native.library(tmp_path / "file") is None
    assert [record.getMessage() for record in caplog.records] == [
        "the native CPU kernels are not used: it cannot be built (Not a directory)"
    ]


@pytest.mark.parametrize("left", [4, 4096, -4096])
def test_a_damaged_entry_is_built_anew(
    left: int, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one cut short behind its headers, which the loader would map."""
    monkeypatch.setattr(native.build, "__kwdefaults__", {**(native.build.__kwdefaults__ or {}), "sources": sources})
    built = native.build(tmp_path)
    built.write_bytes(built.read_bytes()[:left])
    with pytest.raises(native.NativeError, match="is damaged"):
        native.load(built)
    native.library.cache_clear()
    loaded = native.library(tmp_path)
    assert loaded is not None
    assert loaded.meterhouse_available_forms() == 7


def test_the_command_says_what_it_does(tmp_path: Path) -> None:
    """As `make serve` runs it; a failure is said and told by the exit status, which the installer passes over."""
    environment = {**os.environ, "METERHOUSE_CACHE_DIR": str(tmp_path), "CXX": "no-such-compiler"}
    command = [sys.executable, "-m", "kernels.native"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith(
        "meterhouse: building the native kernels [   0 s] failed, torch's own will be used: there"
    )
    assert not done.stderr
