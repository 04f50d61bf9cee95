"""``lockkit holders`` and ``lockkit break``: see who holds a lock, and free it by force."""

from __future__ import annotations

import dataclasses
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

import lockkit
from lockkit.cli.output import plain, print_json, refuse_private, say
from lockkit.cli.status import Status
from lockkit.cli.tables import print_table

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from lockkit.backend import Holder
    from lockkit.sync import Client

__all__ = ["break_lock", "facts", "has_other_holders", "show_holders"]


def show_holders(name: str, url: str | None, profile: str | None, *, as_json: bool) -> None:
    """
    Print who holds a lock.

    Raises:
        LockError: The backend cannot be asked.
    """
    with lockkit.connect(url, profile=profile) as client:
        refuse_private(client)
        holders = client.holders(name)
        if as_json:
            rows = [dataclasses.asdict(holder) for holder in holders]
            print_json({"name": name, "backend": client.url, "holders": rows})
        elif holders:
            print_table(_table(name, client.url, holders))
        else:
            print(plain(f"nobody holds {name!r} at {client.url}"))


def break_lock(name: str, url: str | None, profile: str | None, *, yes: bool, as_json: bool) -> Status:
    """
    Free a lock by force.

    Args:
        name: The lock.
        url: Backend, or None.
        profile: Profile, or None.
        yes: Do not ask.
        as_json: Print JSON.

    Raises:
        LockError: The backend cannot be reached, or does not allow it.
        typer.BadParameter: There is nobody to ask.
    """
    with lockkit.connect(url, profile=profile) as client:
        refuse_private(client)
        holders = client.holders(name)
        if holders and not yes:
            if not _agreed(name, client.url, holders):
                say("the lock was not broken")
                return Status.FAILED
            if has_other_holders(client, name, {holder.owner for holder in holders}):
                say(f"{name!r} has another holder by now: not broken")
                return Status.FAILED
        broken = client.break_lock(name)
        if as_json:
            print_json({"name": name, "backend": client.url, "broken": broken})
        else:
            what = "broke" if broken else "nobody held"
            print(plain(f"{what} {name!r} at {client.url}"))
    return Status.OK


def has_other_holders(client: Client, name: str, shown: Collection[str]) -> bool:
    """
    Tell whether a lock has other holders by now than the user was shown, and asked about.

    Args:
        client: Of the backend.
        name: The lock.
        shown: The owner ids of the holders that were shown.

    Raises:
        LockError: The backend cannot be asked.
    """
    return any(holder.owner not in shown for holder in client.holders(name))


def _agreed(name: str, url: str, holders: Sequence[Holder]) -> bool:
    if not sys.stdin.isatty():
        message = "cannot ask for confirmation without a terminal: give --yes to break the lock"
        raise typer.BadParameter(message, param_hint="--yes")
    print_table(_table(name, url, holders), stderr=True)
    return typer.confirm("The holder keeps working until its next renewal. Break the lock?", err=True)


def _table(name: str, url: str, holders: Sequence[Holder]) -> Table:
    """One row per fact: a holder has more of them than fit side by side."""
    table = Table(title=Text(plain(f"{name!r} at {url}")), title_justify="left", show_header=False)
    for holder in holders:
        for key, value in facts(holder).items():
            table.add_row(key, Text(plain(value)))
        table.add_section()
    return table


def facts(holder: Holder) -> dict[str, Any]:
    """Give what is known of a holder, by the words for it, as people read it."""
    known: dict[str, Any] = {
        "owner": holder.owner,
        "token": "none (a foreign client)" if holder.token is None else holder.token,
        "seconds left": "unknown" if holder.remaining is None else f"{holder.remaining:.1f}",
    }
    if holder.waiters is not None:
        known["waiters"] = holder.waiters
    for key, value in holder.metadata.items():
        known[plain(key)] = _local_time(value) if key == "started" else value
    return known


def _local_time(value: object) -> object:
    """Show Unix time as people read it; whatever else a foreign client wrote there, as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    try:
        return datetime.fromtimestamp(value, UTC).astimezone().isoformat(sep=" ", timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return value
