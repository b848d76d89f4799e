"""Which gateways write to this ledger, and up to when the usage of each one is stored.

Operational, beside the log: rows are updated and removed. No charge rests on it; only how far an invoice may be cut.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "gateways",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("folder", sa.Text, nullable=False, unique=True),
        sa.Column("watermark_us", sa.BigInteger, nullable=False),
        sa.Column("seen_us", sa.BigInteger, nullable=False),
        sa.Column("started_us", sa.BigInteger, nullable=False),
        if_not_exists=True,  # SQLite commits each statement: a kill before the version is written runs this again
    )
