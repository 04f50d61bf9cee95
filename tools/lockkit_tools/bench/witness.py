"""
Whether exclusion held, judged from outside every backend.

Each contender notes when its critical section began and ended, by the machine's monotonic clock, which all processes of
the machine share; both notes are taken inside the section. So two sections that overlap *were* inside together: no
false alarm. A section that did not overlap any other proves nothing about the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple


class Section(NamedTuple):
    """One critical section."""

    began_ns: int  # when the holder was inside
    ended_ns: int  # when it was still inside
    token: int | None  # its fencing token, or None
    contender: int
    writes: bool = True  # it excludes all others; a reader's excludes writers only


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the sections show."""

    sections: int
    overlaps: int  # how many began while an earlier one had not ended
    disorders: int  # how many had a token that was not above all those before
    example: str  # the first violation in words; empty if there is none

    @property
    def broken(self) -> str:
        """Say what is wrong; empty if nothing is."""
        if not self.overlaps and not self.disorders:
            return ""
        counts = [f"{self.overlaps} overlaps"] if self.overlaps else []
        counts += [f"{self.disorders} tokens out of order"] if self.disorders else []
        return f"{' and '.join(counts)} in {self.sections} sections; first: {self.example}"


def judge(sections: Iterable[Section]) -> Verdict:
    """
    Look for writers that were inside with others, and for tokens not above those of the writers before.

    A plain lock has writers only.
    """
    ordered = sorted(sections, key=lambda section: section[:2])
    overlaps = disorders = 0
    example = ""
    last_writer: Section | None = None  # of those that began, the one that ends last
    last_reader: Section | None = None
    written = read = 0
    for section in ordered:
        beside = [last_writer, last_reader] if section.writes else [last_writer]
        inside = next((one for one in beside if one is not None and section.began_ns < one.ended_ns), None)
        if inside is not None:
            overlaps += 1
            example = example or _overlap(inside, section)
        if section.token is not None:
            highest = max(written, read) if section.writes else written
            if section.token <= highest:
                disorders += 1
                example = example or f"token {section.token} of contender {section.contender} came after {highest}"
            if section.writes:
                written = max(written, section.token)
            else:
                read = max(read, section.token)
        if section.writes:
            last_writer = _later(last_writer, section)
        else:
            last_reader = _later(last_reader, section)
    return Verdict(len(ordered), overlaps, disorders, example)


def judge_permits(sections: Iterable[Section], permits: int) -> Verdict:
    """Look for sections that began while as many others as there are permits had not ended."""
    ordered = sorted(sections, key=lambda section: section[:2])
    excess = 0
    example = ""
    ends: list[int] = []
    for section in ordered:
        while ends and ends[0] <= section.began_ns:
            heappop(ends)
        if len(ends) >= permits:
            excess += 1
            example = example or f"contender {section.contender} came beside {len(ends)} others, of {permits} permits"
        heappush(ends, section.ended_ns)
    return Verdict(len(ordered), excess, 0, example)


def _later(one: Section | None, other: Section) -> Section:
    return other if one is None or other.ended_ns > one.ended_ns else one


def _overlap(first: Section, second: Section) -> str:
    together_us = (min(first.ended_ns, second.ended_ns) - second.began_ns) / 1000
    return f"contenders {first.contender} and {second.contender} were inside together for {together_us:.1f} µs"
