"""
Leases, loss and the life of a client: the policy of lockkit, written once for all backends and both faces.

The rules, and where each is kept:

====  =======================================================================  ===============================
1     The deadline counts from before the request was sent                     `Acquisition._ask`, `Hold.believe`
2     A fresh random owner for each acquisition                                `Acquisition._new_request`
3     A grant whose answer was lost is undone by owner, never handed out       `Acquisition._undo`
4     Only the head of a line per name contends at the backend                 `line.Lines`
5     Woken, not polling, where the backend can; look again at the ttl         `Acquisition._wait`
6     Loss is marked at the deadline even while a renewal hangs                `keeper.Keeper._watch`
7     The clock comes first: past the deadline means lost                      `Engine.is_lost`
8     After ``fork`` the child owns nothing                                    `Engine.forked`
9     Exit releases what is held, within a second for all clients together     `_at_exit`
10    Every call is back in time, also when the server hangs                   `Request.answer_by`, `Engine.close`
11    Nothing is started, logged or called back under the mutex                `background.Background`, `keeper.Notes`
12    What was left at a backend is undone until a ttl has done the same       `Engine.undo_later`
13    An outage is retried until the timeout, or ``unavailable_after``         `Acquisition._back_off`
====  =======================================================================  ===============================
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from lockkit import validation
from lockkit.backend import CALL_SECONDS, Gone, Grant, Holder, LockBackend, Renewed, Request, Unknown
from lockkit.engine.acquisition import UNDO_SECONDS, Acquisition, Outage
from lockkit.engine.cleanup import Undoer
from lockkit.engine.lease import BaseLease, Hold, LostCallback, drift
from lockkit.engine.local_queue import Lines
from lockkit.engine.renewal import Keeper, Notes, renewed
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockLost, LockTimeout
from lockkit.runtime import drive, in_forked_child, monotonic, wall_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from datetime import timedelta

    from lockkit.backend import Capabilities, LossReason, Renewal
    from lockkit.runtime import Event, Runtime

__all__ = ["Engine", "Spec"]

log = logging.getLogger("lockkit")

L = TypeVar("L", bound=BaseLease)

DEFAULT_TTL = 30.0
"""Seconds. Longer keeps a crashed holder's lock longer; shorter loses leases to shorter pauses and outages."""

DEFAULT_UNAVAILABLE_AFTER = 30.0
"""Seconds without one answer after which a wait without timeout gives up."""

RELEASE_SECONDS = CALL_SECONDS - 0.5
"""What a release may take, seconds: leaving a ``with`` block takes at most five, whatever hangs."""

CLOSE_SECONDS = 4.5
"""What closing a client may take for everything together, seconds, whatever hangs."""

EARLY_LOSSES_MAX = 100
"""How many losses of unknown owners are remembered. Those of leases that were released stay until others push them out;
fewer, and one that was granted in this instant could be forgotten."""

CLOSE_SHARE = 1.0
"""What of `CLOSE_SECONDS` is kept for the waiters to leave and for what is still to be undone, seconds."""

EXIT_SECONDS = 0.9
"""What releasing at interpreter exit may take, seconds, for all clients together. Longer delays the exit when a server
does not answer."""


@dataclass(slots=True)
class Spec:
    """What `Client.lock` was asked for, validated. Not changed afterwards (``frozen`` would cost a µs per lock)."""

    name: str
    ttl: float
    timeout: float | None
    renew: bool
    reentrant: bool
    max_hold: float | None
    metadata: str
    on_lost: LostCallback | None
    raise_on_lost: bool


