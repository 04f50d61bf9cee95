"""
Several locks at once: all of them or none, without deadlock.

::

    a free ──> b free ──> c busy ──> wait for c, holding a and b ──> d ──> all still held? ──> the body runs
                                            │                                  │
                                            └── timeout, outage, Ctrl-C ───────┴──> d, c, b, a are released

Two clients that want the same locks ask for them in the same order, by the bytes of the name and then by URL. So the
one that holds the smallest lock that both want gets the others too, or waits only for a client that is further on: no
circle of waiters can form (E. W. Dijkstra's hierarchical ordering of resources). A waiter keeps its place in the
queue of one lock and keeps what it has, so it is served in the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import timedelta
from math import inf
from typing import Any, ClassVar, Final, Generic, NoReturn, TypeVar

from lockkit import validation
from lockkit.backend import split_space
from lockkit.configuration.name_template import NameTemplate
from lockkit.engine.acquisition import ANSWER_GRACE, UNDO_SECONDS, UNDO_SECONDS_MIN
from lockkit.engine.cleanup import RELEASE_SECONDS
from lockkit.engine.engine import Engine
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.settings import INHERIT, Inherit, LockOptions, LockSettings, LostCallback
from lockkit.errors import ConfigurationError, LockError, LockLost, LockTimeout
from lockkit.runtime import Runtime
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

NAMES_MAX: Final = 100
"""How many locks a set has at most. Each costs a round trip, and a renewal every third of its ttl. More locks at once
mostly mean that one coarser lock is wanted."""

L = TypeVar("L")
T = TypeVar("T")


# -- which locks -------------------------------------------------------------------------------------------------------


def members_of(locks: Iterable[T], lock_class: type[T], module: str) -> list[T]:
    """Return the locks that the caller gave for a set across clients."""
    given = _listed(locks, f"{module}.locks() takes a list of locks, such as [client.lock('a'), other.lock('b')]")
    for lock in given:
        if not isinstance(lock, lock_class):
            kind = f"{type(lock).__module__}.{type(lock).__qualname__}"
            message = (
                f"{module}.locks() takes locks of clients of {module}.connect(), not {kind}: all locks of a set must "
                "be of the same API. For names use client.locks([...])"
            )
            raise ConfigurationError(message)
    return given


def _listed(given: Iterable[T], wanted: str) -> list[T]:
    if isinstance(given, (str, bytes)):
        message = f"{wanted}, not the single {type(given).__name__} {validation.shown(given)}"
        raise ConfigurationError(message)
    try:
        return list(given)
    except TypeError as error:
        message = f"{wanted}, not {type(given).__name__}"
        raise ConfigurationError(message) from error


class SetMember(Generic[L]):
    """
    One lock of a set.

    Attributes:
        engine: Of its client.
        settings: What to acquire.
    """

    __slots__ = ("engine", "settings")

    def __init__(self, engine: Engine[L], settings: LockSettings) -> None:
        """Take both as they are."""
        self.engine = engine
        self.settings = settings

    @property
    def name(self) -> str:
        """Name of the lock."""
        return self.settings.name

    @property
    def template(self) -> str:
        """The name as the user gave it, also of a semaphore: for a decorator, with its fields."""
        return split_space(self.settings.name)[1]

    def named(self, name: str) -> SetMember[L]:
        """Return the same lock or semaphore under another name."""
        return SetMember(self.engine, self.engine.named(self.settings, name))

    @property
    def order(self) -> tuple[bytes, str]:
        """By which all clients sort: by bytes, so that no locale or normalisation plays a part."""
        return self.settings.name.encode(), self.engine.url


def _in_order(members: Sequence[SetMember[L]]) -> tuple[SetMember[L], ...]:
    """Sort the members, each lock once."""
    if not members:
        message = "a set of locks needs at least one lock: give a non-empty list"
        raise ConfigurationError(message)
    ordered: list[SetMember[L]] = []
    for member in sorted(members, key=lambda member: member.order):
        if not ordered or ordered[-1].order != member.order:
            ordered.append(member)
        elif not ordered[-1].engine.opens_the_same(member.engine):
            message = (
                f"lock {member.name!r} at {member.engine.url} is in the set twice, of clients with different options: "
                "lockkit cannot tell whether it is one lock. Take both from one client, or give the options in the URL"
            )
            raise ConfigurationError(message, name=member.name, backend=member.engine.url)
        elif ordered[-1].settings.mode == "shared":
            ordered[-1] = member  # writing allows reading, too
    if len(ordered) > NAMES_MAX:
        message = f"a set of locks has at most {NAMES_MAX} locks, not {len(ordered)}: use one lock for a group of them"
        raise ConfigurationError(message)
    return tuple(ordered)


class LockSetCore(Generic[L]):
    """
    What `LockSet` of both APIs is made of.

    Attributes:
        members: In the order in which they are acquired; each lock once.
        timeout: Seconds for all of them together; None without limit.
        on_lost: Called when the first lease of a set is lost.
        cancel_on_lost: ``async with`` cancels its body then.
    """

    __slots__ = ("cancel_on_lost", "members", "on_lost", "timeout")

    def __init__(
        self,
        members: Sequence[SetMember[L]],
        timeout: Seconds | timedelta | None,
        on_lost: LostCallback | None,
        *,
        cancel_on_lost: bool = False,
    ) -> None:
        """Check and sort. Nothing is sent."""
        self.members = _in_order(members)
        self.timeout = validation.timeout(timeout)
        self.cancel_on_lost = validation.flag(cancel_on_lost, "cancel_on_lost")
        self.on_lost = None if on_lost is None else validation.on_lost(on_lost, awaits=self.awaits)

    @classmethod
    def of_names(
        cls,
        engine: Engine[L],
        names: Iterable[str],
        function: Callable[..., object],
        options: LockOptions,
        *,
        cancel_on_lost: bool = False,
    ) -> LockSetCore[L]:
        """Make a set of one client's locks from the arguments of `function`: ``Client.locks`` of the API in use."""
        on_lost, timeout = options.pop("on_lost", None), options.get("timeout", INHERIT)
        listed = _listed(names, "locks() takes a list of lock names, such as ['acct:1', 'acct:2']")
        members = [SetMember(engine, engine.settings(name, function, **options)) for name in listed]
        within = engine.default_timeout if isinstance(timeout, Inherit) else timeout
        return cls(members, within, on_lost, cancel_on_lost=cancel_on_lost)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the locks, in the order in which they are acquired."""
        return tuple(member.template for member in self.members)

    @property
    def runtime(self) -> Runtime:
        """Of the API in use; the runtimes of all members have the same clock."""
        return self.members[0].engine.runtime

    @property
    def awaits(self) -> bool:
        """Whether callbacks may be coroutine functions."""
        return self.runtime.kind != "blocking"

    def named(self, names: Sequence[str]) -> LockSetCore[L]:
        """Return a set with other names: those of `members`, in that order, with their fields filled in."""
        assert len(names) == len(self.members), "a name for each lock"
        members = [member.named(name) for member, name in zip(self.members, names, strict=True)]
        return LockSetCore(members, self.timeout, self.on_lost, cancel_on_lost=self.cancel_on_lost)

    async def acquire(self, timeout: Seconds | None) -> LeaseSetCore[L]:
        """Acquire all of them, or none, within `timeout` seconds for all together."""
        runtime, leases = self.runtime, LeaseSetCore(self)
        began = runtime.now()
        answer_by = inf if timeout is None else began + timeout + ANSWER_GRACE
        member = self.members[0]
        try:
            left = timeout
            for member in self.members:
                leases.acquired.append((member, await member.engine.acquire(member.settings, left)))
                left = None if timeout is None else max(0.0, began + timeout - runtime.now())
            leases.complete(self.on_lost)
            leases.check()
        except LockTimeout as error:
            waited = round(runtime.now() - began, 3)
            await leases.undo(answer_by)
            raise self._timed_out(error, member, waited) from error
        except BaseException:
            await leases.undo(answer_by)
            raise
        return leases

    def _timed_out(self, error: LockTimeout, member: SetMember[L], waited: Seconds) -> LockError:
        """Say which lock was busy, and what the set as a whole has waited."""
        message = f"could not acquire {len(self.members)} locks within {waited:g} s, none of them is kept: {error}"
        return LockTimeout(message, name=member.name, backend=member.engine.url, holder=error.holder)


def name_templates(
    core: LockSetCore[Any], function: Callable[..., Any], *, coroutine: bool = False
) -> list[NameTemplate]:
    """Bind the names of a set to the function that it decorates."""
    templates = [NameTemplate(member.template, function, backend=member.engine.url) for member in core.members]
    first = templates[0]
    if first.wraps_coroutine or (coroutine and not first.is_coroutine):
        kind = "wraps a coroutine function in a plain one" if first.wraps_coroutine else "is not a coroutine function"
        message = (
            f"locks {', '.join(map(repr, core.names))} cannot decorate {first.label!r}, which {kind}: decorate the "
            "`async def` itself, or use `with` inside the function"
        )
        raise ConfigurationError(message)
    return templates


# -- the leases --------------------------------------------------------------------------------------------------------


class LeaseSetCore(Generic[L]):
    """
    The leases of a set: what `LeaseSet` of both APIs is made of.

    Attributes:
        locks: Of which locks.
        acquired: The leases that are still to be released, in the order in which they were acquired.
        leases: All leases, once all were acquired.
        released: The set was released, or is about to be.
    """

    __slots__ = ("acquired", "leases", "locks", "released")

    def __init__(self, locks: LockSetCore[L]) -> None:
        """Start empty; filled by `LockSetCore.acquire`."""
        self.locks = locks
        self.acquired: list[tuple[SetMember[L], L]] = []
        self.leases: tuple[L, ...] = ()
        self.released = False

    @property
    def records(self) -> list[LeaseRecord]:
        """The engine's records of the leases."""
        return [_record(lease) for lease in self.leases]

    @property
    def held(self) -> bool:
        """Whether all are held."""
        return not self.released and all(record.held for record in self.records)

    @property
    def lost(self) -> bool:
        """Whether one was lost."""
        return any(record.lost for record in self.records)

    def remaining(self) -> float:
        """Return the seconds until the first deadline, 0.0 when one is not held."""
        return 0.0 if self.released else min(record.remaining() for record in self.records)

    def check(self) -> None:
        """Raise unless all are held."""
        if self.released:
            raise self._released_error()
        for record in self.records:
            record.check()

    def _released_error(self) -> LockLost:
        names = ", ".join(map(repr, self.locks.names))
        return LockLost(f"the leases of locks {names} were released; acquire the locks again", name=self.locks.names[0])

    def find(self, lock: object) -> list[L]:
        """Return the leases of a lock, which is given by its name or as a lock object."""
        pairs = zip(self.locks.members, self.leases, strict=True)
        if isinstance(lock, str):
            return [lease for member, lease in pairs if member.template == lock]
        settings: LockSettings | None = getattr(lock, "_settings", None)
        engine: Engine[L] | None = getattr(lock, "_engine", None)
        if settings is None or engine is None:
            return []
        wanted = SetMember(engine, settings).order
        return [lease for member, lease in pairs if member.order == wanted]

    def on_lost(self, callback: LostCallback) -> None:
        """Have ``callback(lease, reason)`` called once, with the first lease of the set that is lost."""
        validation.on_lost(callback, awaits=self.locks.awaits)
        left = [callback]

        def first(lease: object, reason: str) -> object:
            try:
                chosen = left.pop()
            except IndexError:  # another lease of the set was lost before
                return None
            return chosen(lease, reason)

        for member, record in zip(self.locks.members, self.records, strict=True):
            member.engine.leases.on_lost(record, first)

    def complete(self, on_lost: LostCallback | None) -> None:
        """Take the leases that were acquired as those of the set."""
        assert len(self.acquired) == len(self.locks.members), "all or nothing"
        self.leases = tuple(lease for _, lease in self.acquired)
        if on_lost is not None:
            self.on_lost(on_lost)

    def enter(self) -> None:
        """Note that a ``with`` block runs under the leases, perhaps of another thread or task than acquired them."""
        for member, record in zip(self.locks.members, self.records, strict=True):
            member.engine.leases.enter(record)

    async def confirm(self) -> bool:
        """Ask each backend whether the lease still holds the lock."""
        if self.released:
            return False
        held = True
        for member, record in zip(self.locks.members, self.records, strict=True):
            held = await member.engine.confirm(record) and held
        return held and self.held

    async def extend(self, ttl: Seconds | timedelta | None) -> None:
        """Set the time left of each lease, in order; the first error ends it."""
        if self.released:
            raise self._released_error()
        for member in self.locks.members:
            if ttl is not None:
                with validation.about(member.name, member.engine.url):
                    validation.ttl(ttl, member.engine.capabilities.min_ttl)
        for member, record in zip(self.locks.members, self.records, strict=True):
            await member.engine.extend(record, ttl)
        self.check()

    async def release(self) -> None:
        """Release all, the last first; each is tried."""
        self.released = True

        async def give_back(member: SetMember[L], record: LeaseRecord, answer_by: Instant) -> None:
            await member.engine.releases.release(record, answer_by)

        await self._each(give_back, RELEASE_SECONDS)

    async def leave(self, error: BaseException | None) -> None:
        """Release all at the end of a ``with`` block, as `Releases.leave` does with one."""
        self.released = True

        async def leave(member: SetMember[L], record: LeaseRecord, answer_by: Instant) -> None:
            await member.engine.releases.leave(record, error, answer_by)

        await self._each(leave, RELEASE_SECONDS)

    async def leave_cancelled(self) -> NoReturn:
        """Release all at the end of a block whose body was cancelled because a lease was lost."""
        lost = next(record for record in self.records if record.lost)
        await self.leave(None)
        raise lost.lost_error()  # leave() does not raise it with raise_on_lost=False

    async def undo(self, answer_by: Instant = inf) -> None:
        """
        Leave none held, after an acquisition that did not come to its end.

        Takes at most about `UNDO_SECONDS`, and not longer than the caller has time; what the backend has not answered
        by then goes on in the background.
        """
        self.released = True
        if not self.acquired:
            return
        runtime = self.locks.runtime
        seconds = min(UNDO_SECONDS, max(UNDO_SECONDS_MIN, answer_by - runtime.now()))
        try:
            await runtime.settle(self._each(self._undo, seconds), seconds)
        except TimeoutError as error:
            log.debug("releasing the locks of a set continues in the background: %s", error)

    @staticmethod
    async def _undo(member: SetMember[L], record: LeaseRecord, answer_by: Instant) -> None:
        try:
            await member.engine.releases.release(record, answer_by)
        except LockLost as error:
            log.debug("releasing a lock of a set: %s", error)
        except LockError as error:
            log.debug("releasing a lock of a set, lockkit retries: %s", error)
            member.engine.cleanups.release_later(record)

    async def _each(
        self, action: Callable[[SetMember[L], LeaseRecord, Instant], Coroutine[Any, Any, None]], seconds: Seconds
    ) -> None:
        """Call `action` for each lease that is still to be released, the last first, whatever the others raise."""
        errors: list[LockError] = []
        runtime = self.locks.runtime
        until = runtime.now() + seconds
        left, self.acquired = self.acquired, []
        try:
            await self._each_of(left, action, until, errors)
        except BaseException as interrupt:
            # Cut short within one lease, whose release is sent all the same. Nothing that a further cancellation could
            # stop.
            await runtime.settle(self._each_of(left, action, until, errors), seconds)
            _add_notes(interrupt, errors)
            raise
        try:
            if errors:
                _add_notes(errors[0], errors[1:])
                raise errors[0]
        finally:
            errors.clear()  # each refers to frames that refer to the list

    async def _each_of(
        self,
        left: list[tuple[SetMember[L], L]],
        action: Callable[[SetMember[L], LeaseRecord, Instant], Coroutine[Any, Any, None]],
        until: Instant,
        errors: list[LockError],
    ) -> None:
        while left:
            member, lease = left.pop()
            # The first that hangs may take all of the time; the others are still tried.
            answer_by = max(until, self.locks.runtime.now() + UNDO_SECONDS_MIN)
            try:
                await action(member, _record(lease), answer_by)
            except LockError as error:
                errors.append(error)
                if not isinstance(error, LockLost):
                    self.acquired.insert(0, (member, lease))  # release() may be called again


