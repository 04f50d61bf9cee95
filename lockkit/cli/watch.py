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

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import lockkit
from lockkit.cli.inspection import describe, facts, kind_text, print_table
from lockkit.cli.options import WatchOptions
from lockkit.cli.output import refuse_private
from lockkit.cli.sightings import EXPIRING_SHARE, NAMES_MAX, Change, Look, Looker, Printer, Record, Watched
from lockkit.cli.status import SIGNALLED, Status
from lockkit.configuration import registry
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import BlockingRuntime, drive, monotonic, wall_clock
from lockkit.units import Instant, Seconds
from lockkit.validation import plain
from lockkit.validation import shown as quoted

REDRAW_SECONDS = 0.25
"""How often the time left is drawn anew. Longer looks as if it hung; shorter is work for nothing."""

KEYS: Final = "q quit  ↑↓ select  s sort  r reverse  / filter  m metadata  b break"

HEAD_AND_FOOT: Final = 4
"""Lines around the holders: backend, column titles, state, keys."""

_KEY: Final = re.compile(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])?|.", re.DOTALL)
"""One key: a character, or the sequence that a terminal sends for an arrow."""

_UP: Final = frozenset({"\x1b[A", "\x1bOA", "k"})
_DOWN: Final = frozenset({"\x1b[B", "\x1bOB", "j"})
_ENTER: Final = frozenset({"\r", "\n"})
_ERASE: Final = frozenset({"\x7f", "\x08"})
_ESCAPE: Final = "\x1b"
_UNKNOWN: Final = "-"


def watch(patterns: Sequence[str], options: WatchOptions) -> int:
    """Show who holds which locks, and what changes."""
    with lockkit.connect(options.url, profile=options.profile) as client:
        refuse_private(client)
        looker, watched = Looker(client, patterns), Watched()
        look = looker.look()
        changes = watched.see(look)
        if options.as_json or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            return _print_events(looker, watched, look, changes, options)
        if options.once:
            return _print_once(client.url, watched)
        if sys.stdin.isatty():
            return _show_table(client.url, looker, watched, look, options.interval)
        return _print_events(looker, watched, look, changes, options)


def _print_events(
    looker: Looker, watched: Watched, look: Look, changes: Sequence[Change], options: WatchOptions
) -> Status:
    """Print a line for each event."""
    printer = Printer(as_json=options.as_json)
    printer.seen(look, changes)
    while not options.once:
        drive(BlockingRuntime().sleep(options.interval))
        try:
            look = looker.look()
        except BackendUnavailable as error:
            printer.failed(error)
        else:
            printer.seen(look, watched.see(look))
    return Status.OK


