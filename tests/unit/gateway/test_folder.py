"""The data folder is nobody else's to read: it holds clients' answers, the ledger and the admin key."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from gateway.app import now_us
from gateway.keyfile import admin_key
from gateway.settings import Settings
from gateway.stores import StartError, Stores


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_opens_for_its_owner_alone(tmp_path: Path, chdb_url: str) -> None:
    by_key = Settings(data_dir=tmp_path / "a")
    by_stores = Settings(data_dir=tmp_path / "b", clickhouse_url=chdb_url)
    admin_key(by_key)
    stores = Stores(by_stores, now_us)
    stores.open("base")
    try:
        with pytest.raises(StartError, match="Another Meterhouse server"):
            Stores(by_stores, now_us).open("base")
    finally:
        stores.close()
    assert (mode(by_key.data_dir), mode(by_stores.data_dir)) == (0o700, 0o700)
    assert mode(by_key.admin_key_file) == 0o600
