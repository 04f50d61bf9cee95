"""``lockkit list``, ``lockkit wait`` and ``lockkit ping``: look at a backend and its locks, and change nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rich.cells import cell_len
from rich.table import Column, Table
from rich.text import Text

import lockkit
from lockkit import validation
from lockkit.backend import Holder
from lockkit.cli.inspection import holders_of, kind_text, local_time, print_table
from lockkit.cli.output import in_options, print_json, refuse_private, say
from lockkit.cli.status import Status
from lockkit.engine.lookup import SPACE_OF, Kind
from lockkit.errors import BackendUnavailable
from lockkit.runtime import BlockingRuntime, drive, monotonic
from lockkit.sync import Client
from lockkit.units import Seconds
from lockkit.validation import plain

LOOK_SECONDS_MIN = 0.05
LOOK_SECONDS_MAX = 1.0
"""Pauses of ``lockkit wait``; they grow. Longer notices a free lock later, or not at all; shorter asks the server more
often."""

OUTAGE_SECONDS = 30.0
"""How long ``lockkit wait`` goes on without one answer. Longer reports an outage later; shorter ends a wait of hours
when a server restarts."""


_OPTIONAL = ("waiters", "held since", "kind", "seconds left", "token")
"""Columns that a narrow terminal goes without, in this order: the name stays whole, and who holds it is told."""


def show_locks(prefix: str, url: str | None, profile: str | None, *, as_json: bool) -> None:
    """Print what is held, of all kinds, and by whom."""
    with lockkit.connect(url, profile=profile) as client:
        refuse_private(client)
        held = sorted(_held(client, prefix), key=lambda row: row[0])
        if as_json:
            rows = [{"name": name, "kind": kind, **dataclasses.asdict(holder)} for name, kind, holder in held]
            print_json({"prefix": prefix, "backend": client.url, "locks": rows})
        elif held:
            print_table(_table(held), optional=_OPTIONAL)
        else:
            which = f"no lock whose name begins with {prefix!r}" if prefix else "no lock"
            print(plain(f"{which} is held at {client.url}"))
            if url is None and "://" in prefix:
                say("to list the locks of another backend, give its URL with --url")


def _held(client: Client, prefix: str) -> Iterator[tuple[str, Kind, Holder]]:
    for kind in SPACE_OF:
        for name in client.names(prefix, kind):
            for holder in holders_of(client, name, kind):  # none: it was released since
                yield name, kind, holder


def _table(held: list[tuple[str, Kind, Holder]]) -> Table:
    table = Table(
        Column("name", min_width=max(cell_len(plain(name)) for name, _, _ in held)),
        "kind",
        "host",
        "pid",
        "token",
        "held since",
        "seconds left",
        "waiters",
    )
    for name, kind, holder in held:
        cells = (
            name,
            kind_text(kind, holder),
            holder.metadata.get("host", ""),
            holder.metadata.get("pid", ""),
            "none (a foreign client)" if holder.token is None else holder.token,
            "unknown" if holder.since is None else local_time(holder.since),
            "unknown" if holder.remaining is None else f"{holder.remaining:.1f}",
            "unknown" if holder.waiters is None else holder.waiters,
        )
        table.add_row(*(Text(plain(cell)) for cell in cells))
    return table


def wait_until_free(name: str, url: str | None, profile: str | None, *, timeout: Seconds | None) -> Status:
    """Wait until nobody holds a lock, without acquiring it."""
    runtime = BlockingRuntime()
    timeout = validation.timeout(timeout, name=name)
    pause, began = LOOK_SECONDS_MIN, monotonic()
    answered, told = began, False
    with lockkit.connect(url, profile=profile) as client:
        refuse_private(client)
        while True:
            outage: BackendUnavailable | None = None
            try:
                if not client.holders(name):
                    return Status.OK
                answered = monotonic()
            except BackendUnavailable as error:
                outage = error
            now = monotonic()
            left = pause if timeout is None else began + timeout - now
            if outage is not None and (left <= 0 or now - answered >= OUTAGE_SECONDS):
                raise outage
            if outage is not None and not told:
                told = True
                say(in_options(f"{outage}; lockkit retries"))
            if left <= 0:
                say(f"lock {name!r} at {client.url} is still held: waited {now - began:.3g} s")
                return Status.BUSY
            drive(runtime.sleep(min(pause, left)))
            pause = min(pause * 1.5, LOOK_SECONDS_MAX)


def ping(url: str | None, profile: str | None, *, as_json: bool) -> None:
    """Print how long a backend takes to answer."""
    with lockkit.connect(url, profile=profile) as client:
        began = monotonic()
        client.ping()
        connected = monotonic()
        client.ping()
        round_trip = monotonic() - connected
        if as_json:
            seconds = {"first_seconds": round(connected - began, 6), "round_trip_seconds": round(round_trip, 6)}
            print_json({"backend": client.url, **seconds})
        else:
            first = f"the first answer, with connecting, took {(connected - began) * 1000:.2f} ms"
            print(plain(f"{client.url} answers in {round_trip * 1000:.2f} ms ({first})"))
