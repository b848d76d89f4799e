"""The schema of a cluster, as text: what `ON CLUSTER` and replicated tables need cannot run here."""

from __future__ import annotations

import re

import pytest

from migrations.cluster import SHARDED_BY, Cluster, RenderError, create_database, migrations_table, render
from migrations.runner import CLICKHOUSE_FOLDER, MigrationError, migrate_clickhouse, read_folder

REPLICATED = Cluster("the-cluster")
ALONE = Cluster("both", replicated=False)
STATEMENTS = [statement for migration in read_folder(CLICKHOUSE_FOLDER) for statement in migration.statements]
CREATES = [statement for statement in STATEMENTS if "CREATE TABLE" in statement]


def test_a_table_becomes_a_replicated_one_and_one_over_all_shards() -> None:
    statement = (
        "-- why\nCREATE TABLE IF NOT EXISTS usage_hourly (hour DateTime('UTC'), version UInt64) -- how\n"
        "ENGINE = ReplacingMergeTree(version) ORDER BY hour SETTINGS non_replicated_deduplication_window = 0"
    )
    assert render(statement, REPLICATED, "meter") == [
        "CREATE TABLE IF NOT EXISTS usage_hourly_local ON CLUSTER `the-cluster` (hour DateTime('UTC'), version UInt64) "
        "\nENGINE = ReplicatedReplacingMergeTree('/clickhouse/tables/{shard}/meter/usage_hourly', '{replica}', version)"
        " ORDER BY hour SETTINGS replicated_deduplication_window = 0",
        "CREATE TABLE IF NOT EXISTS usage_hourly ON CLUSTER `the-cluster` AS usage_hourly_local "
        "ENGINE = Distributed('the-cluster', 'meter', 'usage_hourly_local', cityHash64(hour))",
    ]
    assert render(statement, ALONE, "it's") == [
        "CREATE TABLE IF NOT EXISTS usage_hourly_local (hour DateTime('UTC'), version UInt64) \n"
        "ENGINE = ReplacingMergeTree(version) ORDER BY hour SETTINGS non_replicated_deduplication_window = 0",
        "CREATE TABLE IF NOT EXISTS usage_hourly AS usage_hourly_local "
        "ENGINE = Distributed('both', 'it\\'s', 'usage_hourly_local', cityHash64(hour))",
    ]


def test_a_table_without_a_version_has_path_and_replica_alone() -> None:
    statement = (
        "CREATE TABLE IF NOT EXISTS usage_conflicts (event_id String) ENGINE = ReplacingMergeTree ORDER BY event_id"
    )
    path = "/clickhouse/tables/{shard}/meter/usage_conflicts"
    assert f"ReplicatedReplacingMergeTree('{path}', '{{replica}}') ORDER" in render(statement, REPLICATED, "meter")[0]


def test_a_column_is_added_to_both() -> None:
    assert render("-- why\nALTER TABLE usage_events\n    ADD COLUMN IF NOT EXISTS x Int64", REPLICATED, "meter") == [
        "ALTER TABLE usage_events_local ON CLUSTER `the-cluster`\n    ADD COLUMN IF NOT EXISTS x Int64",
        "ALTER TABLE usage_events ON CLUSTER `the-cluster`\n    ADD COLUMN IF NOT EXISTS x Int64",
    ]


def test_what_was_run_is_known_to_every_replica_of_every_shard() -> None:
    assert create_database(REPLICATED, "meter") == "CREATE DATABASE IF NOT EXISTS `meter` ON CLUSTER `the-cluster`"
    text = migrations_table(REPLICATED, "meter")
    assert "ON CLUSTER `the-cluster`" in text
    assert "('/clickhouse/meterhouse/meter/schema_migrations', '{shard}-{replica}')" in text


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda text: re.sub(r"\W+", "-", text[-40:]))
def test_every_statement_has_a_form_on_a_cluster(statement: str) -> None:
    for text in render(statement, REPLICATED, "meter"):
        assert "ON CLUSTER `the-cluster`" in text
        assert "Distributed(" in text or "ALTER" in text or "ENGINE = ReplicatedReplacingMergeTree(" in text
        assert "--" not in text
        assert "non_replicated" not in text


@pytest.mark.parametrize("statement", CREATES, ids=lambda text: re.findall(r"EXISTS (\w+)", text)[0])
def test_rows_of_one_sort_key_lie_on_one_shard(statement: str) -> None:
    """FINAL merges within a shard: what the sharding key hashes must be part of what makes rows the same."""
    (name,) = re.findall(r"CREATE TABLE IF NOT EXISTS (\w+)", statement)
    (order,) = re.findall(r"ORDER BY (\([^\n]*\)|\w+)", statement)
    (hashed,) = re.fullmatch(r"cityHash64\((\w+)\)", SHARDED_BY[name]).groups()  # type: ignore[union-attr]
    assert hashed in re.findall(r"\w+", order)


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE IF NOT EXISTS unheard_of (x Int64) ENGINE = ReplacingMergeTree ORDER BY x",
        "ALTER TABLE unheard_of ADD COLUMN y Int64",
        "CREATE TABLE IF NOT EXISTS usage_events (x Int64) ENGINE = MergeTree ORDER BY x",
        "DROP TABLE usage_events",
    ],
)
def test_what_has_no_form_is_refused(statement: str) -> None:
    with pytest.raises(RenderError):
        render(statement, REPLICATED, "meter")


def test_one_server_does_not_become_a_cluster_nor_the_reverse(server_url: str, cluster_url: str) -> None:
    migrate_clickhouse(server_url)
    with pytest.raises(MigrationError, match="are those of one server, and the settings are for a cluster"):
        migrate_clickhouse(server_url, cluster=ALONE)
    with pytest.raises(MigrationError, match="are those of a cluster, and the settings are for one server"):
        migrate_clickhouse(cluster_url)
    assert migrate_clickhouse(cluster_url, cluster=ALONE) == []
