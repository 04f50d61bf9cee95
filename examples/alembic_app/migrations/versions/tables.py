"""Make the table of orders."""

import sqlalchemy as sa
from alembic import op

revision = "tables"
down_revision = None


def upgrade() -> None:
    """Make it, with some orders in it."""
    orders = op.create_table(
        "orders", sa.Column("id", sa.Integer, primary_key=True), sa.Column("reference", sa.String(40), nullable=False)
    )
    op.bulk_insert(orders, [{"reference": f"order {number}"} for number in range(1, 101)])


def downgrade() -> None:
    """Remove it."""
    op.drop_table("orders")
