"""Brings the usage store and the ledger to the schema of this code.

Knows: numbered SQL files for ClickHouse and Alembic revisions for the ledger, with a checksum of each that was
run. Does not know: what the tables mean. Everything may be run again, also after a kill in the middle and by
two processes at once: a ClickHouse statement says IF NOT EXISTS and its file is recorded when all of it was
run, the ledger's revisions are transactions under a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import clickhouse_connect
import sqlalchemy
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from clickhouse_connect.driver.binding import quote_identifier
from clickhouse_connect.driver.exceptions import ClickHouseError
from sqlalchemy.exc import SQLAlchemyError

from migrations.cluster import Cluster, RenderError, create_database, migrations_table, render

CLICKHOUSE_FOLDER = Path(__file__).parent / "clickhouse"
LEDGER_FOLDER = Path(__file__).parent / "ledger"
CHDB_DATABASE = "meterhouse"  # `metering.clickhouse`, which may not be imported here, has the same
_FILE_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_UNUSED = frozenset(range(3, 10))  # numbers that may be left out: kept free for files that were written side by side
_STATEMENT_END = re.compile(r";[ \t]*(?:\n|$)")
_ONE_SERVER = (
    "CREATE TABLE IF NOT EXISTS schema_migrations (number UInt32, name String, checksum String, "
    "applied DateTime64(6, 'UTC') DEFAULT now64(6)) ENGINE = ReplacingMergeTree ORDER BY (number, checksum) "
    "SETTINGS fsync_after_insert = 1, fsync_part_directory = 1"
)
_LOCK_ID = 0x6D65746572  # PostgreSQL's advisory locks are numbers


class MigrationError(Exception):
    """The schema cannot be brought to this code's; the text says why. Nothing after the fault was run."""


class Migration(NamedTuple):
    """One numbered SQL file."""

    number: int
    name: str
    checksum: str  # sha256 of the file's bytes, hex
    statements: list[str]


# -- ClickHouse ----------------------------------------------------------------------------------


def migrate_clickhouse(target: Any, folder: Path = CLICKHOUSE_FOLDER, *, cluster: Cluster | None = None) -> list[str]:
    """Run what a usage store lacks; returns the names of the files that were run now.

    `target` is `chdb:///abs/path`, `http(s)://user:pw@host:port/database` (the database is created when it is
    missing) or an open clickhouse-connect client. `cluster`: the server is one of its nodes. A file is run on all of
    them before it is recorded; a database of one server does not become a cluster's, nor the reverse. Raises
    `MigrationError`.
    """
    migrations = read_folder(folder)
    try:
        if not isinstance(target, str):
            return _migrate(target, migrations, cluster)
        with _opened(target, cluster) as client:
            return _migrate(client, migrations, cluster)
    except RenderError as error:
        raise MigrationError(f"the usage store cannot be migrated: {error}") from error
    except (ClickHouseError, OSError) as error:
        if (reason := _unreachable(error)) and isinstance(target, str):
            parts = urlsplit(target)
            at = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
            raise MigrationError(f"the usage store at {at} cannot be reached: {reason}") from error
        raise MigrationError(f"the usage store cannot be migrated: {_first_line(error)}") from error


def usage_store_is_empty(url: str, cluster: Cluster | None = None) -> bool:
    """Whether no event was ever put into a usage store; one without tables has none. Raises `MigrationError`."""
    try:
        with _opened(url, cluster) as client:
            tables = ("usage_events", "usage_archives", "usage_conflicts", "usage_dead_letters")
            found = [name for name in tables if client.query(f"EXISTS TABLE {name}").result_rows[0][0]]
            return not any(client.query(f"SELECT 1 FROM {name} LIMIT 1").result_rows for name in found)  # noqa: S608
    except (ClickHouseError, OSError) as error:
        raise MigrationError(f"the usage store cannot be looked at: {_first_line(error)}") from error


