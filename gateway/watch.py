"""What a server watches and carries besides serving: alerts, the hourly comparison of all books, meters, invoices.

Knows: what is looked at how often, and which finding is which alert. Does not know how anything is compared, sent or
kept. Every round may run in several gateways, and be killed anywhere: what must not happen twice is kept from that in
the ledger's database (`billing.duties`, an alert's cause).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from billing.alerts import AlertKind, Alerts
from billing.audit import Audit
from billing.automation import Automation, InvoiceAutomation
from billing.errors import ExportError
from billing.invoice import Invoice
from billing.meters import MeterExport, Progress
from billing.modes import ExportMode
from billing.stripe import StripeExporter
from billing.webhooks import StripeWebhooks
from gateway.admin import AdminState
from gateway.admin.times import format_time
from gateway.alerting import Delivery, signer
from gateway.comparison import Comparison
from gateway.rounds import Round
from gateway.settings import Settings, SettingsError
from gateway.stores import Stores
from gateway.telemetry import Telemetry
from metering.counts import HOUR_US

FEED_S = 2.0
DELIVERY_S = 2.0
LAG_S = 15.0
METERS_S = 10.0
INVOICES_S = 60.0
FIRST_COMPARISON_S = 60.0
DAY_US = 24 * HOUR_US
PRUNE_US = HOUR_US


def money_parts(settings: Settings, stores: Stores, clock_us: Callable[[], int]) -> dict[str, Any]:
    """What the admin API needs of the ways to Stripe and to the operator. Raises `SettingsError`."""
    if settings.alert_url is not None:
        try:
            signer(settings.alert_secret or "")
        except ValueError as error:
            raise SettingsError(str(error)) from None
    exporter = StripeExporter(settings.stripe_api_key, settings.stripe_api_base)
    alerts = Alerts(stores.events, sends=settings.alert_url is not None)
    if settings.invoice_automation == Automation.EXPORT:
        if settings.export_mode == ExportMode.METER:
            raise SettingsError("invoice_automation: export is for export_mode invoice: meters are Stripe's to invoice")
        if settings.stripe_api_key is None:
            raise SettingsError("invoice_automation: export needs stripe_api_key")
    automation = InvoiceAutomation(
        stores.events,
        stores.billing,
        stores.usage,
        exporter,
        holder=stores.folder,
        grace_us=int(settings.invoice_grace_s * 1_000_000),
        clock_us=clock_us,
    )
    meters = MeterExport(
        stores.events,
        stores.billing,
        exporter,
        holder=stores.folder,
        mode=ExportMode(settings.export_mode),
        alerts=alerts,
        clock_us=clock_us,
    )
    exporter.refusal = lambda invoice: stores.billing.export_refusal(invoice) or meters.refusal(invoice)
    exporter.on_failure = lambda invoice, error: export_failed(alerts, invoice, error, clock_us())
    secrets = [part.strip() for part in (settings.stripe_webhook_secret or "").split(",") if part.strip()]
    webhooks = StripeWebhooks(stores.billing, exporter, secrets) if secrets else None
    return {
        "exporter": exporter,
        "webhooks": webhooks,
        "meters": meters,
        "automation": automation,
        "alerts": alerts,
        "audit": Audit(stores.events),
    }


def export_failed(alerts: Alerts, invoice: Invoice, error: ExportError, now_us: int) -> None:
    """An invoice did not get to Stripe: one alert an hour."""
    data = {"invoice": invoice.id, "tenant": invoice.tenant, "reason": str(error)}
    alerts.tell(AlertKind.EXPORT_FAILED, f"export:{invoice.id}:{now_us // HOUR_US}", data, now_us)


class Watch:
    """All rounds of one gateway. `stop` it before the stores close."""

    def __init__(
        self,
        settings: Settings,
        stores: Stores,
        admin: AdminState,
        telemetry: Telemetry,
        clock_us: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._stores = stores
        self._admin = admin
        self._alerts = admin.alerts
        self._telemetry = telemetry
        self._clock_us = clock_us
        self._ending = threading.Event()
        self._pruned_us = 0
        self.comparison = Comparison(settings, stores, admin, telemetry, clock_us, self._ending.is_set)
        telemetry.sample_with(self._sample)
        self.rounds = [
            Round("alert-feed", self._follow, FEED_S),
            Round("spool-lag", self._look_at_spool, LAG_S),
            Round("meters", self._meter, METERS_S),  # in every mode: what a switch left behind is delivered too
        ]
        if settings.alert_url is not None:
            self.rounds.append(Round("alert-delivery", self._delivery(settings.alert_url).run, DELIVERY_S))
        if settings.reconcile_every_s > 0:
            first_s = min(FIRST_COMPARISON_S, settings.reconcile_every_s)
            self.rounds.append(Round("reconcile", self.comparison.run, settings.reconcile_every_s, first_s=first_s))
        self._automation = Automation(settings.invoice_automation)
        if self._automation is not Automation.OFF:
            self.rounds.append(Round("invoices", self._invoice, INVOICES_S))

    def start(self) -> None:
        for each in self.rounds:
            each.start()

    def stop(self) -> None:
        """Returns when no round is under way; again does nothing."""
        self._ending.set()
        for each in self.rounds:
            each.end()
        for each in self.rounds:
            each.stop()

    # -- rounds -----------------------------------------------------------------------------------

    def _delivery(self, url: str) -> Delivery:
        secret = self._settings.alert_secret or ""
        return Delivery(
            self._stores.events,
            self._alerts,
            url,
            secret,
            holder=self._stores.folder,
            clock_us=self._clock_us,
            stopping=self._ending.is_set,
        )

    def _follow(self) -> None:
        now_us = self._clock_us()
        self._alerts.follow(self._stores.folder, now_us, self._stores.billing.suspended_tenants)
        if now_us - self._pruned_us > PRUNE_US:  # here, not where they are sent: they grow without an alert_url too
            self._alerts.prune(now_us)
            self._pruned_us = now_us

    def _look_at_spool(self) -> None:
        """Settlements that wait too long for a store: one alert an hour and store."""
        now_us = self._clock_us()
        for drain in (self._stores.recorder, self._stores.shipper):
            oldest_us = self._stores.spool.oldest_unacked_us(drain.consumer)
            if oldest_us is None or now_us - oldest_us < self._settings.alert_spool_lag_s * 1_000_000:
                continue
            data = {
                "gateway": self._settings.gateway_id,
                "consumer": drain.consumer,
                "oldest": format_time(oldest_us),
                "events": self._stores.spool.count(drain.consumer),
                "reason": drain.last_error or "",
            }
            cause = f"lag:{self._stores.folder}:{drain.consumer}:{now_us // HOUR_US}"
            self._alerts.tell(AlertKind.SPOOL_LAG, cause, data, now_us)

    def _meter(self) -> None:
        """Deliver to Stripe's meters. That it cannot go on is an alert, as is what is put aside (`billing.meters`)."""
        now_us = self._clock_us()
        try:
            progress = self._admin.meters.run(stopping=self._ending.is_set)
        except ExportError as error:
            data = {"gateway": self._settings.gateway_id, "reason": str(error)}
            self._alerts.tell(AlertKind.EXPORT_FAILED, f"meters:{now_us // HOUR_US}", data, now_us)
            raise
        if progress is not None:
            self._metered(progress)

    def _metered(self, progress: Progress) -> None:
        for outcome, count in (("delivered", progress.delivered), ("put_aside", progress.put_aside)):
            if count:
                self._telemetry["meterhouse_meter_events_total"].labels(outcome).inc(count)

    def _invoice(self) -> None:
        """Draft what is due, and carry it on as far as is asked. What fails is an alert a day, until it does not."""
        slowest = min(self._admin.gateways.all(), key=lambda row: row.watermark_us, default=None)
        if slowest is None:
            return
        outcome = self._admin.automation.run(self._automation, slowest.watermark_us, stopping=self._ending.is_set)
        now_us = self._clock_us()
        for failure in outcome.failures if outcome is not None else []:
            if failure.step == "export":
                continue  # told as what every export that fails is
            data = {
                "tenant": failure.tenant,
                "period_start": format_time(failure.period.start_us),
                "period_end": format_time(failure.period.end_us),
                "step": failure.step,
                "invoice": failure.invoice_id or None,
                "reason": failure.reason,
                "behind": {"gateway": slowest.id, "stored_until": format_time(slowest.watermark_us)},
            }
            cause = f"invoice:{failure.tenant}:{failure.period.start_us}:{failure.step}:{now_us // DAY_US}"
            self._alerts.tell(AlertKind.INVOICE_FAILED, cause, data, now_us)

    def _sample(self) -> None:
        for state, count in self._alerts.counts().items():
            self._telemetry["meterhouse_alerts"].labels(state).set(count)
