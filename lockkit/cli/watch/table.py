"""Draws the table of ``lockkit watch``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lockkit.cli.inspection import facts
from lockkit.cli.watch.changes import Record
from lockkit.cli.watch.columns import COLUMNS, fitting
from lockkit.cli.watch.looking import NAMES_MAX
from lockkit.cli.watch.view import Breaking, Shown, View
from lockkit.units import Instant
from lockkit.validation import plain
from lockkit.validation import shown as quoted

if TYPE_CHECKING:
    from rich.console import RenderableType


KEYS: Final = "q quit  ↑↓ select  s sort  r reverse  / filter  m metadata  b break"
HEAD_AND_FOOT: Final = 4
"""Lines around the holders: backend, column titles, shown, keys."""


def draw(view: View, shown: Shown, now: Instant, size: tuple[int, int]) -> RenderableType:
    """Draw one screen."""
    width, height = size
    about = _about(view.rows[view.selected]) if view.metadata and view.rows else []
    del about[max(0, min(height // 2, height - HEAD_AND_FOOT - 1)) :]
    room = max(1, height - HEAD_AND_FOOT - len(about))
    first = max(0, min(view.selected - room // 2, len(view.rows) - room))
    body = _rows(view, view.rows[first : first + room], first, now, width)
    filling = [Text("")] * (room - len(view.rows[first : first + room]))
    head = Text(plain(shown.url), style="bold", no_wrap=True, overflow="ellipsis")
    details = [Text(line, no_wrap=True, overflow="ellipsis") for line in about]
    return Group(head, body, *filling, *details, _state(view, shown, now), _foot(view))


def summary(rows: Sequence[Record], now: Instant) -> Table:
    """Draw the holders as a table that is printed once; what takes a second look to know is left out."""
    columns = [column for column in COLUMNS if column.title not in {"age", "missed"}]
    table = Table(*(column.title for column in columns))
    table.columns[0].min_width = max(cell_len(plain(row.name)) for row in rows)
    for row in rows:
        table.add_row(*(Text(plain(column.cell(row, now)).strip()) for column in columns))
    return table


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


def _state(view: View, shown: Shown, now: Instant) -> Text:
    names = len({(row.name, row.of) for row in view.rows})
    what = "name" if any(row.of != "lock" for row in view.rows) else "lock"
    parts = [f"{names} {what}{'' if names == 1 else 's'} held"]
    if view.filter and not view.typing:
        parts.append(f"filter {quoted(view.filter)}")
    if shown.cut:
        parts.append(f"the first {NAMES_MAX} only: give a PATTERN")
    style = ""
    if shown.problem:
        parts.append(f"no answer, seen {now - shown.seen:.0f} s ago: {shown.problem}")
        style = "bold red"
    if shown.said:
        parts.append(shown.said)
    return Text(plain("  |  ".join(parts)), style=style, no_wrap=True, overflow="ellipsis")


def _permit(asking: Breaking) -> str:
    return "" if asking.permit is None else f" (permit {asking.permit})"


def _foot(view: View) -> Text:
    if view.asking is not None:
        asking = view.asking
        who = f"{quoted(asking.name)}{_permit(asking)} is held by {asking.holders}"
        held = f"{who}, which keeps working until its next renewal"
        return Text(plain(f"Break it? (y/n)  {held}"), style="bold reverse", no_wrap=True, overflow="ellipsis")
    if view.typing:
        return Text(plain(f"filter: {view.filter}") + "▏", no_wrap=True, overflow="ellipsis")
    return Text(KEYS, style="dim", no_wrap=True, overflow="ellipsis")
