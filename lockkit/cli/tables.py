"""Tables of the commands that show locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["print_table"]

WIDTH_MAX = 10_000
"""Columns of a table in a pipe: more than the names and metadata of a lock can take."""


def print_table(table: Table, *, stderr: bool = False) -> None:
    """
    Print a table without cutting what is in it: a terminal gets lines of its width, a pipe or file one line a row.

    Args:
        table: Its cells are folded where they do not fit.
        stderr: Print it there, before a question.
    """
    console = Console(stderr=stderr)
    if not console.is_terminal:
        console.width = Measurement.get(console, console.options.update(max_width=WIDTH_MAX), table).maximum
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)
