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
from dataclasses import replace
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
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockLost, LockTimeout
from lockkit.runtime import Runtime
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

NAMES_MAX: Final = 100
"""How many locks a set has at most. Each costs a round trip, and a renewal every third of its ttl. More locks at once
mostly mean that one coarser lock is wanted."""

L = TypeVar("L")
T = TypeVar("T")
S = TypeVar("S", bound="BaseLeaseSet[Any]")


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
        raise ConfigurationError(f"{wanted}, not the single {type(given).__name__} {validation.shown(given)}")
    try:
        return list(given)
    except TypeError as error:
        raise ConfigurationError(f"{wanted}, not {type(given).__name__}") from error


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

    def without_stall(self) -> SetMember[L]:
        """Return the same lock, with a lease that has no beats of its own."""
        return self if self.settings.stall is None else SetMember(self.engine, replace(self.settings, stall=None))

    @property
    def order(self) -> tuple[bytes, str]:
        """By which all clients sort: by bytes, so that no locale or normalisation plays a part."""
        return self.settings.name.encode(), self.engine.url


def _in_order(members: Sequence[SetMember[L]]) -> tuple[SetMember[L], ...]:
    """Sort the members, each lock once."""
    if not members:
        raise ConfigurationError("a set of locks needs at least one lock: give a non-empty list")
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
        stall: Seconds without a beat of the set after which none of its leases is renewed; None without limit.
    """

    __slots__ = ("cancel_on_lost", "members", "on_lost", "stall", "timeout")

    def __init__(
        self,
        members: Sequence[SetMember[L]],
        timeout: Seconds | timedelta | None,
        on_lost: LostCallback | None,
        *,
        cancel_on_lost: bool = False,
        stall: Seconds | timedelta | None = None,
    ) -> None:
        """Check and sort. Nothing is sent."""
        ordered = _in_order(members)
        # The first beat of a set comes with its last lease, so no lease of it has beats of its own.
        limits = [member.settings.stall for member in ordered if member.settings.stall is not None]
        if stall is not None:
            renewed = all(member.settings.renew for member in ordered)
            limits.append(validation.stall(stall, renew=renewed))
        self.stall = min(limits, default=None)
        self.members = tuple(member.without_stall() for member in ordered)
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
        return LockSetCore(members, self.timeout, self.on_lost, cancel_on_lost=self.cancel_on_lost, stall=self.stall)

    async def acquire(self, timeout: Seconds | Inherit | timedelta | None, make: Callable[[LockSetCore[L]], S]) -> S:
        """Acquire all of them, or none, within `timeout` seconds for all together; `make` is the class of the set."""
        leases = make(self)
        await leases._acquire(self.timeout if isinstance(timeout, Inherit) else validation.timeout(timeout))  # noqa: SLF001 - same module
        return leases


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


class BaseLeaseSet(Generic[L]):
    """The leases of a set, in both APIs: what looks at local state and never blocks; and the rest, without colour."""

    __slots__ = ("__weakref__", "_acquired", "_callbacks", "_leases", "_locks", "_released")

    _api: ClassVar[str]
    """Where users import the class from, for the repr."""

    def __init__(self, locks: LockSetCore[L]) -> None:
        """Made by ``LockSet.acquire``."""
        self._locks = locks
        self._acquired: list[tuple[SetMember[L], L]] = []  # still to be released, in the order in which they came
        self._leases: tuple[L, ...] = ()  # all, once all were acquired
        self._released = False  # or about to be
        self._callbacks: list[LostCallback] = []

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the locks, in the order in which they were acquired."""
        return self._locks.names

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
        found = self._find(lock)
        if not found:
            raise KeyError(lock)
        if len(found) > 1:
            message = f"several locks of the set have the name {lock!r}: use leases[lock] with the lock object"
            raise ConfigurationError(message, name=str(lock))
        return found[0]

    def __contains__(self, item: object) -> bool:
        """Whether a name, a lock or a lease is in the set."""
        return item in self._leases or bool(self._find(item))

    def __iter__(self) -> Iterator[L]:
        """Iterate over the leases, in the order in which they were acquired."""
        return iter(self._leases)

    def __len__(self) -> int:
        """Return the number of locks; a lock that was given twice counts once."""
        return len(self._leases)

    @property
    def held(self) -> bool:
        """Every lease is held, and the set was not released. Local, as ``Lease.held``."""
        return not self._released and all(record.held for record in self._records)

    @property
    def lost(self) -> bool:
        """A lease of the set was lost: work that needs all of the locks must stop."""
        return any(record.lost for record in self._records)

    def remaining(self) -> float:
        """Seconds until the first deadline unless it is renewed; 0.0 when one lease is not held. Local."""
        return 0.0 if self._released else min(record.remaining() for record in self._records)

    def check(self) -> None:
        """
        Raise unless all are held. Local.

        Raises:
            LockLost: One is not; the message names it.
        """
        if self._released:
            names = ", ".join(map(repr, self.names))
            raise LockLost(f"the leases of locks {names} were released; acquire the locks again", name=self.names[0])
        for record in self._records:
            record.check()

    def beat(self) -> None:
        """
        Say that the work under the locks makes progress, where they have ``stall=``. As ``Lease.beat``, for all.

        Raises:
            LockLost: As `check` does.
        """
        self.check()
        for member, record in zip(self._locks.members, self._records, strict=True):
            member.engine.beat(record)

    @property
    def stalled(self) -> bool:
        """No beat for `stall` seconds: the leases are not renewed any more, until the next one. Local."""
        return any(record.stalled for record in self._records)

    def on_lost(self, callback: LostCallback) -> None:
        """
        Have ``callback(lease, reason)`` called once, with the first lease of the set that is lost.

        Args:
            callback: As for ``Lease.on_lost``. To be called for each lease that is lost, register it with each.
        """
        validation.on_lost(callback, awaits=self._locks.awaits)
        left = [callback]

        def first(lease: object, reason: str) -> object:
            try:
                chosen = left.pop()
            except IndexError:  # another lease of the set was lost before
                return None
            return chosen(lease, reason)

        self._callbacks.append(first)
        for member, record in zip(self._locks.members, self._records, strict=True):
            member.engine.leases.on_lost(record, first)

    def __bool__(self) -> bool:
        """Return True: a set of leases never stands for "not acquired"."""
        return True

    def __repr__(self) -> str:
        """Show names and state."""
        if self._released:
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
        raise TypeError("lockkit leases cannot be pickled or copied: pass leases.tokens to the other process instead")

    # -- without colour ----------------------------------------------------------------------------------------------

    @property
    def _records(self) -> list[LeaseRecord]:
        return [_record(lease) for lease in self._leases]

    def _find(self, lock: object) -> list[L]:
        """Return the leases of a lock, which is given by its name or as a lock object."""
        pairs = zip(self._locks.members, self._leases, strict=True)
        if isinstance(lock, str):
            return [lease for member, lease in pairs if member.template == lock]
        settings: LockSettings | None = getattr(lock, "_settings", None)
        engine: Engine[L] | None = getattr(lock, "_engine", None)
        if settings is None or engine is None:
            return []
        wanted = SetMember(engine, settings).order
        return [lease for member, lease in pairs if member.order == wanted]

    async def _acquire(self, timeout: Seconds | None) -> None:
        """Acquire all, or none."""
        locks = self._locks
        began = locks.runtime.now()
        answer_by = inf if timeout is None else began + timeout + ANSWER_GRACE
        member = locks.members[0]
        try:
            left = timeout
            for member in locks.members:
                self._acquired.append((member, await member.engine.acquire(member.settings, left)))
                left = None if timeout is None else max(0.0, began + timeout - locks.runtime.now())
            self._leases = tuple(lease for _, lease in self._acquired)
            for record in self._records:
                if record.count > 1:  # the outer block goes on with it, as it was, when the set has been left
                    continue
                record.part_of = "a set of locks"
                if locks.stall is not None:
                    record.start_beats(locks.stall)
            if locks.on_lost is not None:
                self.on_lost(locks.on_lost)
            self.check()
        except LockTimeout as error:
            waited = round(locks.runtime.now() - began, 3)
            await self._undo_all(answer_by)
            message = f"could not acquire {len(locks.members)} locks within {waited:g} s, none of them is kept: {error}"
            raise LockTimeout(message, name=member.name, backend=member.engine.url, holder=error.holder) from error
        except BaseException:
            await self._undo_all(answer_by)
            raise

    def _enter(self) -> None:
        """Note that a ``with`` block runs under the leases, perhaps of another thread or task than acquired them."""
        for member, record in zip(self._locks.members, self._records, strict=True):
            member.engine.leases.enter(record)

    async def _confirm(self) -> bool:
        """Ask each backend whether the lease still holds the lock."""
        if self._released:
            return False
        held = True
        for member, record in zip(self._locks.members, self._records, strict=True):
            held = await member.engine.confirm(record) and held
        return held and self.held

    async def _extend(self, ttl: Seconds | timedelta | None) -> None:
        """Set the time left of each lease, in order; the first error ends it."""
        if self._released:
            self.check()
        for member in self._locks.members:
            if ttl is not None:
                with validation.about(member.name, member.engine.url):
                    validation.ttl(ttl, member.engine.capabilities.min_ttl)
        for member, record in zip(self._locks.members, self._records, strict=True):
            await member.engine.extend(record, ttl)
        self.check()

    async def _release(self) -> None:
        """Release all, the last first; each is tried."""
        self._released = True
        await self._each(self._release_one, RELEASE_SECONDS)

    @staticmethod
    async def _release_one(member: SetMember[L], record: LeaseRecord, answer_by: Instant) -> None:
        try:
            await member.engine.releases.release(record, answer_by)
        except BackendUnavailable:
            if member.engine.runtime.now() >= answer_by:  # the others have taken the time for it
                member.engine.cleanups.release_later(record)
            raise

    async def _leave(self, error: BaseException | None) -> None:
        """Release all at the end of a ``with`` block, as `Releases.leave` does with one."""
        self._released = True
        await self._each(lambda member, record, by: member.engine.releases.leave(record, error, by), RELEASE_SECONDS)

    async def _leave_cancelled(self) -> NoReturn:
        """Release all at the end of a block whose body was cancelled because a lease was lost."""
        lost = next(record for record in self._records if record.lost)
        await self._leave(None)
        raise lost.lost_error()  # leave() does not raise it with raise_on_lost=False

    async def _undo_all(self, answer_by: Instant = inf) -> None:
        """
        Leave none held, after an acquisition that did not come to its end.

        Takes at most about `UNDO_SECONDS`, and not longer than the caller has time; what the backend has not answered
        by then goes on in the background.
        """
        self._released = True
        if not self._acquired:
            return
        for record in (_record(lease) for _, lease in self._acquired):
            if record.settings.min_hold and record.count == 1:  # no work ran under it
                record.settings = replace(record.settings, min_hold=0.0)
        runtime = self._locks.runtime
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
        runtime = self._locks.runtime
        until = runtime.now() + seconds
        left, self._acquired = self._acquired, []
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
            record = _record(lease)
            try:
                await action(member, record, until)
                if record.held:  # an outer block of a reentrant lock goes on with it
                    with member.engine.client.mutex:
                        record.callbacks = [one for one in record.callbacks or () if one not in self._callbacks]
            except LockError as error:
                errors.append(error)
                if not isinstance(error, LockLost):
                    self._acquired.insert(0, (member, lease))  # release() may be called again


def _record(lease: object) -> LeaseRecord:
    record: LeaseRecord = lease._record  # type: ignore[attr-defined]  # noqa: SLF001 - the face's lease of the engine's
    return record


def _add_notes(error: BaseException, others: Iterable[LockError]) -> None:
    for other in others:
        error.add_note(f"lockkit: {other}")
