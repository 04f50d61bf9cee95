"""
Permits of a semaphore where the backend has none of its own: one lock for each slot, of which a holder has one.

A permit is the first of the slots' locks that is free. If none is, lockkit waits for one of them, chosen at random, and
for another one after `SLICE_SECONDS`: so whichever is released first has a waiter before long.

A majority that counts permits would grant too many: with five Redlock nodes and two permits, three clients can each
have two nodes that no other two of them share. A lock for each slot has one holder by the same proof as any lock.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol, TypeVar

from lockkit.backend import SlotName, split_space
from lockkit.engine.settings import LockSettings
from lockkit.errors import BackendUnavailable, LockTimeout
from lockkit.runtime import Runtime
from lockkit.units import Instant, Seconds

SLOT_NAME_BYTES_MAX = 240
"""Longest name of a semaphore, UTF-8 bytes, where the number of the slot is added to it."""

SLICE_SECONDS = 0.5
"""How long a waiter waits for one slot before it looks at all of them again, seconds, about. Longer notices the release
of another slot later; shorter asks the backend more often."""

OUTAGE_PAUSE_SECONDS = 0.25
"""Pause after a round without an answer, seconds, about."""

L_co = TypeVar("L_co", covariant=True)


def slot_name(name: str, slot: int) -> str:
    """Name the lock of a slot; `name` is the semaphore's, apart from the locks."""
    assert slot >= 0, "slots are counted from 0"
    return SlotName(f"{name}#{slot}")


def no_free_permit(name: str, url: str, limit: int, waited: Seconds, *, advice: str, holder: str = "") -> str:
    """Say that a semaphore stayed busy; `name` is apart from the locks, `holder` empty if nobody is to be named."""
    held = f"all {limit} are held" + (f" (one by {holder})" if holder else "")
    plain = split_space(name)[1]
    return f"semaphore {plain!r} at {url} has no free permit, {held}: waited {round(waited, 3):g} s. {advice}"


class Acquire(Protocol[L_co]):
    """`Engine.acquire`."""

    def __call__(self, settings: LockSettings, timeout: Seconds | None, /, *, name_holder: bool) -> Awaitable[L_co]:
        """Acquire one lock."""
        ...


class SlotSearch:
    """
    One acquisition of a permit.

    Attributes:
        slot: Number of the slot that was had last.
    """

    def __init__(self, runtime: Runtime, settings: LockSettings, url: str, unavailable_after: Seconds) -> None:
        """Start the clock."""
        assert settings.limit > 0, "a semaphore without slots would be searched for ever"
        self.slot = 0
        self._runtime = runtime
        self._settings = settings
        self._url = url
        self._unavailable_after = unavailable_after
        self._began = runtime.now()
        self._answered_at = self._began

    async def run(self, acquire: Acquire[L_co], timeout: Seconds | None) -> L_co:
        """Acquire the lock of a slot."""
        assert self._settings.mode == "permit", "only semaphores have slots"
        deadline = None if timeout is None else self._began + timeout
        while True:
            try:
                for slot in range(self._settings.limit):
                    lease = await self._try(acquire, slot, 0)
                    if lease is not None:
                        return lease
                left = None if deadline is None else deadline - self._runtime.now()
                if left is not None and left <= 0:
                    raise self._timed_out()
                pause = self._jitter(SLICE_SECONDS)
                slot = self._runtime.random.randrange(self._settings.limit)
                lease = await self._try(acquire, slot, pause if left is None else min(pause, left))
                if lease is not None:
                    return lease
            except BackendUnavailable:
                if self._is_over(deadline):
                    raise
                await self._pause(deadline)

    async def _try(self, acquire: Acquire[L_co], slot: int, timeout: Seconds) -> L_co | None:
        """Try one slot; None if it stayed busy."""
        assert 0 <= slot < self._settings.limit, "there is no such slot"
        settings = replace(self._settings, name=slot_name(self._settings.name, slot), mode="exclusive")
        try:
            lease = await acquire(settings, timeout, name_holder=False)
        except LockTimeout:
            self._answered_at = self._runtime.now()
            return None
        self.slot = slot
        return lease

    def _is_over(self, deadline: Instant | None) -> bool:
        now = self._runtime.now()
        return now - self._answered_at >= self._unavailable_after if deadline is None else now >= deadline

    async def _pause(self, deadline: Instant | None) -> None:
        pause = self._jitter(OUTAGE_PAUSE_SECONDS)
        await self._runtime.sleep(pause if deadline is None else min(pause, deadline - self._runtime.now()))

    def _jitter(self, seconds: Seconds) -> Seconds:
        return seconds * self._runtime.random.uniform(0.5, 1.5)

    def _timed_out(self) -> LockTimeout:
        settings, waited = self._settings, self._runtime.now() - self._began
        message = no_free_permit(settings.name, self._url, settings.limit, waited, advice="Wait longer with timeout=.")
        return LockTimeout(message, name=split_space(settings.name)[1], backend=self._url)
