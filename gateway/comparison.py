"""The comparison of all books by the clock: every hour once it is over and stored everywhere, none left out, again for
a day; and once a day what Stripe has of every invoice of the last months.

Knows: how far it is, which is kept in the ledger's database (`billing.duties`), one row a data folder, as a journal is
one gateway's; what is told as an alert and as a gauge. Does not know: how books are compared. Hours that wait for a
gateway that is gone are compared once it is removed, however long that takes. That something could not be compared is
told like that something parts, and apart from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from billing.alerts import AlertKind
from billing.duties import Duties
from billing.reconcile import INVOICE_AND_PROVIDER, SUMS_AND_EVENTS, Report
from gateway.admin import AdminState
from gateway.admin.comparing import ComparisonStopped, compare_books
from gateway.admin.times import format_time
from gateway.settings import Settings
from gateway.stores import Stores
from gateway.telemetry import Telemetry
from metering.counts import HOUR_US, hour_of

DAY_US = 24 * HOUR_US
AGAIN_US = 26 * HOUR_US  # what was compared lately is compared again: much of what goes wrong does so a little later
ASKED_US = 90 * DAY_US  # of so many days Stripe is asked for every invoice, once a day
BEHIND_US = 26 * HOUR_US
LEASE_US = HOUR_US
TOLD = 20  # differences named in one alert


class Compared(msgspec.Struct, frozen=True):
    """How far a gateway's comparison is."""

    until_us: int  # every hour before was compared
    asked_us: int = 0  # when Stripe was last asked for every invoice


class Comparison:
    """One gateway's. `run` again and again; `compared` is told of what somebody asked for, too."""

    def __init__(
        self,
        settings: Settings,
        stores: Stores,
        admin: AdminState,
        telemetry: Telemetry,
        clock_us: Callable[[], int],
        stopping: Callable[[], bool],
    ) -> None:
        self._gateway_id = settings.gateway_id
        self._folder = stores.folder
        self._duties = Duties(stores.events)
        self._admin = admin
        self._alerts = admin.alerts
        self._telemetry = telemetry
        self._clock_us = clock_us
        self._stopping = stopping
        admin.compared = self.compared
        telemetry["meterhouse_reconcile_timestamp_seconds"].set(0)
        telemetry["meterhouse_reconcile_until_timestamp_seconds"].set(0)

    def run(self) -> None:
        """Compare the hours that are over and of which every gateway has stored everything: nothing of them is on its
        way. What keeps it from its end is an alert, and raised."""
        try:
            self._run()
        except ComparisonStopped:
            return
        except Exception as error:
            self._tell(AlertKind.NOT_COMPARED, {"reason": str(error) or type(error).__name__})
            raise
        finally:
            self._look_behind()

    def _run(self) -> None:
        now_us = self._clock_us()
        stored_us = [row.watermark_us for row in self._admin.gateways.all()]
        end_us = hour_of(min([now_us, *stored_us]))
        if end_us <= 0:
            return
        duty = self._duties.take(f"reconcile:{self._folder}", self._folder, now_us, LEASE_US)
        if duty is None:  # another process on this folder: it has it
            return
        before = msgspec.json.decode(duty.state, type=Compared) if duty.state else None
        if before is None:
            before = Compared(max(0, end_us - AGAIN_US))
            duty = self._duties.note(duty, msgspec.json.encode(before).decode(), now_us + LEASE_US)
        asks = now_us - before.asked_us >= DAY_US
        report = compare_books(
            self._admin,
            max(0, min(before.until_us, end_us - AGAIN_US)),
            end_us,
            stripe_from_us=now_us - ASKED_US if asks else None,
            stopping=self._stopping,
        )
        away = any(one.between == INVOICE_AND_PROVIDER and one.passing for one in report.missing)
        compared = Compared(max(before.until_us, end_us), now_us if asks and not away else before.asked_us)
        self._duties.note(duty, msgspec.json.encode(compared).decode(), now_us + LEASE_US)

    def _look_behind(self) -> None:
        """How far it is; an alert a day while that is long ago."""
        duty = self._duties.find(f"reconcile:{self._folder}")
        if duty is None or not duty.state:
            return
        until_us = msgspec.json.decode(duty.state, type=Compared).until_us
        self._telemetry["meterhouse_reconcile_until_timestamp_seconds"].set(until_us // 1_000_000)
        if self._clock_us() - until_us > BEHIND_US:
            slowest = min(self._admin.gateways.all(), key=lambda row: row.watermark_us, default=None)
            behind = None if slowest is None else slowest.id
            self._tell(AlertKind.NOT_COMPARED, {"compared_until": format_time(until_us), "slowest_gateway": behind})

    def compared(self, report: Report) -> None:
        """All books were compared, by the clock or because somebody asked."""
        self._telemetry["meterhouse_reconcile_differences"].set(len(report.differences))
        self._telemetry["meterhouse_reconcile_missing"].set(len(report.missing))
        drifts = sum(one.between == SUMS_AND_EVENTS for one in report.differences)
        self._telemetry["meterhouse_rollup_drift_hours"].set(drifts)
        self._telemetry["meterhouse_reconcile_timestamp_seconds"].set(self._clock_us() // 1_000_000)
        if report.differences:
            self._tell_differences(report)
        if report.missing:
            told = [{"between": one.between, "reason": one.reason} for one in report.missing[:TOLD]]
            self._tell(AlertKind.NOT_COMPARED, {"count": len(report.missing), "missing": told})

    def _tell_differences(self, report: Report) -> None:
        """The same difference is one alert a day, however often it is found."""
        told = [
            {
                "between": one.between,
                "tenant": one.tenant,
                "model": one.model,
                "hour": None if one.hour_us is None else format_time(one.hour_us),
                "invoice": one.invoice_id,
                "left": one.left,
                "right": one.right,
                "event_ids": one.event_ids,
            }
            for one in report.differences[:TOLD]
        ]
        now_us = self._clock_us()
        parts = hashlib.sha256(repr(report.differences).encode()).hexdigest()
        cause = f"reconcile:{self._folder}:{now_us // DAY_US}:{parts}"
        data = {"gateway": self._gateway_id, "count": len(report.differences), "differences": told}
        self._alerts.tell(AlertKind.RECONCILE, cause, data, now_us)

    def _tell(self, kind: AlertKind, data: dict[str, object]) -> None:
        """The same is one alert a day."""
        now_us = self._clock_us()
        what = hashlib.sha256(repr(sorted(data.items())).encode()).hexdigest()
        cause = f"{kind}:{self._folder}:{now_us // DAY_US}:{what}"
        self._alerts.tell(kind, cause, {"gateway": self._gateway_id, **data}, now_us)
