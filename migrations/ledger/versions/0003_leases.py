"""Leases: which part of a tenant's balance, or of a budget's window, is whose to spend.

Operational, beside the log: rows are updated and removed. `lease_holders` has a row for each gateway that admits
requests, with the epoch that fences it and the time from which others may take what it leased; `leases` one for each of
its parts, with what it asks the others for. Amounts are whole numbers of femto-units, as text.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # SQLite commits each statement: a kill before the version is written runs this again.
    op.create_table(
        "lease_holders",
        sa.Column("gateway", sa.Text, primary_key=True),
        sa.Column("folder", sa.Text, nullable=False),
        sa.Column("epoch", sa.Text, nullable=False),
        sa.Column("seen_us", sa.BigInteger, nullable=False),
        sa.Column("expires_us", sa.BigInteger, nullable=False),
        sa.Column("recorded_us", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "leases",
        sa.Column("quota", sa.Text, primary_key=True),
        sa.Column("gateway", sa.Text, primary_key=True),
        sa.Column("amount_femto", sa.Text, nullable=False),
        sa.Column("wants_femto", sa.Text, nullable=False),
        sa.Column("wanted_us", sa.BigInteger, nullable=False),
        if_not_exists=True,
    )
