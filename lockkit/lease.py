"""What the sync and async APIs share: all that looks at local state, and which lease belongs to which ``with``."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Self, TypeVar, cast

from lockkit import validation
from lockkit.backend import Mode, decode_metadata, split_space
from lockkit.engine import observation
from lockkit.engine.engine import Engine
from lockkit.engine.lease_record import RELEASED, LeaseRecord
from lockkit.engine.settings import LockSettings, LostCallback
from lockkit.errors import LockError
from lockkit.primitives.election import Candidate
from lockkit.primitives.lock_set import LockSetCore
from lockkit.units import Seconds


class _WrongApiError(LockError, TypeError, AttributeError):
    """What Python raises for the wrong ``with``; and an AttributeError, so that hasattr() tells the two APIs apart."""


class OtherApi:
    """In place of the method that the ``with`` of the other API calls: says which API the object is of."""

    def __init__(self, instead: str = "") -> None:
        """Without `instead`, the object itself is for the right ``with``."""
        self._instead = instead

    def __set_name__(self, owner: type, name: str) -> None:
        """Keep which method it is."""
        self._sync = name == "__aenter__"

    def __get__(self, instance: object, owner: type) -> NoReturn:
        """
        Say it.

        Raises:
            TypeError: Always.
        """
        api, right, other = ("sync", "with", "aio.connect()") if self._sync else ("async", "async with", "connect()")
        right = f"`{right} {self._instead}`" if self._instead else f"`{right}`"
        what = owner.__name__ if instance is None else repr(instance)
        raise _WrongApiError(f"{what} is of the {api} API: use {right}, or connect with lockkit.{other}")


class BaseLease:
    """One grant of a lock: the properties and methods that look at local state only and never block."""

    __slots__ = ("__weakref__", "_engine", "_record")

    _api: ClassVar[str]
    """Where users import the class from, for the repr."""

    def __init__(self, engine: Engine[Any], record: LeaseRecord) -> None:
        """Made by the engine only."""
        self._engine = engine
        self._record = record
        record.lease_ref = weakref.ref(self)

    @property
    def name(self) -> str:
        """Name of the lock, or of the semaphore."""
        record = self._record
        name = record.grant.name
        return name if name[0] != "\0" else observation.public(record.client, name, record.mode)[0]

    @property
    def owner(self) -> str:
        """Random id of this acquisition, 32 hexadecimal digits."""
        return self._record.grant.owner

    @property
    def token(self) -> int:
        """Fencing token: above 0, higher than that of every earlier grant of this lock."""
        return self._record.grant.token

    @property
    def ttl(self) -> float:
        """Seconds for which the backend keeps the lock without renewal, as granted or last extended."""
        return self._record.grant.ttl

    @property
    def mode(self) -> Mode:
        """``exclusive``; ``shared`` for a reader's lease and after ``downgrade()``; ``permit`` of a semaphore."""
        return self._record.mode

    @property
    def slot(self) -> int | None:
        """Number of the permit, from 0 on; no two that are held at the same time have the same. None for a lock."""
        return self._record.grant.slot

    @property
    def metadata(self) -> Mapping[str, Any]:
        """
        What is stored beside the lock for ``holders``: ``host``, ``pid``, ``started`` and the application's own.

        Read-only: give what is to be stored to ``Client.lock(metadata=…)``, or to ``update``.
        """
        return MappingProxyType(dict(decode_metadata(self._record.metadata)))

    @property
    def held(self) -> bool:
        """
        Not released and the deadline has not passed. Local: asks the clock, not the backend.

        True is no proof that the next statement runs in time (the process may be paused right after): guard storage
        with `token`.
        """
        return self._record.held

    @property
    def lost(self) -> bool:
        """The lease ended without being released: the deadline passed, or the backend said so."""
        return self._record.lost

    def remaining(self) -> float:
        """Seconds until the deadline unless it is renewed; 0.0 when not held. Local."""
        return self._record.remaining()

    def check(self) -> None:
        """
        Raise unless held. Local: call it often, it costs less than a microsecond.

        Raises:
            LockLost: The deadline passed, the backend said that the lease has ended, or it was released.
        """
        self._record.check()

    def beat(self) -> None:
        """
        Say that the work makes progress, where its lock has ``stall=``. Local: call it often, from any thread.

        The grant is the first beat, and ``extend()`` is one. Without a beat for `stall` seconds lockkit stops renewing:
        the lease is lost at its deadline, unless a beat comes before that. Without ``stall=`` as `check`.

        Raises:
            LockLost: As `check` does.
        """
        self._engine.beat(self._record)

    @property
    def stalled(self) -> bool:
        """No beat for `stall` seconds: not renewed any more, until the next one. Local."""
        return self._record.stalled

    def on_lost(self, callback: LostCallback) -> None:
        """
        Have ``callback(lease, reason)`` called once if the lease is lost; at once if it is lost already.

        Args:
            callback: Called in a thread of its own (in a task under asyncio, where it may be a coroutine function).
                ``reason`` is one of ``lockkit.backend.LossReason``. Its exceptions are logged and go no further.
        """
        self._engine.leases.on_lost(self._record, callback)

    def __bool__(self) -> bool:
        """Return True: a lease never stands for "not acquired"."""
        return True

    def __repr__(self) -> str:
        """Show name, token and state."""
        record = self._record
        if record.released:
            state = "released"
        elif record.lost_reason is not None:
            state = f"lost: {record.lost_reason}"
        else:
            state = f"{self.remaining():.3f} s left"
        return f"<{self._api}.{type(self).__name__} {self.name!r} token={self.token} {state}>"

    def __reduce__(self) -> NoReturn:
        """
        Refuse to be pickled: another process would neither renew it nor notice its loss.

        Raises:
            TypeError: Always.
        """
        raise TypeError("a lockkit Lease cannot be pickled or copied: pass lease.token to the other process instead")

    def __del__(self) -> None:
        """Stop renewing a lease that was dropped without release; the lock goes at its ttl. No I/O."""
        record = self._record
        if record.state is RELEASED:
            return
        if self._engine.leases.dropped(record):
            message = (
                f"lease of lock {self.name!r} (token {record.grant.token}) at {record.client.url} was dropped without "
                f"release; the backend frees it within {record.grant.ttl:g} s. Use `with`, or keep the lease and call "
                "its release(): `if lock.try_acquire():` keeps none, `if lease := lock.try_acquire():` does."
            )
            self._engine.leases.log_soon(message)
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)


