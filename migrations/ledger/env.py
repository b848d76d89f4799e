"""Alembic's door to the ledger's schema.

`migrations.runner` drives it through alembic's API with this folder as `script_location`, and hands over
a connection in `config.attributes["connection"]` or a URL in `sqlalchemy.url`. The revisions are plain
operations: they import nothing of billing, so an old revision means the same for ever.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine, pool


def _migrate(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=None, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()


def _run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        _migrate(connection)
        return
    url = context.config.get_main_option("sqlalchemy.url")
    if not url:
        raise ValueError("the ledger's migrations need a connection or sqlalchemy.url")
    engine = create_engine(url, poolclass=pool.NullPool)
    try:
        with engine.connect() as opened:
            _migrate(opened)
    finally:
        engine.dispose()


if context.is_offline_mode():
    raise ValueError("the ledger is migrated online only")
_run()
