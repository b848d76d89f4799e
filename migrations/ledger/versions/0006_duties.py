"""What gateways on one ledger share out among themselves, and what is on its way to Stripe's meters and the operator.

Operational, beside the log: rows are updated and removed. No balance and no invoice rests on them.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # SQLite commits each statement: a kill before the version is written runs this again.
    op.create_table(
        "duties",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("until_us", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "meter_rejects",
        sa.Column("identifier", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("event_id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("quantity", sa.Text, nullable=False),
        sa.Column("ts_us", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("tried_us", sa.BigInteger, nullable=True),
        if_not_exists=True,
    )
    op.create_table(
        "alerts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("cause", sa.Text, nullable=False, unique=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("created_us", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("attempts", sa.BigInteger, nullable=False),
        sa.Column("next_us", sa.BigInteger, nullable=False),
        sa.Column("last_error", sa.Text, nullable=False),
        if_not_exists=True,
    )
    op.create_index("alerts_by_next", "alerts", ["state", "next_us"], if_not_exists=True)
