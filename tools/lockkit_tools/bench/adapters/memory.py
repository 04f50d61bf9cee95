"""What the standard library offers inside one process."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any

from lockkit.units import Seconds
from lockkit_tools.bench.adapters.base import AsyncAdapter, BlockingAdapter
from lockkit_tools.bench.subject import Kind


class ThreadingLock(BlockingAdapter):
    """``threading.Lock``: no ttl, no token, no owner."""

    def __init__(self, url: str, ttl: Seconds) -> None:
        """One lock for each name."""
        super().__init__(url, ttl)
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        return self._locks[name]


class AsyncioLock(AsyncAdapter):
    """``asyncio.Lock``: no ttl, no token, no owner."""

    def __init__(self, url: str, ttl: Seconds) -> None:
        """One lock for each name."""
        super().__init__(url, ttl)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def lock(self, name: str, *, renew: bool = False) -> AbstractAsyncContextManager[Any]:
        del renew
        return self._locks[name]


class ThreadingSemaphore(ThreadingLock):
    """``threading.Semaphore``: no ttl, no token, no slot."""

    def __init__(self, url: str, ttl: Seconds) -> None:
        """One semaphore for each name."""
        super().__init__(url, ttl)
        self._semaphores: dict[str, threading.Semaphore] = {}

    def primitive(self, kind: Kind, name: str, count: int = 1) -> AbstractContextManager[Any]:
        assert kind == "permit", "nothing else"
        return self._semaphores.setdefault(name, threading.Semaphore(count))


class AsyncioSemaphore(AsyncioLock):
    """``asyncio.Semaphore``: no ttl, no token, no slot."""

    def __init__(self, url: str, ttl: Seconds) -> None:
        """One semaphore for each name."""
        super().__init__(url, ttl)
        self._semaphores: dict[str, asyncio.Semaphore] = {}

    def primitive(self, kind: Kind, name: str, count: int = 1) -> AbstractAsyncContextManager[Any]:
        assert kind == "permit", "nothing else"
        return self._semaphores.setdefault(name, asyncio.Semaphore(count))
