"""Make `.venv` in the project's root and install Meterhouse into it: `python3 deploy/install.py serve|dev|test`.

Knows: which build of PyTorch this machine needs, what the tests need beyond Python packages, and how to say in one
sentence what went wrong. Uses the standard library alone, since it runs before anything is installed. Quick when
nothing changed: a stamp holds the digest of what was installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TORCH_VERSION = "2.13.0"
NEEDED_GB = {"serve": 4, "dev": 6, "test": 6}
# `client`: for the Python line that the server prints; `dev` is `test` without the services the tests start.
EXTRAS = {"serve": ["client"], "dev": ["test"], "test": ["test"]}


class InstallError(Exception):
    """What went wrong, in one sentence that says what to do."""


def say(text: str) -> None:
    print(f"meterhouse: {text}", flush=True)


def has_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def torch_requirement() -> str:
    """The build of PyTorch for this machine: on Linux the default build carries gigabytes of CUDA."""
    chosen = os.environ.get("TORCH")
    if chosen:
        return chosen
    plain = sys.platform != "linux" or has_gpu()
    return f"torch=={TORCH_VERSION}" if plain else f"torch=={TORCH_VERSION}+cpu"


def fault(output: str, requirement: str) -> str:
    """The one sentence for a failed pip run."""
    if "No space left" in output:
        return "the disk is full; free some space and run the same command again"
    if requirement.endswith("+cpu") and "No matching distribution" in output:
        return (
            f"your package indexes offer no CPU build of PyTorch {TORCH_VERSION} for Python "
            f"{platform.python_version()}; put PyTorch's CPU index (see pytorch.org/get-started) into "
            f"PIP_EXTRA_INDEX_URL, or set TORCH=torch=={TORCH_VERSION} to accept the CUDA build"
        )
    network = ("Temporary failure in name resolution", "Connection refused", "NewConnectionError", "ReadTimeout")
    if any(sign in output for sign in network):
        return "the package index cannot be reached; check the network (or PIP_INDEX_URL) and run it again"
    lines = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()
    return f"pip could not install {requirement}: {lines[-1] if lines else 'no output'}"


def pip(*arguments: str, what: str) -> None:
    """Run pip with a line of progress every few seconds; raise `InstallError` when it fails."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    began, shown, collected, output = time.monotonic(), 0.0, 0, []
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    for line in process.stdout:
        output.append(line)
        collected += line.startswith("Collecting")
        if time.monotonic() - shown > 5 and re.match(r"\s*(Collecting|Downloading|Building|Installing)", line):
            shown = time.monotonic()
            say(f"{what} [{shown - began:4.0f} s, {collected} packages] {' '.join(line.split())[:80]}")
    if process.wait():
        raise InstallError(fault("".join(output), arguments[-1]))


def make_venv() -> None:
    if PYTHON.exists() and subprocess.run([str(PYTHON), "-c", ""], check=False).returncode == 0:
        return
    say(f"creating {VENV.relative_to(ROOT)} with Python {platform.python_version()}")
    try:
        venv.create(VENV, with_pip=True, clear=True, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallError(f"the virtual environment could not be made ({error}); is python3-venv installed?") from None


def install_packages(kind: str) -> None:
    """PyTorch first, so that nothing else chooses its build; then Meterhouse with the versions we test with."""
    extras = EXTRAS[kind] + (["gpu"] if has_gpu() else [])
    pip(torch_requirement(), what="installing PyTorch")
    pip("-c", "constraints.txt", "-e", f".[{','.join(extras)}]", what="installing Meterhouse")


def apt_install(package: str) -> None:
    """Install a Debian package where we may; raise `InstallError` naming it where we may not."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise InstallError(f"the tests need {package}; install it with your system's package manager")
    say(f"installing Debian's {package} for the tests")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(["apt-get", "update"], check=False, env=environment, **quiet)  # type: ignore[call-overload]
    command = ["apt-get", "install", "-y", "--no-install-recommends", package]
    if subprocess.run(command, check=False, env=environment, **quiet).returncode:  # type: ignore[call-overload]
        raise InstallError(f"apt-get could not install {package}, which the tests need")


def install_test_services() -> None:
    """PostgreSQL and npm from Debian; the tests fetch the ClickHouse library and promtool themselves."""
    postgres = os.environ.get("METERHOUSE_TEST_POSTGRES_URL") or list(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not postgres and shutil.which("initdb") is None:
        apt_install("postgresql")
    if not os.environ.get("METERHOUSE_TEST_CLICKHOUSE_URL") and shutil.which("npm") is None:
        apt_install("npm")


def build_native() -> None:
    """The CPU kernels for this machine, where the server will look for them; in no time when they are there.

    Not fatal: the program says why it failed, and the server uses PyTorch's own operations instead.
    """
    subprocess.run([str(PYTHON), "-m", "kernels.native"], cwd=ROOT, check=False)


def stamp_digest() -> str:
    digest = hashlib.sha256(str((ROOT, torch_requirement(), sys.version_info[:2])).encode())
    for name in ("pyproject.toml", "constraints.txt", "deploy/install.py"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def installed(kind: str) -> bool:
    """Whether the packages of this kind, or of a larger one, stand as they should."""
    enough = [VENV / f".installed-{name}" for name, extras in EXTRAS.items() if "test" in extras or name == kind]
    return PYTHON.exists() and any(stamp.exists() and stamp.read_text() == stamp_digest() for stamp in enough)


def install(kind: str) -> None:
    if sys.version_info < (3, 11):
        raise InstallError(f"Python 3.11 or newer is needed, this is {platform.python_version()}")
    if not installed(kind):
        free_gb = shutil.disk_usage(ROOT).free / 1e9
        if free_gb < NEEDED_GB[kind]:
            raise InstallError(f"{NEEDED_GB[kind]} GB of disk are needed, {free_gb:.1f} GB are free")
        make_venv()
        install_packages(kind)
        (VENV / f".installed-{kind}").write_text(stamp_digest())
    build_native()
    if kind == "test":
        install_test_services()


def main() -> None:
    try:
        install(sys.argv[1])
    except (InstallError, OSError) as error:
        say(f"cannot install: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        say("stopped; run the same command again to go on")
        sys.exit(130)


if __name__ == "__main__":
    main()
