"""The usage store's schema on a ClickHouse cluster: the same files, rendered.

Each table becomes two: `NAME_local` on every node, replicated within its shard, and `NAME`, `Distributed` over them. So
whoever reads or writes says the same names as on one server.

FINAL merges rows of one sort key within a shard, never across shards: all rows that may replace each other must lie on
one. A sharding key is therefore made of columns of the sort key, so that equal sort keys always agree on it. Events go
by their id: an event and its replays meet, a second content of the id (which may name another tenant) meets the first,
and a large tenant is spread over all shards. The sums of an hour lie together, so that they are replaced in one step.

Knows: how a statement of `clickhouse/` reads on a cluster. Does not know: what the tables mean, how statements are run.
"""

from __future__ import annotations

import re
from typing import NamedTuple

SHARDED_BY = {
    "usage_events": "cityHash64(event_id)",
    "usage_conflicts": "cityHash64(event_id)",
    "usage_dead_letters": "cityHash64(event_id)",
    "usage_hourly": "cityHash64(hour)",
    "usage_dirty_hours": "cityHash64(hour)",
    "usage_archives": "cityHash64(month)",
}
"""Table → the shard of a row. A new table is put in here by who writes its file, or its migration is refused."""

MIGRATIONS = "schema_migrations"
_CREATE = re.compile(r"CREATE TABLE IF NOT EXISTS (\w+)(.*)", re.DOTALL)
_ALTER = re.compile(r"ALTER TABLE (\w+)\b(.*)", re.DOTALL)
_ENGINE = re.compile(r"ENGINE\s*=\s*ReplacingMergeTree(?:\(([^)]*)\))?")
_COMMENT = re.compile(r"--[^\n]*")


class RenderError(Exception):
    """A statement has no form on a cluster; the text says which."""


class Cluster(NamedTuple):
    """A cluster as the servers' `remote_servers` names it. `replicated`: they have Keeper and the macros `{shard}` and
    `{replica}`; without it a shard is one server, and each of them is migrated by itself."""

    name: str
    replicated: bool = True


def render(statement: str, cluster: Cluster, database: str) -> list[str]:
    """One statement of the files → those that do the same on a cluster. Raises `RenderError`."""
    text = _COMMENT.sub("", statement).strip()
    if match := _CREATE.match(text):
        return _create(match[1], match[2], cluster, database)
    if match := _ALTER.match(text):
        name, change = match[1], match[2]
        _sharding(name)
        return [f"ALTER TABLE {table}{_everywhere(cluster)}{change}" for table in (local(name), name)]
    raise RenderError(f"a statement has no form on a cluster: {text[:60]}")


def migrations_table(cluster: Cluster, database: str) -> str:
    """What is run is the whole cluster's: every replica of every shard has all rows of this one."""
    engine = "ReplacingMergeTree"
    if cluster.replicated:
        path = f"/clickhouse/meterhouse/{database}/{MIGRATIONS}"
        engine = f"ReplicatedReplacingMergeTree({_text(path)}, '{{shard}}-{{replica}}')"
    return (
        f"CREATE TABLE IF NOT EXISTS {MIGRATIONS}{_everywhere(cluster)} (number UInt32, name String, checksum String, "
        f"applied DateTime64(6, 'UTC') DEFAULT now64(6)) ENGINE = {engine} ORDER BY (number, checksum) "
        "SETTINGS fsync_after_insert = 1, fsync_part_directory = 1"
    )


def create_database(cluster: Cluster, database: str) -> str:
    """On every node."""
    return f"CREATE DATABASE IF NOT EXISTS {_name(database)}{_everywhere(cluster)}"


def local(name: str) -> str:
    """The table that holds a node's part."""
    return f"{name}_local"


def _create(name: str, rest: str, cluster: Cluster, database: str) -> list[str]:
    sharding = _sharding(name)
    if not _ENGINE.search(rest):
        raise RenderError(f"the table {name} has no engine that a cluster's tables are made of")
    if cluster.replicated:
        path = _text(f"/clickhouse/tables/{{shard}}/{database}/{name}")
        rest = _ENGINE.sub(lambda found: f"ENGINE = ReplicatedReplacingMergeTree({_arguments(path, found[1])})", rest)
        # Its own log of what was inserted would drop a batch that is sent again after it was lost.
        rest = rest.replace("non_replicated_deduplication_window", "replicated_deduplication_window")
    here = _everywhere(cluster)
    where = f"{_text(cluster.name)}, {_text(database)}, {_text(local(name))}"
    return [
        f"CREATE TABLE IF NOT EXISTS {local(name)}{here}{rest.rstrip()}",
        f"CREATE TABLE IF NOT EXISTS {name}{here} AS {local(name)} ENGINE = Distributed({where}, {sharding})",
    ]


def _arguments(path: str, version: str | None) -> str:
    return ", ".join([path, "'{replica}'", *([version] if version else [])])


def _sharding(name: str) -> str:
    if name not in SHARDED_BY:
        raise RenderError(f"nothing says by what the table {name} is spread over a cluster's shards")
    return SHARDED_BY[name]


def _everywhere(cluster: Cluster) -> str:
    return f" ON CLUSTER {_name(cluster.name)}" if cluster.replicated else ""


def _text(value: str) -> str:
    return _quoted(value, "'")


def _name(value: str) -> str:
    return _quoted(value, "`")


def _quoted(value: str, mark: str) -> str:
    escaped = value.replace("\\", "\\\\").replace(mark, f"\\{mark}")
    return f"{mark}{escaped}{mark}"
