"""``lockkit backends``, ``ping``, ``migrate`` and ``limit``: what a backend can do, and what is set up there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import lockkit
from lockkit.backend import Capabilities
from lockkit.cli.inspection import print_table
from lockkit.cli.output import print_json, refuse_private
from lockkit.configuration import profiles, registry
from lockkit.configuration.registry import DetachedHost
from lockkit.errors import ConfigurationError
from lockkit.runtime import drive
from lockkit.validation import plain


@dataclass(slots=True)
class _Row:
    """One backend."""

    schemes: list[str]  # its URL schemes
    mode: str | None  # which of their modes it is, where they have several
    capabilities: Capabilities | None  # none if it cannot be loaded
    problem: str | None = None  # why not, and what to install

    def urls(self) -> list[str]:
        return [*(f"{scheme}:" for scheme in self.schemes), *([] if self.mode is None else [f"mode={self.mode}"])]

    def as_dict(self) -> dict[str, Any]:
        capabilities = None if self.capabilities is None else dataclasses.asdict(self.capabilities)
        return {"schemes": self.schemes, "mode": self.mode, "available": self.problem is None, "problem": self.problem,
                "capabilities": capabilities}  # fmt: skip


def show_backends(*, as_json: bool) -> None:
    """Print every backend that is installed."""
    rows = _rows()
    if as_json:
        print_json([row.as_dict() for row in rows])
        return
    table = _table([row for row in rows if row.capabilities is not None])
    print_table(table, follow_columns=True, optional=("notes", "lists locks", "shortest ttl", "survives", "queue"))
    console = Console()
    for row in rows:
        where = ", ".join(row.schemes) + (f" (mode={row.mode})" if row.mode is not None else "")
        if row.capabilities is not None:
            what = f"{row.capabilities.caveat} Tokens: {row.capabilities.token_source}."
        else:
            what = f"not available: {row.problem}"
        console.print()
        console.print(Text(plain(f"{where}: {what}")))


def _rows() -> list[_Row]:
    """All backends, each in one row with all its schemes."""
    rows: dict[object, _Row] = {}
    for scheme in registry.schemes():
        for mode in registry.modes(scheme):
            try:
                backend_class = registry.find(scheme, mode)
                backend_class.driver_options()  # of SQL, loading the class needs no driver
            except ConfigurationError as error:
                builtin = registry.BUILTIN.get(scheme)
                key: object = scheme if builtin is None else (builtin.target, mode)
                row = rows.setdefault(key, _Row([], mode, None, str(error)))
            else:
                row = rows.setdefault(backend_class, _Row([], mode, backend_class.capabilities))
            row.schemes.append(scheme)
    return list(rows.values())


def _table(rows: list[_Row]) -> Table:
    table = Table(
        "URL",
        "excludes",
        "a dead holder's lock is free",
        "shortest ttl",
        "queue",
        "waiters",
        "lists locks",
        "survives",
        "notes",
    )
    for row in rows:
        if row.capabilities is None:
            continue
        capabilities = row.capabilities
        survives = {"a lost node": capabilities.survives_node_loss, "lost data": capabilities.survives_data_loss}
        table.add_row(
            "\n".join(row.urls()),
            f"one {capabilities.scope}" if capabilities.scope != "network" else "all clients",
            _CRASH_RELEASE[capabilities.crash_release],
            f"{capabilities.min_ttl:g} s",
            "fair" if capabilities.fair else "unfair",
            {"push": "woken", "poll": "polling"}[capabilities.wakeup],
            "yes" if capabilities.listing else "no",
            "\n".join(what for what, survived in survives.items() if survived) or "neither",
            "yes" if capabilities.notes else "no",
        )
    return table


_CRASH_RELEASE = {
    "ttl": "after the ttl",
    "session": "when its session ends",
    "connection": "when its connection ends",
    "process": "at once",
}


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


NONE = "none"
"""What stands for "no cap" on the command line."""


def limit(name: str, cap: str | None, url: str | None, profile: str | None, *, as_json: bool) -> None:
    """Show or change the cap of a semaphore."""
    with lockkit.connect(url, profile=profile) as client:
        refuse_private(client)
        semaphore = client.semaphore(name, limit=1)
        if cap is not None:
            semaphore.set_cap(None if cap == NONE else int(cap))
        now = semaphore.cap()
        if as_json:
            print_json({"name": name, "backend": client.url, "cap": now})
        elif now is None:
            print(plain(f"semaphore {name!r} at {client.url} has no cap: each client counts to its own limit"))
        else:
            pauses = ": new permits are paused" if now == 0 else ""
            print(plain(f"semaphore {name!r} at {client.url} is capped at {now}{pauses}"))
