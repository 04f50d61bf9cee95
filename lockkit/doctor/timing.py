"""Compares the clocks of servers with this machine's, and with one another."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity
from lockkit.runtime import Runtime, wall_clock

_PAGE = "how-to/check-your-servers.md#all-backends"

CLOCK_DIFFERENCE_MAX = 1.0
"""Seconds. Synchronised clocks differ by some milliseconds; if they differ by more, something does not keep time."""

CLOCK_DIFFERS = Check(
    "clock-differs",
    Severity.WARNING,
    "The clock of the server or of this machine is wrong. Leases do not depend on it, but if it is corrected by a jump "
    "they can end early, and tokens may decrease after the server has lost its data.",
    _PAGE,
)
CLOCKS_DIFFER = Check(
    "clocks-differ",
    Severity.WARNING,
    "Tokens may decrease after nodes have lost their data: their clocks must differ by less than the longest ttl.",
    "backends/redlock.md#what-it-does-not-promise",
)

_FIX_CLOCK = "On the machine whose clock is wrong: systemctl enable --now chrony, then check with: chronyc tracking"


async def clock_offset(runtime: Runtime, ask: Callable[[], Awaitable[float]]) -> tuple[float, float]:
    """Compare a server's clock with this machine's (Cristian 1989: assume it was read halfway through the request)."""
    best = (0.0, float("inf"))
    for _ in range(3):
        here, started = wall_clock(), runtime.now()
        server = await ask()
        half = (runtime.now() - started) / 2
        # The quickest answer is the most precise; a stall of this process adds to the error.
        best = min(best, (server - (here + half), half), key=lambda one: one[1])
    return best


def judge_clock(examination: Examination, where: str, offset: float, error_max: float) -> None:
    """Judge how far a server is ahead of this machine, and the largest error of that; both in seconds."""
    if abs(offset) - error_max <= CLOCK_DIFFERENCE_MAX:
        return
    how = "ahead of" if offset > 0 else "behind"
    seen = f"The server's clock is {abs(offset):.1f} s {how} this machine's."
    examination.find(CLOCK_DIFFERS, where, seen, _FIX_CLOCK)


def judge_clocks(examination: Examination, offsets: Mapping[str, tuple[float, float]]) -> None:
    """Judge how much the clocks of independent nodes differ; `offsets` by node, as from `clock_offset`."""
    if not offsets:
        return
    slowest = min(offsets, key=lambda node: offsets[node][0])
    fastest = max(offsets, key=lambda node: offsets[node][0])
    difference = offsets[fastest][0] - offsets[slowest][0]
    error_max = offsets[fastest][1] + offsets[slowest][1]
    if difference - error_max > min(CLOCK_DIFFERENCE_MAX, examination.ttl):
        seen = f"The clock of {fastest} is {difference:.1f} s ahead of that of {slowest}."
        examination.find(CLOCKS_DIFFER, fastest, seen, _FIX_CLOCK)
