"""Panels, queries and variables, in the few shapes our dashboards use, over the Grafana foundation SDK.

Knows: how Grafana wants a panel. Does not know: what is shown. A metric or column that does not exist in the
code cannot be named: `metric` and `column` refuse it while the dashboard is built.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from gateway.telemetry import METRICS
from metering.queries import EVENT_COLUMNS

PROMETHEUS = "prometheus"
CLICKHOUSE = "grafana-clickhouse-datasource"
POSTGRESQL = "grafana-postgresql-datasource"
SOURCES = {PROMETHEUS: "prometheus", CLICKHOUSE: "usage", POSTGRESQL: "ledger"}  # plugin → our variable

_KINDS = {spec.name: spec.kind for spec in METRICS}


def metric(name: str) -> str:
    """The name, if the gateway exposes a counter or gauge that is called so. Raises `KeyError`."""
    if _KINDS[name] == "histogram":
        raise KeyError(f"{name} is a histogram: use `buckets`")
    return name


def buckets(name: str) -> str:
    """The bucket series of a histogram. Raises `KeyError`."""
    if _KINDS[name] != "histogram":
        raise KeyError(f"{name} is not a histogram")
    return f"{name}_bucket"


def column(name: str) -> str:
    """The name, if the usage store has such a column. Raises `KeyError`."""
    if name not in EVENT_COLUMNS:
        raise KeyError(name)
    return name


def quantile(q: float, histogram: str) -> str:
    """PromQL for a quantile over all instances shown."""
    inner = f'sum by (le) (rate({buckets(histogram)}{{instance=~"$instance"}}[$__rate_interval]))'
    return f"histogram_quantile({q}, {inner})"


def rate(name: str, by: str = "") -> str:
    """PromQL for the growth of a counter per second over all instances shown."""
    grouped = f"sum by ({by})" if by else "sum"
    return f'{grouped} (rate({metric(name)}{{instance=~"$instance"}}[$__rate_interval]))'


def gauge(name: str, by: str = "", how: str = "sum") -> str:
    """PromQL for a gauge over all instances shown."""
    grouped = f"{how} by ({by})" if by else how
    return f'{grouped} ({metric(name)}{{instance=~"$instance"}})'


class SqlQuery:
    """A query in SQL for one of the two SQL data sources; `series` says whether rows are points in time."""

    def __init__(self, plugin: str, sql: str, series: bool) -> None:
        self.plugin, self.sql, self.series = plugin, sql, series

    def to_json(self) -> dict[str, object]:
        shared = {"refId": "A", "rawSql": self.sql, "datasource": source(self.plugin).to_json()}
        if self.plugin == POSTGRESQL:
            return {
                **shared,
                "editorMode": "code",
                "rawQuery": True,
                "format": "time_series" if self.series else "table",
            }
        kind, number = ("timeseries", 0) if self.series else ("table", 1)
        return {**shared, "editorType": "sql", "queryType": kind, "format": number}


class _Ready:
    """A query that needs no further building."""

    def __init__(self, query: SqlQuery) -> None:
        self._query = query

    def build(self) -> SqlQuery:
        return self._query


def source(plugin: str) -> models.DataSourceRef:
    """A reference to the data source that the viewer chose."""
    return models.DataSourceRef(type_val=plugin, uid=f"${{{SOURCES[plugin]}}}")


def source_variable(plugin: str, label: str) -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable(SOURCES[plugin]).label(label).type(plugin)


def choice_variable(name: str, label: str, plugin: str, query: str) -> dashboard.QueryVariable:
    """A multi-choice variable that begins with everything chosen."""
    everything = models.VariableOption(selected=True, text=["All"], value=["$__all"])
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(source(plugin))
        .query(query)
        .multi(True)
        .include_all(True)
        .current(everything)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _promql(queries: Sequence[tuple[str, str]]) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + n)).datasource(source(PROMETHEUS))
        for n, (expr, legend) in enumerate(queries)
    ]


def lines(
    title: str,
    about: str,
    queries: Sequence[tuple[str, str]],
    *,
    unit: str = "short",
    width: int = 8,
    top: float | None = None,
) -> timeseries.Panel:
    """Lines over time from PromQL: (expression, legend) each. `top` fixes the axis at it."""
    panel = _plot(title, about, unit, width).datasource(source(PROMETHEUS))
    for query in _promql(queries):
        panel = panel.with_target(query)
    return panel if top is None else panel.max(top)


def sql_lines(
    title: str, about: str, plugin: str, sql: str, *, unit: str = "short", width: int = 8, stacked: bool = False
) -> timeseries.Panel:
    """Lines or stacked bars over time from SQL."""
    panel = _plot(title, about, unit, width).datasource(source(plugin)).with_target(_Ready(SqlQuery(plugin, sql, True)))
    if not stacked:
        return panel
    stacking = common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A")
    return panel.draw_style(common_models.GraphDrawStyle.BARS).fill_opacity(80).stacking(stacking)


def _plot(title: str, about: str, unit: str, width: int) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    tooltip = (
        common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI).sort(common_models.SortOrder.DESCENDING)
    )
    panel = timeseries.Panel().title(title).description(about).unit(unit).min(0).span(width).height(8)
    return panel.line_width(1).fill_opacity(10).legend(legend).tooltip(tooltip)


def number(title: str, about: str, plugin: str, query: str, *, unit: str = "short", width: int = 6) -> stat.Panel:
    """One big number: PromQL or SQL."""
    last = common.ReduceDataOptions().calcs(["lastNotNull"])
    panel = stat.Panel().title(title).description(about).unit(unit).span(width).height(4)
    panel = panel.datasource(source(plugin)).reduce_options(last)
    if plugin == PROMETHEUS:
        return panel.with_target(_promql([(query, "")])[0])
    return panel.with_target(_Ready(SqlQuery(plugin, query, False)))


def rows(title: str, about: str, plugin: str, sql: str, *, width: int = 12) -> table.Panel:
    """A table from SQL."""
    panel = table.Panel().title(title).description(about).span(width).height(10).show_header(True)
    panel = panel.datasource(source(plugin))
    return panel.with_target(_Ready(SqlQuery(plugin, sql, False)))


def plain(board: dashboard.Dashboard) -> dict[str, Any]:
    """The dashboard as the JSON that Grafana imports, its panels numbered in order."""
    shown: dict[str, Any] = json.loads(JSONEncoder().encode(board.build()))
    for ident, panel in enumerate(shown["panels"], start=1):
        panel["id"] = ident
    return shown
