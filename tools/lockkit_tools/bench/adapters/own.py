"""lockkit itself, through its public API only."""

from __future__ import annotations

import lockkit
import lockkit.aio
from lockkit_tools.bench.adapters.base import Adapter, Anew, Bracket, Library, several_names

_KEEP_SECONDS = 600
"""How long the record of a key is kept: longer than any turn."""


class _Own(Adapter):
    """What both APIs have in common: their names. Leases are always renewed: that is what users get."""

    _client: Library

    def lock(self, name: str) -> Library:
        return self._client.lock(name, ttl=self.ttl)

    def read(self, name: str) -> Library:
        return self._client.rwlock(name, ttl=self.ttl).read()

    def write(self, name: str) -> Library:
        return self._client.rwlock(name, ttl=self.ttl).write()

    def permit(self, name: str, count: int) -> Library:
        return self._client.semaphore(name, limit=count, ttl=self.ttl)

    def locks(self, name: str, count: int) -> Library:
        return self._client.locks(several_names(name, count), ttl=self.ttl)

    def election(self, name: str) -> Library:
        """Each time a campaign, and a resignation."""
        return Anew(self._client.election(name, ttl=self.ttl).campaign)

    def token(self, entered: Library) -> int | None:
        return int(entered.token)

    def still_held(self, lock: Library, entered: Library) -> bool | None:
        """By its own deadline."""
        del lock
        return bool(entered.held)


class Blocking(_Own):
    """``lockkit.connect``."""

    async def open(self) -> None:
        self._client = lockkit.connect(self.url)

    async def close(self) -> None:
        self._client.close()

    def once(self, name: str) -> Library:
        """The first time the work is done, then its result is read."""
        once = self._client.once(name, keep=_KEEP_SECONDS, ttl=self.ttl)

        def enter() -> Library:
            attempt = once.__enter__()
            if attempt.first:
                attempt.done(1)
            return attempt

        return Bracket(enter, lambda: once.__exit__(None, None, None))


class Asyncio(_Own):
    """``lockkit.aio.connect``."""

    face = "asyncio"

    async def open(self) -> None:
        self._client = await lockkit.aio.connect(self.url)

    async def close(self) -> None:
        await self._client.close()

    def once(self, name: str) -> Library:
        once = self._client.once(name, keep=_KEEP_SECONDS, ttl=self.ttl)

        async def enter() -> Library:
            attempt = await once.__aenter__()
            if attempt.first:
                await attempt.done(1)
            return attempt

        return Bracket(enter, lambda: once.__aexit__(None, None, None))
