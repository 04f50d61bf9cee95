"""
``lockkit watch``: who holds which locks, as it changes. A table on a terminal, else a line for each event.

Below the command: what keys do to the table, its columns, and how it is drawn. `lockkit.cli.sightings` has the rest.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Final, NamedTuple, Self

import typer
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lockkit.cli.app import OnBackend, argument, command, complete, flag, time
from lockkit.cli.holders import describe, facts, print_held
from lockkit.cli.output import connected
from lockkit.cli.sightings import EXPIRING_SHARE, NAMES_MAX, Change, Look, Looker, Printer, Record, Watched
from lockkit.cli.status import SIGNALLED, Status
from lockkit.configuration import profiles, registry
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import BlockingRuntime, drive, monotonic, wall_clock
from lockkit.units import Instant, Seconds
from lockkit.validation import plain
from lockkit.validation import shown as quoted

INTERVAL_MIN = 0.1
"""Seconds, the shortest ``--interval``. Below it the looks take longer than the pauses, and are load."""

REDRAW_SECONDS = 0.25
"""How often the time left is drawn anew. Longer looks as if it hung; shorter is work for nothing."""

KEYS: Final = "q quit  ↑↓ select  s sort  r reverse  / filter  m metadata  b break"

HEAD_AND_FOOT: Final = 4
"""Lines around the holders: backend, column titles, state, keys."""

_KEY: Final = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])?|.", re.DOTALL)
"""One key: a character, or the sequence that a terminal sends for an arrow."""

_UP: Final = frozenset({"\x1b[A", "\x1bOA", "k"})
_DOWN: Final = frozenset({"\x1b[B", "\x1bOB", "j"})
_ESCAPE: Final = "\x1b"
_UNKNOWN: Final = "-"


def _interval(value: float) -> float:
    if not INTERVAL_MIN <= value < float("inf"):
        raise typer.BadParameter(f"it must be {INTERVAL_MIN:g} or more seconds, not {value:g}")
    return value


@command("watch", "Show who holds which locks, as it changes.")
class Watch(OnBackend):
    """
    Show who holds which locks, as it changes: a table on a terminal, else one line for each event.

    The table shows holder, mode, token, time left, waiters, for how long the lock is held (>: it was held when the
    watch began), and how many renewals are overdue, once one was seen. The line below the table lists the keys.

    Events: appeared, changed (another holder), renewed, expiring, released; and unreachable, reachable of the server.
    lockkit asks every --interval, so it does not see what begins and ends in between.

    Exit status: 0; 69 if the backend is unavailable at the beginning; 78 if the URL, a credential or an option is
    wrong, or the backend cannot list its locks: then give names; 128 + n if signal n ended it.
    """

    arguments: list[str] | None = argument(
        None,
        "URL|PATTERN",
        "The backend, as with --url, and names of locks or patterns: * stands for any text, ? for one character. "
        "Default: all locks.",
        autocompletion=complete,
    )
    interval: float = time(1.0, "How often to ask the backend.", _interval)
    once: bool = flag("Ask once, print what is held, and end.", "--once")
    as_json: bool = flag("Print each event as one line of JSON.", "--json")

    def run(self) -> int:
        given, patterns = split_url(self.arguments or []) if self.url is None else (self.url, self.arguments or [])
        with connected(self, profiles.resolve(given, self.profile, {})) as client:
            looker, watched = Looker(client, patterns), Watched()
            look = looker.look()
            changes = watched.see(look)
            terminal = not self.as_json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
            if terminal and self.once:
                if held := sorted((record.held for record in watched.records), key=lambda one: one.name):
                    print_held(held)
                else:
                    print(plain(f"no such lock is held at {client.url}"))
                return Status.OK
            if terminal and sys.stdin.isatty():
                return _show_table(client.url, looker, watched, look, self.interval)
            return self._print_events(looker, watched, look, changes)

    def _print_events(self, looker: Looker, watched: Watched, look: Look, changes: Sequence[Change]) -> Status:
        """Print a line for each event."""
        printer = Printer(as_json=self.as_json)
        printer.seen(look, changes)
        while not self.once:
            drive(BlockingRuntime().sleep(self.interval))
            try:
                look = looker.look()
            except BackendUnavailable as error:
                printer.failed(error)
            else:
                printer.seen(look, watched.see(look))
        return Status.OK


def split_url(arguments: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Tell a URL from a lock's name such as ``seat:1``: a URL comes first and has ``://`` or a backend's scheme."""
    if arguments:
        scheme, colon, _ = arguments[0].partition(":")
        if colon and ("://" in arguments[0] or scheme.partition("+")[0] in registry.schemes()):
            return arguments[0], arguments[1:]
    return None, arguments


# -- the terminal ------------------------------------------------------------------------------------------------------


