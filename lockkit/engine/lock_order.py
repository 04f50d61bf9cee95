"""
Finds locks that the program takes in different orders: with ``LOCKKIT_DEBUG_ORDER=1`` in the environment.

A holds ``a`` and waits for ``b``; B holds ``b`` and waits for ``a``: both wait for ever. It happens only if both are in
between at the same moment, so tests seldom see it. What they do see is that a call waited for ``b`` while ``a`` was
held, and later another one the other way round: an edge a → b, and one back. lockkit records the edges, and warns of
the first circle. (As the lock validator of Linux does, Documentation/locking/lockdep-design.rst, which records every
acquisition and not only those that waited.)
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lockkit.engine.leases import Leases

VARIABLE = "LOCKKIT_DEBUG_ORDER"

EDGES_MAX = 10_000
"""How many pairs of locks are remembered. With names of ever new objects more would fill the memory; fewer would
overlook circles."""

FRAMES_MAX = 12
"""How many calls of the program a stack shows."""

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class _Key(NamedTuple):
    name: str
    url: str


class LockOrder:
    """
    Which locks were waited for while others were held, by all clients of the process.

    Without a mutex: each step is one operation of a dict, so two threads may find the same circle, but one warns.
    """

    def __init__(self) -> None:
        """Know of no lock."""
        self._clients: weakref.WeakSet[Leases] = weakref.WeakSet()
        self._edges: dict[_Key, dict[_Key, str]] = {}
        self._warned: dict[frozenset[_Key], object] = {}
        self._count = 0

    def add(self, leases: Leases) -> None:
        """Look also at what this client holds."""
        self._clients.add(leases)

    def waits(self, name: str, url: str, who: object) -> str | None:
        """Record that a thread or task is about to wait for a lock."""
        wanted = _Key(name, url)
        warning = None
        for held in self._held_by(who):
            known = self._edges.setdefault(held, {})
            if held == wanted or wanted in known or self._count >= EDGES_MAX:
                continue
            known[wanted] = _stack()
            self._count += 1
            circle = self._path(wanted, held)
            assert circle is None or (circle[0], circle[-1]) == (wanted, held), "a way has the ends that were asked for"
            if circle is not None and self._is_new(circle):
                warning = self._describe([held, *circle])
        return warning

    def _held_by(self, who: object) -> list[_Key]:
        return [
            _Key(record.grant.name, record.client.url)
            for leases in tuple(self._clients)
            for record in leases.all()
            if record.acquired_by == who
        ]

    def _path(self, start: _Key, end: _Key) -> list[_Key] | None:
        """Return a way along the edges, both ends included."""
        seen, left = {start}, [[start]]
        while left:
            path = left.pop()
            if path[-1] == end:
                return path
            for there in tuple(self._edges.get(path[-1], ())):
                if there not in seen:
                    seen.add(there)
                    left.append([*path, there])
        return None

    def _is_new(self, circle: list[_Key]) -> bool:
        mine = object()
        return self._warned.setdefault(frozenset(circle), mine) is mine

    def _describe(self, circle: list[_Key]) -> str:
        assert circle[0] == circle[-1], "it ends where it begins"
        names = " -> ".join(repr(key.name) for key in circle)
        stacks = "".join(
            f"\nholding {held.name!r} at {held.url}, waited for {wanted.name!r} at {wanted.url}:\n"
            f"{self._edges[held][wanted]}"
            for held, wanted in itertools.pairwise(circle)
        )
        return (
            f"locks are taken in different orders ({names}), so calls may wait for each other for ever. Take them in "
            f"one order everywhere, or all at once with client.locks([...]).{stacks}"
        )


def _frames() -> Iterator[traceback.FrameSummary]:
    for frame, line in traceback.walk_stack(sys._getframe(1)):  # noqa: SLF001 - documented for this use
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            yield traceback.FrameSummary(code.co_filename, line, code.co_name)


def _stack() -> str:
    """Return the program's own part of the stack, the innermost call last."""
    frames = [frame for frame, _ in zip(_frames(), range(FRAMES_MAX), strict=False)]
    return "".join(traceback.format_list(frames[::-1]))


_order = LockOrder()


def of_client(leases: Leases) -> LockOrder | None:
    """Return where a new client records its waits; None unless ``LOCKKIT_DEBUG_ORDER`` is 1."""
    if os.environ.get(VARIABLE) != "1":
        return None
    _order.add(leases)
    return _order
