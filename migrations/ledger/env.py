"""Alembic's door to the ledger's schema.

`migrations.runner` drives it through alembic's API with this folder as `script_location`, and hands over
a connection in `config.attributes["connection"]`. The revisions are plain operations: they import nothing of
billing, so an old revision means the same for ever.
"""

from __future__ import annotations

from alembic import context

context.configure(
    connection=context.config.attributes["connection"], target_metadata=None, transaction_per_migration=True
)
with context.begin_transaction():
    context.run_migrations()