def _show_table(url: str, looker: Looker, watched: Watched, look: Look, interval: Seconds) -> int:
    """Show the table until the user quits."""
    view = View(url=url, seen=look.at, cut=look.cut)
    wanted: SimpleQueue[Breaking | None] = SimpleQueue()
    results: SimpleQueue[Look | str | Exception] = SimpleQueue()
    # A thread: a call to the server may hang, and keys are answered all the same. A daemon: so may the process end.
    arguments = (looker, interval, wanted, results)
    threading.Thread(target=_poll, args=arguments, name="lockkit-watch", daemon=True).start()
    try:
        with _log_into(view), _Terminal() as terminal:
            while True:
                while not results.empty():
                    _take(results.get(), watched, view)
                now = monotonic()
                view.arrange(watched.records, now)
                terminal.draw(draw(view, now, terminal.size))
                keys = terminal.wait(REDRAW_SECONDS)
                if keys is None:
                    return SIGNALLED + signal.SIGHUP
                for key in keys:
                    if key == "q" and not view.captures:
                        return Status.OK
                    breaking = view.press(key)
                    if breaking is not None:
                        wanted.put(breaking)
    finally:
        wanted.put(None)


def _poll(
    looker: Looker,
    interval: Seconds,
    wanted: SimpleQueue[Breaking | None],
    results: SimpleQueue[Look | str | Exception],
) -> None:
    """Look again and again, and break what the user wants broken, until None is wanted."""
    while True:
        try:
            with suppress(Empty):
                breaking = wanted.get(timeout=interval)
                if breaking is None:
                    return
                try:
                    results.put(looker.break_lock(breaking.name, breaking.owners, breaking.permit))
                except LockError as error:
                    results.put(f"{breaking.name!r} was not broken: {error}")
            results.put(looker.look())
        except BackendUnavailable as error:
            results.put(error)
        except Exception as error:  # noqa: BLE001 - raised again in the main thread
            results.put(error)
            return


def _take(result: Look | str | Exception, watched: Watched, view: View) -> None:
    if isinstance(result, str):
        view.said = result
    elif isinstance(result, Look):
        watched.see(result)
        view.seen, view.cut, view.problem = result.at, result.cut, ""
    elif isinstance(result, BackendUnavailable):
        # Without what the screen says anyway: what was asked for, and where.
        view.problem = str(result.__cause__ or result)
    else:
        raise result


