"""
Backends that are wrong in one way each, and the cases of the conformance suite that must notice.

All but the last are ``memory://`` with one promise broken. `BROKEN` is read by ``broken_suite.py`` and
``test_conformance_catches.py``.
"""

from __future__ import annotations

import dataclasses
import os
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from lockkit.backend import Busy, Gone, Grant, Holder, Host, Renewal, Renewed, Request
from lockkit.backends.file.backend import FileBackend
from lockkit.backends.memory.backend import MemoryBackend
from lockkit.units import Instant


class Silent(MemoryBackend):
    """Leaves it to the next renewal to tell that a lock was broken, as a server far away does: no mistake yet."""

    def _report_broken(self, owner: str) -> None:
        """See the class."""


class ReleasesAnything(Silent):
    """Frees the lock whoever holds it: an unchecked ``DEL``."""

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        del answer_by
        await self.break_lock(grant.name)
        return True


class ConstantToken(MemoryBackend):
    """Gives the same fencing token to everybody."""

    async def try_acquire(self, request: Request) -> Grant | Busy:
        outcome = await super().try_acquire(request)
        return dataclasses.replace(outcome, token=7) if isinstance(outcome, Grant) else outcome


class TokenPerClient(MemoryBackend):
    """Counts tokens in the client, not in the store."""

    def __init__(self, space: str, host: Host) -> None:
        super().__init__(space, host)
        self._count = 0

    async def try_acquire(self, request: Request) -> Grant | Busy:
        outcome = await super().try_acquire(request)
        if isinstance(outcome, Grant):
            self._count += 1
            outcome.token = self._count
        return outcome


class RenewalRecreates(Silent):
    """Takes a lock that is gone again when it should only be renewed."""

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        outcomes = list(await super().renew(grants))
        for index, (grant, outcome) in enumerate(zip(grants, outcomes, strict=True)):
            if isinstance(outcome, Gone):
                again = Request(grant.name, grant.owner, grant.ttl, "{}", queue=False, runtime=self._runtime)
                await self.try_acquire(again)
                outcomes[index] = Renewed()
        return outcomes


class RenewalOfAnybody(Silent):
    """Renews for any owner, also if another one holds the lock."""

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See the class."""

        async def of_holder(grant: Grant) -> Grant:
            holders = await self.holders(grant.name)
            return dataclasses.replace(grant, owner=holders[0].owner) if holders else grant

        return await super().renew([await of_holder(grant) for grant in grants])


class RenewalIgnored(MemoryBackend):
    """Says that it renewed and does nothing."""

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        return [Renewed() for _ in grants]


class RenewalAdds(MemoryBackend):
    """Adds to the time left where it should set it."""

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        left = {holder.owner: holder.remaining or 0.0 for grant in grants for holder in await self.holders(grant.name)}
        return await super().renew(
            [dataclasses.replace(grant, ttl=grant.ttl + left.get(grant.owner, 0.0)) for grant in grants]
        )


class AbandonForgets(MemoryBackend):
    """Leaves the queue place, and a grant whose answer was lost, behind."""

    async def abandon(self, request: Request) -> None:
        request.state = None


class TtlIgnored(MemoryBackend):
    """Keeps a lock for ever."""

    async def try_acquire(self, request: Request) -> Grant | Busy:
        asked = request.ttl
        request.ttl = 1e8
        outcome = await super().try_acquire(request)
        return dataclasses.replace(outcome, ttl=asked) if isinstance(outcome, Grant) else outcome


class FreesEarly(MemoryBackend):
    """Keeps a lock for half of its ttl."""

    async def try_acquire(self, request: Request) -> Grant | Busy:
        asked = request.ttl
        request.ttl = asked / 2
        outcome = await super().try_acquire(request)
        return dataclasses.replace(outcome, ttl=asked) if isinstance(outcome, Grant) else outcome


class TakesExpiredTwice(MemoryBackend):
    """Looks in one step whether a lock has expired, and takes it in another: meanwhile somebody else may have it."""

    async def try_acquire(self, request: Request) -> Grant | Busy:
        lock = self._space.locks.get(request.name)
        if lock is not None and lock.alone is not None and not lock.held(self._runtime.now()):
            await self._runtime.sleep(0.005)
            self._space.locks.pop(request.name, None)
        return await super().try_acquire(request)


def _sometimes_granted(request: Request, outcome: Grant | Busy) -> Grant | Busy:
    if isinstance(outcome, Busy) and random.random() < 0.2:
        return Grant(request.name, request.owner, time.time_ns() // 1000, request.ttl)
    return outcome


class GrantsTwice(MemoryBackend):
    """Decides in two steps: now and then somebody comes in between."""

    async def try_acquire(self, request: Request) -> Grant | Busy:
        return _sometimes_granted(request, await super().try_acquire(request))


class WakesNobody(MemoryBackend):
    """Waiters sleep until the ttl of the holder is over."""

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        del request, busy
        await self._runtime.sleep(min(4.0, until - self._runtime.now()))  # longer than the test waits


class MissesEarlyWakeUps(MemoryBackend):
    """Listens only from the moment on at which it waits."""

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        request.wake.clear()
        await super().wait(request, busy, until)


class FoldsNames(MemoryBackend):
    """Compares names as a database with a default collation does: without case and trailing spaces."""

    async def try_acquire(self, request: Request) -> Grant | Busy:
        name, request.name = request.name, request.name.rstrip(" ").casefold()
        outcome = await super().try_acquire(request)
        request.name = name
        return outcome

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        return await super().release(dataclasses.replace(grant, name=grant.name.rstrip(" ").casefold()), answer_by)

    async def holders(self, name: str) -> Sequence[Holder]:
        return await super().holders(name.rstrip(" ").casefold())


class LastComeFirst(MemoryBackend):
    """Claims to be fair, and serves the newest waiter first."""

    async def try_acquire(self, request: Request) -> Grant | Busy:
        outcome = await super().try_acquire(request)
        if isinstance(outcome, Busy):
            queue = self._space.locks[request.name].queue
            if queue and queue[-1].owner == request.owner:
                queue.insert(0, queue.pop())
        return outcome


class HidesHolder(MemoryBackend):
    """Loses the metadata."""

    async def holders(self, name: str) -> Sequence[Holder]:
        return [dataclasses.replace(holder, metadata={}) for holder in await super().holders(name)]


class TrustsWallClock(MemoryBackend):
    """Takes the time of day for the time that passes."""

    def __init__(self, space: str, host: Host) -> None:
        super().__init__(space, host)
        clock = host.runtime

        class WallClock:
            """The host's runtime with another clock."""

            def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the runtime has
                return getattr(clock, name)

            @staticmethod
            def now() -> float:
                """The time of day."""
                return time.time()

        self._runtime = WallClock()


