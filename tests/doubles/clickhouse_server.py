"""A real ClickHouse server for the tests, started from npm's build of chDB's shared library.

The library's exported C function `chdb_query_cmdline(argc, argv)` is clickhouse-local's main; told to listen and
then to sleep for ever, it is a server with everything clickhouse-connect uses. Run as a program:
`clickhouse_server.py LIBRARY DATA_FOLDER HTTP_PORT TCP_PORT`; it serves until it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

PACKAGE = "@chdb/lib-linux-x64-gnu"
VERSION = "26.7.3-stable.1"
_SERVE = (
    "SYSTEM START LISTEN HTTP; SYSTEM START LISTEN TCP; SELECT sleepEachRow(1) FROM system.numbers FORMAT Null "
    "SETTINGS function_sleep_max_microseconds_per_block=0, max_block_size=1"
)


class InstallFailed(Exception):
    """npm could not install the library; the text has its last words."""


def install(cache: Path) -> Path:
    """The shared library, from the cache or by npm. Two callers at once are safe. Raises `InstallFailed`."""
    folder = cache / VERSION
    library = folder / "node_modules" / PACKAGE / "libchdb.so"
    done = folder / "installed"  # written last: a killed npm leaves half a library behind
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() and library.exists():
            return library
        command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]
        try:
            ran = subprocess.run(
                [*command, f"{PACKAGE}@{VERSION}"], capture_output=True, text=True, timeout=600, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InstallFailed(f"npm: {error}") from error
        if ran.returncode != 0 or not library.exists():
            raise InstallFailed(f"npm install {PACKAGE}@{VERSION}: {ran.stderr[-2000:]}")
        done.touch()
    return library


class ClickHouseServer:
    """One server process on free ports of 127.0.0.1; may be killed and started again on the same data and ports."""

    def __init__(self, library: Path, data: Path, config: str | None = None) -> None:
        """`config`: the path of a configuration file, which need not be there before `start`."""
        self.library = library
        self.config = config
        self.data = data
        self.http_port, self.tcp_port = _free_ports(2)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """With no database; append /name."""
        return f"http://default@127.0.0.1:{self.http_port}"

    def start(self, timeout_s: float = 30.0) -> None:
        """Return when it answers. Raises `RuntimeError` with the log's end when it does not."""
        self.data.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, __file__, self.library, self.data / "db", self.http_port, self.tcp_port]
        command += [self.config] if self.config else []
        log_path = self.data / "log"
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command], cwd=self.data, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}/ping", timeout=1) as answer:
                    answer.read()
                return
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"ClickHouse did not start: {log_path.read_text(errors='replace')[-2000:]}")

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """SIGSTOP: connections open, nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _serve(library_path: str, data: str, http_port: str, tcp_port: str, config: str | None = None) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no server outlives its tests
    if os.getppid() == 1:
        sys.exit("the parent is gone")
    library = ctypes.CDLL(library_path)
    library.chdb_query_cmdline.restype = ctypes.c_void_p
    library.chdb_query_cmdline.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    library.chdb_result_error.restype = ctypes.c_char_p
    library.chdb_result_error.argtypes = [ctypes.c_void_p]
    arguments = ["clickhouse", "--path", data, "--http_port", http_port, "--tcp_port", tcp_port]
    arguments += ["--listen_host", "127.0.0.1", "--query", _SERVE]
    arguments += ["--config-file", config] if config else []
    argv = (ctypes.c_char_p * len(arguments))(*(argument.encode() for argument in arguments))
    result = library.chdb_query_cmdline(len(arguments), argv)
    sys.exit((library.chdb_result_error(result) or b"ended").decode())


if __name__ == "__main__":
    _serve(*sys.argv[1:6])
