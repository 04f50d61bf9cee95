"""``lockkit holders``, ``list``, ``wait`` and ``break``: see who holds what, wait for its end, free it by force."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement, measure_renderables
from rich.table import Column, Table
from rich.text import Text

from lockkit import validation
from lockkit.backend import Holder
from lockkit.cli.app import JSON, NAME, OnBackend, argument, command, complete, flag, no_url, option, time
from lockkit.cli.output import answer, connected, in_options, print_json, say
from lockkit.cli.status import Status
from lockkit.engine.lookup import SPACE_OF, Kind
from lockkit.engine.semaphore import SLOT_NAME_BYTES_MAX
from lockkit.errors import BackendUnavailable
from lockkit.runtime import BlockingRuntime, drive, monotonic
from lockkit.sync import Client
from lockkit.validation import plain

SLOTS_LOOKED_AT = 10
"""Slots of a semaphore that are looked at where each is a lock, if no holder in them says that there are more."""

LOOK_SECONDS_MIN = 0.05
LOOK_SECONDS_MAX = 1.0
"""Pauses of ``lockkit wait``; they grow. Longer notices a free lock later, or not at all; shorter asks the server more
often."""

OUTAGE_SECONDS = 30.0
"""How long ``lockkit wait`` goes on without one answer. Longer reports an outage later; shorter ends a wait of hours
when a server restarts."""

# -- asking ------------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """One holder, and the name and kind of what it holds."""

    name: str
    kind: Kind
    holder: Holder

    @property
    def kind_text(self) -> str:
        """The kind for people: with the number of a permit, and of a reader's lock that it is shared."""
        if self.holder.mode == "shared":
            return f"{self.kind} shared"
        return self.kind if self.holder.slot is None else f"{self.kind} {self.holder.slot}"

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, **dataclasses.asdict(self.holder)}


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


@command("holders", "Show who holds a lock.")
class Holders(OnBackend):
    """
    Show who holds the lock of that name, permits of the semaphore, or runs the key of once().

    Exit status 0 also if nobody does.
    """

    name: str = NAME
    as_json: bool = JSON

    def run(self) -> None:
        name = self.name
        with connected(self) as client:
            held = [Held(name, kind, holder) for kind in SPACE_OF for holder in holders_of(client, name, kind)]
            if held and not self.as_json:
                print_holders(client.url, held)
            else:
                rows = [{"kind": one.kind, **dataclasses.asdict(one.holder)} for one in held]
                values = {"name": name, "backend": client.url, "holders": rows}
                answer(self, values, f"nobody holds {name!r} at {client.url}")


@command("note", "Show the note that a holder has left with a lock.")
class ShowNote(OnBackend):
    """
    Show what a holder of the lock has left with lease.write_note(), as a JSON object: value, token and remaining.

    token is the fencing token of that holder, remaining the seconds until the backend forgets the note. Exit status 1
    if there is no note; 78 if the backend keeps none.
    """

    name: str = NAME

    def run(self) -> Status | None:
        with connected(self) as client:
            note = client.read_note(self.name)
        if note is None:
            say(f"lock {self.name!r} at {client.url} has no note")
            return Status.FAILED
        print_json(dataclasses.asdict(note))
        return None


@command("list", "List what is held: locks, permits, runs of once().")
class List(OnBackend):
    """
    List what is held: name, kind, host and process of the holder, token, since when, time left, waiters.

    The kind is lock, semaphore with the number of the permit, or once: a run of once() that is under way. Locks are
    acquired and released while the list is made, so it shows no single moment. Exit status 0 also if none is held; 78
    if the backend cannot list its locks.
    """

    prefix: str = argument(
        "",
        "PREFIX",
        "List only names that begin with PREFIX, which has no wildcards.",
        callback=no_url,
        autocompletion=complete,
    )
    as_json: bool = JSON

    def run(self) -> None:
        prefix = self.prefix
        with connected(self) as client:
            found = (
                Held(name, kind, holder)
                for kind in SPACE_OF
                for name in client.names(prefix, kind)
                for holder in holders_of(client, name, kind)  # none: it was released since
            )
            held = sorted(found, key=lambda one: one.name)
            if self.as_json:
                print_json({"prefix": prefix, "backend": client.url, "locks": [one.as_dict() for one in held]})
            elif held:
                print_held(held)
            else:
                which = f"no lock whose name begins with {prefix!r}" if prefix else "no lock"
                print(plain(f"{which} is held at {client.url}"))
                if self.url is None and "://" in prefix:
                    say("to list the locks of another backend, give its URL with --url")


