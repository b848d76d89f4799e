"""An index of the log without its charges, by which the audit is read: of a million events a few are decisions."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(
        "CREATE INDEX IF NOT EXISTS events_decided ON events (seq) WHERE type NOT IN ('usage.rated', 'usage.unrated')"
    )
