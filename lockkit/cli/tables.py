"""Tables of the commands that show locks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

__all__ = ["print_table"]

WIDTH_MAX = 10_000
"""Columns of a table in a pipe: more than the names and metadata of a lock can take."""


def print_table(
    table: Table, *, stderr: bool = False, follow_columns: bool = False, optional: Sequence[str] = ()
) -> None:
    """
    Print a table without cutting what is in it: a terminal gets lines of its width, a pipe or file one line a row.

    Args:
        table: Its cells are folded where they do not fit.
        stderr: Print it there, before a question.
        follow_columns: In a pipe or file too, print lines of the width in the variable COLUMNS, if that is set.
        optional: Columns to leave out, in this order, where words would be broken otherwise; a word of what is left
            that is wider than the terminal makes a longer line.
    """
    console = Console(stderr=stderr)

    def needed() -> Measurement:
        return Measurement.get(console, console.options.update(max_width=WIDTH_MAX), table)

    if not console.is_terminal and not (follow_columns and "COLUMNS" in os.environ):
        console.width = needed().maximum
    for title in optional:
        if needed().minimum > console.width:
            table.columns = [column for column in table.columns if column.header != title]
    if optional:
        console.width = max(console.width, needed().minimum)
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)
