"""What the standard library offers inside one process: no ttl, no token, no owner. One object for each name."""

from __future__ import annotations

import asyncio
import threading
from types import ModuleType

from lockkit.units import Seconds
from lockkit_tools.bench.adapters.base import Adapter, AsyncAdapter, Library


class Threading(Adapter):
    """``threading.Lock`` and ``threading.Semaphore``."""

    module: ModuleType = threading

    def __init__(self, url: str, ttl: Seconds) -> None:
        super().__init__(url, ttl)
        self._made: dict[str, Library] = {}

    def lock(self, name: str) -> Library:
        return self._made.setdefault(name, self.module.Lock())

    def permit(self, name: str, count: int) -> Library:
        return self._made.setdefault(name, self.module.Semaphore(count))


class Asyncio(Threading, AsyncAdapter):
    """``asyncio.Lock`` and ``asyncio.Semaphore``."""

    module = asyncio
