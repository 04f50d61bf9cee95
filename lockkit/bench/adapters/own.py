"""lockkit itself, through its public API only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lockkit
import lockkit.aio
from lockkit.bench.adapters.base import AsyncAdapter, BlockingAdapter

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

__all__ = ["Asyncio", "Blocking"]


class Blocking(BlockingAdapter):
    """``lockkit.connect``."""

    async def open(self) -> None:
        """See `Adapter.open`."""
        self._client = lockkit.connect(self.url)

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        """Renewed always: that is what users get."""
        del renew
        return self._client.lock(name, ttl=self.ttl)

    def token(self, entered: Any) -> int | None:  # noqa: ANN401 - see Adapter
        """See `Adapter.token`."""
        return int(entered.token)

    def still_held(self, lock: Any, entered: Any) -> bool | None:  # noqa: ANN401 - see Adapter
        """By its own deadline."""
        del lock
        return bool(entered.held)

    async def close(self) -> None:
        """See `Adapter.close`."""
        self._client.close()


class Asyncio(AsyncAdapter):
    """``lockkit.aio.connect``."""

    async def open(self) -> None:
        """See `Adapter.open`."""
        self._client = await lockkit.aio.connect(self.url)

    def lock(self, name: str, *, renew: bool = False) -> AbstractAsyncContextManager[Any]:
        """Renewed always: that is what users get."""
        del renew
        return self._client.lock(name, ttl=self.ttl)

    def token(self, entered: Any) -> int | None:  # noqa: ANN401 - see Adapter
        """See `Adapter.token`."""
        return int(entered.token)

    def still_held(self, lock: Any, entered: Any) -> bool | None:  # noqa: ANN401 - see Adapter
        """By its own deadline."""
        del lock
        return bool(entered.held)

    async def close(self) -> None:
        """See `Adapter.close`."""
        await self._client.close()