def split_url(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Tell a URL from a lock's name such as ``seat:1``: a URL comes first and has ``://`` or a backend's scheme."""
    if arguments:
        scheme, colon, _ = arguments[0].partition(":")
        if colon and ("://" in arguments[0] or scheme.partition("+")[0] in registry.schemes()):
            return arguments[0], list(arguments[1:])
    return None, list(arguments)


def _print_once(url: str, watched: Watched) -> Status:
    """Print the table once, without what takes a second look to know."""
    rows = sorted(watched.records, key=lambda row: row.name)
    if not rows:
        print(plain(f"no such lock is held at {url}"))
        return Status.OK
    columns = [column for column in COLUMNS if column.title not in {"age", "missed"}]
    table = Table(*(column.title for column in columns))
    table.columns[0].min_width = max(cell_len(plain(row.name)) for row in rows)
    now = monotonic()
    for row in rows:
        table.add_row(*(Text(plain(column.cell(row, now)).strip()) for column in columns))
    print_table(table, optional=[title for title in DROPPED if title != "holder"])  # a line may be longer here
    return Status.OK


def _show_table(url: str, looker: Looker, watched: Watched, look: Look, interval: Seconds) -> int:
    """Show the table until the user quits."""
    view = View(url=url, seen=look.at, cut=look.cut)
    wanted: SimpleQueue[Breaking | None] = SimpleQueue()
    results: SimpleQueue[Look | str | Exception] = SimpleQueue()
    # A thread: a call to the server may hang, and keys are answered all the same. A daemon: so may the process end.
    polling = threading.Thread(
        target=_poll, args=(looker, interval, wanted, results), name="lockkit-watch", daemon=True
    )
    polling.start()
    try:
        with _log_into(view), _Terminal() as terminal:
            while True:
                while not results.empty():
                    _take(results.get(), watched, view)
                now = monotonic()
                view.arrange(watched.records, now)
                terminal.draw(draw(view, now, terminal.size))
                keys, signum = terminal.wait(REDRAW_SECONDS)
                if signum is not None:
                    return SIGNALLED + signum
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
    if isinstance(result, Look):
        watched.see(result)
        view.seen, view.cut, view.problem = result.at, result.cut, ""
    elif isinstance(result, BackendUnavailable):
        # Without what the screen says anyway: what was asked for, and where.
        view.problem = str(result.__cause__ or result)
    elif isinstance(result, Exception):
        raise result
    else:
        view.said = result


@contextmanager
def _log_into(view: View) -> Iterator[None]:
    """Show what the library logs below the table: on stderr it would be in the middle of it."""

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            view.said = record.getMessage()

    logger = logging.getLogger("lockkit")
    before, logger.handlers = logger.handlers, [Said()]
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
        self._came: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Other signals raise a KeyboardInterrupt: see `lockkit.cli.signals.interrupted_by_signals`.
        for signum in (signal.SIGTSTP, signal.SIGQUIT):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._note)
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        self._hide()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self._came.append(signum)

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

    def wait(self, seconds: Seconds) -> tuple[list[str], int | None]:
        """Wait for keys; returns them, or the signal that ends the command."""
        ready, _, _ = select.select([self._input], [], [], seconds)
        while self._came:
            if self._came.pop() == signal.SIGQUIT:
                return [], signal.SIGQUIT
            # Stop as any other program at Ctrl-Z, and take the terminal again when the user comes back.
            self._hide()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)
            signal.signal(signal.SIGTSTP, self._note)
            self._show()
        if not ready:
            return [], None
        try:
            data = os.read(self._input, 1024)
        except OSError:
            data = b""
        # Without a terminal there are no keys any more.
        return (_KEY.findall(data.decode(errors="replace")), None) if data else ([], signal.SIGHUP)


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
        rows = [row for row in records if wanted in f"{row.name}\0{describe(row.holder)}".casefold()]
        rows.sort(key=lambda row: (row.name, row.holder.slot or 0, row.holder.token or 0))
        rows.sort(key=lambda row: COLUMNS[self.sorted_by].order(row, now), reverse=self.reverse)
        self.rows = rows
        # The same record: a holder that was seen again keeps its own.
        places = [index for index, row in enumerate(rows) if row is chosen]
        self._select(places[0] if places else self.selected)

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
            row = self.rows[self.selected]
            if row.of == "once":
                self.said = f"the run of {quoted(row.name)} cannot be broken: it ends by itself, or after its ttl"
            else:
                self.asking = self._breaking(row)

    def _breaking(self, chosen: Record) -> Breaking:
        """Name the holder of a permit, or all of a lock, also those that the filter hides: it is freed as a whole."""
        permit = chosen.holder.slot
        held = [row for row in self._all if (row.name, row.of, row.holder.slot) == (chosen.name, chosen.of, permit)]
        holders = describe(held[0].holder) if len(held) == 1 else f"{len(held)} holders"
        return Breaking(chosen.name, frozenset(row.holder.owner for row in held), holders, permit)

    def _type(self, key: str) -> None:
        if key in _ENTER:
            self.typing = False
        elif key == _ESCAPE:
            self.typing, self.filter = False, ""
        elif key in _ERASE:
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
    text: Callable[[Record, Instant], str] | None = None  # what it shows; None: what `order` gives
    right: bool = False  # aligned to the right

    def cell(self, record: Record, now: Instant) -> str:
        """Give what it shows of a holder."""
        return str(self.order(record, now)) if self.text is None else self.text(record, now)


def _left(record: Record, now: Instant) -> str:
    remaining = record.remaining(now)
    if remaining is None:
        return _UNKNOWN
    return f"{remaining:.1f} s{'!' if remaining < record.longest * EXPIRING_SHARE else ' '}"


def _age(record: Record, now: Instant) -> str:
    """Tell since when it holds the lock; ``>``: at least, because the backend does not know since when."""
    known = record.holder.since is not None
    seconds = _held_seconds(record, now)
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= 2 * size), (1, "s"))
    return f"{'> ' if record.from_start and not known else ''}{seconds / size:.0f} {unit}"


_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "m"))


def _held_seconds(record: Record, now: Instant) -> Seconds:
    """Give how long it holds the lock: since its grant, if that is known, or since it was first seen."""
    since = record.holder.since
    return now - record.since if since is None else max(0.0, wall_clock() - since)


def _number(value: int | None) -> str:
    return _UNKNOWN if value is None else str(value)


def _known(value: Seconds | None) -> Seconds:
    """Sort what is not known before all that is."""
    return -1.0 if value is None else value


COLUMNS: Final = (
    Column("name", 12, lambda record, _: record.name),
    Column("holder", 10, lambda record, _: describe(record.holder)),
    Column("kind", 11, lambda record, _: kind_text(record.of, record.holder)),
    Column(
        "token",
        16,
        lambda record, _: -1 if record.holder.token is None else record.holder.token,
        lambda record, _: _number(record.holder.token),
        right=True,
    ),
    Column("left", 9, lambda record, now: _known(record.remaining(now)), _left, right=True),
    Column(
        "waiters",
        7,
        lambda record, _: _known(record.holder.waiters),
        lambda record, _: _number(record.holder.waiters),
        right=True,
    ),
    Column("age", 7, _held_seconds, _age, right=True),
    Column("missed", 6, lambda record, _: _known(record.missed), lambda record, _: _number(record.missed), right=True),
)
"""In the order of the table."""

DROPPED: Final = ("kind", "age", "waiters", "token", "holder", "missed")
"""What a narrow terminal goes without, in this order."""


def fitting(width: int) -> list[Column]:
    """Choose the columns that fit side by side, with two spaces between."""
    chosen = list(COLUMNS)
    for title in DROPPED:
        if sum(column.width + 2 for column in chosen) <= width:
            break
        chosen = [column for column in chosen if column.title != title]
    return chosen


# -- drawing -----------------------------------------------------------------------------------------------------------


def draw(view: View, now: Instant, size: tuple[int, int]) -> RenderableType:
    """Draw one screen."""
    width, height = size
    about = _about(view.rows[view.selected]) if view.metadata and view.rows else []
    del about[max(0, min(height // 2, height - HEAD_AND_FOOT - 1)) :]
    room = max(1, height - HEAD_AND_FOOT - len(about))
    first = max(0, min(view.selected - room // 2, len(view.rows) - room))
    body = _rows(view, view.rows[first : first + room], first, now, width)
    filling = [Text("")] * (room - len(view.rows[first : first + room]))
    head = Text(plain(view.url), style="bold", no_wrap=True, overflow="ellipsis")
    details = [Text(line, no_wrap=True, overflow="ellipsis") for line in about]
    return Group(head, body, *filling, *details, _state(view, now), _foot(view))


def _rows(view: View, rows: Sequence[Record], first: int, now: Instant, width: int) -> Table:
    table = Table(box=None, expand=True, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    columns = fitting(width)
    for column in columns:
        arrow = ("↓" if view.reverse else "↑") if column is COLUMNS[view.sorted_by] else ""
        table.add_column(
            column.title + arrow,
            justify="right" if column.right else "left",
            no_wrap=True,
            overflow="ellipsis",
            ratio={"name": 2, "holder": 1}.get(column.title),
            min_width=column.width if column.right else None,
        )
    for index, row in enumerate(rows, first):
        cells = [Text(plain(column.cell(row, now))) for column in columns]
        style = "red" if row.expiring else "yellow" if row.missed else ""
        table.add_row(*cells, style=f"{style} reverse" if index == view.selected else style)
    return table


def _about(row: Record) -> list[str]:
    """All that the backend says about a holder, one fact a line."""
    known = facts(row.holder)
    del known["seconds left"]  # as old as the last look
    # The table has these already, unless it is too narrow: so they come last.
    last: dict[str, Any] = {key: known.pop(key) for key in ("token", "waiters", "held since") if key in known}
    known |= last
    return ["", *(f"  {plain(key)}: {plain(value)}" for key, value in known.items())]


def _state(view: View, now: Instant) -> Text:
    names = len({(row.name, row.of) for row in view.rows})
    what = "name" if any(row.of != "lock" for row in view.rows) else "lock"
    parts = [f"{names} {what}{'' if names == 1 else 's'} held"]
    if view.filter and not view.typing:
        parts.append(f"filter {quoted(view.filter)}")
    if view.cut:
        parts.append(f"the first {NAMES_MAX} only: give a PATTERN")
    style = ""
    if view.problem:
        parts.append(f"no answer, seen {now - view.seen:.0f} s ago: {view.problem}")
        style = "bold red"
    if view.said:
        parts.append(view.said)
    return Text(plain("  |  ".join(parts)), style=style, no_wrap=True, overflow="ellipsis")


def _foot(view: View) -> Text:
    if view.asking is not None:
        asking = view.asking
        permit = "" if asking.permit is None else f" (permit {asking.permit})"
        who = f"{quoted(asking.name)}{permit} is held by {asking.holders}"
        held = f"{who}, which keeps working until its next renewal"
        return Text(plain(f"Break it? (y/n)  {held}"), style="bold reverse", no_wrap=True, overflow="ellipsis")
    if view.typing:
        return Text(plain(f"filter: {view.filter}") + "▏", no_wrap=True, overflow="ellipsis")
    return Text(KEYS, style="dim", no_wrap=True, overflow="ellipsis")