class MakesLeases:
    """Base of locks and the like, which in other libraries are released themselves; here their leases are."""

    __slots__ = ()
    _lease_from: ClassVar[str] = "lease = lock.acquire()"

    if not TYPE_CHECKING:  # type checkers are to find what is missing

        def __getattr__(self, name: str) -> NoReturn:
            """
            Say that the lease has the missing attribute, if it has.

            Raises:
                AttributeError: Always.
            """
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _OF_LEASES:
                way = self._lease_from
                message += f": it belongs to the lease. `{way}`, then `{way.partition(' ')[0]}.{name}`; or use `with`"
            raise AttributeError(message, name=name, obj=self)


_OF_LEASES = frozenset(
    ("beat", "check", "confirm", "downgrade", "extend", "held", "lost", "on_lost", "owner", "release", "remaining",
     "resign", "stalled", "token", "update", "wait_lost",
     "write_note")
)  # fmt: skip
"""What leases have and what makes them has not."""


B = TypeVar("B")
L = TypeVar("L", bound=BaseLease)


class WithStack(Generic[B]):
    """
    Which lease belongs to which ``with`` of one lock object.

    One lock object may be entered by many threads or tasks at once, and again by the same one when reentrant, so each
    keeps its own stack. The key is what ``Runtime.current`` returns.
    """

    __slots__ = ("_stacks",)

    def __init__(self) -> None:
        """Start without blocks."""
        self._stacks: dict[object, list[B]] = {}

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickle and copy no blocks: they are of the object that was entered."""
        return type(self), ()

    def push(self, who: object, lease: B) -> None:
        """
        Remember the lease of the block that `who` entered.

        No call comes after the lease is stored: Ctrl-C would strike there, and nobody would leave the block.
        """
        self._stacks[who] = [*self._stacks.get(who, ()), lease]

    def pop(self, current: Callable[[], object]) -> B:
        """
        Return the lease of the block that the caller leaves.

        A block may be left by another thread or task than entered it (an exit stack closed elsewhere): that is clear as
        long as only one thread or task is inside.

        Args:
            current: Tells who the caller is, see ``Runtime.current``.

        Raises:
            LockError: Several are inside, and none of them is the caller.
        """
        if len(self._stacks) == 1:
            # A copy, whose first is the one that was inside alone: another thread may enter at this moment.
            who = list(self._stacks)[0]  # noqa: RUF015 - next(iter()) is no copy
        elif (who := current()) not in self._stacks:
            message = (
                "this `with` block was entered by another thread or task, and the lock object is in use by "
                "several: hold the lease of lock.acquire() and release that"
            )
            raise LockError(message)
        stack = self._stacks[who]
        lease = stack.pop()
        if not stack:
            del self._stacks[who]
        return lease


class SharedWithStack(WithStack[B]):
    """
    The same for a lock object under which several threads or tasks may be inside at once: readers, permits, sets.

    A block in a generator may be entered by one thread or task and left by another that is inside too: a web framework
    runs its dependencies so, and asyncio closes an async generator so that was not read to its end. The key of such a
    block is the id of the generator's frame, which stays as long as the generator does.
    """

    __slots__ = ()

    def push(self, who: object, lease: B) -> None:
        """See `WithStack.push`. Called by the method that enters the block."""
        super().push(_generator_of(sys._getframe(1).f_back) or who, lease)  # noqa: SLF001 - documented

    def pop(self, current: Callable[[], object]) -> B:
        """See `WithStack.pop`. Called by the method that leaves the block."""
        generator = _generator_of(sys._getframe(1).f_back)  # noqa: SLF001 - as above
        return super().pop(current if generator is None else lambda: generator)


def _generator_of(frame: FrameType | None) -> int | None:
    """Identify the generator that runs in a frame; None if none does."""
    if frame is None or not frame.f_code.co_flags & (CO_GENERATOR | CO_ASYNC_GENERATOR):
        return None
    return id(frame)


_current: ContextVar[BaseLease | None] = ContextVar("lockkit_current_lease", default=None)


@contextmanager
def as_current(lease: BaseLease | None) -> Iterator[None]:
    """Have `find_current` return a lease within a block of this thread or task, and in tasks that begin there."""
    before = _current.set(lease)
    try:
        yield
    finally:
        _current.reset(before)


def find_current(kind: type[L]) -> L:
    """Return the lease of the innermost `as_current`; LockError if there is none of this API."""
    lease = _current.get()
    if not isinstance(lease, kind):
        raise LockError(
            f"current_lease() of {kind._api} was called outside a function that a lock or once decorates, and outside "  # noqa: SLF001 - of this module
            "a job that has a lock"
        )
    return lease


class BaseLock(MakesLeases):
    """A named lock of a client, in both APIs."""

    __slots__ = ("_blocks", "_engine", "_settings")
    _api: ClassVar[str]

    def __init__(self, engine: Engine[Any], settings: LockSettings) -> None:
        """Made by the client."""
        self._engine = engine
        self._settings = settings
        self._blocks: WithStack[Any] = WithStack() if settings.mode == "exclusive" else SharedWithStack()

    @property
    def name(self) -> str:
        """Name of the lock."""
        return self._settings.name

    def __reduce__(self) -> tuple[type[Self], tuple[Engine[Any], LockSettings]]:
        """Pickle what the lock is, and not who is inside it."""
        return type(self), (self._engine, self._settings)

    def _seconds(self, timeout: Seconds | timedelta | None) -> float | None:
        return validation.timeout(timeout, name=self._settings.name, backend=self._engine.url)

    def __repr__(self) -> str:
        """Show name and backend."""
        return f"<{self._api}.Lock {self._settings.name!r} at {self._engine.url}>"


class PermitFacts:
    """What a semaphore of either API knows without asking; beside its `BaseLock`."""

    __slots__ = ()
    _api: ClassVar[str]
    _engine: Engine[Any]
    _settings: LockSettings

    @property
    def name(self) -> str:
        """Name of the semaphore."""
        return split_space(self._settings.name)[1]

    @property
    def limit(self) -> int:
        """How many permits may be held at the same time."""
        return self._settings.limit

    def __repr__(self) -> str:
        """Show name, limit and backend."""
        return f"<{self._api}.Semaphore {self.name!r} limit={self.limit} at {self._engine.url}>"


class BaseRWLock(MakesLeases, Generic[B]):
    """A read/write lock, in both APIs: makes the locks of its two sides."""

    __slots__ = ("_engine", "_settings")
    _api: ClassVar[str]
    _side: ClassVar[type[Any]]
    """Makes a lock of the API."""

    def __init__(self, engine: Engine[Any], settings: LockSettings) -> None:
        """Made by ``Client.rwlock``."""
        self._engine = engine
        self._settings = settings

    @property
    def name(self) -> str:
        """Name of the lock."""
        return self._settings.name

    def read(self) -> B:
        """
        Return the read side.

        Raises:
            Unsupported: The backend has no read locks.
        """
        self._engine.check_readers(self.name)
        return cast("B", self._side(self._engine, replace(self._settings, mode="shared")))

    def write(self) -> B:
        """Return the write side."""
        return cast("B", self._side(self._engine, self._settings))

    def __repr__(self) -> str:
        """Show name and backend."""
        return f"<{self._api}.RWLock {self.name!r} at {self._engine.url}>"


class BaseElection(MakesLeases):
    """A named election of a client, in both APIs."""

    __slots__ = ("_candidate",)
    _api: ClassVar[str]

    def __init__(self, candidate: Candidate[Any]) -> None:
        """Made by ``Client.election``."""
        self._candidate = candidate

    @property
    def name(self) -> str:
        """Name of the election."""
        return self._candidate.name

    def __repr__(self) -> str:
        """Show name and backend."""
        return f"<{self._api}.Election {self.name!r} at {self._candidate.url}>"


class BaseLockSet(MakesLeases):
    """Several locks that are held together or not at all, in both APIs."""

    __slots__ = ("_blocks", "_core")
    _api: ClassVar[str]

    def __init__(self, core: LockSetCore[Any]) -> None:
        """Made by ``Client.locks`` and ``locks``."""
        self._core = core
        self._blocks: SharedWithStack[Any] = SharedWithStack()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the locks, in the order in which they are acquired."""
        return self._core.names

    def __repr__(self) -> str:
        """Show the names."""
        return f"<{self._api}.LockSet {', '.join(map(repr, self.names))}>"
