"""Tables of the commands that show locks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement, measure_renderables
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table


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