@contextmanager
def _log_into(view: View) -> Iterator[None]:
    """Show what the library logs below the table: on stderr it would be in the middle of it."""
    said = logging.Handler()
    said.emit = lambda record: setattr(view, "said", record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lockkit")
    before, logger.handlers = logger.handlers, [said]
    try:
        yield
    finally:
        logger.handlers = before


class _Terminal:
    """Has the terminal's second screen and single keys from ``__enter__`` to ``__exit__``."""

    def __init__(self) -> None:
        self._console = Console()
        self._live = Live(
            console=self._console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._input = sys.stdin.fileno()
        self._mode: list[Any] = []
        self._before = signal.getsignal(signal.SIGTSTP)

    def __enter__(self) -> Self:
        # Other signals raise a KeyboardInterrupt: see `lockkit.cli.signals.interrupted_by_signals`.
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, self._stop)
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()
        signal.signal(signal.SIGTSTP, self._before)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        """Stop as any other program at Ctrl-Z, and take the terminal again when the user comes back."""
        del frame
        self._hide()
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)
        signal.signal(signum, self._stop)
        self._show()

    def _show(self) -> None:
        self._mode = termios.tcgetattr(self._input)
        try:
            tty.setcbreak(self._input)
            self._live.start()
        except BaseException:
            self._hide()
            raise

    def _hide(self) -> None:
        # A terminal that is gone needs nothing.
        with suppress(OSError, termios.error):
            self._live.stop()
        with suppress(OSError, termios.error):
            termios.tcsetattr(self._input, termios.TCSADRAIN, self._mode)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines, now. An exported COLUMNS would be that of the beginning."""
        try:
            width, height = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            width = height = 0
        return width or 80, height or 24  # a serial line does not know

    def draw(self, picture: RenderableType) -> None:
        """Draw over what is shown."""
        self._console.size = ConsoleDimensions(*self.size)
        self._live.update(picture, refresh=True)

    def wait(self, seconds: Seconds) -> list[str] | None:
        """Wait for keys; None if the terminal is gone."""
        ready, _, _ = select.select([self._input], [], [], seconds)
        try:
            data = os.read(self._input, 1024) if ready else None
        except OSError:
            data = b""
        return None if data == b"" else _KEY.findall((data or b"").decode(errors="replace"))


# -- what the user has chosen ------------------------------------------------------------------------------------------


class Breaking(NamedTuple):
    """A lock that the user wants freed: the owners that the user was shown, and the same in words."""

    name: str
    owners: frozenset[str]
    holders: str
    permit: int | None = None  # number of the permit, of a semaphore


@dataclass(slots=True)
class View:
    """What is shown, as the user has chosen it."""

    url: str = ""
    seen: Instant = 0.0  # when the last look was answered, monotonic clock
    cut: bool = False  # that look did not ask for all locks
    problem: str = ""  # why the server does not answer now
    said: str = ""  # what came of the last key, or what lockkit logged
    sorted_by: int = 0  # number of the column
    reverse: bool = False
    filter: str = ""  # text that names or holders must contain
    typing: bool = False  # the keys go into the filter
    metadata: bool = False  # show all that is known of the selected holder
    asking: Breaking | None = None  # the user was asked whether to break this lock
    rows: Sequence[Record] = field(default_factory=list)
    selected: int = 0
    _all: Sequence[Record] = field(default_factory=list)

    @property
    def captures(self) -> bool:
        """Letters are an answer, or part of the filter."""
        return self.typing or self.asking is not None

    def arrange(self, records: Sequence[Record], now: Instant) -> None:
        """Filter and sort what was seen. The selection stays on its holder; if that is gone, on its place."""
        chosen = self.rows[self.selected] if self.rows else None
        self._all = records
        wanted = self.filter.casefold()
        rows = [row for row in records if wanted in f"{row.held.name}\0{describe(row.held.holder)}".casefold()]
        rows.sort(key=lambda row: (row.held.name, row.held.holder.slot or 0, row.held.holder.token or 0))
        rows.sort(key=lambda row: COLUMNS[self.sorted_by].order(row, now), reverse=self.reverse)
        self.rows = rows
        # The same record: a holder that was seen again keeps its own.
        self._select(next((index for index, row in enumerate(rows) if row is chosen), self.selected))

    def press(self, key: str) -> Breaking | None:
        """Take a key; ``q`` is the caller's unless `captures`. What is to say about it goes into `said`."""
        self.said = ""
        if self.asking is not None:
            asked, self.asking = self.asking, None
            if key in {"y", "Y"}:
                return asked
            self.said = f"{quoted(asked.name)} was not broken"
        elif self.typing:
            self._type(key)
        else:
            self._command(key)
        return None

    def _command(self, key: str) -> None:
        if key in _UP or key in _DOWN:
            self._select(self.selected + (1 if key in _DOWN else -1))
        elif key == "s":
            self.sorted_by = (self.sorted_by + 1) % len(COLUMNS)
        elif key == "r":
            self.reverse = not self.reverse
        elif key == "m":
            self.metadata = not self.metadata
        elif key == "/":
            self.typing, self.filter = True, ""
        elif key == _ESCAPE:
            self.filter, self.metadata = "", False
        elif key == "b" and self.rows:
            self._ask(self.rows[self.selected])

    def _ask(self, chosen: Record) -> None:
        """Ask about the holder of a permit, or all of a lock, also those that the filter hides: all are freed."""
        name, kind, holder = chosen.held
        if kind == "once":
            self.said = f"the run of {quoted(name)} cannot be broken: it ends by itself, or after its ttl"
            return
        rows = [row.held.holder for row in self._all if row.held[:2] == (name, kind)]
        held = [one for one in rows if one.slot == holder.slot]
        holders = describe(holder) if len(held) == 1 else f"{len(held)} holders"
        self.asking = Breaking(name, frozenset(one.owner for one in held), holders, holder.slot)

    def _type(self, key: str) -> None:
        if key in {"\r", "\n"}:
            self.typing = False
        elif key == _ESCAPE:
            self.typing, self.filter = False, ""
        elif key in {"\x7f", "\x08"}:
            self.filter = self.filter[:-1]
        elif key.isprintable():
            self.filter += key

    def _select(self, index: int) -> None:
        self.selected = max(0, min(index, len(self.rows) - 1))


# -- columns -----------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """One column of the table; needs `width` characters to be worth its place."""

    title: str
    width: int
    order: Callable[[Record, Instant], Any]  # sorts the holders
    text: Callable[[Record, Instant], str] | None = None  # of a number, to the right; None: what `order` gives


def _left(record: Record, now: Instant) -> str:
    remaining = record.remaining(now)
    if remaining is None:
        return _UNKNOWN
    return f"{remaining:.1f} s{'!' if remaining < record.longest * EXPIRING_SHARE else ' '}"


def _held_seconds(record: Record, now: Instant) -> Seconds:
    """Give how long it holds the lock: since its grant, if that is known, or since it was first seen."""
    since = record.held.holder.since
    return now - record.since if since is None else max(0.0, wall_clock() - since)