def read_folder(folder: Path) -> list[Migration]:
    """The numbered files in order, from 1 on; none is missing but those known to be unused. Raises `MigrationError`."""
    migrations = []
    for path in sorted(folder.glob("*.sql")):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None:
            raise MigrationError(f"{path.name} is not named NNNN_what_it_does.sql")
        data = path.read_bytes()
        statements = [part.strip() for part in _STATEMENT_END.split(data.decode())]
        migrations.append(
            Migration(
                int(match[1]), path.stem, hashlib.sha256(data).hexdigest(), [s for s in statements if _has_sql(s)]
            )
        )
    numbers = [m.number for m in migrations]
    wanted = [number for number in range(1, max(numbers, default=0) + 1) if number not in _UNUSED - set(numbers)]
    if numbers != wanted:
        raise MigrationError(f"the numbers of the files in {folder.name} have a gap or a double")
    return migrations


def _migrate(client: Any, migrations: list[Migration], cluster: Cluster | None) -> list[str]:
    _check_kind(client, cluster)
    client.command(_ONE_SERVER if cluster is None else migrations_table(cluster, client.database))
    rows = client.query("SELECT number, checksum FROM schema_migrations FINAL ORDER BY number").result_rows
    _check({m.number: m.checksum for m in migrations}, rows, "usage store")
    done = {number for number, _ in rows}
    ran = []
    for migration in migrations:
        if migration.number in done:
            continue
        for statement in migration.statements:
            for part in [statement] if cluster is None else render(statement, cluster, client.database):
                client.command(part)
        client.insert(
            "schema_migrations",
            [[migration.number, migration.name, migration.checksum]],
            column_names=["number", "name", "checksum"],
            column_type_names=["UInt32", "String", "String"],
            settings={"async_insert": 0},
        )
        ran.append(migration.name)
    return ran


def _check_kind(client: Any, cluster: Cluster | None) -> None:
    """Tables of one server are never taken for a cluster's: half of the usage would be read for the whole of it."""
    query = "SELECT count(), countIf(engine = 'Distributed') FROM system.tables WHERE database = currentDatabase()"
    tables, spread = client.query(f"{query} AND name = 'usage_events'").result_rows[0]
    if tables and bool(spread) != (cluster is not None):
        what, other = ("one server", "a cluster") if cluster else ("a cluster", "one server")
        raise MigrationError(
            f"the usage store's tables are those of {what}, and the settings are for {other}: restore a backup into an "
            "empty database"
        )


def _check(code: Mapping[Any, str], stored: list[tuple[Any, str]], what: str) -> None:
    for key, checksum in stored:
        if key not in code:
            raise MigrationError(f"the {what} is newer than this version of Meterhouse (migration {key})")
        if code[key] != checksum:
            raise MigrationError(f"migration {key} of the {what} was edited after it was run: write a new one instead")


@contextmanager
def _opened(url: str, cluster: Cluster | None = None) -> Iterator[Any]:
    """A client on the URL's database, which exists then."""
    parts = urlsplit(url)
    if parts.scheme == "chdb":
        options: dict[str, Any] = {"interface": "chdb", "path": parts.path}
        database = CHDB_DATABASE
    elif parts.scheme in ("http", "https"):
        options = {"dsn": urlunsplit(parts._replace(path="")), "interface": parts.scheme, "connect_timeout": 5}
        options["autogenerate_session_id"] = False
        database = unquote(parts.path.strip("/")) or "default"
    else:
        raise MigrationError("a usage store is chdb:///absolute/path or http(s)://user:password@host:port/database")
    client = clickhouse_connect.get_client(**options)
    try:
        here = f"CREATE DATABASE IF NOT EXISTS {quote_identifier(database)}"
        client.command(here if cluster is None else create_database(cluster, database))
        client.database = database
        yield client
    finally:
        client.close()


def _has_sql(statement: str) -> bool:
    return any(line.strip() and not line.strip().startswith("--") for line in statement.splitlines())


# -- ledger --------------------------------------------------------------------------------------


def migrate_ledger(target: str | sqlalchemy.Engine, folder: Path = LEDGER_FOLDER, *, upto: str = "head") -> list[str]:
    """Run what a ledger lacks, up to a revision; returns the revisions that were run now. Raises `MigrationError`.

    `target` is `sqlite:///path`, `postgresql+psycopg://…` or an engine on one.
    """
    engine = _engine(target) if isinstance(target, str) else target
    try:
        with _one_at_a_time(engine), engine.connect() as connection:
            return _upgrade(connection, folder, upto)
    except (SQLAlchemyError, CommandError, OSError) as error:
        raise MigrationError(f"the ledger cannot be migrated: {_first_line(error)}") from error
    finally:
        if isinstance(target, str):
            engine.dispose()


