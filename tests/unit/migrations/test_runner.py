from __future__ import annotations

import shutil
import threading
from pathlib import Path

import clickhouse_connect
import msgspec
import pytest
import sqlalchemy

from metering.clickhouse import UsageStore, client_options
from metering.events import content_hash, decode, encode
from metering.hourly import DIRTY, HOURLY
from metering.queries import CONFLICTS, DEAD_LETTERS, EVENT_COLUMNS, EVENTS, INSERT_COLUMNS
from metering.retention import ARCHIVES
from migrations.runner import (
    CLICKHOUSE_FOLDER,
    LEDGER_FOLDER,
    MigrationError,
    migrate_clickhouse,
    migrate_ledger,
    read_folder,
)
from tests import oldevents

# -- ClickHouse ----------------------------------------------------------------------------------


@pytest.fixture(params=["chdb", "server"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "chdb":
        return f"chdb://{tmp_path}/db"
    return request.getfixturevalue("server_url")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(CLICKHOUSE_FOLDER, tmp_path / "clickhouse")


LATER = ("compute_us", "kv_block_us", "preemptions", "cache_write_tokens", "images", "audio_ms", "tool_calls")


def following(folder: Path) -> str:
    """The number of the next file, as a name begins with it."""
    return f"{read_folder(folder)[-1].number + 1:04}"


def query(url: str, sql: str) -> list[tuple[object, ...]]:
    client = clickhouse_connect.get_client(**client_options(url))
    try:
        return client.query(sql).result_rows
    finally:
        client.close()


def test_an_empty_store_gets_every_table_and_a_second_run_does_nothing(url: str) -> None:
    names = [m.name for m in read_folder(CLICKHOUSE_FOLDER)]
    assert migrate_clickhouse(url) == names
    assert migrate_clickhouse(url) == []
    tables = {name for (name,) in query(url, "SELECT name FROM system.tables WHERE database = currentDatabase()")}
    assert tables == {EVENTS, DEAD_LETTERS, CONFLICTS, HOURLY, DIRTY, ARCHIVES, "schema_migrations"}
    columns = query(
        url, f"SELECT name, type FROM system.columns WHERE database = currentDatabase() AND table = '{EVENTS}'"
    )
    assert dict(columns) == {**INSERT_COLUMNS, "precedence": "UInt64"}
    assert [name for name, _ in columns][: len(EVENT_COLUMNS)] == list(EVENT_COLUMNS)


def test_a_run_that_was_killed_in_the_middle_is_finished_by_the_next(url: str, folder: Path) -> None:
    more = folder / f"{following(folder)}_more.sql"
    more.write_text("CREATE TABLE IF NOT EXISTS half (a Int8) ENGINE = MergeTree ORDER BY a;\nSELECT throwIf(1);\n")
    with pytest.raises(MigrationError, match="throwIf"):
        migrate_clickhouse(url, folder)
    more.write_text(
        "CREATE TABLE IF NOT EXISTS half (a Int8) ENGINE = MergeTree ORDER BY a; \n"
        "-- the rest; of it\nCREATE TABLE IF NOT EXISTS whole (a Int8) ENGINE = MergeTree ORDER BY a"
    )
    assert migrate_clickhouse(url, folder) == [more.stem]
    assert query(url, "SELECT count() FROM whole") == [(0,)]


def test_an_edited_old_file_and_a_newer_store_are_refused(url: str, folder: Path) -> None:
    (folder / f"{following(folder)}_more.sql").write_text("SELECT 1;\n")
    migrate_clickhouse(url, folder)
    with pytest.raises(MigrationError, match="newer"):
        migrate_clickhouse(url)
    with (folder / "0001_usage_events.sql").open("a") as file:
        file.write("-- a word more\n")
    with pytest.raises(MigrationError, match=r"migration 1 .*edited"):
        migrate_clickhouse(url, folder)


def test_two_at_once(server_url: str) -> None:
    faults: list[BaseException] = []

    def run() -> None:
        try:
            migrate_clickhouse(server_url)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    ran = query(server_url, "SELECT number FROM schema_migrations FINAL ORDER BY number")
    assert ran == [(migration.number,) for migration in read_folder(CLICKHOUSE_FOLDER)]


def test_events_of_a_store_of_version_1_are_the_same_after_the_second_migration(url: str, folder: Path) -> None:
    for later in folder.glob("*.sql"):
        if not later.name.startswith("0001_"):
            later.unlink()
    migrate_clickhouse(url, folder)
    columns = [name for name in INSERT_COLUMNS if name not in LATER]
    old = [decode(body) for body in oldevents.EVENTS]
    client = clickhouse_connect.get_client(**client_options(url))
    client.insert(
        EVENTS,
        [(*msgspec.structs.astuple(event)[: len(columns) - 1], content_hash(event)) for event in old],
        column_names=columns,
        column_type_names=[INSERT_COLUMNS[name] for name in columns],
    )
    client.close()
    assert migrate_clickhouse(url)[0] == "0002_usage_costs"
    store = UsageStore(url)
    try:
        by_time = sorted(oldevents.EVENTS, key=lambda body: decode(body).ts_us)
        assert [encode(event) for event in store.events(None, 0, 1 << 61)] == by_time
        store.insert(old)  # a replay over the border is a replay
        assert [encode(event) for event in store.events(None, 0, 1 << 61)] == by_time
        assert (store.conflicts_total, store.conflicts(0, 1 << 61)) == (0, [])
    finally:
        store.close()


@pytest.mark.parametrize("name", ["0999_gap.sql", "0001_double.sql", "second.sql", "02_short.sql"])
def test_files_are_numbered_without_a_gap(folder: Path, name: str) -> None:
    (folder / name).write_text("SELECT 1;")
    with pytest.raises(MigrationError):
        read_folder(folder)


def test_a_store_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(MigrationError) as caught:
        migrate_clickhouse("http://default:secret@127.0.0.1:1/x")
    assert str(caught.value) == "the usage store at 127.0.0.1:1 cannot be reached: Connection refused"
    with pytest.raises(MigrationError, match="chdb:///"):
        migrate_clickhouse("sqlite:///x")


# -- ledger --------------------------------------------------------------------------------------


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/deep/ledger.sqlite3"
    return request.getfixturevalue("postgres_url")


@pytest.fixture
def ledger_folder(tmp_path: Path) -> Path:
    return shutil.copytree(LEDGER_FOLDER, tmp_path / "100% ledger", ignore=shutil.ignore_patterns("__pycache__"))


def add_revision(folder: Path, body: str = "pass") -> None:
    first = next((LEDGER_FOLDER / "versions").glob("0001_*.py")).read_text()
    assert 'revision = "0001"' in first
    (folder / "versions" / "0999_more.py").write_text(
        f'revision = "0999"\ndown_revision = "{head()}"\nbranch_labels = None\ndepends_on = None\n\n'
        f"from alembic import op\n\n\ndef upgrade() -> None:\n    {body}\n"
    )


def head() -> str:
    return max(path.name.split("_")[0] for path in (LEDGER_FOLDER / "versions").glob("[0-9]*.py"))


def test_an_empty_ledger_gets_every_revision_and_a_second_run_does_nothing(ledger: str) -> None:
    assert migrate_ledger(ledger)[-1] == head()
    assert migrate_ledger(ledger) == []
    engine = sqlalchemy.create_engine(ledger)
    assert "events" in sqlalchemy.inspect(engine).get_table_names()
    assert migrate_ledger(engine) == []
    engine.dispose()


def test_an_edited_revision_and_a_newer_ledger_are_refused(ledger: str, ledger_folder: Path) -> None:
    migrate_ledger(ledger, ledger_folder)
    add_revision(ledger_folder)
    assert migrate_ledger(ledger, ledger_folder) == ["0999"]
    with pytest.raises(MigrationError, match="newer"):
        migrate_ledger(ledger)
    add_revision(ledger_folder, "op.execute('SELECT 1')")
    with pytest.raises(MigrationError, match=r"0999 .*edited"):
        migrate_ledger(ledger, ledger_folder)


def test_a_revision_that_fails_leaves_the_ledger_where_it_was(ledger: str, ledger_folder: Path) -> None:
    migrate_ledger(ledger, ledger_folder)
    add_revision(ledger_folder, "op.execute('SELECT nonsense FROM nowhere')")
    with pytest.raises(MigrationError, match="nowhere"):
        migrate_ledger(ledger, ledger_folder)
    add_revision(ledger_folder)
    assert migrate_ledger(ledger, ledger_folder) == ["0999"]


def test_two_ledger_migrations_at_once(ledger: str) -> None:
    ran: list[list[str]] = []
    threads = [threading.Thread(target=lambda: ran.append(migrate_ledger(ledger))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, ran))[:3] == [0, 0, 0]
    assert len(ran) == 4


def test_a_ledger_that_cannot_be_opened_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(MigrationError, match="cannot be migrated"):
        migrate_ledger(f"sqlite:///{tmp_path}")


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("no url, and a secret", "cannot be understood"),
        ("postgresql+psycopg://me:secret@host:port/db", "cannot be understood"),
        ("oracle://me:secret@host/db", "not installed"),
    ],
)
def test_a_ledger_url_that_leads_nowhere_is_one_sentence_without_it(url: str, told: str) -> None:
    with pytest.raises(MigrationError, match=told) as caught:
        migrate_ledger(url)
    assert "secret" not in str(caught.value)
