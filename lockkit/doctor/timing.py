"""Measures round trips and clocks, and judges a ttl by them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from lockkit.backend import LockBackend
from lockkit.doctor.findings import Check, Severity
from lockkit.engine.settings import drift_margin
from lockkit.runtime import Runtime
from lockkit.units import Seconds
from lockkit.url import Url

_PAGE = "how-to/check-your-servers.md#all-backends"

SAMPLES = 15
"""How often a server is asked. More takes longer over a slow network; with fewer, one stall distorts the median."""

ROUND_TRIPS_MIN = 30
"""How many round trips should fit into a ttl. A renewal is due after a third of it, which leaves twenty round trips for
retries; with fewer, one stall of the network loses leases."""

ROUND_TRIPS_NEEDED = 3
"""With fewer, a lease has ended, or nearly, when its holder gets the reply: one round trip for the grant, one for the
first renewal, and one of delay."""

TTL_SHORT = 1.0
"""Seconds. Swapping or garbage collection can stop a process for longer than a third of that."""

CLOCK_DIFFERENCE_MAX = 1.0
"""Seconds. Synchronised clocks differ by some milliseconds; if they differ by more, something does not keep time."""

TTL_BELOW_MINIMUM = Check(
    "ttl-below-minimum", Severity.ERROR, "lockkit refuses such a lock with ConfigurationError.", _PAGE
)
TTL_BELOW_ROUND_TRIP = Check(
    "ttl-below-round-trip",
    Severity.ERROR,
    "A lease ends before its holder gets the reply to its request, or before the first renewal arrives: locks are lost "
    "all the time.",
    _PAGE,
)
TTL_NEAR_ROUND_TRIP = Check(
    "ttl-near-round-trip",
    Severity.WARNING,
    "There is no time to retry a failed renewal: one stall of the network loses the lease.",
    _PAGE,
)
TTL_SHORT_CHECK = Check(
    "ttl-short",
    Severity.WARNING,
    "A holder that is stopped for two thirds of the ttl (a busy machine, garbage collection) loses its lease while it "
    "works.",
    "how-to/choose-a-ttl.md#start-from-these",
)
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


class Case(Protocol):
    """What is judged: an `lockkit.doctor.examination.Examination`, which stands above this module."""

    url: Url
    backend_class: type[LockBackend]
    ttl: float
    """Seconds."""

    def find(self, check: Check, where: str, seen: str, fix: str) -> None:
        """Take a finding down."""


async def measure(runtime: Runtime, ask: Callable[[], Awaitable[object]]) -> float:
    """Return the median time of a request, seconds. The first one does not count: it may have to connect."""
    await ask()
    times = []
    for _ in range(SAMPLES):
        started = runtime.now()
        await ask()
        times.append(runtime.now() - started)
    return statistics.median(times)


def judge_ttl(examination: Case) -> None:
    """Judge the ttl by the backend's shortest one, and by how long a process may be stopped."""
    ttl, capabilities = examination.ttl, examination.backend_class.capabilities
    where = examination.url.safe_text
    if ttl < capabilities.min_ttl:
        examination.find(
            TTL_BELOW_MINIMUM,
            where,
            f"The ttl is {ttl:g} s; the shortest ttl of this backend is {capabilities.min_ttl:g} s.",
            f"Set ttl={capabilities.min_ttl:g} or more, or leave it out for 30 s: {examination.url.scheme}://…?ttl=30",
        )
    elif ttl < TTL_SHORT and capabilities.scope != "process":
        examination.find(
            TTL_SHORT_CHECK,
            where,
            f"The ttl is {ttl:g} s.",
            "Set a ttl of 5 s or more: other clients then wait longer, but only after a crash.",
        )


def judge_round_trip(examination: Case, where: str, round_trip: Seconds) -> None:
    """Compare the ttl with a round trip, in seconds."""
    ttl = examination.ttl
    seen = f"A round trip takes {round_trip * 1000:.3g} ms, the ttl is {ttl:g} s."
    fix = f"Set ttl={max(5.0, ROUND_TRIPS_MIN * round_trip):.3g} or more, or move clients and server closer together."
    if ttl - drift_margin(ttl) <= ROUND_TRIPS_NEEDED * round_trip:
        examination.find(TTL_BELOW_ROUND_TRIP, where, seen, fix)
    elif ttl < ROUND_TRIPS_MIN * round_trip:
        examination.find(TTL_NEAR_ROUND_TRIP, where, seen, fix)


def wall_clock() -> float:
    """Return the time of day of this machine, seconds since 1970. It is only compared with a server's."""
    return time.time()  # noqa: TID251 - it decides nothing


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


def judge_clock(examination: Case, where: str, offset: float, error_max: float) -> None:
    """Judge how far a server is ahead of this machine, and the largest error of that; both in seconds."""
    if abs(offset) - error_max <= CLOCK_DIFFERENCE_MAX:
        return
    how = "ahead of" if offset > 0 else "behind"
    seen = f"The server's clock is {abs(offset):.1f} s {how} this machine's."
    examination.find(CLOCK_DIFFERS, where, seen, _FIX_CLOCK)


def judge_clocks(examination: Case, offsets: Mapping[str, tuple[float, float]]) -> None:
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
