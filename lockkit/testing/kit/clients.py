"""Clients of the test kit: the memory backend with the clock of a test, and what a test does to it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar, get_args

from lockkit import aio, sync, validation
from lockkit.backend import Busy, Grant, LockBackend, LossReason, Mode, Request, split_space
from lockkit.backends.memory.backend import MemoryBackend
from lockkit.engine.engine import Engine
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.settings import LockSettings
from lockkit.errors import ConfigurationError, LockError
from lockkit.runtime import drive
from lockkit.testing.kit.clock import AsyncioKitRuntime, BlockingKitRuntime, Clock, Done, KitRuntime
from lockkit.units import Instant, Seconds

__all__ = ["AioKitClient", "Granted", "KitClient"]

L = TypeVar("L")


@dataclass(frozen=True, slots=True)
class Granted:
    """
    One lease that a client of the kit was granted.

    Attributes:
        name: Of the lock.
        mode: ``exclusive``, ``shared`` or ``permit``.
        token: Its fencing token.
        owner: Id of the acquisition, as in ``lease.owner``.
        ttl: Seconds.
        slot: Of a permit.
    """

    name: str
    mode: Mode
    token: int
    owner: str
    ttl: Seconds
    slot: int | None = None


class KitBackend(MemoryBackend):
    """The memory backend, slowed down."""

    delay: Seconds = 0.0

    async def try_acquire(self, request: Request) -> Grant | Busy:
        outcome = await super().try_acquire(request)
        if self.delay:
            await self._runtime.sleep(self.delay)
        return outcome

    def holds(self, granted: Granted, name: str) -> bool:
        """Tell whether a lease still has its lock."""
        return any(holder.owner == granted.owner for holder in drive(self.holders(name)))


class KitEngine(Engine[L]):
    """An engine that fails when a test says so, and remembers what it was granted."""

    def __init__(self, runtime: KitRuntime, make_lease: Any) -> None:  # noqa: ANN401 - the lease class of either API
        """Open the space of the clock."""
        self.kit_runtime = runtime
        self.granted: list[tuple[str, Granted]] = []
        self.failures: list[Failure] = []
        space = runtime.clock.space
        super().__init__(lambda host: (KitBackend(space, host), {}), runtime, make_lease)

    async def acquire(self, settings: LockSettings, timeout: Seconds | None, *, name_holder: bool = True) -> L:
        call = self.kit_runtime.begin_call()
        try:
            return await super().acquire(settings, timeout, name_holder=name_holder)
        finally:
            self.kit_runtime.end_call(call)

    async def granting(
        self, backend: LockBackend, settings: LockSettings, timeout: Seconds | None, *, name_holder: bool
    ) -> L:
        """See `Engine.granting`: observers see the failure too."""
        self._fail(settings)
        return await super().granting(backend, settings, timeout, name_holder=name_holder)

    def _fail(self, settings: LockSettings) -> None:
        if self.client.closed or not self.failures:
            return
        error, name, backend = self.failures.pop(0)
        if isinstance(error, type):
            error = error(f"lockkit_client.fail() was called: lock {settings.name!r} at {self.url}")
        if isinstance(error, LockError):
            error.name, error.backend = name or settings.name, backend or self.url
        raise error

    def admit(self, settings: LockSettings, grant: Grant, started: Instant) -> L | None:
        lease = super().admit(settings, grant, started)
        if lease is not None:
            name = split_space(grant.name)[1]
            granted = Granted(name, settings.mode, grant.token, grant.owner, grant.ttl, grant.slot)
            self.granted.append((grant.name, granted))
        return lease

    @property
    def kit_backend(self) -> KitBackend:
        """
        The backend.

        Raises:
            LockError: The client is closed.
        """
        backend = self.client.ready()
        assert isinstance(backend, KitBackend), "opened by this engine"
        return backend

    def held(self, name: str) -> list[LeaseRecord]:
        """Return the leases of a lock."""
        return [record for record in self.leases.all() if split_space(record.grant.name)[1] == name]

    def lose(self, name: str, reason: LossReason) -> None:
        if reason not in get_args(LossReason):
            message = f"reason must be one of {', '.join(get_args(LossReason))}, not {reason!r}"
            raise ConfigurationError(message, name=name, backend=self.url)
        records = self.held(name)
        if not records:
            message = f"lock {name!r} is not held by this client, so it cannot be lost: call lose() while it is held"
            raise LockError(message, name=name, backend=self.url)
        for record in records:
            with self.client.mutex:
                record.valid_until = min(record.valid_until, self.runtime.now())
            drive(self.kit_backend.release(record.grant))
            self.leases.lose(record, reason)

    def not_released(self) -> list[Granted]:
        """Return the leases that still have their locks."""
        backend = self.kit_backend
        return [granted for name, granted in self.granted if backend.holds(granted, name)]


Failure = tuple[BaseException | type[BaseException], str | None, str | None]
"""An error that a test gave, with the lock and the backend that it named: each time it is raised it names others."""


def _failures(error: Any, times: Any) -> list[Failure]:  # noqa: ANN401 - to be checked
    if not isinstance(error, BaseException) and not (isinstance(error, type) and issubclass(error, BaseException)):
        raise ConfigurationError(f"fail() takes an exception or its class, not {error!r}")
    if isinstance(times, bool) or not isinstance(times, int) or times < 0:
        raise ConfigurationError(f"times must be a whole number from 0 on, not {times!r}")
    return [(error, getattr(error, "name", None), getattr(error, "backend", None))] * times


class _Kit:
    """What the clients of both APIs have in common."""

    __slots__ = ()

    _engine: Any
    _others: list[Self]

    def other(self) -> Self:
        """Make another client of the same locks and clock, as another process would have it. Closed with this one."""
        other = type(self)(self._engine.kit_runtime.clock)  # type: ignore[call-arg]  # as both clients take it
        self._others.append(other)
        return other

    def lose(self, name: str, reason: LossReason = "expired") -> Done:
        """Have this client lose a lock that it holds: it is free for others from now on."""
        self._engine.lose(name, reason)
        return Done()

    def fail(self, error: BaseException | type[BaseException], *, times: int = 1) -> Done:
        """Have the next acquisitions of this client raise an error, without a retry."""
        self._engine.failures = _failures(error, times)
        return Done()

    def slow(self, seconds: Seconds | timedelta) -> Done:
        """
        Have the answer to each acquisition of this client come so many seconds late, by the clock of the test.

        The server grants at once, and the caller waits until the test has advanced the clock: acquire in another thread
        or task. With a delay longer than the ttl, the lease has ended when the answer comes.
        """
        self._engine.kit_backend.delay = validation.seconds(seconds, "seconds")
        return Done()

    @property
    def grants(self) -> list[Granted]:
        """All leases that this client was granted so far, also those that have ended, in order."""
        return [granted for _, granted in self._engine.granted]

    def assert_all_released(self) -> Done:
        """Check that this client holds no lock any more. A lease that was dropped without a release counts as held."""
        held = [f"{granted.name!r} (token {granted.token})" for granted in self._engine.not_released()]
        if held:
            raise AssertionError(f"{len(held)} of {len(self.grants)} leases are not released: {', '.join(held)}")
        return Done()


class KitClient(_Kit, sync.Client):
    """A `lockkit.Client` on memory with the clock of a test: the fixture ``lockkit_client``."""

    __slots__ = ("_others",)

    _engine: KitEngine[sync.Lease]

    def __init__(self, clock: Clock) -> None:
        """Join the space of the clock."""
        super().__init__(KitEngine(BlockingKitRuntime(clock), sync.Lease))
        self._others: list[KitClient] = []

    def close(self) -> None:
        for other in self._others:
            other.close()
        super().close()


class AioKitClient(_Kit, aio.Client):
    """
    A `lockkit.aio.Client` on memory with the clock of a test: the fixture ``lockkit_aio_client``.

    ``lose``, ``fail``, ``slow``, ``other`` and ``assert_all_released`` do no I/O; awaiting them is allowed, too.
    """

    __slots__ = ("_others",)

    _engine: KitEngine[aio.Lease]

    def __init__(self, clock: Clock) -> None:
        """Join the space of the clock."""
        super().__init__(KitEngine(AsyncioKitRuntime(clock), aio.Lease))
        self._others: list[AioKitClient] = []

    async def close(self) -> None:
        for other in self._others:
            await other.close()
        await super().close()

    def close_without_loop(self) -> None:
        """Close at the end of a test, when its event loop may have ended: nothing of the kit needs one for that."""
        coroutine = self.close()
        try:
            coroutine.send(None)
        except StopIteration:
            return
        coroutine.close()
