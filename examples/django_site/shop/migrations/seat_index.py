"""Make an index of seats, on PostgreSQL without stopping those who write sales meanwhile."""

from typing import Any

from django.db import migrations


def make_index(apps: Any, schema_editor: Any) -> None:
    """Make it."""
    del apps
    concurrently = "CONCURRENTLY" if schema_editor.connection.vendor == "postgresql" else ""
    schema_editor.execute(f"CREATE INDEX {concurrently} sales_of_seat ON shop_sale (seat)")


def drop_index(apps: Any, schema_editor: Any) -> None:
    """Remove it."""
    del apps
    schema_editor.execute("DROP INDEX sales_of_seat")


class Migration(migrations.Migration):
    """CONCURRENTLY is possible only outside a transaction."""

    atomic = False
    dependencies = [("shop", "sales")]
    operations = [migrations.RunPython(make_index, drop_index)]
