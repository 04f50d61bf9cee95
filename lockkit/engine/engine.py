"""
The life of a client: opening, acquiring, closing, forking, the interpreter's exit.

This package is the policy of lockkit, written once for all backends and for the sync and async APIs. The rules, and
where each is kept:

====  =======================================================================  ===================================
1     The deadline counts from before the request was sent                     `Acquisition._ask`,
                                                                               `LeaseRecord.set_deadline`,
                                                                               `Renewer._apply`
2     A fresh random owner for each acquisition                                `Acquisition._new_request`
3     A grant whose answer was lost is undone by owner, never handed out       `Acquisition._undo`
4     Only the head of a queue per name contends at the backend                `Acquisition.run`,
                                                                               `local_queue.LocalQueues`
5     Woken, not polling, where the backend can; look again at the ttl         `Acquisition._wait`
6     Loss is marked at the deadline even while a renewal hangs                `renewal.Renewer._watch`
7     The clock comes first: past the deadline means lost                      `LeaseRecord.lost`
8     After ``fork`` the child owns nothing                                    `Engine.forked`
9     Exit releases what is held, within a second for all clients together     `_at_exit`
10    Every call is back in time, also when the server hangs                   `Request.answer_by`, `Engine.close`
11    Nothing is started, logged or called back under the mutex; background    `ClientState.mutex`,
      work that fails is logged and goes on                                    `background.Background`
12    What was left at a backend is undone until a ttl has done the same       `cleanup.PendingCleanups`
13    An outage is retried until the timeout, or ``unavailable_after``         `Acquisition._back_off`
====  =======================================================================  ===================================
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar, Unpack, cast

from lockkit import observers, validation
from lockkit.backend import (
    CALL_SECONDS,
    Capabilities,
    Grant,
    Holder,
    LockBackend,
    LossReason,
    Renewal,
    Unknown,
    apart,
    split_space,
)
from lockkit.engine import observation, ticket
from lockkit.engine.acquisition import Acquisition, AcquisitionContext
from lockkit.engine.cleanup import PendingCleanups
from lockkit.engine.client_state import ClientState, check_host
from lockkit.engine.lease_record import RELEASED, LeaseRecord
from lockkit.engine.leases import Leases
from lockkit.engine.lookup import SPACE_OF, Kind, Listing, Notes
from lockkit.engine.observation import ObservedCall
from lockkit.engine.release import Releases
from lockkit.engine.renewal import Renewer
from lockkit.engine.semaphore import (
    CAPS_NAME,
    SLOT_NAME_BYTES_MAX,
    CountedAcquisition,
    SemaphoreCaps,
    SlotSearch,
    limit_of,
    slot_name,
    with_limit,
)
from lockkit.engine.settings import (
    DEFAULT_TTL,
    DEFAULT_UNAVAILABLE_AFTER,
    INHERIT,
    LIMIT_MAX,
    Inherit,
    LockOptions,
    LockSettings,
    LostCallback,
    NoOthers,
    unknown_parameter,
)
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockTimeout, Unsupported
from lockkit.runtime import Event, Runtime, drive, in_forked_child, monotonic, wall_clock
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

L = TypeVar("L")

CLOSE_SECONDS = 4.5
"""What closing a client may take for everything together, seconds, whatever hangs."""

CLOSE_SHARE = 1.0
"""What of `CLOSE_SECONDS` is kept for the waiters to leave and for what is still to be undone, seconds."""

EXIT_SECONDS = 0.9
"""What releasing at interpreter exit may take, seconds, for all clients together. Longer delays the exit when a server
does not answer."""


@dataclass(frozen=True)
class Origin:
    """What ``connect`` of one of the APIs was called with, without a password."""

    connect: Callable[..., Any]
    url: str | None
    profile: str | None
    options: Mapping[str, Any]
    has_secret: bool

    def __hash__(self) -> int:
        """Leave out the options, which may be unhashable."""
        return hash((self.connect, self.url, self.profile))


def engine_of(origin: Origin) -> Engine[Any]:
    """Return the client of this process that stands for one of another process: one for all that was pickled of it."""
    engine = _unpickled.get(origin)
    if engine is None:
        client = origin.connect(origin.url, profile=origin.profile, **origin.options)
        engine = _unpickled[origin] = client._engine  # noqa: SLF001 - the API's object for the engine
    return engine


class Engine(Generic[L]):
    """One client: its parts, and what is done with all of them."""

    def __init__(
        self,
        open_backend: Callable[[Engine[L]], tuple[LockBackend, dict[str, Any]]],
        runtime: Runtime,
        make_lease: Callable[[Engine[L], LeaseRecord], L],
    ) -> None:
        """Open the backend, without I/O."""
        check_host(runtime)
        self.runtime = runtime
        self.origin: Origin | None = None
        self._make_lease = make_lease
        self._open_backend = open_backend
        self._ended = False
        backend, options = open_backend(self)
        self.client = ClientState(runtime, backend, self._open_again)
        self.url = self.client.url
        self.cleanups = PendingCleanups(self.client)
        self.leases = Leases(self.client, self.cleanups)
        self._lose = self.leases.lose  # bound once: every grant comes here
        self.releases = Releases(self.client, self.leases, self.cleanups)
        self.notes = Notes(self.client, self.leases)
        self.caps = SemaphoreCaps(self.client, self.notes)
        self.renewer = Renewer(self.client, self.leases, self._loop_ended)
        unavailable_after = options.get("unavailable_after")
        self.acquisitions: AcquisitionContext[L] = AcquisitionContext(
            self.client,
            self.leases,
            self.cleanups,
            self.admit,
            DEFAULT_UNAVAILABLE_AFTER if unavailable_after is None else unavailable_after,
        )
        self.default_timeout: Seconds | None = options.get("timeout")
        self.default_ttl = validation.ttl(options.get("ttl") or DEFAULT_TTL, self.client.capabilities.min_ttl)
        self.client.begin_anew = self.forked
        self._enter_process()
        _engines.add(self)

    def _open_again(self) -> LockBackend:
        """Open a backend in the child of a fork."""
        backend, _ = self._open_backend(self)
        self._enter_process()
        return backend

    def _enter_process(self) -> None:
        """Note whose locks these are, and that they are released at the end of this process."""
        self._about = {"host": os.uname().nodename, "pid": os.getpid(), "started": round(wall_clock(), 3)}
        self._metadata = validation.metadata(None, self._about)
        _release_at_end_of_child()

    def __reduce__(self) -> tuple[Callable[..., Engine[Any]], tuple[object, ...]]:
        """
        Pickle what `connect` was called with, so that locks can be sent to another process, which connects itself.

        TypeError: That has a password, is a connection of the application, or leads to locks of this process alone.
        """
        problem = ""
        if self.origin is None:
            problem = "it uses a connection of this process (from_client)"
        elif self.capabilities.scope == "process":
            problem = f"locks at {self.url} exclude only within this process"
        elif self.origin.has_secret:
            problem = "its URL or options have a password: give the URL in LOCKKIT_URL or a profile, in each process"
        if problem or self.origin is None:
            raise TypeError(f"this client and what it makes cannot be pickled or copied: {problem}")
        return engine_of, (self.origin,)

    def opens_the_same(self, other: Engine[Any]) -> bool:
        """Tell whether another client was surely made with the same URL, or connection, and the same options."""
        ours, theirs = self._open_backend, other._open_backend
        if not isinstance(ours, partial) or not isinstance(theirs, partial):
            return ours is theirs
        return bool(ours.func is theirs.func and ours.args == theirs.args)

    @property
    def _backend(self) -> LockBackend | None:
        """The backend in use."""
        return self.client.backend

    @property
    def capabilities(self) -> Capabilities:
        """What the backend promises."""
        return self.client.capabilities

    # -- acquire ---------------------------------------------------------------------------------------------------

    def settings(
        self,
        name: str,
        function: Callable[..., object] | None = None,
        nests: bool = False,  # noqa: FBT001, FBT002 - no option of the user's can have its name
        /,
        *,
        ttl: Seconds | timedelta | None = None,
        timeout: Seconds | timedelta | Inherit | None = INHERIT,
        renew: bool = True,
        reentrant: bool = False,
        max_hold: Seconds | timedelta | None = None,
        stall: Seconds | timedelta | None = None,
        min_hold: Seconds | timedelta | None = None,
        metadata: str | Mapping[str, object] | None = None,
        on_lost: LostCallback | None = None,
        raise_on_lost: bool = True,
        label: str | None = None,
        **unknown: Unpack[NoOthers],
    ) -> LockSettings:
        """Validate the arguments of `function`, such as `Client.lock`. Nothing is sent."""
        if unknown:
            raise unknown_parameter(function or self.settings, unknown, LockOptions.__annotations__)
        if self.client.closed:
            raise self.client.closed_error()
        try:
            return LockSettings(
                validation.name_to_lock(name),
                self.default_ttl if ttl is None else validation.ttl(ttl, self.client.capabilities.min_ttl),
                self.default_timeout if timeout is INHERIT else validation.timeout(timeout),
                validation.flag(renew, "renew"),
                validation.flag(reentrant, "reentrant"),
                None if max_hold is None else validation.seconds(max_hold, "max_hold", exclusive=True),
                self._metadata if metadata is None else validation.metadata(metadata, self._about),
                None if on_lost is None else validation.on_lost(on_lost, awaits=self.runtime.kind != "blocking"),
                validation.flag(raise_on_lost, "raise_on_lost"),
                self._about,
                nests=nests,
                label=None if label is None else validation.label(label),
                stall=None if stall is None else validation.stall(stall, renew=renew),
                min_hold=0.0 if min_hold is None else self._min_hold(min_hold, name),
            )
        except ConfigurationError as error:  # not by `validation.about`, which takes almost as long as all of this
            given: object = name  # of any type: the name may be what is wrong
            error.name = given if isinstance(given, str) else None
            error.backend = self.url
            raise

    def _min_hold(self, given: Seconds | timedelta, name: str) -> Seconds:
        seconds = validation.lifetime(given, "min_hold")
        if self.capabilities.crash_release == "ttl" or self.capabilities.transfer:
            return seconds
        message = (
            f"min_hold= needs a backend that keeps a lock after its holder has ended, and at {self.url} a lock belongs "
            "to its session or connection. Use redis://, file: or the lock table of a database"
        )
        raise Unsupported(message, name=name, backend=self.url)

    def named(self, settings: LockSettings, name: str) -> LockSettings:
        """Return the settings for one call of a decorated function, whose arguments have completed the name."""
        space, template = split_space(settings.name)
        try:
            checked = validation.name_to_lock(name)
        except ConfigurationError as error:  # as above: each decorated call comes here
            error.backend = self.url
            raise
        if settings.about is not self._about:  # here too: each call would correct a copy
            self._name_this_process(settings)
        return replace(settings, name=apart(space, checked) if space else checked, label=settings.label or template)

    def _name_this_process(self, settings: LockSettings) -> None:
        """Correct the metadata of a lock that was described before this process was forked."""
        settings.metadata = json.dumps({**json.loads(settings.metadata), **self._about}, separators=(",", ":"))
        settings.about = self._about

    def check_readers(self, name: str) -> None:
        """Check that the backend has read locks."""
        if not self.capabilities.shared_mode:
            message = (
                f"{self.url} has no read locks (capabilities.shared_mode): use write() for readers too, or a backend "
                "that has them"
            )
            raise Unsupported(message, name=name, backend=self.url)

    async def acquire(self, settings: LockSettings, timeout: Seconds | None, *, name_holder: bool = True) -> L:
        """Wait for the lock: the lease that this thread or task has of it already, or else a new one."""
        backend = self.client.ready()
        if settings.about is not self._about:
            self._name_this_process(settings)
        if self.leases.reentrant and (lease := await self._reenter(settings)) is not None:
            return cast("L", lease)  # made by make_lease
        if observers.active is None:
            return await self.granting(backend, settings, timeout, name_holder=name_holder)
        call = ObservedCall(self.client, settings)
        settings = replace(settings, on_wait=call.waits)
        return await call.follow(
            self.granting(backend, settings, timeout, name_holder=name_holder), self.releases.leave
        )

    def granting(
        self, backend: LockBackend, settings: LockSettings, timeout: Seconds | None, *, name_holder: bool
    ) -> Awaitable[L]:
        """Return the call by which the backend grants a lock, a permit, or the lock of a slot."""
        if settings.mode != "permit":
            return Acquisition(self.acquisitions, backend, settings, timeout).run(name_holder)
        self.caps.compare(settings)
        if self.capabilities.permits == "slots":
            return SlotSearch(self.acquisitions, backend, settings, timeout).run()
        return CountedAcquisition(self.acquisitions, backend, settings, timeout, self.caps).run(name_holder)

    async def _reenter(self, settings: LockSettings) -> Any | None:  # noqa: ANN401 - as `Leases.reenter`
        """See `Leases.reenter`; of a semaphore whose slots are locks, a permit in any of them."""
        if settings.mode == "exclusive":
            await self.leases.refuse_write_inside_read(settings)
        if settings.mode != "permit" or self.capabilities.permits != "slots":
            return self.leases.reenter(settings)
        slots = range(settings.limit if settings.reentrant else 0)
        leases = (self.leases.reenter(replace(settings, name=slot_name(settings.name, slot))) for slot in slots)
        return next((lease for lease in leases if lease is not None), None)

    async def free_permits(self, settings: LockSettings) -> int:
        """Ask how many permits of a semaphore nobody holds."""
        assert settings.mode == "permit", "only semaphores have permits"
        if self.capabilities.permits == "native":
            cap = await self.caps.cap(settings.name, CALL_SECONDS)
            limit = settings.limit if cap is None else min(settings.limit, cap)
            return max(0, limit - len(await self._holders(settings.name)))
        slots = [slot_name(settings.name, slot) for slot in range(settings.limit)]
        return sum([not await self._holders(name) for name in slots])

    def permit_settings(self, settings: LockSettings, limit: object) -> LockSettings:
        """Turn the settings of a lock into those of a permit of the semaphore of that name."""
        assert settings.mode == "exclusive", "the settings of a lock"
        name, permits = settings.name, self.capabilities.permits
        if permits == "none":
            message = f"{self.url} has no semaphores (capabilities.permits): use another backend for them"
            raise Unsupported(message, name=name, backend=self.url)
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= LIMIT_MAX:
            message = f"limit must be a whole number from 1 to {LIMIT_MAX}, not {validation.shown(limit)}"
            raise ConfigurationError(message, name=name, backend=self.url)
        if permits == "slots" and len(name.encode()) > SLOT_NAME_BYTES_MAX:
            message = (
                f"name of a semaphore must have at most {SLOT_NAME_BYTES_MAX} UTF-8 bytes at {self.url}, where each of "
                "its slots is a lock"
            )
            raise ConfigurationError(message, name=name, backend=self.url)
        metadata = with_limit(settings.metadata, limit)
        return replace(settings, name=apart("sem", name), mode="permit", limit=limit, metadata=metadata)

    async def try_acquire(self, settings: LockSettings, timeout: Seconds | None) -> L | None:
        """As `acquire`, with None instead of `LockTimeout`."""
        try:
            return await self.acquire(settings, timeout, name_holder=False)
        except LockTimeout:
            return None

    def admit(self, settings: LockSettings, grant: Grant, started: Instant) -> L | None:
        """Turn a grant into a lease, watched and renewed from now on."""
        client, leases = self.client, self.leases
        record = LeaseRecord(client, grant, settings, started, self._lose)
        if record.valid_until <= self.runtime.now():
            return None
        # The lease first: should an interrupt strike from here on, dropping the lease ends the renewal.
        lease: L = (settings.make_lease or self._make_lease)(self, record)
        with client.mutex:
            if client.closed:
                raise client.closed_error()
            leases.add(record, settings)
            self.renewer.reschedule(record)
        try:
            self.renewer.start()
        except RuntimeError as error:
            record.state = RELEASED
            leases.drop(record)
            message = (
                f"lock {settings.name!r} at {self.url} was granted and released again, because lockkit could not start "
                f"its watch: {error}"
            )
            raise LockError(message, name=settings.name, backend=self.url) from error
        if leases.early_losses:
            leases.apply_early_loss(record)
        return lease

    # -- the lease: asking the backend -----------------------------------------------------------------------------

    async def extend(self, record: LeaseRecord, ttl: Seconds | timedelta | None) -> None:
        """Set the time left to `ttl` (None: the lease's ttl). Never adds."""
        grant, client = record.grant, self.client
        with validation.about(grant.name, self.url):
            wanted = grant.ttl if ttl is None else validation.ttl(ttl, client.capabilities.min_ttl)
        await self._extended(record, self.renewer.extend(record, client.ready(), wanted), f"extend lock {grant.name!r}")
        record.check()

    async def _extended(self, record: LeaseRecord, renewal: Awaitable[Renewal], action: str) -> None:
        """Await a renewal on the holder's request; without an answer, raise."""
        client, name = self.client, record.grant.name
        outcome = await client.asked(renewal, action, name)
        if isinstance(outcome, Unknown):
            failure = BackendUnavailable(str(outcome.error))
            raise client.unavailable(failure, action, name) from outcome.error

    async def ticket(self, record: LeaseRecord, ttl: Seconds | timedelta | None) -> str:
        """End a lease without releasing its lock, which whoever has the ticket can take within `ttl`."""
        grant, client = record.grant, self.client
        name, url = grant.name, self.url
        ticket.require(client, "ticket()")
        with validation.about(name, url):
            wanted = grant.ttl if ttl is None else validation.ttl(ttl, client.capabilities.min_ttl)
        record.check()
        problem = ""
        if record.mode != "exclusive":
            problem = "it is held together with others"
        elif record.part_of:
            problem = f"it is part of {record.part_of}, which would lose it"
        elif record.count > 1:
            problem = "it was entered again, and an outer block relies on it: leave the inner blocks first"
        if problem:
            raise LockError(f"the lease of lock {name!r} at {url} has no ticket: {problem}", name=name, backend=url)
        action = f"hand over lock {name!r}"
        await self._extended(record, self.renewer.extend(record, client.ready(), wanted, hand_over=True), action)
        if not record.handed_over:  # lost, or released by another thread
            record.check()
        observation.post("released", record, "handed_over")
        return str(ticket.Handed(name, grant.owner, grant.token, wall_clock() + wanted))

    async def take(self, text: object, function: Callable[..., object], options: LockOptions) -> L:
        """Take the lock of a ticket. `function` is ``Client.take`` of the API in use."""
        ticket.require(self.client, "take()")
        handed = ticket.read(text, self.url)
        if "timeout" in options:
            message = "take() has no timeout=: the lock of a ticket is taken at once or not at all. Leave it out"
            raise ConfigurationError(message, name=handed.name, backend=self.url)
        settings = self.settings(handed.name, function, **options)
        backend = self.client.ready()
        if observers.active is None:
            return await ticket.Taking(self.acquisitions, backend, settings, handed).take()
        call = ObservedCall(self.client, settings)
        taking = ticket.Taking(self.acquisitions, backend, settings, handed)
        return await call.follow(taking.take(), self.releases.leave)

    def beat(self, record: LeaseRecord) -> None:
        """Note that the holder makes progress. Local."""
        record.check()
        self.renewer.beat(record)

    async def update(self, record: LeaseRecord, metadata: str | Mapping[str, object] | None) -> None:
        """Replace the application's metadata of a held lease."""
        grant, client = record.grant, self.client
        name, url = grant.name, self.url
        record.check()
        if not client.capabilities.metadata_update:
            message = (
                f"could not update the metadata of lock {name!r} at {url}: this backend stores it when the lock is "
                "acquired (capabilities.metadata_update). Give it to lock(metadata=...), or store it elsewhere"
            )
            raise Unsupported(message, name=name, backend=url)
        with validation.about(name, url):
            text = validation.metadata(metadata, self._about)
        gone = await client.asked(client.ready().update(grant, text), f"update the metadata of lock {name!r}", name)
        if gone is not None:
            self.leases.lose(record, gone.reason)
            record.check()
        else:
            record.metadata = text

    async def confirm(self, record: LeaseRecord) -> bool:
        """Ask the backend whether the lease still holds the lock; a "no" marks it as lost."""
        if not record.held:
            return False
        name, answer = record.grant.name, self.client.ready().confirm(record.grant)
        gone = await self.client.asked(answer, f"ask for the holders of lock {name!r}", name)
        if gone is None:
            return record.held
        self.leases.lose(record, gone.reason)
        return False

    async def downgrade(self, record: LeaseRecord) -> None:
        """Turn a write lease into a read lease; no waiting writer gets in between."""
        grant, client = record.grant, self.client
        record.check()
        problem = ""
        if record.mode != "exclusive":
            problem = "is no write lease: only those can be downgraded"
        elif record.count > 1:
            problem = "was entered again, and an outer block relies on it: downgrade it there"
        if problem:
            message = f"the lease of lock {grant.name!r} at {self.url} {problem}"
            raise LockError(message, name=grant.name, backend=self.url)
        held = await client.asked(client.ready().downgrade(grant), f"downgrade lock {grant.name!r}", grant.name)
        if not held:
            self.leases.lose(record, "gone")
        record.check()
        record.mode = "shared"

    # -- for the backend -------------------------------------------------------------------------------------------

    def lost(self, owner: str, reason: LossReason) -> None:
        self.leases.lost_at_backend(owner, reason)

    def confirm_soon(self) -> None:
        with self.client.mutex:
            self.renewer.renew_soon()

    # -- the client ------------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> list[Holder]:
        """Who holds the lock now."""
        with validation.about(name, self.url):
            checked = validation.lock_name(name)
        return await self._holders(checked)

    async def holders_in(self, space: str, name: str) -> list[Holder]:
        """Who holds what has a valid name in a space apart."""
        return await self._holders(apart(space, name))

    async def _holders(self, name: str) -> list[Holder]:
        answer = self.client.ready().holders(name)
        return list(await self.client.asked(answer, f"ask for the holders of lock {name!r}", name))

    def names(self, prefix: str, kind: Kind = "lock") -> Listing:
        """List what is held of a kind. Nothing is sent yet."""
        if self.client.closed:
            raise self.client.closed_error()
        if kind not in SPACE_OF:
            message = f"kind must be one of {', '.join(map(repr, SPACE_OF))}, not {validation.shown(kind)}"
            raise ConfigurationError(message, backend=self.url)
        with validation.about(None, self.url):
            return Listing(self.client, validation.name_prefix(prefix), kind)

    async def break_lock(self, name: str, *, force: bool) -> bool:
        """Free the lock, whoever holds it; with `force` also what may be data of an application."""
        with validation.about(name, self.url):
            name = validation.lock_name(name)
            force = validation.flag(force, "force")
        backend = self.client.ready()
        return await self._broken(backend.break_unproven(name) if force else backend.break_lock(name), name)

    async def _broken(self, work: Awaitable[bool], name: str) -> bool:
        broken = await self.client.asked(work, f"break lock {name!r}", split_space(name)[1])
        if broken:
            log.warning("lock %r at %s was broken by force", name, self.url)
        return broken

    async def permits(self, settings: LockSettings) -> list[Holder]:
        """Who holds permits of a semaphore, in the order of their slots."""
        assert settings.mode == "permit", "only semaphores have permits"
        if self.capabilities.permits == "native":
            return sorted(await self._holders(settings.name), key=lambda holder: holder.slot or 0)
        found: list[Holder] = []
        slot, slots = 0, settings.limit
        while slot < slots:
            for holder in await self._holders(slot_name(settings.name, slot)):
                found.append(replace(holder, mode="permit", slot=slot))
                slots = max(slots, limit_of(holder.metadata))  # another client may have a higher limit
            slot += 1
        return found

    async def break_permit(self, settings: LockSettings, slot: int) -> bool:
        """Free one permit of a semaphore, whoever holds it."""
        assert settings.mode == "permit", "only semaphores have permits"
        name = split_space(settings.name)[1]
        if type(slot) is not int or not 0 <= slot < LIMIT_MAX:
            message = f"slot must be a whole number from 0 to {LIMIT_MAX - 1}, not {validation.shown(slot)}"
            raise ConfigurationError(message, name=name, backend=self.url)
        backend = self.client.ready()
        if self.capabilities.permits == "native":
            return await self._broken(backend.break_permit(settings.name, slot), settings.name)
        return await self._broken(backend.break_lock(slot_name(settings.name, slot)), settings.name)

    async def cap(self, settings: LockSettings) -> int | None:
        """Ask for the cap of a semaphore; None if it has none."""
        name = split_space(settings.name)[1]
        self.caps.require(name)
        self.client.ready()
        return (await self.caps.read()).get(name)

    async def set_cap(self, settings: LockSettings, cap: int | None) -> None:
        """Set or remove the cap of a semaphore."""
        name = split_space(settings.name)[1]
        self.caps.require(name)
        given: object = cap
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= LIMIT_MAX):
            shown = validation.shown(cap)
            message = f"the cap of a semaphore must be a whole number from 0 to {LIMIT_MAX}, or None, not {shown}"
            raise ConfigurationError(message, name=name, backend=self.url)
        of_caps = replace(self.settings("semaphores"), name=CAPS_NAME)
        lease = await self.acquire(of_caps, of_caps.timeout)
        record: LeaseRecord = cast("Any", lease)._record  # noqa: SLF001 - made by make_lease
        try:
            await self.caps.write(record, name, cap)
        except BaseException as error:
            await self.releases.leave(record, error)
            raise
        await self.releases.leave(record, None)

    async def ping(self) -> None:
        """Ask the backend for any answer."""
        await self.client.asked(self.client.ready().ping(), "ping the backend", None)

    # -- the end ---------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """
        Release what is held, end the waits, close lockkit's connections. May be called again, also if it was cancelled.

        Takes at most `CLOSE_SECONDS` for everything together. A lease that it ends is lost for the body that runs under
        it.
        """
        if self._ended:
            return
        client, backend = self.client, self._backend
        client.check_loop()
        client.closed = True
        until = client.close_by = self.runtime.now() + CLOSE_SECONDS
        for request in list(self.acquisitions.waiting):
            request.wake.set()
        client.wake()
        await self.releases.end_all(until - CLOSE_SHARE)
        # Let the waiters leave the backend's queue before its connections are closed.
        await self.acquisitions.queues.close(until - self.runtime.now())
        await self.cleanups.flush(until)
        self._ended = True
        assert not self.leases.records, "a client that is closed holds nothing"
        _engines.discard(self)
        client.backend = None
        self.renewer.end()
        await self.leases.report.end(max(CLOSE_SHARE, until - self.runtime.now()))
        if backend is not None:
            await self._disconnect(backend, max(CLOSE_SHARE, until - self.runtime.now()))

    async def _disconnect(self, backend: LockBackend, seconds: Seconds) -> None:
        """Close the connections, to the end also if this call is cancelled: a further one would not go on."""
        try:
            await self.runtime.settle(backend.close(), seconds)
        except TimeoutError as error:
            log.warning("closing the connections to %s takes long and continues in the background: %s", self.url, error)

    async def _loop_ended(self) -> None:
        """
        Nothing but background work is left in the event loop: nothing else will release what is still held.

        In a loop that comes after this one the client begins anew, with connections of its own.
        """
        until = self.runtime.now() + EXIT_SECONDS
        await self.releases.end_all(until)
        backend, self.client.backend = self.client.backend, None
        if backend is not None:
            await self._disconnect(backend, until - self.runtime.now())

    def forked(self) -> None:
        """Own nothing, in the child of a fork (rule 8) or in the next event loop. The first use connects anew."""
        self.runtime.forked()
        self.client.forked()
        self.leases.forked()
        self.renewer.forked()
        self.cleanups.forked()
        self.releases.forked()
        self.acquisitions.forked()
        self.caps.forked()
        assert self._backend is None, "the connections are the parent's"
        assert not self.leases.records, "the leases are the parent's"

    def exit(self, until: Instant) -> Event | None:
        """Release what is held while the interpreter exits (rule 9), and admit nothing that nobody would release."""
        self.client.closed = True  # before the release: a daemon thread may wait for that very lock
        if not self.releases.outstanding:
            return None
        assert not self._ended, "a client that is closed holds nothing"
        work = partial(self.releases.end_all, until, notify=False)
        done = self.renewer.hand_over(work) if self.runtime.works_at_exit else None
        if done is None:
            self.runtime.at_exit(work)
        return done


_engines: weakref.WeakSet[Engine[Any]] = weakref.WeakSet()
_unpickled: weakref.WeakValueDictionary[Origin, Engine[Any]] = weakref.WeakValueDictionary()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.forked()


def _release_at_end_of_child() -> None:
    """
    Have `_at_exit` called also if this is a child of `multiprocessing` or billiard.

    Such a child ends with ``os._exit``, unless it was spawned: functions of `atexit` are not called, those of
    ``multiprocessing.util.Finalize``, which is billiard's too, are. A fork removes what the parent has registered
    there. The children of billiard's pool, and so of Celery, call neither; Celery sends them a signal before they end.
    """
    global _end_registered_in  # noqa: PLW0603 - once for each process
    pid = os.getpid()
    if (ends := getattr(sys.modules.get("celery.signals"), "worker_process_shutdown", None)) is not None:
        ends.connect(_at_exit_of_worker, weak=False, dispatch_uid="lockkit")
    if _end_registered_in == pid or not any(map(_is_child, ("multiprocessing.process", "billiard.process"))):
        return
    from multiprocessing.util import Finalize  # noqa: PLC0415 - `import lockkit` stays light

    _end_registered_in = pid
    Finalize(None, _at_exit, exitpriority=0)


def _is_child(processes: str) -> bool:
    module = sys.modules.get(processes)
    return module is not None and module.current_process()._parent_pid is not None  # noqa: SLF001 - billiard has no other


def _at_exit_of_worker(**_: object) -> None:
    _at_exit()


_end_registered_in = 0


def _at_exit() -> None:
    until = monotonic() + EXIT_SECONDS
    for done in [engine.exit(until) for engine in list(_engines)]:
        if done is not None:
            drive(done.wait(until - monotonic()))
    for engine in list(_engines):
        if engine.runtime.works_at_exit:
            drive(engine.leases.report.end(until - monotonic()))
        engine.leases.report.flush()


in_forked_child(_after_fork)
atexit.register(_at_exit)
