"""What the pages that programs write are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    for row in (head, ["---"] * len(head), *rows):
        yield f"|{'|'.join(row)}|" if row[0] == "---" else f"| {' | '.join(row)} |"


def cell(text: str) -> str:
    """What stays within one cell, whatever a server or a library said."""
    return " ".join(text.split()).replace("|", "/").replace("`", "'")


def code(text: str) -> str:
    """Text to be taken as it is."""
    return f"`{text}`"


def by_line(text: str) -> str:
    """The sentences of an item of a list, each on a line of its own."""
    return text.replace(". ", ".\n  ")
