"""The dashboards' JSON: up to date, importable, and naming nothing that the code does not have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import panels
from dashboards.build import BOARDS, FOLDER, rendered
from gateway.telemetry import METRICS

ROOT = Path(__file__).resolve().parents[3]
PROMETHEUS = ROOT / "dashboards" / "prometheus"


def boards() -> list[dict[str, Any]]:
    return [json.loads((FOLDER / name).read_text()) for name in BOARDS]


def queries(plugin: str) -> list[tuple[str, str]]:
    """(panel title, query) of every target of a plugin, and of every variable that asks it."""
    field = "expr" if plugin == panels.PROMETHEUS else "rawSql"
    found = [
        (panel["title"], target[field])
        for board in boards()
        for panel in board["panels"]
        for target in panel["targets"]
        if target["datasource"]["type"] == plugin
    ]
    for board in boards():
        for variable in board["templating"]["list"]:
            if variable.get("datasource", {}).get("type") == plugin:
                found.append((f"variable {variable['name']}", variable["query"]))
    return found


def known_series() -> set[str]:
    names = {spec.name for spec in METRICS} | {"up"}
    for spec in METRICS:
        if spec.kind == "histogram":
            names |= {f"{spec.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
    return names


def named_series(promql: str) -> set[str]:
    """Series an expression selects; our own recording rules (`meterhouse:…`) are left out."""
    return set(re.findall(r"\b(?:vllm:|meterhouse_)[a-z0-9_]+", promql))


@pytest.mark.parametrize("name", BOARDS)
def test_the_kept_json_is_what_the_code_builds(name: str) -> None:
    assert (FOLDER / name).read_text() == rendered()[name], "run `python -m dashboards.build`"


@pytest.mark.parametrize("name", BOARDS)
def test_the_json_survives_a_round_trip_through_grafanas_own_schema(name: str) -> None:
    shown = json.loads((FOLDER / name).read_text())
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(shown)))
    for panel in (*shown["panels"], *again["panels"]):
        del panel["targets"]  # queries of data sources that the SDK has no model for come back as they are, or not
    assert again == shown


def test_ids_are_unique_and_every_panel_says_what_it_shows() -> None:
    uids = [board["uid"] for board in boards()]
    assert len(set(uids)) == len(uids)
    for board in boards():
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
        assert len({panel["title"] for panel in board["panels"]}) == len(board["panels"])
        assert all(panel["description"] and panel["targets"] and panel["options"] for panel in board["panels"])
        assert all(len({t["refId"] for t in panel["targets"]}) == len(panel["targets"]) for panel in board["panels"])


def test_panels_do_not_overlap() -> None:
    for board in boards():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken, panel["title"]
            assert max(x for x, _ in cells) < 24
            taken |= cells


def test_every_metric_shown_or_alerted_on_exists() -> None:
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())
    expressions = [query for _, query in queries(panels.PROMETHEUS)]
    expressions += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"] if "record" in rule}
    for expression in expressions:
        assert named_series(expression) <= known_series(), expression
        assert set(re.findall(r"\bmeterhouse:[a-z0-9_:]+", expression)) <= recorded, expression


def test_what_must_be_seen_is_shown() -> None:
    """Latency, throughput, cache, queue, preemptions: the engine's dashboard shows each."""
    shown = {name for _, query in queries(panels.PROMETHEUS) for name in named_series(query)}
    assert {
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_hits_total",
        "meterhouse_spool_oldest_seconds",
    } <= shown


def test_an_unknown_name_cannot_be_built_in() -> None:
    for wrong in (
        lambda: panels.metric("meterhouse_no_such_total"),
        lambda: panels.metric("vllm:time_to_first_token_seconds"),
        lambda: panels.buckets("meterhouse_engine_up"),
        lambda: panels.column("no_such_column"),
    ):
        with pytest.raises(KeyError):
            wrong()


def test_provisioning_offers_the_sources_the_dashboards_ask_for() -> None:
    folder = ROOT / "dashboards" / "grafana" / "provisioning"
    offered = yaml.safe_load((folder / "datasources" / "meterhouse.yaml").read_text())["datasources"]
    asked = {t["datasource"]["type"] for board in boards() for panel in board["panels"] for t in panel["targets"]}
    assert asked == {source["type"] for source in offered} == set(panels.SOURCES)
    assert yaml.safe_load((folder / "dashboards" / "meterhouse.yaml").read_text())["providers"][0]["type"] == "file"
