"""The append-only event log of the ledger.

One table; the database itself refuses to change or remove a row, so that a slip in the code or at a
console cannot rewrite history. There is no way down: a ledger is never unmade.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

SQLITE_GUARDS = (
    "CREATE TRIGGER events_are_never_updated BEFORE UPDATE ON events "
    "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
    "CREATE TRIGGER events_are_never_deleted BEFORE DELETE ON events "
    "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END",
)
POSTGRESQL_GUARDS = (
    "CREATE FUNCTION events_are_append_only() RETURNS trigger LANGUAGE plpgsql AS "
    "$$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$",
    "CREATE TRIGGER events_are_never_changed BEFORE UPDATE OR DELETE OR TRUNCATE ON events "
    "FOR EACH STATEMENT EXECUTE FUNCTION events_are_append_only()",
)


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("stream", sa.Text, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("time_us", sa.BigInteger, nullable=False),
        sa.Column("idempotency_key", sa.Text, nullable=True),
        sa.Column("payload_hash", sa.Text, nullable=True),
        sa.Column("result", sa.Text, nullable=True),
        sa.Column("hash", sa.Text, nullable=False),
        sa.UniqueConstraint("stream", "version", name="events_stream_version"),
        sa.UniqueConstraint("idempotency_key", name="events_idempotency_key"),
    )
    guards = POSTGRESQL_GUARDS if op.get_bind().dialect.name == "postgresql" else SQLITE_GUARDS
    for statement in guards:
        op.execute(statement)
