"""
Locks by hand, as many programs have them: a few plain Redis commands. Each is wrong in its own way.

How each fails on a real server is shown in ``tests/comparison/test_naive_ways.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from lockkit.units import Instant
from lockkit_tools.lab.scenario import TTL
from lockkit_tools.lab.services import ByHand
from lockkit_tools.simulation.world import Process

POLL_SECONDS = 0.2
"""Pause between two tries."""


class Recipe:
    """One client's way to lock."""

    def __init__(self, process: Process, service: ByHand) -> None:
        self._process = process
        self._service = service

    async def acquire(self, wall: Callable[[], float]) -> Instant:
        """Poll until the lock is there."""
        while (until := await self._try(wall)) is None:
            await self._process.waiter(POLL_SECONDS).park()
        return until

    async def release(self) -> None:
        """Delete the key."""
        await self._run(ByHand.delete)

    async def _try(self, wall: Callable[[], float]) -> Instant | None:
        raise NotImplementedError

    async def _run(self, command: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - the reply
        service = self._service
        # As the owner of the lock, for the drawing.
        service.owners[self._process.name] = self._process.name
        return await service.network.call(self._process, service.node, lambda: command(service, *arguments), TTL)


class SetNx(Recipe):
    """``SETNX lock 1``: without an end."""

    async def _try(self, wall: Callable[[], float]) -> Instant | None:
        del wall
        return inf if await self._run(ByHand.set_if_absent, self._process.name) else None


class UncheckedDelete(Recipe):
    """``SET lock 1 NX PX``, and ``DEL lock`` without asking who holds it by then."""

    async def _try(self, wall: Callable[[], float]) -> Instant | None:
        del wall
        sent = self._process.world.now
        granted = await self._run(ByHand.set_if_absent, self._process.name, TTL)
        return sent + TTL if granted else None


class GetSet(Recipe):
    """``SETNX lock DEADLINE``, and ``GETSET`` once the deadline has passed by the client's own clock."""

    async def _try(self, wall: Callable[[], float]) -> Instant | None:
        mine = f"{self._process.name}.{wall() + TTL!r}"
        until = self._process.world.now + TTL
        if await self._run(ByHand.set_if_absent, mine):
            return until
        seen = await self._run(ByHand.get)
        if seen is None or float(seen.partition(".")[2]) >= wall():
            return None
        return until if await self._run(ByHand.swap, mine) == seen else None


RECIPES: dict[str, type[Recipe]] = {"setnx": SetNx, "delete": UncheckedDelete, "getset": GetSet}