class LeaksOnClose(MemoryBackend):
    """Leaves a descriptor and a thread behind."""

    def __init__(self, space: str, host: Host) -> None:
        super().__init__(space, host)
        self._pipe = os.pipe()
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class NeverLetsGo(FileBackend):
    """Keeps the lock of a process that is gone or stopped, as a session lock without limits does."""

    async def try_acquire(self, request: Request) -> Grant | Busy:
        asked = request.ttl
        request.ttl = 1e6
        outcome = await super().try_acquire(request)
        return dataclasses.replace(outcome, ttl=asked) if isinstance(outcome, Grant) else outcome


class LetsIn(FileBackend):
    """Takes the lock for free when a process dawdles."""

    async def try_acquire(self, request: Request) -> Grant | Busy:
        return _sometimes_granted(request, await super().try_acquire(request))


class SleepsOn(FileBackend):
    """Leaves waiters asleep for seconds after a release."""

    async def wait(self, request: Request, busy: Busy, until: Instant) -> None:
        del request, busy
        await self._runtime.sleep(min(until - self._now(), 6.0))


class LeavesFiles(FileBackend):
    """Leaves a file for each request that got no lock."""

    async def abandon(self, request: Request) -> None:
        self._leave(f"{request.owner}.left")
        await super().abandon(request)

    def _leave(self, name: str) -> None:
        Path(self._directory.path, name).touch()


@dataclass(frozen=True, slots=True)
class Broken:
    """A backend, and what must fail on it: cases by name."""

    backend: type[MemoryBackend | FileBackend]
    caught_by: tuple[str, ...]
    scheme: str = "memory"


# What does not happen is waited for in vain, seconds for each face: few cases each.
BROKEN = [
    Broken(
        ReleasesAnything,
        ("test_break_lock_frees_by_force",),
    ),
    Broken(
        ConstantToken,
        ("test_tokens_increase_from_grant_to_grant", "test_clients_exclude_each_other"),
    ),
    Broken(
        TokenPerClient,
        ("test_tokens_increase_from_grant_to_grant", "test_break_lock_frees_by_force"),
    ),
    Broken(
        RenewalRecreates,
        ("test_renewal_does_not_take_a_lost_lock_back", "test_extend_of_a_broken_lease_raises"),
    ),
    Broken(RenewalOfAnybody, ("test_extend_of_a_lease_leaves_the_next_holder_alone",)),
    Broken(RenewalIgnored, ("test_renewal_keeps_the_lock_beyond_its_ttl",)),
    Broken(RenewalAdds, ("test_extend_is_heard_by_the_backend",)),
    Broken(
        AbandonForgets,
        (
            "test_waiter_that_timed_out_leaves_nothing_behind",
            "test_cancelled_waiters_leave_nothing_behind",
            "test_interrupted_waiters_leave_nothing_behind",
        ),
    ),
    Broken(TtlIgnored, ("test_lease_that_nobody_renews_ends",)),
    Broken(FreesEarly, ("test_nobody_is_granted_the_lock_while_its_holder_believes",)),
    Broken(TakesExpiredTwice, ("test_expired_lock_goes_to_one_of_many",)),
    Broken(GrantsTwice, ("test_clients_exclude_each_other", "test_each_unusual_name_excludes")),
    Broken(WakesNobody, ("test_waiter_is_woken_by_a_release",)),
    Broken(MissesEarlyWakeUps, ("test_release_between_attempt_and_wait_is_not_missed",)),
    Broken(FoldsNames, ("test_unusual_names_are_all_different_locks",)),
    Broken(LastComeFirst, ("test_clients_come_in_the_order_of_their_arrival",)),
    Broken(HidesHolder, ("test_holder_is_described", "test_text_as_metadata")),
    Broken(TrustsWallClock, ("test_wall_clock_decides_nothing_at_the_client",)),
    Broken(LeaksOnClose, ("test_threads_and_descriptors_go_with_the_client",)),
    Broken(NeverLetsGo, ("test_stopped_holder_is_replaced_and_told",), "file"),
    Broken(LetsIn, ("test_processes_exclude_each_other",), "file"),
]


def _all_cases(scheme: str) -> tuple[str, ...]:
    return tuple(sorted({case for entry in BROKEN if entry.scheme == scheme for case in entry.caught_by}))


SOUND = [Broken(MemoryBackend, _all_cases("memory")), Broken(FileBackend, _all_cases("file"), "file")]
