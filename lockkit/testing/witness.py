"""
Tells whether two were inside a critical section at once, and in which order they were.

It stands outside of every backend: plain files of one directory, no lock of any kind.

- A process that enters creates the marker file exclusively (``O_EXCL``, one atomic step of the kernel). If it is there
  already, somebody else is inside: that is taken down, and nothing is removed.
- Entry and exit are appended to a log (``O_APPEND``, one ``write`` each, so lines of several processes do not mix).
  If exclusion held, the log is a row of pairs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """One stay in the critical section: who was inside, under which token."""

    who: str
    token: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a witness saw."""

    entries: Sequence[Entry]  # the stays, in the order in which they began
    violations: Sequence[str]  # what went against exclusion or token order, one sentence each; empty if nothing did

    def shares(self, until: int | None = None) -> dict[str, int]:
        """How often each was inside, among the first `until` stays (None: all)."""
        shares: dict[str, int] = {}
        for entry in self.entries[:until]:
            shares[entry.who] = shares.get(entry.who, 0) + 1
        return shares

    def expect_exclusion(self, entries_count: int) -> None:
        """Assert that nothing was violated and that as many stays were seen as there should be."""
        assert not self.violations, "\n".join(self.violations[:20])
        assert len(self.entries) == entries_count


class Witness:
    """
    Watches one critical section. Any number of processes and threads may open the same directory.

    Args:
        directory: Of its own, existing; shared by all that take part.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._marker = str(self.directory / "inside")
        self._log = str(self.directory / "log")

    def enter(self, who: str, token: int) -> None:
        """Say that `who` (a word without spaces) is inside now, with the token of its lease."""
        try:
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            self._append(f"overlap {who} {token}")
        self._append(f"enter {who} {token}")

    def leave(self, who: str, token: int) -> None:
        """Say that `who` is about to leave."""
        self._append(f"leave {who} {token}")
        try:
            os.unlink(self._marker)  # noqa: PTH108 - a Path would be made at every call
        except FileNotFoundError:
            self._append(f"overlap {who} {token}")

    def _append(self, line: str) -> None:
        fd = os.open(self._log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        try:
            os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)

    def report(self) -> Report:
        """Read the log."""
        try:
            lines = Path(self._log).read_text().splitlines()
        except FileNotFoundError:
            lines = []
        return read(lines)


def read(lines: Sequence[str]) -> Report:
    """Judge the lines of a log. Pure."""
    entries: list[Entry] = []
    violations: list[str] = []
    inside: list[Entry] = []
    for number, line in enumerate(lines, 1):
        what, who, token = line.split(" ")
        entry = Entry(who, int(token))
        if what == "overlap":
            violations.append(f"line {number}: {entry} met somebody inside")
        elif what == "leave":
            if entry in inside:
                inside.remove(entry)
            else:
                violations.append(f"line {number}: {entry} left without having entered")
        else:
            if inside:
                violations.append(f"line {number}: {entry} entered while {inside} was inside")
            if entries and entry.token <= entries[-1].token:
                violations.append(f"line {number}: {entry} has no higher token than {entries[-1]} before it")
            inside.append(entry)
            entries.append(entry)
    violations.extend(f"{entry} never left" for entry in inside)
    return Report(entries, violations)
