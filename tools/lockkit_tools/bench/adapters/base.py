"""What a workload needs from a library: a context manager that locks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, Self

from lockkit.units import Seconds
from lockkit_tools.bench.subject import Face, Kind


class Adapter(ABC):
    """One client of one subject, in one process."""

    face: ClassVar[Face]

    def __init__(self, url: str, ttl: Seconds) -> None:
        """Keep the arguments; `open` connects."""
        self.url = url
        self.ttl = ttl

    async def open(self) -> None:  # noqa: B027 - most have nothing to do
        """Connect, in the event loop where there is one."""

    async def close(self) -> None:  # noqa: B027 - as above
        """Disconnect."""

    def token(self, entered: Any) -> int | None:  # noqa: ANN401 - whatever the library's context manager gives
        """Give the fencing token of what entering a lock gave, if there is one."""
        del entered
        return None

    def still_held(self, lock: Any, entered: Any) -> bool | None:  # noqa: ANN401 - as above
        """Tell whether a lock that should be held is; None if the library cannot tell. Not for asyncio peers."""
        del lock, entered
        return None


class BlockingAdapter(Adapter):
    """
    A library that blocks the thread.

    Attributes:
        leaves_something: Its clients make tables or nodes at the server that stay: see `erase`.
    """

    face = "blocking"
    leaves_something: ClassVar[bool] = False

    def primitive(self, kind: Kind, name: str, count: int = 1) -> AbstractContextManager[Any]:
        """Make an object that one contender enters again and again, of a kind in `Subject.kinds`."""
        if kind == "locks":
            return InTurn([self.lock(one) for one in several_names(name, count)])
        assert kind == "lock", f"{type(self).__name__} has no {kind}"
        return self.lock(name)

    @abstractmethod
    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        """Make the lock object that one contender enters again and again, waiting as long as it takes."""

    async def erase(self) -> None:
        """Remove what all such clients have left at the server."""
        raise NotImplementedError


class AsyncAdapter(Adapter):
    """A library for asyncio."""

    face = "asyncio"

    def primitive(self, kind: Kind, name: str, count: int = 1) -> AbstractAsyncContextManager[Any]:
        del count
        assert kind == "lock", f"{type(self).__name__} has no {kind}"
        return self.lock(name)

    @abstractmethod
    def lock(self, name: str, *, renew: bool = False) -> AbstractAsyncContextManager[Any]:
        """See `BlockingAdapter.lock`."""


class InTurn:
    """Several locks by hand: one after the other in the order of their names, and back."""

    def __init__(self, locks: Sequence[AbstractContextManager[Any]]) -> None:
        """Keep the locks, which are in order."""
        self._locks = locks

    def __enter__(self) -> Self:
        """Lock all, waiting for each while those before are held."""
        for lock in self._locks:
            lock.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unlock all."""
        for lock in reversed(self._locks):
            lock.__exit__(kind, error, trace)


def several_names(name: str, count: int) -> list[str]:
    """Give the names of several locks."""
    return [f"{name}-{index}" for index in range(count)]


def load(target: str) -> type[BlockingAdapter | AsyncAdapter]:
    """Import an adapter."""
    module, _, name = target.partition(":")
    adapter: type[BlockingAdapter | AsyncAdapter] = getattr(import_module(module), name)
    return adapter
