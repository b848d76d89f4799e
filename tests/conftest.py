"""Wires the shared fixtures; each topic's fixtures live in one file under tests/fixtures/."""

pytest_plugins = [f"tests.fixtures.{topic}" for topic in ("model", "clickhouse", "postgres", "stripe", "server")]
