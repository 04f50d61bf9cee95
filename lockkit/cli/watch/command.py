"""The two loops of ``lockkit watch``: the table on a terminal, and else a line for each event."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import lockkit
from lockkit.cli.output import refuse_private
from lockkit.cli.status import SIGNALLED, Status
from lockkit.cli.tables import print_table
from lockkit.cli.watch.changes import Watched
from lockkit.cli.watch.columns import DROPPED
from lockkit.cli.watch.lines import JsonEvents, Printer, TextEvents
from lockkit.cli.watch.looking import Failure, Look, Looker, Poller
from lockkit.cli.watch.screen import Screen
from lockkit.cli.watch.table import draw, summary
from lockkit.cli.watch.view import Shown, View
from lockkit.configuration import registry
from lockkit.errors import BackendUnavailable
from lockkit.runtime import BlockingRuntime, drive, monotonic, wall_clock
from lockkit.units import Seconds
from lockkit.validation import plain

REDRAW_SECONDS = 0.25
"""How often the time left is drawn anew. Longer looks as if it hung; shorter is work for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """
    The options of ``lockkit watch``.

    Attributes:
        url: Backend, or None.
        profile: Profile, or None.
        interval: Between two looks, seconds.
        once: Look once.
        as_json: Print JSON, one event a line.
    """

    url: str | None
    profile: str | None
    interval: Seconds
    once: bool
    as_json: bool


def split_url(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Tell a URL from a lock's name such as ``seat:1``: a URL comes first and has ``://`` or a backend's scheme."""
    if arguments:
        scheme, colon, _ = arguments[0].partition(":")
        if colon and ("://" in arguments[0] or scheme.partition("+")[0] in registry.schemes()):
            return arguments[0], list(arguments[1:])
    return None, list(arguments)


def watch(patterns: Sequence[str], options: WatchOptions) -> int:
    """Show who holds which locks, and what changes."""
    with lockkit.connect(options.url, profile=options.profile) as client:
        refuse_private(client)
        session = _Session(client.url, Looker(client, patterns), options)
        has_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and not options.as_json
        if has_terminal and options.once:
            return session.print_table()
        if has_terminal and sys.stdin.isatty():
            return session.show_table()
        return session.print_events()


class _Session:
    """One run of the command, after its first look."""

    def __init__(self, url: str, looker: Looker, options: WatchOptions) -> None:
        self._url = url
        self._looker = looker
        self._options = options
        self._watched = Watched()
        self._first = looker.look()
        self._changes = self._watched.see(self._first)

    def print_table(self) -> Status:
        """Print the table once."""
        rows = sorted(self._watched.records, key=lambda row: row.name)
        if rows:
            optional = [title for title in DROPPED if title != "holder"]  # a line may be longer here
            print_table(summary(rows, monotonic()), optional=optional)
        else:
            print(plain(f"no such lock is held at {self._url}"))
        return Status.OK

    # -- a line for each event -------------------------------------------------------------------------------------

    def print_events(self) -> Status:
        """Print lines until a signal ends it, or the end of the reader."""
        printer = Printer(JsonEvents() if self._options.as_json else TextEvents())
        pause = BlockingRuntime().sleep
        printer.seen(self._first, self._changes)
        while not self._options.once:
            drive(pause(self._options.interval))
            try:
                look = self._looker.look()
            except BackendUnavailable as error:
                printer.failed(Failure(error, monotonic(), wall_clock()))
            else:
                printer.seen(look, self._watched.see(look))
        return Status.OK

    # -- the table -------------------------------------------------------------------------------------------------

    def show_table(self) -> int:
        """Show the table until the user quits."""
        view, shown = View(), Shown(self._url, self._first.at, self._first.cut)
        with Screen() as screen, _log_into(shown):
            poller = Poller(self._looker, self._options.interval, screen.notify)
            poller.start()
            try:
                return self._loop(screen, poller, view, shown)
            finally:
                poller.stop()

    def _loop(self, screen: Screen, poller: Poller, view: View, shown: Shown) -> int:
        while True:
            for result in poller.take():
                self._take(result, shown)
            now = monotonic()
            view.arrange(self._watched.records, now)
            screen.draw(draw(view, shown, now, screen.size))
            keys, signum = screen.wait(REDRAW_SECONDS)
            if signum is not None:
                return SIGNALLED + signum
            for key in keys:
                if key == "q" and not view.captures:
                    return Status.OK
                breaking = view.press(key, shown)
                if breaking is not None:
                    poller.break_lock(breaking.name, breaking.owners, breaking.permit)

    def _take(self, result: Look | Failure | str, shown: Shown) -> None:
        if isinstance(result, Look):
            self._watched.see(result)
            shown.seen, shown.cut, shown.problem = result.at, result.cut, ""
        elif isinstance(result, Failure):
            # Without what the screen says anyway: what was asked for, and where.
            shown.problem = str(result.error.__cause__ or result.error)
        else:
            shown.said = result


@contextmanager
def _log_into(shown: Shown) -> Iterator[None]:
    """Show what the library logs in the status line: on stderr it would be in the middle of the table."""
    logger = logging.getLogger("lockkit")
    before, logger.handlers = logger.handlers, [_StatusLine(shown)]
    try:
        yield
    finally:
        logger.handlers = before


class _StatusLine(logging.Handler):
    def __init__(self, shown: Shown) -> None:
        super().__init__()
        self._shown = shown

    def emit(self, record: logging.LogRecord) -> None:
        self._shown.said = record.getMessage()
