"""Leader election in the async API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

from lockkit import validation
from lockkit.aio.lease import Cancellation, Lease
from lockkit.engine.engine import Engine
from lockkit.engine.lease_record import LeaseRecord
from lockkit.lease import BaseElection, OtherApi
from lockkit.primitives.election import Candidate, Leader, Observer, ObservingEnded, StopSignal, Tenure, with_value
from lockkit.units import Seconds

__all__ = ["Campaign", "Election", "Term"]

R = TypeVar("R")


class Term(Lease):
    """One term of a leader: a lease whose `token` is the term number."""

    __slots__ = ("_cancel_on_stop", "_cancellation", "_tenure")

    def __init__(self, engine: Engine[Any], record: LeaseRecord) -> None:
        """Made by `Election.campaign`."""
        super().__init__(engine, record)
        self._tenure = Tenure(record, engine.renewer)
        self._cancel_on_stop = False
        self._cancellation: Cancellation | None = None

    @property
    def grace(self) -> float:
        """See `lockkit.Term.grace`."""
        return self._record.renewal.grace

    async def must_stop(self, seconds: float | timedelta | None = 0) -> bool:
        """See `lockkit.Term.must_stop`."""
        return await self._tenure.ask(seconds)

    async def update(self, metadata: str | Mapping[str, object] | None) -> None:
        """See `lockkit.Term.update`."""
        await super().update(with_value(self._record, metadata))

    async def resign(self) -> None:
        """See `lockkit.Term.resign`."""
        await self.release()

    async def __aenter__(self) -> Self:
        """Return itself: it is held already."""
        await super().__aenter__()
        if self._cancel_on_stop:
            self._cancellation = self._cancelled_in_time()
        return self

    def _cancelled_in_time(self) -> Cancellation:
        """Cancel the body when its leader must stop. What watches over it must not refer to the term."""
        runtime, tenure = self._engine.runtime, self._tenure
        cancellation = Cancellation(runtime.current())

        async def watch() -> None:
            await runtime.sleep(0)  # not within the task that is to be cancelled, see `Cancellation`
            await tenure.must_stop(None)
            cancellation.cancel("the lockkit term ends")

        runtime.spawn("lockkit-election-cancel", watch)
        return cancellation

    async def __aexit__(  # type: ignore[override] # a cancellation of its own may end here
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """
        Resign.

        Raises:
            LockLost: The body ended well, but the term was lost before; or ``cancel_on_stop`` cancelled the body.
        """
        cancellation, self._cancellation = self._cancellation, None
        if cancellation is None or not cancellation.ends(error):
            await super().__aexit__(kind, error, trace)
            return False
        if not self._tenure.failed:
            await super().__aexit__(None, None, None)
            return True  # another task resigned
        ended = self._tenure.ended_error()
        await super().__aexit__(type(ended), ended, None)
        raise ended from None


class Campaign:
    """
    What `Election.campaign` returns: ``await`` it for the `Term`, or use it with ``async with``.

    Used once.
    """

    __slots__ = ("_cancel_on_stop", "_candidate", "_term", "_timeout")
    __enter__ = OtherApi()

    def __init__(
        self, candidate: Candidate[Term], timeout: Seconds | timedelta | None, *, cancel_on_stop: bool
    ) -> None:
        """Made by `Election.campaign`."""
        self._candidate = candidate
        self._timeout = timeout
        self._cancel_on_stop = validation.flag(cancel_on_stop, "cancel_on_stop")
        self._term: Term | None = None

    def __await__(self) -> Generator[Any, None, Term]:
        """Wait to be elected."""
        return self._run().__await__()

    async def _run(self) -> Term:
        term = await self._candidate.campaign(self._timeout)
        term._cancel_on_stop = self._cancel_on_stop  # noqa: SLF001 - same module
        return term

    async def __aenter__(self) -> Term:
        """Wait to be elected; the body never runs without the term."""
        self._term = await (await self).__aenter__()
        return self._term

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Resign. See `Term`."""
        assert self._term is not None, "entered"
        return await self._term.__aexit__(kind, error, trace)


class Election(BaseElection):
    """A named election of a client. Holds nothing itself: every campaign that is won is a `Term` of its own."""

    __slots__ = ()
    _lease_from = "term = await election.campaign()"
    __enter__ = OtherApi("election.campaign()")
    _api = "lockkit.aio"
    _candidate: Candidate[Term]

    def campaign(self, timeout: Seconds | timedelta | None = None, *, cancel_on_stop: bool = False) -> Campaign:
        """
        Wait to be elected: ``term = await election.campaign()``, or ``async with election.campaign() as term``.

        Args:
            timeout: Seconds to wait; None without limit, 0 tries once.
            cancel_on_stop: ``async with`` cancels its body when the leader must stop, and raises `LockLost` in place of
                the cancellation; no error if another task has resigned.

        Raises:
            LockTimeout: See `lockkit.Election.campaign`, as for the others.
            BackendUnavailable: See there.
            ConfigurationError: See there.
        """
        return Campaign(self._candidate, timeout, cancel_on_stop=cancel_on_stop)

    async def run(self, work: Callable[[Term], Awaitable[R]], stop: asyncio.Event | None = None) -> R | None:
        """
        See `lockkit.Election.run`. `work` is a coroutine function; `stop` is set in the client's event loop.

        Raises:
            ConfigurationError: `work` is no function, or `stop` is no ``asyncio.Event`` or the like.
        """
        self._candidate.check_run(work, stop)
        signal = self._candidate.stop_signal()
        watcher = None if stop is None else asyncio.create_task(_follow(stop, signal))
        try:
            if stop is not None and stop.is_set():
                signal.set()
            result: R | None = await self._candidate.run(work, signal)
            return result
        finally:
            if watcher is not None:
                watcher.cancel()

    async def leader(self) -> Leader | None:
        """See `lockkit.Election.leader`."""
        return await self._candidate.leader()

    def observe(self) -> AsyncIterator[Leader | None]:
        """See `lockkit.Election.observe`."""
        return _Leaders(self._candidate.observe())


async def _follow(stop: asyncio.Event, signal: StopSignal) -> None:
    await stop.wait()
    signal.set()


class _Leaders:
    """The iterator of `Election.observe`."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Leader | None:
        try:
            return await self._observer.next()
        except ObservingEnded:
            raise StopAsyncIteration from None