def _age(record: Record, now: Instant) -> str:
    """Tell since when it holds the lock; ``>``: at least, because the backend does not know since when."""
    seconds = _held_seconds(record, now)
    units = ((86_400, "d"), (3_600, "h"), (60, "m"))
    size, unit = next(((size, unit) for size, unit in units if seconds >= 2 * size), (1, "s"))
    at_least = record.from_start and record.held.holder.since is None
    return f"{'> ' if at_least else ''}{seconds / size:.0f} {unit}"


def _number(title: str, width: int, value: Callable[[Record], int | None]) -> Column:
    """Make a column of numbers; what is not known comes before all that is."""

    def order(record: Record, _: Instant) -> int:
        known = value(record)
        return -1 if known is None else known

    def text(record: Record, _: Instant) -> str:
        known = value(record)
        return _UNKNOWN if known is None else str(known)

    return Column(title, width, order, text)


COLUMNS: Final = (
    Column("name", 12, lambda record, _: record.held.name),
    Column("holder", 10, lambda record, _: describe(record.held.holder)),
    Column("kind", 11, lambda record, _: record.held.kind_text),
    _number("token", 16, lambda record: record.held.holder.token),
    Column("left", 9, lambda record, now: -1.0 if record.expires is None else record.expires - now, _left),
    _number("waiters", 7, lambda record: record.held.holder.waiters),
    Column("age", 7, _held_seconds, _age),
    _number("missed", 6, lambda record: record.missed),
)
"""In the order of the table."""

DROPPED: Final = ("kind", "age", "waiters", "token", "holder", "missed")
"""What a narrow terminal goes without, in this order."""


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw(view: View, now: Instant, size: tuple[int, int]) -> RenderableType:
    """Draw one screen."""
    width, height = size
    about = _about(view.rows[view.selected]) if view.metadata and view.rows else []
    del about[max(0, min(height // 2, height - HEAD_AND_FOOT - 1)) :]
    room = max(1, height - HEAD_AND_FOOT - len(about))
    first = max(0, min(view.selected - room // 2, len(view.rows) - room))
    shown = view.rows[first : first + room]
    filling = [Text("")] * (room - len(shown))
    details = [_line(line) for line in about]
    return Group(_line(view.url, "bold"), _rows(view, shown, first, now, width), *filling, *details, *_foot(view, now))


def _line(text: str, style: str = "") -> Text:
    return Text(plain(text), style=style, no_wrap=True, overflow="ellipsis")


def _rows(view: View, rows: Sequence[Record], first: int, now: Instant, width: int) -> Table:
    columns = list(COLUMNS)
    for title in DROPPED:
        if sum(column.width + 2 for column in columns) > width:
            columns = [column for column in columns if column.title != title]
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        arrow = ("↓" if view.reverse else "↑") if column is COLUMNS[view.sorted_by] else ""
        table.add_column(
            column.title + arrow,
            justify="right" if column.text else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio={"name": 2, "holder": 1}.get(column.title),
            min_width=column.width if column.text else None,
        )
    for index, row in enumerate(rows, first):
        cells = [Text(plain((column.text or column.order)(row, now))) for column in columns]
        style = "red" if row.expiring else "yellow" if row.missed else ""
        table.add_row(*cells, style=f"{style} reverse" if index == view.selected else style)
    return table


def _about(row: Record) -> list[str]:
    """All that the backend says about a holder, one fact a line."""
    known = facts(row.held.holder)
    del known["seconds left"]  # as old as the last look
    # The table has these already, unless it is too narrow: so they come last.
    keys = sorted(known, key=("token", "waiters", "held since").__contains__)
    return ["", *(f"  {key}: {known[key]}" for key in keys)]


def _foot(view: View, now: Instant) -> tuple[Text, Text]:
    """Draw the line of the state, and that of the keys."""
    names = len({row.held[:2] for row in view.rows})
    what = "name" if any(row.held.kind != "lock" for row in view.rows) else "lock"
    parts = [f"{names} {what}{'' if names == 1 else 's'} held"]
    if view.filter and not view.typing:
        parts.append(f"filter {quoted(view.filter)}")
    if view.cut:
        parts.append(f"the first {NAMES_MAX} only: give a PATTERN")
    if view.problem:
        parts.append(f"no answer, seen {now - view.seen:.0f} s ago: {view.problem}")
    if view.said:
        parts.append(view.said)
    state = _line("  |  ".join(parts), "bold red" if view.problem else "")
    if view.asking is not None:
        name, _, holders, permit = view.asking
        which = "" if permit is None else f" (permit {permit})"
        who = f"{quoted(name)}{which} is held by {holders}, which keeps working until its next renewal"
        return state, _line(f"Break it? (y/n)  {who}", "bold reverse")
    return state, _line(f"filter: {view.filter}▏") if view.typing else _line(KEYS, "dim")
