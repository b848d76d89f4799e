"""The admin key when no setting names one: minted at the first start, kept in the data folder for its owner only."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from gateway.settings import Settings, SettingsError
from metering.disk import fsync

PREFIX = "mh-admin-"


def admin_key(settings: Settings) -> str:
    """The setting, else the file's key, which is made when it is missing. Raises `SettingsError`."""
    if settings.admin_key is not None:
        return settings.admin_key
    path = settings.admin_key_file
    try:
        return _read(path) if path.exists() else _mint(path)
    except OSError as error:
        raise SettingsError(f"the admin key in {path} cannot be read or made: {error.strerror}") from None


def _read(path: Path) -> str:
    key = path.read_text(encoding="ascii", errors="replace").strip()
    if not key:
        raise SettingsError(f"{path} is empty: remove it to have a new admin key made")
    return key


def _mint(path: Path) -> str:
    """Write beside, then link: of two processes that mint at once both end up with the one key that stands."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = PREFIX + secrets.token_urlsafe(32)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, key.encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    try:
        os.link(beside, path)
    except FileExistsError:
        key = _read(path)
    finally:
        beside.unlink()
    fsync(path.parent)
    return key
