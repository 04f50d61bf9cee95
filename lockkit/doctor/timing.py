"""Round trips and clocks, and what they mean for a ttl."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from lockkit.doctor.findings import Check, Severity
from lockkit.engine.settings import drift_margin

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from lockkit.doctor.examination import Examination
    from lockkit.runtime import Runtime

__all__ = ["CLOCK_DIFFERENCE_MAX", "clock_offset", "judge_clock", "judge_clocks", "judge_round_trip", "judge_ttl",
           "measure"]  # fmt: skip

_PAGE = "how-to/check-your-servers.md#all-backends"

SAMPLES = 15
"""How often a server is asked. More takes longer over a slow network, fewer is more at the mercy of one stall."""

ROUND_TRIPS_MIN = 30
"""Round trips that a ttl should have room for. A renewal is due after a third of it, so this leaves twenty for tries
again; fewer loses leases to one stall of the network."""

ROUND_TRIPS_NEEDED = 3
"""Fewer, and a lease has ended, or nearly, when its holder hears of it: one for the grant, one for the first renewal,
and one to be late."""

TTL_SHORT = 1.0
"""Seconds. A machine that swaps, or a process that collects garbage, stands still for longer than a third of that."""

CLOCK_DIFFERENCE_MAX = 1.0
"""Seconds. Clocks that something keeps right differ by some milliseconds; more means that nothing does."""

TTL_BELOW_MINIMUM = Check(
    "ttl-below-minimum", Severity.ERROR, "lockkit refuses such a lock with ConfigurationError.", _PAGE
)
TTL_BELOW_ROUND_TRIP = Check(
    "ttl-below-round-trip",
    Severity.ERROR,
    "A lease ends before its holder hears of the grant, or before the first renewal is through: locks are lost all the "
    "time.",
    _PAGE,
)
TTL_NEAR_ROUND_TRIP = Check(
    "ttl-near-round-trip",
    Severity.WARNING,
    "There is no time to try a failed renewal again: one stall of the network loses the lease.",
    _PAGE,
)
TTL_SHORT_CHECK = Check(
    "ttl-short",
    Severity.WARNING,
    "A holder that stands still for two thirds of the ttl (a busy machine, garbage collection) loses its lease while "
    "it works.",
    "how-to/choose-a-ttl.md#start-from-these",
)
CLOCK_DIFFERS = Check(
    "clock-differs",
    Severity.WARNING,
    "The clock of the server or of this machine is wrong. Leases do not depend on it, but a clock that is set right "
    "by a jump can end them early, and tokens may go back when the server has lost its data.",
    _PAGE,
)
CLOCKS_DIFFER = Check(
    "clocks-differ",
    Severity.WARNING,
    "Tokens may go back when nodes have lost their data: their clocks must differ by less than the longest ttl.",
    "backends/redlock.md#what-it-does-not-promise",
)

_MEND_CLOCK = "On the machine whose clock is wrong: systemctl enable --now chrony, then look at: chronyc tracking"


async def measure(runtime: Runtime, ask: Callable[[], Awaitable[object]]) -> float:
    """Give the median time of a question, seconds. The first one is not counted: it may have to connect."""
    await ask()
    times = []
    for _ in range(SAMPLES):
        started = runtime.now()
        await ask()
        times.append(runtime.now() - started)
    return statistics.median(times)


def judge_ttl(examination: Examination) -> None:
    """Judge the ttl by what the backend can do, and by what machines do."""
    ttl, capabilities = examination.ttl, examination.backend_class.capabilities
    where = examination.url.safe_text
    if ttl < capabilities.min_ttl:
        examination.find(
            TTL_BELOW_MINIMUM,
            where,
            f"The ttl is {ttl:g} s; the shortest of this backend is {capabilities.min_ttl:g} s.",
            f"Set ttl={capabilities.min_ttl:g} or more, best leave it out: {examination.url.scheme}://…?ttl=30",
        )
    elif ttl < TTL_SHORT and capabilities.scope != "process":
        examination.find(
            TTL_SHORT_CHECK,
            where,
            f"The ttl is {ttl:g} s.",
            "Set a ttl of 5 s or more: others then wait longer after a crash, and only then.",
        )


def judge_round_trip(examination: Examination, where: str, round_trip: float) -> None:
    """Compare the ttl with a round trip, in seconds."""
    ttl = examination.ttl
    seen = f"A round trip takes {round_trip * 1000:.3g} ms, the ttl is {ttl:g} s."
    mend = f"Set ttl={max(5.0, ROUND_TRIPS_MIN * round_trip):.3g} or more, or move clients and server closer together."
    if ttl - drift_margin(ttl) <= ROUND_TRIPS_NEEDED * round_trip:
        examination.find(TTL_BELOW_ROUND_TRIP, where, seen, mend)
    elif ttl < ROUND_TRIPS_MIN * round_trip:
        examination.find(TTL_NEAR_ROUND_TRIP, where, seen, mend)


def wall_clock() -> float:
    """Give the time of day of this machine, seconds since 1970. It is only compared with a server's."""
    return time.time()  # noqa: TID251 - nothing is decided by it


async def clock_offset(runtime: Runtime, ask: Callable[[], Awaitable[float]]) -> tuple[float, float]:
    """
    Compare a server's clock with this machine's (Cristian 1989: the answer was made in the middle, or nearly).

    Args:
        runtime: For the time that the question takes.
        ask: Gives the server's time of day, seconds since 1970.

    Returns:
        How far the server is ahead, and how wrong that may be, both in seconds.
    """
    best = (0.0, float("inf"))
    for _ in range(3):
        here, started = wall_clock(), runtime.now()
        server = await ask()
        half = (runtime.now() - started) / 2
        # The quickest answer tells most; a stall of this process counts as doubt.
        best = min(best, (server - (here + half), half), key=lambda one: one[1])
    return best


def judge_clock(examination: Examination, where: str, offset: float, doubt: float) -> None:
    """Judge how far a server is ahead of this machine; both in seconds."""
    if abs(offset) - doubt <= CLOCK_DIFFERENCE_MAX:
        return
    how = "ahead of" if offset > 0 else "behind"
    seen = f"The server's clock is {abs(offset):.1f} s {how} this machine's."
    examination.find(CLOCK_DIFFERS, where, seen, _MEND_CLOCK)


def judge_clocks(examination: Examination, offsets: Mapping[str, tuple[float, float]]) -> None:
    """Judge how much the clocks of independent nodes differ; `offsets` by node, as from `clock_offset`."""
    if not offsets:
        return
    slowest = min(offsets, key=lambda node: offsets[node][0])
    fastest = max(offsets, key=lambda node: offsets[node][0])
    difference = offsets[fastest][0] - offsets[slowest][0]
    doubt = offsets[fastest][1] + offsets[slowest][1]
    if difference - doubt > min(CLOCK_DIFFERENCE_MAX, examination.ttl):
        seen = f"The clock of {fastest} is {difference:.1f} s ahead of that of {slowest}."
        examination.find(CLOCKS_DIFFER, fastest, seen, _MEND_CLOCK)