class Engine(Generic[L]):
    """Everything that one client does, for the face that made it."""

    def __init__(
        self,
        open_backend: Callable[[Engine[L]], tuple[LockBackend, dict[str, Any]]],
        runtime: Runtime,
        make_lease: Callable[[Hold], L],
    ) -> None:
        """
        Open the backend, without I/O.

        Args:
            open_backend: Makes the backend (called again in a forked child) and gives the engine's own options.
            runtime: Of the face.
            make_lease: The face's lease class.

        Raises:
            ConfigurationError: From `open_backend`.
        """
        self.runtime = runtime
        self._make_lease = make_lease
        self._open_backend = open_backend
        self._mutex = runtime.mutex()
        self.lines = Lines(runtime)
        self.waiting: set[Request] = set()
        self._reentrant: dict[tuple[int, str], Hold] = {}
        self.closed = False
        self.close_by = inf
        self._ended = False
        self._early_losses: dict[str, LossReason] = {}
        self._unreleased: list[Grant] = []
        self.outage = Outage()
        self.keeper = Keeper(runtime, self._mutex, lambda: self._backend, self.lose, self._loop_ended)
        self.undoer = Undoer(runtime, self._mutex)
        self._backend: LockBackend | None
        self._backend, options = open_backend(self)
        self.url = self._backend.url
        self.default_ttl = validation.ttl(options.get("ttl") or DEFAULT_TTL, self.capabilities.min_ttl)
        self.unavailable_after: float = options.get("unavailable_after") or DEFAULT_UNAVAILABLE_AFTER
        self._describe_client()
        _engines.add(self)

    @property
    def capabilities(self) -> Capabilities:
        """What the backend promises; a backend may know more precisely once it has seen its server."""
        backend = self._backend
        if backend is not None:
            self._capabilities = backend.capabilities
        return self._capabilities

    def _describe_client(self) -> None:
        self._about = {"host": os.uname().nodename, "pid": os.getpid(), "started": round(wall_clock(), 3)}
        self._metadata = validation.metadata(None, self._about)

    # -- the call's edge -------------------------------------------------------------------------------------------

    def spec(
        self,
        name: str,
        *,
        ttl: float | timedelta | None,
        timeout: float | timedelta | None,
        renew: bool,
        reentrant: bool,
        max_hold: float | timedelta | None,
        metadata: str | Mapping[str, object] | None,
        on_lost: LostCallback | None,
        raise_on_lost: bool,
    ) -> Spec:
        """
        Validate the arguments of `Client.lock`. Nothing is sent.

        Raises:
            ConfigurationError: One of them is wrong.
            LockError: The client is closed.
        """
        if self.closed:
            raise self.closed_error()
        try:
            return Spec(
                validation.lock_name(name),
                self.default_ttl if ttl is None else validation.ttl(ttl, self.capabilities.min_ttl),
                None if timeout is None else validation.timeout(timeout),
                renew,
                reentrant,
                None if max_hold is None else validation.seconds(max_hold, "max_hold", exclusive=True),
                self._metadata if metadata is None else validation.metadata(metadata, self._about),
                None if on_lost is None else validation.on_lost(on_lost),
                raise_on_lost,
            )
        except ConfigurationError as error:
            given: object = name  # whatever it is: that may be what is wrong
            error.name = given if isinstance(given, str) else None
            error.backend = self.url
            raise

    def _ready(self) -> LockBackend:
        """Give the backend to a call that may do I/O; opens a new one after a fork."""
        backend = self._backend
        if backend is None:
            if self.closed:
                raise self.closed_error()
            backend, _ = self._open_backend(self)
            self._backend = backend
            self._describe_client()
        try:
            self.runtime.bind()
        except RuntimeError as error:
            message = f"this asyncio client of {self.url} cannot be used here: {error}. Make one client per event loop."
            raise LockError(message, backend=self.url) from error
        return backend

    def closed_error(self) -> LockError:
        """What every call gets after ``close()``."""
        return LockError(f"the client of {self.url} is closed; connect again", backend=self.url)

    # -- acquire ---------------------------------------------------------------------------------------------------

    async def acquire(self, spec: Spec, timeout: float | None) -> L:
        """
        Wait for the lock.

        Args:
            spec: What to acquire.
            timeout: Seconds to wait, None without limit, 0 to try once.

        Raises:
            LockTimeout: Somebody held it for the whole wait.
            BackendUnavailable: No answer to the end of the wait, or for ``unavailable_after`` without a timeout.
            LockLost: A reentrant lease of this thread or task was lost.
            LockError: The client is closed.
        """
        backend = self._ready()
        if spec.reentrant and (again := self._reenter(spec.name)) is not None:
            return again
        return await Acquisition(self, backend, spec, timeout).run()

    def admit(self, spec: Spec, grant: Grant, started: float) -> L | None:
        """Turn a grant into a lease, watched and renewed from now on; None if its deadline has passed already."""
        hold = Hold(self, grant, spec.metadata, raise_on_lost=spec.raise_on_lost)
        if spec.renew:
            hold.renew_at = 0.0
            if spec.max_hold is not None:
                hold.renew_until = started + spec.max_hold
        hold.believe(started if grant.anchor is None else grant.anchor, grant.ttl)
        if hold.valid_until <= self.runtime.now():
            return None
        if spec.on_lost is not None:
            hold.callbacks = [spec.on_lost]
        hold.acquired_by = self.runtime.current()
        # The lease first: should an interrupt strike from here on, dropping the lease ends the renewal.
        lease = self._make_lease(hold)
        with self._mutex:
            if self.closed:
                raise self.closed_error()
            if spec.reentrant:
                hold.reentry_key = (id(hold.acquired_by), spec.name)
                self._reentrant[hold.reentry_key] = hold
            self.keeper.add(hold)
        try:
            self.keeper.start()
        except RuntimeError as error:
            message = (
                f"lock {spec.name!r} at {self.url} was granted and given back: nothing could watch over it: {error}"
            )
            hold.finished = True
            self._drop(hold)
            raise LockError(message, name=spec.name, backend=self.url) from error
        if self._early_losses and (reason := self._early_losses.pop(grant.owner, None)) is not None:
            self.lose(hold, reason)
        return lease

    def _reenter(self, name: str) -> L | None:
        hold = self._reentrant.get((id(self.runtime.current()), name))
        if hold is None:
            return None
        self.check(hold)
        lease = None if hold.lease_ref is None else hold.lease_ref()
        if lease is None:
            return None
        with self._mutex:
            if hold.finished:
                return None  # handed over, and released there in this instant
            hold.count += 1
        return cast("L", lease)  # made by make_lease

    def unavailable(self, error: LockError, what: str, name: str | None) -> LockError:
        """Say what was tried, on which lock and at which backend; the driver's exception stays the cause."""
        message = f"could not {what} at {self.url}: {error}"
        wrapped = type(error)(message, name=name, backend=self.url)
        wrapped.__cause__ = error.__cause__ or error
        return wrapped

    # -- the lease: local ------------------------------------------------------------------------------------------

    def is_held(self, hold: Hold) -> bool:
        """Tell whether the holder may believe that it holds."""
        return not hold.finished and not self.is_lost(hold)

    def is_lost(self, hold: Hold) -> bool:
        """
        Tell whether it was lost; a passed deadline is loss whatever the backend would say (rule 7).

        After SIGSTOP or a VM migration the watch may not have run yet: so the clock is asked here.
        """
        if hold.lost_reason is None and not hold.finished and self.runtime.now() >= hold.valid_until:
            self.lose(hold, "expired")
        return hold.lost_reason is not None

    def remaining(self, hold: Hold) -> float:
        """Seconds to the deadline, 0.0 when not held."""
        return max(0.0, hold.valid_until - self.runtime.now()) if self.is_held(hold) else 0.0

    def check(self, hold: Hold) -> None:
        """
        Raise unless held.

        Raises:
            LockLost: It is not.
        """
        if self.is_lost(hold):
            raise self._lost_error(hold)
        if hold.finished:
            message = f"the lease of lock {hold.grant.name!r} at {self.url} was released; acquire the lock again"
            raise LockLost(message, name=hold.grant.name, backend=self.url)

    def _lost_error(self, hold: Hold) -> LockLost:
        why = _LOSS_TEXTS[hold.lost_reason or "expired"]
        message = (
            f"lost lock {hold.grant.name!r} (token {hold.grant.token}) at {self.url}: {why}. "
            "Somebody else may hold it now: stop, and let storage reject this token."
        )
        return LockLost(message, name=hold.grant.name, backend=self.url)

    def lose(self, hold: Hold, reason: LossReason) -> None:
        """Mark a lease as lost, once, and tell its holder."""
        with self._mutex:
            if hold.finished or hold.lost_reason is not None:
                return
            if reason == "expired" and self.runtime.now() < hold.valid_until:
                return  # renewed between the watch's look and now
            hold.lost_reason = reason
            # It stays the reentrant lease of its thread until released: entering again must say "lost", not acquire.
            self.keeper.forget(hold)
            callbacks, hold.callbacks = hold.callbacks or (), None
            event = hold.lost_event
            renewing = hold.renew_at != inf or hold.in_flight or hold.unanswered_ttl != inf
        if event is not None:
            event.set()
        for callback in callbacks:
            self._tell(hold, callback, reason)
        if reason == "expired" and renewing:
            # A renewal whose answer was lost may have kept the lock at the server: free it for the others.
            self._free_later(hold.grant)
        log.warning(
            "lost lock %r (token %d) at %s: %s", hold.grant.name, hold.grant.token, self.url, _LOSS_TEXTS[reason]
        )

    def lost(self, owner: str, reason: LossReason) -> None:
        """See `lockkit.backend.Host.lost`."""
        # First this: the lease may have been granted, and is being admitted in another thread.
        self._early_losses[owner] = reason
        hold = self.keeper.holds.get(owner)
        if hold is not None:
            self._early_losses.pop(owner, None)
            self.runtime.deliver(lambda: self.lose(hold, reason))
        elif len(self._early_losses) > EARLY_LOSSES_MAX:
            self._early_losses.pop(next(iter(self._early_losses)), None)

    def confirm_soon(self) -> None:
        """See `lockkit.backend.Host.confirm_soon`."""
        with self._mutex:
            for hold in self.keeper.all():
                if hold.renew_at != inf:
                    hold.renew_at = 0.0
                    self.keeper.reschedule(hold)

    def on_lost(self, hold: Hold, callback: LostCallback) -> None:
        """Register a callback, or call it at once if the lease is lost already."""
        validation.on_lost(callback)
        with self._mutex:
            if hold.lost_reason is None:
                hold.callbacks = [*(hold.callbacks or ()), callback]
                return
        self._tell(hold, callback, hold.lost_reason)

    def _tell(self, hold: Hold, callback: LostCallback, reason: str) -> None:
        lease = None if hold.lease_ref is None else hold.lease_ref()

        async def call() -> None:
            try:
                await self.runtime.io(callback(lease, reason))
            except Exception:
                log.exception("on_lost callback of lock %r raised", hold.grant.name)

        # In the background: a slow callback must delay neither the loss of other leases nor the caller of check().
        try:
            self.runtime.spawn("lockkit-on-lost", call)
        except RuntimeError:  # no more threads, or the event loop has ended: the watch must survive that
            log.exception("could not call the on_lost callback of lock %r", hold.grant.name)

    def _drop(self, hold: Hold) -> None:
        """Forget a hold that has ended. Dict operations only: also called from ``__del__``."""
        self.keeper.forget(hold)
        if hold.reentry_key is not None:
            self._reentrant.pop(hold.reentry_key, None)

    def dropped(self, hold: Hold) -> bool:
        """Stop renewing a lease that nobody points to any more; False if that is no surprise (lost, or closed)."""
        # No mutex: the garbage collector may run this in a thread that holds it.
        surprise = hold.lost_reason is None and not self.closed
        hold.finished = True
        self._drop(hold)
        return surprise

    # -- the lease: asking the backend -----------------------------------------------------------------------------

    async def try_acquire(self, spec: Spec, timeout: float | None) -> L | None:
        """As `acquire`, with None instead of `LockTimeout`."""
        try:
            return await self.acquire(spec, timeout)
        except LockTimeout:
            return None

    async def release(self, hold: Hold) -> None:
        """
        Give the lock back.

        Raises:
            LockLost: It was lost before.
            BackendUnavailable: No answer; renewal has stopped, call again or leave it to the ttl.
        """
        while True:
            if self.is_lost(hold):
                self._drop(hold)
                raise self._lost_error(hold)
            again = hold.unconfirmed
            with self._mutex:
                if not hold.releasing:
                    if hold.finished and not hold.unconfirmed:
                        return
                    if hold.count > 1:
                        hold.count -= 1
                        return
                    self._finish(hold)
                    break
                # Two threads release one lease: were both to ask, the second would be told that it is not ours.
                if hold.release_done is None:
                    hold.release_done = self.runtime.event()
                done = hold.release_done
            await done.wait(None)
        try:
            ours = await self._release_at_backend(hold)
        finally:
            with self._mutex:
                hold.releasing = False
                waited, hold.release_done = hold.release_done, None
            if waited is not None:
                waited.set()
        # Not ours any more, though the deadline has not passed: broken, flushed or taken. (Past the deadline the lease
        # may have run out while the release was on its way: the work had ended by then.)
        if not ours and not again and self.runtime.now() < hold.valid_until:
            hold.finished = False
            self.lose(hold, "gone")
            raise self._lost_error(hold)

    def _finish(self, hold: Hold) -> None:
        """End a lease on the user's word, before the backend has heard of it. Under the mutex."""
        hold.finished = hold.unconfirmed = hold.releasing = True
        self._drop(hold)
        if hold.settled is not None:
            hold.settled.set()  # its queued renewal will not be sent: an extend() must not wait for it
        if hold.lost_event is not None:
            hold.lost_event.set()

    async def _release_at_backend(self, hold: Hold) -> bool:
        try:
            answer_by = min(self.runtime.now() + RELEASE_SECONDS, self.close_by)
            ours = await self._ready().release(hold.grant, answer_by)
        except BackendUnavailable as error:
            raise self.unavailable(error, f"release lock {hold.grant.name!r}", hold.grant.name) from error
        except BaseException as error:
            # Cancelled or interrupted halfway: it may or may not have been sent. Comparing the owner makes it safe to
            # send again.
            if not isinstance(error, Exception):
                await self._free(hold.grant)
            raise
        hold.unconfirmed = False
        return ours

    def undo_later(self, seconds: float, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """
        Undo something at the backend in the background, until that has worked.

        Args:
            seconds: When a ttl has done the same. Where none does, the backend remembers what it left behind.
            function: Undoes it.
        """
        with self._mutex:
            if self._ended:
                return
            self.undoer.later(seconds, function)
        self.undoer.start()

    def _free_later(self, grant: Grant) -> None:
        backend = self._backend
        if backend is not None:
            self.undo_later(grant.ttl, lambda: self._release(backend, grant))

    async def _release(self, backend: LockBackend, grant: Grant) -> bool:
        return await backend.release(grant, min(self.runtime.now() + RELEASE_SECONDS, self.close_by))

    async def _free(self, grant: Grant) -> None:
        """Release by owner, best effort: now, else in the background until the ttl has passed."""
        backend = self._backend
        if backend is None:
            return
        try:
            await self.runtime.settle(self._release(backend, grant), UNDO_SECONDS)
        except BaseException as error:
            self._free_later(grant)
            if not isinstance(error, Exception):
                raise

    async def leave(self, hold: Hold, error: BaseException | None) -> None:
        """
        Release at the end of a ``with`` block.

        Args:
            hold: The lease of the block.
            error: What the body raised. It goes on unchanged, with a note: a release error never hides it.

        Raises:
            LockLost: The body ended well but was not protected to its end (unless ``raise_on_lost=False``).
        """
        try:
            await self.release(hold)
        except LockLost as lost:
            if error is not None:
                error.add_note(f"lockkit: {lost}")
            elif hold.raise_on_lost:
                raise
            # With raise_on_lost=False the loss has been logged when it was noticed.
        except LockError as failed:
            if error is not None:
                error.add_note(f"lockkit: {failed}")
            log.warning("%s; lockkit retries, and the backend frees the lock within %g s", failed, hold.grant.ttl)
            self._free_later(hold.grant)

    async def extend(self, hold: Hold, ttl: float | timedelta | None) -> None:
        """
        Set the time left to `ttl` (None: the lease's ttl). Never adds.

        Raises:
            LockLost: The lease is not held.
            BackendUnavailable: No answer; the deadline stays, or is the earlier one that was asked for.
            ConfigurationError: The ttl is wrong.
        """
        wanted = hold.grant.ttl if ttl is None else validation.ttl(ttl, self.capabilities.min_ttl)
        backend = self._ready()
        await self._claim_renewal(hold)
        started = self.runtime.now()
        with self._mutex:
            # Before it is sent: from its arrival on the server counts a shorter ttl, however late we hear of it.
            hold.valid_until = min(hold.valid_until, started + wanted - drift(wanted))
            self.keeper.reschedule(hold)
        outcome: Renewal | None = None
        notes: Notes = []
        try:
            (outcome,) = await backend.renew([replace(hold.grant, ttl=wanted)])
        except BackendUnavailable as error:
            raise self.unavailable(error, f"extend lock {hold.grant.name!r}", hold.grant.name) from error
        finally:
            with self._mutex:
                hold.in_flight = False
                if not isinstance(outcome, Renewed | Gone):
                    hold.doubt(wanted, started)
                # The clock comes first: a "yes" that arrives past the deadline brings nothing back.
                if hold.lost_reason is None and not hold.finished and self.runtime.now() < hold.valid_until:
                    if isinstance(outcome, Renewed):
                        hold.grant.ttl = wanted
                        renewed(hold, outcome, started, notes)
                    elif hold.renew_at != inf:
                        hold.renew_at = 0.0  # the deadline may now be earlier than the next renewal was planned
                    self.keeper.reschedule(hold)
                if hold.settled is not None:
                    hold.settled.set()
            for level, text, arguments in notes:
                log.log(level, text, *arguments)
        if isinstance(outcome, Unknown):
            failure = BackendUnavailable(str(outcome.error))
            raise self.unavailable(failure, f"extend lock {hold.grant.name!r}", hold.grant.name) from outcome.error
        if isinstance(outcome, Gone):
            self.lose(hold, outcome.reason)
        self.check(hold)

    async def _claim_renewal(self, hold: Hold) -> None:
        """
        Wait until no renewal of this lease is under way, and mark ours as being so.

        Without it: A (the renewer) sends ttl=30, B (extend) sends ttl=60; the server runs B, then A;
        B's caller believes in 60 s, the server keeps 30.
        """
        while True:
            self.check(hold)
            with self._mutex:
                if not hold.in_flight:
                    hold.in_flight = True
                    return
                if hold.settled is None:
                    hold.settled = self.runtime.event()
                hold.settled.clear()
                settled = hold.settled
            await settled.wait(self.remaining(hold))

    async def confirm(self, hold: Hold) -> bool:
        """
        Ask the backend whether the lease still holds the lock; a "no" marks it as lost.

        Raises:
            BackendUnavailable: It cannot be asked.
        """
        if not self.is_held(hold):
            return False
        backend, name = self._ready(), hold.grant.name
        try:
            gone = await backend.confirm(hold.grant)
        except BackendUnavailable as error:
            raise self.unavailable(error, f"ask for the holders of lock {name!r}", name) from error
        if gone is None:
            return self.is_held(hold)
        self.lose(hold, gone.reason)
        return False

    async def wait_lost(self, hold: Hold, timeout: float | timedelta | None) -> bool:
        """Wait until the lease is lost (True) or released, or the time is over (False)."""
        seconds = validation.timeout(timeout)
        if self.is_lost(hold):
            return True
        with self._mutex:
            if hold.lost_event is None:
                hold.lost_event = self.runtime.event()
            event = hold.lost_event
            if hold.finished or hold.lost_reason is not None:
                event.set()
        await event.wait(seconds)
        return self.is_lost(hold)

    # -- the client ------------------------------------------------------------------------------------------------

    async def holders(self, name: str) -> list[Holder]:
        """Who holds the lock now."""
        backend = self._ready()
        name = validation.lock_name(name)
        try:
            return list(await backend.holders(name))
        except BackendUnavailable as error:
            raise self.unavailable(error, f"ask for the holders of lock {name!r}", name) from error

    async def break_lock(self, name: str) -> bool:
        """Free the lock by force."""
        backend = self._ready()
        name = validation.lock_name(name)
        try:
            broken = await backend.break_lock(name)
        except BackendUnavailable as error:
            raise self.unavailable(error, f"break lock {name!r}", name) from error
        if broken:
            log.warning("lock %r at %s was broken by force", name, self.url)
        return broken

    async def ping(self) -> None:
        """Ask the backend for any answer."""
        backend = self._ready()
        try:
            await backend.ping()
        except BackendUnavailable as error:
            raise self.unavailable(error, "ping the backend", None) from error

    async def close(self) -> None:
        """
        Release what is held, end the waits, close what is ours. May be called twice, also after it was cut short.

        Takes at most `CLOSE_SECONDS` for everything together. A lease that it ends is lost for the body that runs under
        it.
        """
        if self._ended:
            return
        backend = self._backend
        if backend is not None:
            self._ready()
        self.closed = True
        until = self.close_by = self.runtime.now() + CLOSE_SECONDS
        for request in [*self.waiting]:
            request.wake.set()
        await self._end_all(until - CLOSE_SHARE)
        # Let the waiters leave the backend's queue before its connections are closed.
        await self.lines.close(until - self.runtime.now())
        await self.undoer.flush(until)
        self._ended = True
        self.keeper.stop()
        _engines.discard(self)
        if backend is not None:
            await backend.close()
        self._backend = None

    async def _end_all(self, answer_by: float, *, tell: bool = True) -> None:
        """
        End and free every lease: the client, its event loop or the interpreter ends.

        One under which a ``with`` block runs is lost for that block, which must not end as if it had been protected.

        Args:
            answer_by: When to be back, client monotonic time.
            tell: Call the holders' callbacks.
        """
        ended, callbacks = self._take_all()
        for hold in ended:
            if hold.lost_event is not None:
                hold.lost_event.set()
        if tell:
            for hold, callback in callbacks:
                self._tell(hold, callback, "session")
        if lost := sum(hold.body for hold in ended):
            log.warning("ending %d leases at %s while `with` blocks run under them", lost, self.url)
        # Kept until they have been sent: who is cancelled here is called again.
        self._unreleased += [hold.grant for hold in ended]
        backend = self._backend
        if backend is None or not self._unreleased:
            return
        try:
            await backend.release_all(self._unreleased, answer_by)
        except LockError as error:
            log.warning("could not release all of %d locks at %s: %s", len(self._unreleased), self.url, error)
        self._unreleased = []

    def _take_all(self) -> tuple[list[Hold], list[tuple[Hold, LostCallback]]]:
        """Mark every lease as ended; gives them, and the callbacks of those that are lost."""
        callbacks: list[tuple[Hold, LostCallback]] = []
        with self._mutex:
            ended = [hold for hold in self.keeper.all() if not hold.finished and hold.lost_reason is None]
            for hold in ended:
                if hold.body:
                    hold.lost_reason = "session"
                    callbacks += [(hold, callback) for callback in hold.callbacks or ()]
                    hold.callbacks = None
                    self.keeper.forget(hold)
                else:
                    hold.finished = True
                    self._drop(hold)
                if hold.settled is not None:
                    hold.settled.set()
        return ended, callbacks

    async def _loop_ended(self) -> None:
        """Nothing but background work is left in the event loop: nobody will release what is still held."""
        await self._end_all(self.runtime.now() + EXIT_SECONDS)

    def forked(self) -> None:
        """Own nothing in the child of a fork (rule 8). Its first use opens new connections."""
        self.runtime.forked()
        self._mutex = self.runtime.mutex()  # another thread of the parent may have held the old one
        for hold in self.keeper.all():
            hold.lost_reason = "session"
        self.keeper.forked(self._mutex)
        self.undoer.forked(self._mutex)
        self.lines.forked()
        self.waiting = set()
        self._early_losses = {}
        self._unreleased = []
        self._reentrant = {}
        self._backend = None

    def exit(self, until: float) -> Event | None:
        """
        Release what is held while the interpreter exits (rule 9).

        Returns:
            The event that tells that it is done; None if it is done already, or nothing was held.
        """
        if not self.keeper.holds:
            return None
        work = partial(self._end_all, until, tell=False)
        done = self.keeper.hand_over(work) if self.runtime.works_at_exit else None
        if done is None:
            self.runtime.at_exit(work)
        return done


_LOSS_TEXTS: dict[str, str] = {
    "expired": "its deadline passed without a renewal",
    "taken": "the backend says that another owner holds it",
    "gone": "the backend says that it is not held any more",
    "session": "the client, session or process that it belonged to has ended",
    "broken": "it was freed by force (break_lock)",
}

_engines: weakref.WeakSet[Engine[Any]] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.forked()


def _at_exit() -> None:
    until = monotonic() + EXIT_SECONDS
    for done in [engine.exit(until) for engine in list(_engines)]:
        if done is not None:
            drive(done.wait(until - monotonic()))


in_forked_child(_after_fork)
atexit.register(_at_exit)
