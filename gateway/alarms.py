"""What should never happen and what must not pile up: counted in the other rooms, shown at a scrape.

Knows: which part counts what, and its name among the metrics. Reads memory and two local files' row counts; it asks no
store anything, so a scrape costs the same whatever is down. Does not know: whom to wake (`dashboards/prometheus`).
"""

from __future__ import annotations

from collections.abc import Iterable

from billing.service import Billing
from gateway.telemetry import Telemetry
from metering.clickhouse import UsageStore
from metering.journal import Journal
from metering.shipper import Drain
from metering.spool import Spool


def sample_books(telemetry: Telemetry, billing: Billing, spool: Spool, journal: Journal) -> None:
    """The alarms of the ledger, the spool and the journal, and the holds and unrated requests that stand."""
    telemetry["meterhouse_holds_open"].set(billing.holds_open())
    telemetry["meterhouse_unrated_requests"].set(billing.unrated_count())
    telemetry["meterhouse_suspended_tenants"].set(billing.suspended_count())
    telemetry["meterhouse_dunning_invoices"].set(billing.dunning_count())
    telemetry.alarms(
        billing.alarms()
        | {
            "spool_conflict": spool.conflicts_total,
            "spool_failure": spool.failures_total,
            "spool_quarantined": spool.quarantined_total,
            "journal_damaged": journal.damaged_total,
            "journal_unknown": journal.unknown_total,
        }
    )


def sample_delivery(telemetry: Telemetry, usage: UsageStore, drains: Iterable[Drain]) -> None:
    """How the way out of the spool goes, and its alarms."""
    buried = 0
    for drain in drains:
        telemetry["meterhouse_stuck_events"].labels(drain.consumer).set(drain.stuck)
        telemetry.counted_elsewhere("meterhouse_delivered_events_total", drain.consumer, drain.delivered_total)
        telemetry.counted_elsewhere("meterhouse_delivery_failures_total", drain.consumer, drain.failures_total)
        buried += drain.buried_total
    telemetry.alarms({"store_conflict": usage.conflicts_total, "dead_letter": buried})