def ledger_is_empty(url: str) -> bool:
    """Whether a database has no event of a ledger; nothing is written. Raises `MigrationError`."""
    engine = _engine(url)
    if engine.dialect.name == "sqlite" and not Path(str(engine.url.database)).exists():
        return True  # to look would make the file
    try:
        with engine.connect() as connection:
            if not sqlalchemy.inspect(connection).has_table("events"):
                return True
            return connection.execute(sqlalchemy.text("SELECT 1 FROM events LIMIT 1")).first() is None
    except SQLAlchemyError as error:
        raise MigrationError("the ledger's database cannot be used now") from error
    finally:
        engine.dispose()


def ledger_revisions(folder: Path = LEDGER_FOLDER) -> set[str]:
    """The revisions that this code knows."""
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    return {revision.revision for revision in ScriptDirectory.from_config(config).walk_revisions()}


def _engine(url: str) -> sqlalchemy.Engine:
    """Raises `MigrationError` with a text that does not repeat the URL, which may hold a password."""
    try:
        return sqlalchemy.create_engine(url)
    except ImportError as error:
        raise MigrationError(
            f"the ledger's database needs the package {error.name!r}, which is not installed: for PostgreSQL, "
            "pip install 'meterhouse[postgres]'"
        ) from None
    except (SQLAlchemyError, ValueError):
        raise MigrationError(
            "the ledger's URL cannot be understood: sqlite:///path or postgresql+psycopg://…"
        ) from None


def _upgrade(connection: sqlalchemy.Connection, folder: Path, upto: str) -> list[str]:
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.attributes["connection"] = connection
    script = ScriptDirectory.from_config(config)
    revisions = {r.revision: hashlib.sha256(Path(r.path).read_bytes()).hexdigest() for r in script.walk_revisions()}
    connection.execute(
        sqlalchemy.text(
            "CREATE TABLE IF NOT EXISTS schema_checksums "
            "(revision VARCHAR(64) PRIMARY KEY, checksum VARCHAR(64) NOT NULL)"
        )
    )
    connection.commit()
    rows = connection.execute(sqlalchemy.text("SELECT revision, checksum FROM schema_checksums")).all()
    connection.commit()
    _check(revisions, [(row[0], row[1]) for row in rows], "ledger")
    command.upgrade(config, upto)
    wanted = [revision.revision for revision in script.walk_revisions(head=upto)]
    ran = [revision for revision in reversed(wanted) if revision not in {row[0] for row in rows}]
    if ran:
        connection.execute(
            sqlalchemy.text("INSERT INTO schema_checksums VALUES (:revision, :checksum)"),
            [{"revision": revision, "checksum": revisions[revision]} for revision in ran],
        )
    connection.commit()
    return ran


@contextmanager
def _one_at_a_time(engine: sqlalchemy.Engine) -> Iterator[None]:
    """PostgreSQL: an advisory lock. SQLite: a lock on a file beside it; a database in memory is nobody else's."""
    if engine.dialect.name == "postgresql":
        with engine.connect() as connection:
            connection.execute(sqlalchemy.text("SELECT pg_advisory_lock(:id)"), {"id": _LOCK_ID})
            try:
                yield
            finally:
                connection.execute(sqlalchemy.text("SELECT pg_advisory_unlock(:id)"), {"id": _LOCK_ID})
    elif engine.url.database and engine.url.database != ":memory:":
        path = Path(engine.url.database)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(path.name + ".migrate.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    else:
        yield


def _unreachable(error: BaseException) -> str | None:
    """The system's word for why there is no connection, which the driver wraps several times; None: there is one."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, ConnectionError | TimeoutError | socket.gaierror):
            return found.strerror or "no answer in time"
        found = found.__cause__ or found.__context__
    return None


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:500]
