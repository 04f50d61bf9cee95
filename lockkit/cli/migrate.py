"""``lockkit migrate``: creates the tables of a SQL backend, or prints the statements."""

from __future__ import annotations

from lockkit.configuration import profiles, registry
from lockkit.configuration.detached import DetachedHost
from lockkit.errors import ConfigurationError
from lockkit.runtime import drive
from lockkit.validation import plain


def migrate(url: str | None, profile: str | None, *, sql_only: bool) -> None:
    """Create the missing tables and columns of a backend."""
    settings = profiles.resolve(url, profile, {})
    backend, _ = registry.open_backend(settings.url, settings.options, DetachedHost(), source=settings.elsewhere)
    tables = getattr(backend, "tables", None)
    if tables is None:
        message = f"{backend.url} has no tables: give the URL of a database, such as postgresql://host/name"
        raise ConfigurationError(message, backend=backend.url)
    from lockkit.backends.sql import schema as sql_schema  # noqa: PLC0415 - of these backends only

    if sql_only:
        dialect = backend.database.dialect.name  # type: ignore[attr-defined] # beside `tables`
        for table in tables:
            print(f"{table.ddl(dialect)};")
        return
    try:
        for change in drive(sql_schema.migrate(backend.database, tables)):  # type: ignore[attr-defined]
            print(plain(f"{backend.url}: {change}"))
    finally:
        drive(backend.close())
