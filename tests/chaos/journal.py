"""
The outside witness of a chaos run: what holders wrote down while they believed that they held, and its judgement.

One file, appended to by all processes (``O_APPEND``, one ``write`` a line, so lines do not mix). A line is::

    call  STAY NAME TIME           a client is about to acquire
    enter STAY NAME TOKEN TIME     a holder found its lease held, for the first time
    held  STAY TIME                and again
    left  STAY TIME                its release has returned
    said  STAY WORD TIME           what else happened to a client: timeout, unavailable, lost, error
    fault WORD BEGAN TIME          what was wrong with the servers or the network, from then to TIME

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
from itertools import pairwise
from pathlib import Path

from lockkit_tools.history import Stay


def now() -> int:
    """Nanoseconds of the clock that all processes of the machine share."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(slots=True)
class Verdict:
    """
    What a journal shows.

    Attributes:
        calls: All calls, for `lockkit_tools.history.write`.
        stays: Those that acquired a lock, in the order in which they began.
        said: How often each word was said.
        overlaps: Two who believed that they held at the same time, one sentence each.
        disorder: Tokens that did not increase, one sentence each.
        faults: From when to when something was wrong with the servers, also as a client saw it.
    """

    calls: list[Stay]
    stays: list[Stay]
    said: Counter[str] = field(default_factory=Counter)
    overlaps: list[str] = field(default_factory=list)
    disorder: list[str] = field(default_factory=list)
    faults: list[tuple[int, int]] = field(default_factory=list)

    def hand_offs(self, lock: str, limit: float, grace: float) -> list[float]:
        """
        Measure how long the lock was free while somebody waited for it, each time that it was released, seconds.

        Those that a fault may have delayed do not count: one that began within `limit` after the release, or ended
        less than `grace` before.
        """
        calls = sorted(
            (one for one in self.calls if one.lock == lock and one.returned), key=lambda one: one.returned or 0
        )
        found = []
        for before, after in pairwise(calls):
            if before.left and before.token is not None and after.called < before.leaving:
                seconds = ((after.returned or 0) - before.leaving) / 1e9
                judged = before.leaving + int(min(seconds, limit) * 1e9)
                if not any(begin < judged and before.leaving < end + grace * 1e9 for begin, end in self.faults):
                    found.append(seconds)
        return found


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
        """Read all lines that there are; the last may be half written yet."""
        return judge(self.path.read_text().rpartition("\n")[0].splitlines())


def judge(lines: Iterable[str]) -> Verdict:
    """Find overlaps and disorder. Pure."""
    calls, said, faults = _read(lines)
    granted = [(stay.returned, stay.token, stay) for stay in calls if stay.returned and stay.token is not None]
    granted.sort(key=lambda one: one[0])
    verdict = Verdict(calls, [stay for *_, stay in granted], said, faults=faults)
    longest: dict[str, Stay] = {}  # of each name the stay so far that ends last
    highest: dict[str, tuple[int, Stay]] = {}
    for first, token, stay in granted:
        before = longest.get(stay.lock)
        if before is not None and first < before.leaving:
            verdict.overlaps.append(f"{stay.lock}: {_show(before)} and {_show(stay)}")
        if before is None or stay.leaving > before.leaving:
            longest[stay.lock] = stay
        if stay.lock in highest and token <= highest[stay.lock][0]:
            verdict.disorder.append(f"{stay.lock}: {_show(highest[stay.lock][1])}, and later {_show(stay)}")
        else:
            highest[stay.lock] = token, stay
    return verdict


def _read(lines: Iterable[str]) -> tuple[list[Stay], Counter[str], list[tuple[int, int]]]:
    """Put the lines of each stay together, count what was said, and collect the faults."""
    calls: dict[str, Stay] = {}
    faults = []
    said: Counter[str] = Counter()
    for line in lines:
        what, stay_id, *rest = line.split(" ")
        time = int(rest[-1])
        if what == "call":
            calls[stay_id] = Stay(rest[0], stay_id, time)
        elif what == "enter":
            calls[stay_id].returned, calls[stay_id].token = time, int(rest[1])
        elif what == "left":
            calls[stay_id].left = time
        elif what == "said":
            said[rest[0]] += 1
            if rest[0] == "timeout":
                calls[stay_id].returned = time
            elif rest[0] == "unavailable":
                faults.append((time, time))  # servers that do not answer wake nobody
        elif what == "fault":
            faults.append((int(rest[0]), time))
        if what in {"enter", "held"}:
            calls[stay_id].leaving = time + 1  # not before
    return [*calls.values()], said, faults


def _show(stay: Stay) -> str:
    """Say who, with which token, and when (seconds)."""
    return f"{stay.client} token {stay.token} {(stay.returned or 0) / 1e9:.4f}..{stay.leaving / 1e9:.4f}"
