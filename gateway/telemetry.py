"""Metrics: their names, labels and meaning, and the one object that moves them.

Knows: every metric the server exposes (`METRICS`; dashboards and rules are built from it).
Does not know: tenants. No label carries a tenant or an adapter's name: `/metrics` is not behind a tenant's key, and
the number of series stays fixed. Usage per tenant is in ClickHouse.

Token counters are sums of the differences between journalled steps, so they equal the sum of all usage exactly.
The names starting with `vllm:` are vLLM's, so that its dashboards and load generators work here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from engine.types import Cost, EngineStats, TokenCounts

disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types; they are series nobody reads

_LATENCY_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKEN_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_FSYNC_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class MetricSpec(msgspec.Struct, frozen=True):
    """One metric: its full exposed name (counters end in `_total`), kind, help, labels, histogram bounds."""

    name: str
    kind: str  # counter | gauge | histogram
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("vllm:num_requests_running", "gauge", "Sequences in the running batch.", ("model_name",)),
    MetricSpec("vllm:num_requests_waiting", "gauge", "Sequences waiting to be scheduled.", ("model_name",)),
    MetricSpec("vllm:kv_cache_usage_perc", "gauge", "Share of KV-cache blocks in use, 0 to 1.", ("model_name",)),
    MetricSpec("vllm:num_preemptions_total", "counter", "Sequences preempted.", ("model_name",)),
    MetricSpec("vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked up in the cache.", ("model_name",)),
    MetricSpec("vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.", ("model_name",)),
    MetricSpec("vllm:prompt_tokens_total", "counter", "Prompt tokens computed or reused.", ("model_name",)),
    MetricSpec("vllm:generation_tokens_total", "counter", "Tokens sampled.", ("model_name",)),
    MetricSpec(
        "vllm:request_success_total", "counter", "Requests ended, by reason.", ("model_name", "finished_reason")
    ),
    MetricSpec("vllm:time_to_first_token_seconds", "histogram", "Arrival to first token.", ("model_name",), _LATENCY_S),
    MetricSpec("vllm:inter_token_latency_seconds", "histogram", "Between tokens.", ("model_name",), _TOKEN_GAP_S),
    MetricSpec("vllm:e2e_request_latency_seconds", "histogram", "Arrival to end.", ("model_name",), _LATENCY_S),
    MetricSpec("vllm:request_queue_time_seconds", "histogram", "Time in the queue.", ("model_name",), _LATENCY_S),
    MetricSpec("vllm:request_prompt_tokens", "histogram", "Prompt tokens of a request.", ("model_name",), _TOKENS),
    MetricSpec("vllm:request_generation_tokens", "histogram", "Tokens sampled for it.", ("model_name",), _TOKENS),
    MetricSpec("meterhouse_requests_total", "counter", "Requests settled.", ("endpoint", "outcome")),
    MetricSpec("meterhouse_tokens_total", "counter", "Tokens journalled as done, by kind.", ("kind",)),
    MetricSpec("meterhouse_settled_tokens_total", "counter", "Tokens in settled events, by kind.", ("kind",)),
    MetricSpec(
        "meterhouse_settled_compute_seconds_total",
        "counter",
        "Engine time in settled events, by outcome.",
        ("outcome",),
    ),
    MetricSpec(
        "meterhouse_settled_kv_block_seconds_total",
        "counter",
        "KV-cache blocks held times how long, in settled events, by outcome.",
        ("outcome",),
    ),
    MetricSpec("meterhouse_refused_total", "counter", "Requests refused at the door, by error code.", ("code",)),
    MetricSpec("meterhouse_http_responses_total", "counter", "HTTP responses, by status.", ("status",)),
    MetricSpec("meterhouse_open_requests", "gauge", "Requests admitted and not yet settled."),
    MetricSpec("meterhouse_settle_seconds", "histogram", "Time to make a settlement durable.", (), _FSYNC_S),
    MetricSpec("meterhouse_settle_failures_total", "counter", "Settlements that could not be made durable at once."),
    MetricSpec("meterhouse_spool_pending_events", "gauge", "Settled events not yet delivered.", ("consumer",)),
    MetricSpec("meterhouse_spool_oldest_seconds", "gauge", "Age of the oldest of them, 0 if none.", ("consumer",)),
    MetricSpec("meterhouse_spool_writable", "gauge", "1 while new settlements can be written."),
    MetricSpec("meterhouse_spool_bytes", "gauge", "Bytes of settled events that wait, on disk and in memory."),
    MetricSpec("meterhouse_journal_writable", "gauge", "1 while new requests can be journalled."),
    MetricSpec("meterhouse_journal_bytes", "gauge", "Bytes of all journal segments."),
    MetricSpec("meterhouse_delivered_events_total", "counter", "Events a consumer has taken.", ("consumer",)),
    MetricSpec("meterhouse_delivery_failures_total", "counter", "Deliveries to be tried again.", ("consumer",)),
    MetricSpec("meterhouse_stuck_events", "gauge", "Events a consumer refuses and nothing buries.", ("consumer",)),
    MetricSpec("meterhouse_unrated_requests", "gauge", "Requests served without a charge: they need a price."),
    MetricSpec("meterhouse_suspended_tenants", "gauge", "Tenants that are suspended."),
    MetricSpec("meterhouse_dunning_invoices", "gauge", "Invoices in dunning: their payment failed."),
    MetricSpec("meterhouse_holds_open", "gauge", "Holds on balances; 0 when nothing runs."),
    MetricSpec("meterhouse_alarms_total", "counter", "What should never happen, by kind.", ("kind",)),
    MetricSpec("meterhouse_reconcile_differences", "gauge", "Places where the books part, by the last comparison."),
    MetricSpec("meterhouse_reconcile_missing", "gauge", "Comparisons that could not be made, by the last attempt."),
    MetricSpec("meterhouse_reconcile_until_timestamp_seconds", "gauge", "Every hour before was compared, 0: unknown."),
    MetricSpec("meterhouse_rollup_drift_hours", "gauge", "Hours whose sums are not their events', by the same."),
    MetricSpec("meterhouse_reconcile_timestamp_seconds", "gauge", "When the books were last compared, 0: not yet."),
    MetricSpec("meterhouse_alerts", "gauge", "Alerts in the outbox, by state.", ("state",)),
    MetricSpec("meterhouse_webhooks_total", "counter", "Messages of Stripe, by what became of them.", ("outcome",)),
    MetricSpec("meterhouse_meter_events_total", "counter", "Events for Stripe's meters, by outcome.", ("outcome",)),
    MetricSpec("meterhouse_engine_up", "gauge", "1 while the engine process serves."),
    MetricSpec("meterhouse_engine_restarts_total", "counter", "Times the engine process was started again."),
    MetricSpec("meterhouse_engine_steps_total", "counter", "Engine steps."),
    MetricSpec("meterhouse_engine_busy_seconds_total", "counter", "Time the engine spent in steps."),
    MetricSpec("meterhouse_adapters_loaded", "gauge", "LoRA adapters that the engine knows."),
    MetricSpec("meterhouse_adapters_resident", "gauge", "Of these, in a slot on the device."),
    MetricSpec("meterhouse_adapter_loads_total", "counter", "Times an adapter came into a slot."),
    MetricSpec("meterhouse_adapter_evictions_total", "counter", "Times an adapter left its slot for another."),
    MetricSpec("meterhouse_adapter_reads_total", "counter", "Times an adapter was read from disk."),
    MetricSpec("meterhouse_probe_tokens_total", "counter", "Tokens computed for readiness probes; billed to nobody."),
    MetricSpec("meterhouse_probe_compute_seconds_total", "counter", "Engine time that readiness probes took."),
    MetricSpec("meterhouse_idempotent_answers_total", "counter", "Retries answered without work.", ("kind",)),
    MetricSpec("meterhouse_build_info", "gauge", "1, with the version and the base model.", ("version", "model_name")),
)

ALARM_KINDS = (
    "usage_conflict",  # a second content of an event id came to the ledger; the first stands
    "usage_unrated",  # usage came to the ledger and no price was found
    "hold_exceeded",  # a request cost more than was held for it
    "lease_lost",  # this gateway was away for so long that others may have spent what it had leased
    "spool_conflict",  # an event id was settled twice, with different content
    "spool_failure",  # the disk refused a commit of settlements, or a read
    "spool_quarantined",  # a spool row is not what was settled, or is lost; counted from the file's beginning
    "journal_damaged",  # a stretch of the journal cannot be read; counted from the folder's beginning
    "journal_unknown",  # the engine told of a request that is not open
    "store_conflict",  # a second content of an event id came to the usage store
    "dead_letter",  # the usage store can never take an event
)
"""Kinds of `meterhouse_alarms_total`; all are shown from the start, so that the first one is a growth."""

TOKEN_KINDS = ("prompt", "cached", "completion", "reasoning", "recomputed", "rejected")

_KINDS: dict[str, Callable[..., Any]] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


class Telemetry:
    """All metrics of one gateway in a registry of its own (two gateways in one process do not meet)."""

    def __init__(self, model_name: str, version: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self._metrics: dict[str, Any] = {}
        for spec in METRICS:
            bounds = {"buckets": spec.buckets} if spec.buckets else {}
            metric = _KINDS[spec.kind](spec.name, spec.help, spec.labels, registry=self.registry, **bounds)
            self._metrics[spec.name] = metric.labels(model_name) if spec.labels == ("model_name",) else metric
        self._metrics["meterhouse_build_info"].labels(version, model_name).set(1)
        self._tokens = [self._metrics["meterhouse_tokens_total"].labels(kind) for kind in TOKEN_KINDS]
        self._settled = [self._metrics["meterhouse_settled_tokens_total"].labels(kind) for kind in TOKEN_KINDS]
        self._totals: dict[tuple[str, str], int] = {}
        self.alarms(dict.fromkeys(ALARM_KINDS, 0))
        self._stats = EngineStats()
        self._restarts = 0
        self._samplers: list[Callable[[], None]] = []

    def __getitem__(self, name: str) -> Any:
        """The prometheus object of that name, its `model_name` filled in where that is its only label."""
        return self._metrics[name]

    def counted(self, difference: TokenCounts) -> None:
        """Add what one step did, after it was journalled."""
        if difference.prompt:
            self["vllm:prompt_tokens_total"].inc(difference.prompt)
        if difference.completion:
            self["vllm:generation_tokens_total"].inc(difference.completion)
        for counter, amount in zip(self._tokens, msgspec.structs.astuple(difference), strict=True):
            if amount:
                counter.inc(amount)

    def settled(self, endpoint: str, outcome: str, finished_reason: str, counts: TokenCounts, cost: Cost) -> None:
        """One request ended and is durable."""
        self["meterhouse_requests_total"].labels(endpoint, outcome).inc()
        self["vllm:request_success_total"].labels(self.model_name, finished_reason).inc()
        self["vllm:request_prompt_tokens"].observe(counts.prompt)
        self["vllm:request_generation_tokens"].observe(counts.completion)
        for counter, amount in zip(self._settled, msgspec.structs.astuple(counts), strict=True):
            if amount:
                counter.inc(amount)
        for name, spent_us in (
            ("meterhouse_settled_compute_seconds_total", cost.compute_us),
            ("meterhouse_settled_kv_block_seconds_total", cost.kv_block_us),
        ):
            if spent_us > 0:
                self[name].labels(outcome).inc(spent_us / 1e6)

    def probed(self, counts: TokenCounts, cost: Cost) -> None:
        """A readiness probe ended."""
        self["meterhouse_probe_tokens_total"].inc(counts.prompt + counts.completion)
        self["meterhouse_probe_compute_seconds_total"].inc(max(0, cost.compute_us) / 1e6)

    def engine(self, stats: EngineStats) -> None:
        """Take the engine's gauges and the growth of its counters, which begin at 0 when it is started again."""
        before = self._stats if stats.steps_total >= self._stats.steps_total else EngineStats()
        self._stats = stats
        self.engine_load(stats)
        self["meterhouse_adapters_loaded"].set(stats.adapters_loaded)
        self["meterhouse_adapters_resident"].set(stats.adapters_resident)
        for name, grown in (
            ("vllm:num_preemptions_total", stats.preemptions_total - before.preemptions_total),
            ("vllm:prefix_cache_queries_total", stats.prefix_queries_total - before.prefix_queries_total),
            ("vllm:prefix_cache_hits_total", stats.prefix_hits_total - before.prefix_hits_total),
            ("meterhouse_adapter_loads_total", stats.adapter_loads_total - before.adapter_loads_total),
            ("meterhouse_adapter_evictions_total", stats.adapter_evictions_total - before.adapter_evictions_total),
            ("meterhouse_adapter_reads_total", stats.adapter_reads_total - before.adapter_reads_total),
            ("meterhouse_engine_steps_total", stats.steps_total - before.steps_total),
            ("meterhouse_engine_busy_seconds_total", (stats.busy_us_total - before.busy_us_total) / 1e6),
        ):
            if grown > 0:
                self[name].inc(grown)

    def engine_load(self, stats: EngineStats) -> None:
        """What the engine has in hand. An engine that died has nothing: its last step does not tell that."""
        self["vllm:num_requests_running"].set(stats.running)
        self["vllm:num_requests_waiting"].set(stats.waiting)
        self["vllm:kv_cache_usage_perc"].set(stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0)

    def engine_state(self, up: bool, restarts: int) -> None:
        """Whether the engine serves, and how often it was started again."""
        self["meterhouse_engine_up"].set(1 if up else 0)
        if restarts > self._restarts:
            self["meterhouse_engine_restarts_total"].inc(restarts - self._restarts)
            self._restarts = restarts

    def alarms(self, totals: Mapping[str, int]) -> None:
        """Take what other parts have counted since their start, by kind."""
        for kind, total in totals.items():
            self.counted_elsewhere("meterhouse_alarms_total", kind, total)

    def counted_elsewhere(self, name: str, label: str, total: int) -> None:
        """Bring a counter with one label to what another part has counted since its start."""
        grown = total - self._totals.get((name, label), 0)
        counter = self[name].labels(label)
        if grown > 0:
            counter.inc(grown)
        self._totals[name, label] = total

    def sample_with(self, sampler: Callable[[], None]) -> None:
        """Call `sampler` before every scrape; it sets gauges that are cheap to read and costly to keep."""
        self._samplers.append(sampler)

    def exposition(self) -> bytes:
        """The text format of Prometheus."""
        for sampler in self._samplers:
            sampler()
        return generate_latest(self.registry)
