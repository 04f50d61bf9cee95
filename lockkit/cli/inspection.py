"""``lockkit holders`` and ``lockkit break``: see who holds what a name stands for, and free it by force."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement, measure_renderables
from rich.table import Table
from rich.text import Text

import lockkit
from lockkit.backend import Holder
from lockkit.cli.options import BreakOptions
from lockkit.cli.output import print_json, refuse_private, say
from lockkit.cli.status import Status
from lockkit.engine.lookup import SPACE_OF, Kind
from lockkit.engine.semaphore import SLOT_NAME_BYTES_MAX
from lockkit.runtime import drive
from lockkit.sync import Client
from lockkit.validation import plain

SLOTS_LOOKED_AT = 10
"""Slots of a semaphore that are looked at where each is a lock, if no holder in them says that there are more."""


def show_holders(name: str, url: str | None, profile: str | None, *, as_json: bool) -> None:
    """Print who holds the lock of that name, permits of the semaphore, or runs the key of once."""
    with lockkit.connect(url, profile=profile) as client:
        refuse_private(client)
        held = [(kind, holder) for kind in SPACE_OF for holder in holders_of(client, name, kind)]
        if as_json:
            rows = [{"kind": kind, **dataclasses.asdict(holder)} for kind, holder in held]
            print_json({"name": name, "backend": client.url, "holders": rows})
        elif held:
            print_holders(name, client.url, held)
        else:
            print(plain(f"nobody holds {name!r} at {client.url}"))


def holders_of(client: Client, name: str, kind: Kind) -> Sequence[Holder]:
    """Ask who holds the lock, permits of the semaphore, or the key of once with this name."""
    if kind == "lock":
        return client.holders(name)
    if kind == "once":
        return drive(client._engine.holders_in(SPACE_OF[kind], name)) if client.capabilities.notes else []  # noqa: SLF001 - the command and the client are one product
    permits = client.capabilities.permits
    if permits == "none" or (permits == "slots" and len(name.encode()) > SLOT_NAME_BYTES_MAX):
        return []
    return client.semaphore(name, SLOTS_LOOKED_AT).holders()


def describe(holder: Holder) -> str:
    """Give host and process of a holder, or what a foreign client stored instead."""
    host, pid = holder.metadata.get("host"), holder.metadata.get("pid")
    return holder.owner if host is None or pid is None else f"{host} {pid}"


def kind_text(kind: Kind, holder: Holder) -> str:
    """Give the kind for people: with the number of a permit, and of a reader's lock that it is shared."""
    if holder.mode == "shared":
        return f"{kind} shared"
    return kind if holder.slot is None else f"{kind} {holder.slot}"


def break_lock(name: str, options: BreakOptions) -> Status:
    """Free a lock, or a permit, by force."""
    with lockkit.connect(options.url, profile=options.profile) as client:
        refuse_private(client)
        permit, shown = options.permit, None
        what = repr(name) if permit is None else f"permit {permit} of semaphore {name!r}"
        held = _to_break(client, name, permit)
        if held and not options.yes:
            kind: Kind = "lock" if permit is None else "semaphore"
            if not _agreed(name, client.url, [(kind, holder) for holder in held]):
                say(f"the {'lock' if permit is None else 'permit'} was not broken")
                return Status.FAILED
            shown = {holder.owner for holder in held}
        broken = break_shown(client, name, permit, shown, force=options.force)
        if broken is None:
            say(f"{what} has another holder by now: not broken")
            return Status.FAILED
        if options.as_json:
            print_json({"name": name, "backend": client.url, "broken": broken})
        else:
            print(plain(f"{'broke' if broken else 'nobody held'} {what} at {client.url}"))
        if not broken and permit is None and (other := _held_as(client, name)):
            say(f"{name!r} is {other}")
            return Status.FAILED
    return Status.OK


def _held_as(client: Client, name: str) -> str | None:
    """Say what else is held under the name that is no lock, and how that ends; None if nothing is."""
    if permits := holders_of(client, name, "semaphore"):
        slots = ", ".join(str(holder.slot) for holder in permits)
        return f"a semaphore, of which permits are held ({slots}): give --permit N to free one"
    if holders_of(client, name, "once"):
        return "a key of once whose run is under way: that ends when its process does"
    return None


