"""What a workload needs from a library: a context manager that locks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar, TypeAlias

from lockkit.units import Seconds
from lockkit_tools.bench.subject import Face, Kind

Library: TypeAlias = Any
"""Whatever a library gives: most have no types. Of a lock: a context manager, asyncio's for an asyncio adapter."""


class Adapter(ABC):
    """
    One client of one subject, in one process.

    Each kind of primitive that a subject has (`Subject.kinds`) is made by the method of its name.
    """

    face: ClassVar[Face] = "blocking"
    leaves_something: ClassVar[bool] = False  # its clients make tables or nodes at the server that stay: see `erase`

    def __init__(self, url: str, ttl: Seconds) -> None:
        self.url = url
        self.ttl = ttl
        self.renews = False  # whether the library is to keep locks alive that are made from now on, if it has a choice

    async def open(self) -> None:  # noqa: B027 - most have nothing to do
        """Connect, in the event loop where there is one."""

    async def close(self) -> None:  # noqa: B027 - as above
        """Disconnect."""

    async def erase(self) -> None:
        """Remove what all such clients have left at the server."""
        raise NotImplementedError

    def primitive(self, kind: Kind, name: str, count: int = 1) -> Library:
        """Make an object that one contender enters again and again, waiting as long as it takes."""
        make: Callable[..., Library] = getattr(self, kind)
        return make(name, count) if kind in {"permit", "locks"} else make(name)

    @abstractmethod
    def lock(self, name: str) -> Library:
        """Make a lock."""

    def locks(self, name: str, count: int) -> Library:
        """Several locks by hand: one after the other in the order of their names, and back."""
        return in_turn([self.lock(one) for one in several_names(name, count)])

    def election(self, name: str) -> Library:
        """Make an office: unless the library has its own way, the leader is who has the lock."""
        return self.lock(name)

    def token(self, entered: Library) -> int | None:
        """Give the fencing token of what entering a lock gave, if there is one. Baselines give the token itself."""
        return entered if type(entered) is int else None

    def still_held(self, lock: Library, entered: Library) -> bool | None:
        """Tell whether a lock that should be held is; None if the library cannot tell. Not for asyncio peers."""
        del lock, entered
        return None


class AsyncAdapter(Adapter):
    """A library for asyncio."""

    face = "asyncio"


class Bracket:
    """A context manager of two functions, to be entered again and again; of two coroutine functions for asyncio."""

    def __init__(self, enter: Callable[[], Library], leave: Callable[[], Library]) -> None:
        self._enter, self._leave = enter, leave

    def __enter__(self) -> Library:
        return self._enter()

    def __exit__(self, *_: object) -> None:
        self._leave()

    async def __aenter__(self) -> Library:
        return await self._enter()

    async def __aexit__(self, *_: object) -> None:
        await self._leave()


class Anew:
    """Makes a new lock each time, where those of a library can be entered once."""

    def __init__(self, make: Callable[[], Library]) -> None:
        self._make = make
        self.held: Library = None

    def __enter__(self) -> Library:
        self.held = self._make()
        return self.held.__enter__()

    def __exit__(self, *error: object) -> None:
        self.held.__exit__(*error)

    async def __aenter__(self) -> Library:
        self.held = self._make()
        return await self.held.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        await self.held.__aexit__(*error)


def in_turn(locks: Sequence[Library]) -> Bracket:
    """Lock all, waiting for each while those before are held; unlock in the other order."""

    def enter() -> None:
        for lock in locks:
            lock.__enter__()

    def leave() -> None:
        for lock in reversed(locks):
            lock.__exit__(None, None, None)

    return Bracket(enter, leave)


def several_names(name: str, count: int) -> list[str]:
    """Give the names of several locks."""
    return [f"{name}-{index}" for index in range(count)]


def load(target: str) -> type[Adapter]:
    """Import an adapter."""
    module, _, name = target.partition(":")
    adapter: type[Adapter] = getattr(import_module(module), name)
    return adapter
