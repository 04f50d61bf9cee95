"""Alembic's environment: what `alembic upgrade` runs. The lock is the only thing in it that is not Alembic's own."""

import os

from alembic import context
from sqlalchemy import create_engine

from lockkit.integrations.alembic import migration_lock

url = os.environ.get("DATABASE_URL") or context.config.get_main_option("sqlalchemy.url") or ""


def migrate() -> None:
    """Bring the database to the revision that the command names."""
    engine = create_engine(url)
    with migration_lock(engine, timeout=600) as lease, engine.connect() as connection:
        context.configure(connection=connection, transaction_per_migration=True)
        with context.begin_transaction():
            context.run_migrations()
        print(f"had the lock, token {lease.token}" if lease else "at head already: no lock needed")


if context.is_offline_mode():
    context.configure(url=url, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()
else:
    migrate()