def _to_break(client: Client, name: str, permit: int | None) -> Sequence[Holder]:
    if permit is None:
        return client.holders(name)
    return [holder for holder in client.semaphore(name, permit + 1).holders() if holder.slot == permit]


def break_shown(
    client: Client, name: str, permit: int | None, shown: Collection[str] | None, *, force: bool = False
) -> bool | None:
    """Free a lock, or a permit, unless it has other holders by now than the user was shown, and asked about."""
    if shown is not None and any(holder.owner not in shown for holder in _to_break(client, name, permit)):
        return None
    if permit is None:
        return client.break_lock(name, force=force)
    return client.semaphore(name, permit + 1).break_permit(permit)


def _agreed(name: str, url: str, held: Sequence[tuple[Kind, Holder]]) -> bool:
    if not sys.stdin.isatty():
        message = "cannot ask for confirmation without a terminal: give --yes to break the lock"
        raise typer.BadParameter(message, param_hint="--yes")
    print_holders(name, url, held, stderr=True)
    return typer.confirm("The holder keeps working until its next renewal. Break the lock?", err=True)


def print_holders(name: str, url: str, held: Sequence[tuple[Kind, Holder]], *, stderr: bool = False) -> None:
    """Print a table with one row per fact: a holder has more of them than fit side by side."""
    table = Table(show_header=False)
    for kind, holder in held:
        for key, value in {"kind": kind_text(kind, holder), **facts(holder)}.items():
            table.add_row(key, Text(plain(value)))
        table.add_section()
    print_table(table, heading=(plain(repr(name)), plain(f"at {url}")), stderr=stderr)


def facts(holder: Holder) -> dict[str, Any]:
    """Give what is known of a holder, by the words for it, as people read it."""
    known: dict[str, Any] = {
        "owner": holder.owner,
        "token": "none (a foreign client)" if holder.token is None else holder.token,
        "held since": "unknown" if holder.since is None else local_time(holder.since),
        "seconds left": "unknown" if holder.remaining is None else f"{holder.remaining:.1f}",
    }
    if holder.waiters is not None:
        known["waiters"] = holder.waiters
    for key, value in holder.metadata.items():
        known[plain(key)] = local_time(value) if key == "started" else value
    return known


def local_time(value: object) -> object:
    """Show Unix time as people read it; whatever else a foreign client wrote there, as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    try:
        return datetime.fromtimestamp(value, UTC).astimezone().isoformat(sep=" ", timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return value


WIDTH_MAX = 10_000
"""Columns of a table in a pipe: more than the names and metadata of a lock can take."""


def print_table(
    table: Table,
    *,
    heading: Sequence[str] = (),
    stderr: bool = False,
    follow_columns: bool = False,
    optional: Sequence[str] = (),
) -> None:
    """Print a table without cutting its cells: a terminal gets lines of its width, a pipe or file one line a row."""
    console = Console(stderr=stderr)

    def needed() -> Measurement:
        return Measurement.get(console, console.options.update(max_width=WIDTH_MAX), table)

    if heading:
        line = " ".join(heading)
        fits = cell_len(line) <= console.width or not console.is_terminal
        console.print(Text(line if fits else "\n".join(heading), style="table.title"), soft_wrap=True)
    if not console.is_terminal and not (follow_columns and "COLUMNS" in os.environ):
        console.width = needed().maximum
    for title in optional:
        if needed().minimum > console.width:
            table.columns = [column for column in table.columns if column.header != title]
    if optional:
        console.width = max(console.width, needed().minimum)
    # Left to itself, rich narrows the widest columns, also below their longest word while others could be folded.
    spare = console.width - needed().minimum
    for column in table.columns:
        column.overflow = "fold"
        if spare >= 0:
            cells = [column.header, *column.cells]
            least, most = measure_renderables(console, console.options.update(max_width=WIDTH_MAX), cells)
            least = max(least, column.min_width or 0)
            column.width = min(least + spare, most)
            spare -= column.width - least
    console.print(table)
