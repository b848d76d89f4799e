"""The dashboard "engine": latency, throughput, cache and queue, and below them the gateway that feeds it."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards.panels import (
    PROMETHEUS,
    choice_variable,
    gauge,
    lines,
    metric,
    number,
    quantile,
    rate,
    source_variable,
)

_QUANTILES = ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))


def _latency(histogram: str) -> list[tuple[str, str]]:
    return [(quantile(q, histogram), legend) for q, legend in _QUANTILES]


def build() -> dashboard.Dashboard:
    instances = f"label_values({metric('meterhouse_engine_up')}, instance)"
    hits, queries = rate("vllm:prefix_cache_hits_total"), rate("vllm:prefix_cache_queries_total")
    board = (
        dashboard.Dashboard("Meterhouse: engine")
        .uid("meterhouse-engine")
        .description("The inference engine and the gateway in front of it.")
        .tags(["meterhouse"])
        .time("now-1h", "now")
        .refresh("10s")
        .readonly()
        .with_variable(source_variable(PROMETHEUS, "Prometheus"))
        .with_variable(choice_variable("instance", "Instance", PROMETHEUS, instances))
    )
    for panel in (
        number("Engines up", "Engine processes that serve.", PROMETHEUS, gauge("meterhouse_engine_up")),
        number("Generated tokens/s", "Tokens sampled per second.", PROMETHEUS, rate("vllm:generation_tokens_total")),
        number("Open requests", "Admitted and not settled.", PROMETHEUS, gauge("meterhouse_open_requests")),
        number(
            "Engine busy",
            "Share of time the engines compute.",
            PROMETHEUS,
            f"{rate('meterhouse_engine_busy_seconds_total')} / count({metric('meterhouse_engine_up')}"
            '{instance=~"$instance"})',
            unit="percentunit",
        ),
        lines("Time to first token", "Arrival to first token.", _latency("vllm:time_to_first_token_seconds"), unit="s"),
        lines("Inter-token latency", "Between two tokens.", _latency("vllm:inter_token_latency_seconds"), unit="s"),
        lines("Request latency", "Arrival to end.", _latency("vllm:e2e_request_latency_seconds"), unit="s"),
        lines(
            "Throughput",
            "Tokens per second.",
            [(rate("vllm:prompt_tokens_total"), "prompt"), (rate("vllm:generation_tokens_total"), "generated")],
        ),
        lines(
            "Requests in the engine",
            "Running together, and waiting.",
            [(gauge("vllm:num_requests_running"), "running"), (gauge("vllm:num_requests_waiting"), "waiting")],
        ),
        lines(
            "Time in the queue",
            "Before the first computed token.",
            _latency("vllm:request_queue_time_seconds"),
            unit="s",
        ),
        lines(
            "KV cache",
            "Share of blocks in use.",
            [(gauge("vllm:kv_cache_usage_perc", by="instance", how="max"), "{{instance}}")],
            unit="percentunit",
            top=1,
        ),
        lines(
            "Prefix cache hits",
            "Prompt tokens found / looked up.",
            [(f"{hits} / ({queries} > 0)", "hit rate")],
            unit="percentunit",
            top=1,
        ),
        lines(
            "Preemptions and tokens not billed",
            "Sequences preempted, tokens computed again or rejected, per second.",
            [
                (rate("vllm:num_preemptions_total"), "preemptions"),
                (
                    'sum by (kind) (rate(meterhouse_tokens_total{kind=~"recomputed|rejected",instance=~"$instance"}'
                    "[$__rate_interval]))",
                    "{{kind}} tokens",
                ),
            ],
        ),
        lines(
            "Requests ended",
            "Per second, by reason.",
            [(rate("vllm:request_success_total", by="finished_reason"), "{{finished_reason}}")],
        ),
        lines(
            "HTTP responses",
            "Per second, by status.",
            [(rate("meterhouse_http_responses_total", by="status"), "{{status}}")],
        ),
        lines(
            "Refused at the door",
            "Per second, by error code.",
            [(rate("meterhouse_refused_total", by="code"), "{{code}}")],
        ),
        lines(
            "Settled, not yet delivered",
            "Events in the spool, by who still needs them.",
            [(gauge("meterhouse_spool_pending_events", by="consumer"), "{{consumer}}")],
        ),
        lines(
            "Age of the oldest of them",
            "How far the usage store and the ledger are behind.",
            [(gauge("meterhouse_spool_oldest_seconds", by="consumer", how="max"), "{{consumer}}")],
            unit="s",
        ),
        lines("Settlement", "Time to make one durable.", _latency("meterhouse_settle_seconds"), unit="s"),
        lines(
            "Engine restarts and adapters",
            "Restarts in the last hour; LoRA adapters loaded, and on the device.",
            [
                (
                    f'sum (increase({metric("meterhouse_engine_restarts_total")}{{instance=~"$instance"}}[1h]))',
                    "restarts",
                ),
                (gauge("meterhouse_adapters_loaded"), "adapters"),
                (gauge("meterhouse_adapters_resident"), "on the device"),
            ],
        ),
        lines(
            "Adapters coming and going",
            "Per second: into a slot of the device, out of it for another, read from disk.",
            [
                (rate("meterhouse_adapter_loads_total"), "loads"),
                (rate("meterhouse_adapter_evictions_total"), "evictions"),
                (rate("meterhouse_adapter_reads_total"), "reads"),
            ],
        ),
        lines(
            "Failed settlements",
            "Settlements that could not be made durable at once, per second.",
            [(rate("meterhouse_settle_failures_total"), "failures")],
        ),
        lines(
            "Alarms",
            "What should never happen, in the last hour, by kind.",
            [
                (
                    f'sum by (kind) (increase({metric("meterhouse_alarms_total")}{{instance=~"$instance"}}[1h]))',
                    "{{kind}}",
                )
            ],
        ),
        lines(
            "What must be 0 or come back to it",
            "Requests without a charge, events that a consumer refuses, and holds (0 when nothing runs).",
            [
                (gauge("meterhouse_unrated_requests", how="max"), "without a charge"),
                (gauge("meterhouse_stuck_events", by="consumer"), "refused by {{consumer}}"),
                (gauge("meterhouse_holds_open"), "holds"),
            ],
        ),
        lines(
            "Who does not pay",
            "Invoices in dunning, and tenants that are suspended, by dunning or by an operator.",
            [
                (gauge("meterhouse_dunning_invoices", how="max"), "invoices in dunning"),
                (gauge("meterhouse_suspended_tenants", how="max"), "tenants suspended"),
            ],
        ),
        lines(
            "Retries answered without work",
            "Per second, by kind.",
            [(rate("meterhouse_idempotent_answers_total", by="kind"), "{{kind}}")],
        ),
    ):
        board = board.with_panel(panel)
    return board