@command("wait", "Wait until a lock is free, without acquiring it.")
class Wait(OnBackend):
    """
    Wait until a lock is free, without acquiring it.

    Another client may acquire it at once, so never use this to protect anything: lockkit run does that. lockkit asks
    about every second, and may miss a lock that is free for less than that.

    Exit status: 0 if the lock was free; 75 if it was held until the timeout; 69 if the backend is unavailable; 78 if
    the timeout, the URL, a credential or an option is wrong.
    """

    name: str = NAME
    timeout: float | None = time(None, "How long to wait; 0 asks once. Default: without limit.")

    def run(self) -> Status:
        name, timeout = self.name, validation.timeout(self.timeout, name=self.name)
        pause, began = LOOK_SECONDS_MIN, monotonic()
        answered, told = began, False
        with connected(self) as client:
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
                if outage is not None:
                    if left <= 0 or now - answered >= OUTAGE_SECONDS:
                        raise outage
                    if not told:
                        told = True
                        say(in_options(f"{outage}; lockkit retries"))
                if left <= 0:
                    say(f"lock {name!r} at {client.url} is still held: waited {now - began:.3g} s")
                    return Status.BUSY
                drive(BlockingRuntime().sleep(min(pause, left)))
                pause = min(pause * 1.5, LOOK_SECONDS_MAX)


# -- breaking ----------------------------------------------------------------------------------------------------------


@command("break", "Free a lock by force.")
class Break(OnBackend):
    """
    Free a lock by force, after asking for confirmation.

    The holder notices at its next renewal and works until then: only storage that checks fencing tokens keeps it out.
    Exit status 0 if the lock is now free; 1 if you answered no, another client held it by then, or it may be data of an
    application (see --force).
    """

    name: str = NAME
    permit: int | None = option(
        None, "Free this permit of the semaphore NAME instead.", "--permit", min=0, max=999, metavar="N"
    )
    force: bool = flag("Free it even if it may be data of an application.", "--force")
    yes: bool = flag("Do not ask for confirmation.", "--yes", "-y")
    as_json: bool = JSON

    def run(self) -> Status:
        name, permit = self.name, self.permit
        what = repr(name) if permit is None else f"permit {permit} of semaphore {name!r}"
        with connected(self) as client:
            held, shown = _to_break(client, name, permit), None
            if held and not self.yes:
                kind: Kind = "lock" if permit is None else "semaphore"
                if not _agreed(client.url, [Held(name, kind, holder) for holder in held]):
                    say(f"the {'lock' if permit is None else 'permit'} was not broken")
                    return Status.FAILED
                shown = {holder.owner for holder in held}
            broken = break_shown(client, name, permit, shown, force=self.force)
            if broken is None:
                say(f"{what} has another holder by now: not broken")
                return Status.FAILED
            values = {"name": name, "backend": client.url, "broken": broken}
            answer(self, values, f"{'broke' if broken else 'nobody held'} {what} at {client.url}")
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
        return "a key of once whose run is under way: that ends when its process does, after a kill when its ttl ends"
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


def _agreed(url: str, held: Sequence[Held]) -> bool:
    if not sys.stdin.isatty():
        raise typer.BadParameter(
            "cannot ask for confirmation without a terminal: give --yes to break the lock", param_hint="--yes"
        )
    print_holders(url, held, stderr=True)
    return typer.confirm("The holder keeps working until its next renewal. Break the lock?", err=True)


# -- what is known of a holder -----------------------------------------------------------------------------------------


def describe(holder: Holder) -> str:
    """Give host and process of a holder, or what a foreign client stored instead."""
    host, pid = holder.metadata.get("host"), holder.metadata.get("pid")
    return holder.owner if host is None or pid is None else f"{host} {pid}"


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
    about = {plain(key): local_time(value) if key == "started" else value for key, value in holder.metadata.items()}
    return known | {key: value for key, value in about.items() if key not in known}


def local_time(value: object) -> object:
    """Show Unix time as people read it; whatever else a foreign client wrote there, as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    try:
        return datetime.fromtimestamp(value, UTC).astimezone().isoformat(sep=" ", timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return value


def print_holders(url: str, held: Sequence[Held], *, stderr: bool = False) -> None:
    """Print a table with one row per fact: a holder has more of them than fit side by side."""
    table = Table(show_header=False)
    for one in held:
        for key, value in {"kind": one.kind_text, **facts(one.holder)}.items():
            table.add_row(key, Text(plain(value)))
        table.add_section()
    print_table(table, heading=(plain(repr(held[0].name)), plain(f"at {url}")), stderr=stderr)


_TITLES = ("kind", "host", "pid", "token", "held since", "seconds left", "waiters")
_OPTIONAL = ("waiters", "held since", "kind", "token", "seconds left")
"""Columns that a narrow terminal goes without, in this order: the name stays whole, and who holds it is told."""


def print_held(held: Sequence[Held]) -> None:
    """Print a table with one row per holder."""
    table = Table(Column("name", min_width=max(cell_len(plain(one.name)) for one in held)), *_TITLES)
    for one in held:
        known = {"host": "", "pid": "", "waiters": "unknown"} | facts(one.holder) | {"kind": one.kind_text}
        table.add_row(*(Text(plain(cell)) for cell in (one.name, *map(known.__getitem__, _TITLES))))
    print_table(table, optional=_OPTIONAL)


# -- tables ------------------------------------------------------------------------------------------------------------

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
