"""Make an index of the orders' references, on PostgreSQL without stopping those who write orders meanwhile."""

from alembic import op

revision = "reference_index"
down_revision = "tables"


def upgrade() -> None:
    """Make it; CONCURRENTLY is possible only outside a transaction."""
    with op.get_context().autocommit_block():
        op.create_index("orders_reference", "orders", ["reference"], postgresql_concurrently=True)


def downgrade() -> None:
    """Remove it."""
    with op.get_context().autocommit_block():
        op.drop_index("orders_reference", "orders", postgresql_concurrently=True)
