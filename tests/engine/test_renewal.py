"""When the watch over the leases wakes up."""

from __future__ import annotations

import asyncio

import pytest

import lockkit
import lockkit.aio
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.renewal import Renewer
from lockkit.units import Instant


def test_row_of_short_leases_wakes_the_watch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with asyncio, where the watch runs only when the lease that woke it has been released already."""
    surveys: list[Instant] = []
    survey = Renewer._survey

    def note(renewer: Renewer, now: Instant) -> tuple[list[LeaseRecord], list[LeaseRecord], float]:
        surveys.append(now)
        return survey(renewer, now)

    monkeypatch.setattr(Renewer, "_survey", note)

    async def run() -> None:
        async with lockkit.aio.connect("memory://short-leases") as client:
            for _ in range(100):
                async with client.lock("x", ttl=20):
                    pass
                await asyncio.sleep(0)

    asyncio.run(run())
    assert 1 <= len(surveys) <= 3
