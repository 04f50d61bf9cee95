"""The columns of the table of ``lockkit watch``: what they show, and how they sort."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from lockkit.backend import Holder
from lockkit.cli.inspection import kind_text
from lockkit.cli.watch.changes import EXPIRING_SHARE, Record
from lockkit.runtime import wall_clock
from lockkit.units import Instant, Seconds

UNKNOWN: Final = "-"


class Column(NamedTuple):
    """
    One column.

    Attributes:
        title: Its head.
        width: Characters that it needs to be worth its place.
        order: Sorts the holders.
        text: What it shows; None: what `order` gives.
        right: Its values are aligned to the right.
    """

    title: str
    width: int
    order: Callable[[Record, Instant], Any]
    text: Callable[[Record, Instant], str] | None = None
    right: bool = False

    def cell(self, record: Record, now: Instant) -> str:
        """Give what it shows of a holder."""
        return str(self.order(record, now)) if self.text is None else self.text(record, now)


def describe(holder: Holder) -> str:
    """Give host and process of a holder, or what a foreign client stored instead."""
    host, pid = holder.metadata.get("host"), holder.metadata.get("pid")
    return holder.owner if host is None or pid is None else f"{host} {pid}"


def _left(record: Record, now: Instant) -> str:
    remaining = record.remaining(now)
    if remaining is None:
        return UNKNOWN
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
    return UNKNOWN if value is None else str(value)


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