class BaseLeaseSet(Generic[L]):
    """The leases of a set: the properties and methods that look at local state only and never block."""

    __slots__ = ("__weakref__", "_core")

    _api: ClassVar[str]
    """Where users import the class from, for the repr."""

    def __init__(self, core: LeaseSetCore[L]) -> None:
        """Made by ``LockSet.acquire``."""
        self._core = core

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the locks, in the order in which they were acquired."""
        return self._core.locks.names

    @property
    def tokens(self) -> dict[str, int]:
        """
        Fencing token of each lock by its name, as a dict of its own. There is none for the set.

        Raises:
            ConfigurationError: Several have the same name: use ``leases[lock].token``.
        """
        return {name: _record(self[name]).grant.token for name in self.names}

    def __getitem__(self, lock: object) -> L:
        """
        Return the lease of a lock.

        Args:
            lock: Its name; or the lock object, also where several have the same name.

        Raises:
            KeyError: It is not in the set.
            ConfigurationError: Several locks have this name: use the lock object.
        """
        found = self._core.find(lock)
        if not found:
            raise KeyError(lock)
        if len(found) > 1:
            message = f"several locks of the set have the name {lock!r}: use leases[lock] with the lock object"
            raise ConfigurationError(message, name=str(lock))
        return found[0]

    def __contains__(self, item: object) -> bool:
        """Whether a name, a lock or a lease is in the set."""
        return item in self._core.leases or bool(self._core.find(item))

    def __iter__(self) -> Iterator[L]:
        """Iterate over the leases, in the order in which they were acquired."""
        return iter(self._core.leases)

    def __len__(self) -> int:
        """Return the number of locks; a lock that was given twice counts once."""
        return len(self._core.leases)

    @property
    def held(self) -> bool:
        """Every lease is held, and the set was not released. Local, as ``Lease.held``."""
        return self._core.held

    @property
    def lost(self) -> bool:
        """A lease of the set was lost: work that needs all of the locks must stop."""
        return self._core.lost

    def remaining(self) -> float:
        """Seconds until the first deadline unless it is renewed; 0.0 when one lease is not held. Local."""
        return self._core.remaining()

    def check(self) -> None:
        """
        Raise unless all are held. Local.

        Raises:
            LockLost: One is not; the message names it.
        """
        self._core.check()

    def on_lost(self, callback: LostCallback) -> None:
        """
        Have ``callback(lease, reason)`` called once, with the first lease of the set that is lost.

        Args:
            callback: As for ``Lease.on_lost``. To be called for each lease that is lost, register it with each.
        """
        self._core.on_lost(callback)

    def __bool__(self) -> bool:
        """Return True: a set of leases never stands for "not acquired"."""
        return True

    def __repr__(self) -> str:
        """Show names and state."""
        if self._core.released:
            state = "released"
        elif self.lost:
            state = "lost"
        else:
            state = f"{self.remaining():.3f} s left"
        return f"<{self._api}.LeaseSet {', '.join(map(repr, self.names))} {state}>"

    def __reduce__(self) -> NoReturn:
        """
        Refuse to be pickled, as a lease does.

        Raises:
            TypeError: Always.
        """
        message = "lockkit leases cannot be pickled or copied: pass leases.tokens to the other process instead"
        raise TypeError(message)


def _record(lease: object) -> LeaseRecord:
    record: LeaseRecord = lease._record  # type: ignore[attr-defined]  # noqa: SLF001 - the face's lease of the engine's
    return record


def _add_notes(error: BaseException, others: Iterable[LockError]) -> None:
    for other in others:
        error.add_note(f"lockkit: {other}")
