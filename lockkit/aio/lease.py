"""One grant of a lock, in the async API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, Self, cast

from lockkit.engine.engine import Engine
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.settings import LostCallback
from lockkit.lease import BaseLease, OtherApi, find_current
from lockkit.primitives import note
from lockkit.units import Seconds

__all__ = ["Cancellation", "Cancellations", "Lease", "current_lease"]


class Lease(BaseLease):
    """One grant of a lock to one holder, for a limited time. May be handed to another task and released there."""

    __slots__ = ("_cancellations",)
    __enter__ = OtherApi()
    _api = "lockkit.aio"

    def __init__(self, engine: Engine[Any], record: LeaseRecord) -> None:
        """Made by the engine only."""
        super().__init__(engine, record)
        self._cancellations: Cancellations | None = None  # None: a loss cancels nobody

    async def confirm(self) -> bool:
        """See `lockkit.Lease.confirm`."""
        return await self._engine.confirm(self._record)

    async def extend(self, ttl: Seconds | timedelta | None = None) -> None:
        """See `lockkit.Lease.extend`."""
        await self._engine.extend(self._record, ttl)

    async def update(self, metadata: str | Mapping[str, object] | None) -> None:
        """See `lockkit.Lease.update`."""
        await self._engine.update(self._record, metadata)

    async def ticket(self, ttl: Seconds | timedelta | None = None) -> str:
        """See `lockkit.Lease.ticket`."""
        return await self._engine.ticket(self._record, ttl)

    async def write_note(self, value: Any, keep: float | timedelta = note.KEEP) -> None:  # noqa: ANN401 - any JSON
        """See `lockkit.Lease.write_note`."""
        await note.write(self._engine, self._record, value, keep)

    async def downgrade(self) -> None:
        """See `lockkit.Lease.downgrade`."""
        await self._engine.downgrade(self._record)

    async def release(self) -> None:
        """See `lockkit.Lease.release`."""
        await self._engine.releases.release(self._record)

    async def wait_lost(self, timeout: Seconds | timedelta | None = None) -> bool:
        """See `lockkit.Lease.wait_lost`."""
        return await self._engine.leases.wait_lost(self._record, timeout)

    async def __aenter__(self) -> Self:
        """Return itself: it is held already. Another task that enters it has been handed it over."""
        self._enter()
        return self

    def _enter(self) -> None:
        self._engine.leases.enter(self._record)
        if self._cancellations is not None:
            self._cancellations.enter(self, self._record.acquired_by)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """
        Release, as leaving ``async with lock`` does.

        Raises:
            LockLost: The body ended well, or was cancelled by ``cancel_on_lost``, after the lease was lost.
        """
        await self._leave(error)

    def _leave(self, error: BaseException | None) -> Coroutine[Any, Any, None]:
        releases, record = self._engine.releases, self._record
        if self._cancellations is not None and self._cancellations.leave(self._engine.runtime.current(), error):
            return releases.release(record)  # raises, since the lease is lost, and ends it for re-entry too
        return releases.leave(record, error)


def current_lease() -> Lease:
    """Return the lease of the decorated function that runs in this task. See `lockkit.current_lease`."""
    return find_current(Lease)


class Cancellation:
    """Cancels the task of an ``async with``, and tells its own cancellation from others, as `asyncio.timeout` does."""

    __slots__ = ("_cancelled", "_cancelling", "_who")

    def __init__(self, who: object) -> None:
        """Cancel nothing yet; `who` is from `Runtime.current`."""
        self._who: Callable[[], asyncio.Task[Any] | None] | None = cast("Any", who)
        self._cancelled = False
        self._cancelling = cast("Any", who)().cancelling()

    async def lost(self, lease: BaseLease, reason: str) -> None:
        """Cancel the task of a block whose lease was lost."""
        del reason
        # An eager task (`asyncio.eager_task_factory`) begins within the one that is to be cancelled. A task that
        # cancels itself goes on to its next `await`, which may be one behind the block.
        await lease._engine.runtime.sleep(0)  # noqa: SLF001 - of the same API
        self.cancel("the lockkit lease was lost")

    def cancel(self, message: str) -> None:
        """Cancel the task unless its block has ended."""
        task = None if self._who is None else self._who()
        if task is not None:
            self._cancelled = True
            task.cancel(message)

    def ends(self, error: BaseException | None) -> bool:
        """
        End the block; returns whether it ended by this cancellation.

        If other code has cancelled the task too, that cancellation goes on.
        """
        task, self._who = None if self._who is None else self._who(), None
        if not self._cancelled or task is None:
            return False
        return task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)


class _Losable(Protocol):
    def on_lost(self, callback: LostCallback) -> None: ...


class Cancellations:
    """Those of the blocks under a lease, or a set of leases. Tasks may be in several, and in those of one another."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        """Start without blocks."""
        self._open: list[tuple[object, Cancellation]] = []

    def enter(self, lease: _Losable, who: object) -> None:
        """Have a loss of the lease cancel the block that `who`, from `Runtime.current`, enters."""
        cancellation = Cancellation(who)
        self._open.append((who, cancellation))
        lease.on_lost(cancellation.lost)

    def leave(self, who: object, error: BaseException | None) -> bool:
        """End the innermost block of `who`, or of anybody if `who` has entered none; see `Cancellation.ends`."""
        own = [index for index, (other, _) in enumerate(self._open) if other == who]
        return bool(self._open) and self._open.pop(own[-1] if own else -1)[1].ends(error)
