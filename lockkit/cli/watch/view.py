"""What the user of ``lockkit watch`` has chosen to see, and what keys do to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from lockkit.cli.watch.changes import Record
from lockkit.cli.watch.columns import COLUMNS, describe
from lockkit.units import Instant
from lockkit.validation import shown as quoted

_UP: Final = frozenset({"\x1b[A", "\x1bOA", "k"})
_DOWN: Final = frozenset({"\x1b[B", "\x1bOB", "j"})
_ENTER: Final = frozenset({"\r", "\n"})
_ERASE: Final = frozenset({"\x7f", "\x08"})
_ESCAPE: Final = "\x1b"


class Breaking(NamedTuple):
    """
    A lock that the user wants freed.

    Attributes:
        name: Its name.
        owners: The owner ids of its holders, as the user was shown them.
        holders: The same, for the user.
        permit: Number of the permit, of a semaphore; None: the lock.
    """

    name: str
    owners: frozenset[str]
    holders: str
    permit: int | None = None


@dataclass(slots=True)
class Shown:
    """
    What is shown beside the holders.

    Attributes:
        url: The backend, without a password.
        seen: When the last look was answered, monotonic clock.
        cut: That look did not ask for all locks.
        problem: Why the server does not answer now; empty if it does.
        said: What the user is to know of the last thing that was done, or that lockkit logged.
    """

    url: str
    seen: Instant
    cut: bool = False
    problem: str = ""
    said: str = ""


@dataclass(slots=True)
class View:
    """
    The user's choices.

    Attributes:
        sorted_by: Number of the column.
        reverse: Largest first.
        filter: Text that names or holders must contain.
        typing: The keys go into the filter.
        metadata: Show all that is known of the selected holder.
        asking: The user was asked whether to break this lock.
        rows: The holders that are shown, in order.
        selected: Number of the selected row.
    """

    sorted_by: int = 0
    reverse: bool = False
    filter: str = ""
    typing: bool = False
    metadata: bool = False
    asking: Breaking | None = None
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

    def press(self, key: str, shown: Shown) -> Breaking | None:
        """Take a key; ``q`` is the caller's unless `captures`. What is to say about it goes into the status."""
        shown.said = ""
        if self.asking is not None:
            asked, self.asking = self.asking, None
            if key in {"y", "Y"}:
                return asked
            shown.said = f"{quoted(asked.name)} was not broken"
        elif self.typing:
            self._type(key)
        else:
            self._command(key, shown)
        return None

    def _command(self, key: str, shown: Shown) -> None:
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
                shown.said = f"the run of {quoted(row.name)} cannot be broken: it ends by itself, or after its ttl"
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
