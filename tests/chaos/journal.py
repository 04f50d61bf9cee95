"""
The outside witness of a chaos run: what holders wrote down while they believed that they held, and its judgement.

One file, appended to by all processes (``O_APPEND``, one ``write`` a line, so lines do not mix). A line is::

    enter STAY NAME TOKEN TIME     a holder found its lease held, for the first time
    held  STAY TIME                and again
    said  STAY WORD                what else happened to a client: timeout, unavailable, lost, error

TIME is the machine's clock (ns, the same for all processes), read *before* the look at the lease. A loss is final, so
who finds its lease held has held it at that time and at all times since it entered. From the first to the last line of
a stay it surely believed that it held, however it ended: killed, frozen or by a release. Two stays under one name that
share an instant are two holders; nothing about the backend's own times enters the judgement.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


def now() -> int:
    """Nanoseconds of the clock that all processes of the machine share."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(slots=True)
class Stay:
    """The time in which one holder surely believed that it held."""

    id: str
    name: str
    token: int
    first: int
    last: int

    def __str__(self) -> str:
        """Say who, with which token, and when (seconds)."""
        return f"{self.id} token {self.token} {self.first / 1e9:.4f}..{self.last / 1e9:.4f}"


@dataclass(slots=True)
class Verdict:
    """
    What a journal shows.

    Attributes:
        stays: All, in the order in which they began.
        said: How often each word was said.
        overlaps: Two who believed that they held at the same time, one sentence each.
        disorder: Tokens that did not increase, one sentence each.
    """

    stays: list[Stay] = field(default_factory=list)
    said: Counter[str] = field(default_factory=Counter)
    overlaps: list[str] = field(default_factory=list)
    disorder: list[str] = field(default_factory=list)


class Journal:
    """
    Writes the lines of one process. Threads may share it.

    Args:
        path: The file, shared by all.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, *words: object) -> None:
        """Append one line."""
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())

    def judge(self) -> Verdict:
        """Read all lines that there are."""
        return judge(self.path.read_text().splitlines())


def judge(lines: Iterable[str]) -> Verdict:
    """Find overlaps and disorder. Pure."""
    verdict = Verdict()
    stays: dict[str, Stay] = {}
    for line in lines:
        what, stay_id, *rest = line.split(" ")
        if what == "enter":
            name, token, first = rest
            stays[stay_id] = Stay(stay_id, name, int(token), int(first), int(first))
        elif what == "held":
            stays[stay_id].last = int(rest[0])
        else:
            verdict.said[rest[0]] += 1
    verdict.stays = sorted(stays.values(), key=lambda stay: stay.first)
    longest: dict[str, Stay] = {}  # of each name the stay so far that ends last
    highest: dict[str, Stay] = {}
    for stay in verdict.stays:
        before = longest.get(stay.name)
        if before is not None and stay.first <= before.last:
            verdict.overlaps.append(f"{stay.name}: {before} and {stay}")
        if before is None or stay.last > before.last:
            longest[stay.name] = stay
        higher = highest.get(stay.name)
        if higher is not None and stay.token <= higher.token:
            verdict.disorder.append(f"{stay.name}: {higher}, and later {stay}")
        else:
            highest[stay.name] = stay
    return verdict
