"""The command line: start a server, and everything the admin API does.

Knows: which commands there are (`gateway/commands/`, and the bench's). Does not know: how anything is done. Each
command but `serve`, `migrate`, `restore` and `verify` is a call of the admin API, a running server's or, when none
runs, the same app's opened here on the data folder (`gateway.client`). A failure is one sentence on standard error and
exit code 1; wrong use of a command is exit code 2.
"""

from __future__ import annotations

import click

from gateway.bench.commands import bench
from gateway.commands import (
    adapters,
    admins,
    alerts,
    backup,
    budgets,
    credit_notes,
    credits,
    dunning,
    gateways,
    invoices,
    keys,
    margin,
    prices,
    reconcile,
    server,
    store,
    stripe,
    tenants,
    terms,
    usage,
    verification,
)
from gateway.commands.base import Group

SECTIONS: dict[str, tuple[click.Command, ...]] = {
    "Serving": (server.serve, tenants.tenant, keys.key, adapters.adapter, usage.usage, bench),
    "Prices and money": (prices.price, credits.credit, credits.balance, budgets.budget, margin.margin),
    "Terms of a tenant": (terms.discount, terms.commitment, terms.tax),
    "Invoices": (invoices.invoice, credit_notes.credit_note, dunning.dunning, stripe.stripe, stripe.meters),
    "Proof": (reconcile.reconcile, verification.verify, verification.replay, verification.signing_key, admins.audit),
    "Operations": (
        *(admins.admin_key, alerts.alerts, gateways.gateway, backup.backup, backup.restore),
        *(store.archive, store.rollup, server.migrate),
    ),
}


@click.group(cls=Group, sections=SECTIONS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="meterhouse", prog_name="meterhouse")
def main() -> None:
    """Serve models to tenants and turn every token into an exact invoice line."""


if __name__ == "__main__":
    main()
