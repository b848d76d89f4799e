"""Wires the shared fixtures; each topic's fixtures live in one file under tests/fixtures/."""

from gateway.server import raise_file_limit

pytest_plugins = [f"tests.fixtures.{topic}" for topic in ("model", "clickhouse", "postgres", "stripe", "server")]

# Each chDB engine that a test opens leaves some of its threads' descriptors open until the process ends.
raise_file_limit()
