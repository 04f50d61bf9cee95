"""
Leader election, once for the sync and the async API.

An election is a lock: the candidate that holds it leads, and its token is the number of its term. What this adds:

- A leader stops *before* its deadline: `Tenure.must_stop` is True from ``deadline - grace`` on, so that ``grace``
  seconds are left to stop in. (Kubernetes' ``leaderelection`` has the same margin between its renew deadline and its
  lease duration.)
- `Candidate.run` campaigns again after a loss.
- `Candidate.leader` and `Observer` show the leader and its value, which is part of the lock's metadata.

Acting intervals, from the grant to ``deadline - grace``, never overlap. As with every lease, a leader that is paused
does not know that its term has ended: storage must compare the term number.

========================  ========================================================================================
deadline                  0.99 ttl - 2 ms after the last renewal that was answered was sent
``must_stop`` from        ``deadline - grace``; with the default grace, 0.656 ttl after that renewal
renewals                  every third of the ttl; after a failure so often that several come before ``must_stop``
========================  ========================================================================================

So with the default grace a renewal that fails for 0.2 ttl still succeeds in time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import inf
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from lockkit import validation
from lockkit.backend import Holder
from lockkit.engine.engine import Engine
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.renewal import Renewer
from lockkit.engine.settings import LockSettings
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, LockLost, StaleToken
from lockkit.runtime import Event, Runtime
from lockkit.units import Instant, Seconds

log = logging.getLogger("lockkit")

T = TypeVar("T", bound="HasTenure")

GRACE_SHARE: Final = 3
"""The default grace is the ttl divided by this. A longer grace leaves renewals less time to succeed after an outage; a
shorter one leaves the leader less time to stop."""

GRACE_SHARE_MIN: Final = 2
"""The grace is below the ttl divided by this: the first renewal is sent at a third, and needs time for its answer."""

SLEEP_SECONDS_MAX: Final = 1.0
"""Longest single wait of `Tenure.must_stop`, seconds. A wait does not count the time in which the machine was
suspended; longer notices later that the term ended meanwhile."""

LOOK_SECONDS: Final = 1.0
"""Longest time between two looks of an `Observer`, seconds. Longer shows a new leader later, shorter asks the backend
more often."""

LOOK_SHARE: Final = 10
"""An `Observer` looks at least this often per ttl of the election."""


@dataclass(frozen=True, slots=True)
class Leader:
    """
    The leader of an election, as the backend sees it.

    Attributes:
        owner: Owner id of its term (for a foreign client: what that has stored).
        term: Number of its term, which is the fencing token; None for a foreign client without one.
        value: What it gave to ``Client.election(value=…)``; for a foreign client, the text that it has stored.
        metadata: ``host``, ``pid``, ``started`` (Unix time) of the leader, and ``value``.
    """

    owner: str
    term: int | None
    value: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def _leader_of(holder: Holder) -> Leader:
    metadata = holder.metadata
    # Text without a process is what a foreign client has stored: its value.
    foreign_text = None if "pid" in metadata else metadata.get("text")
    return Leader(holder.owner, holder.token, metadata.get("value", foreign_text), metadata)


class HasTenure(Protocol):
    """What the core knows of the faces' ``Term``."""

    @property
    def _record(self) -> LeaseRecord: ...

    @property
    def _tenure(self) -> Tenure: ...


# -- one term --------------------------------------------------------------------------------------------------------


class Tenure:
    """
    What a term knows beyond its lease: when its leader must stop.

    Once the leader must stop, that is final, also if a renewal succeeds afterwards: of several threads that ask, one
    may have stopped already.
    """

    __slots__ = ("_record", "_renewer", "_runtime", "_signal", "_wake", "failed", "over")

    def __init__(self, record: LeaseRecord, renewer: Renewer) -> None:
        """Begin a term."""
        assert not record.end_events, "a term begins with its lease"
        self._record = record
        self._renewer = renewer
        self._runtime: Runtime = record.client.runtime
        self._signal: StopSignal | None = None
        self._wake = self._runtime.event()
        self.over = False
        """The leader must stop."""
        self.failed = False
        """… because the lease was lost, or could not be renewed in time."""
        record.part_of = "a term"
        record.end_events = self._runtime.event(), self._wake

    @property
    def stop_at(self) -> Instant:
        """When the leader must stop unless the lease is renewed by then, client monotonic clock."""
        return self._record.valid_until - self._record.renewal.grace

    def follow(self, signal: StopSignal) -> None:
        """Stop on this signal, too."""
        self._signal = signal
        signal.wakes(self._wake)

    def _look(self) -> bool:
        """Look at the clock, the lease and the signal; returns whether the leader must stop."""
        if self.over:
            return True
        record = self._record
        if record.released or (self._signal is not None and self._signal.is_set()):
            self.over = True
        elif not record.held or record.stalled or self._runtime.now() >= self.stop_at:
            self.over = self.failed = True
        return self.over

    def ended_error(self) -> LockLost:
        """Return the error for a body that was cancelled because its term ended."""
        assert self.failed, "else its leader resigned"
        record = self._record
        if record.lost:
            return record.lost_error()
        name, url, plan = record.grant.name, record.client.url, record.renewal
        term = f"term {record.grant.token} of election {name!r} at {url}"
        if record.stalled:
            message = f"{term} made no progress for {plan.stall:g} s (stall=): its leader was stopped, and has resigned"
        else:
            message = (
                f"{term} could not be renewed: its leader was stopped {plan.grace:.3g} s before the deadline, and has "
                "resigned"
            )
        return LockLost(message, name=name, backend=url)

    async def must_stop(self, seconds: float | timedelta | None) -> bool:
        """Wait until the leader must stop, at most so many seconds; tell whether it must."""
        name, url = self._record.grant.name, self._record.client.url
        wait = validation.timeout(seconds, name=name, backend=url)
        until = inf if wait is None else self._runtime.now() + wait
        while not self._look():
            now = self._runtime.now()
            if now >= until:
                return False
            stop_at = min(self.stop_at, self._record.renewal.stall_at)
            await self._wake.wait(min(until - now, max(0.0, stop_at - now), SLEEP_SECONDS_MAX))
        return True

    async def ask(self, seconds: float | timedelta | None) -> bool:
        """As `must_stop`, for the leader itself: that it asks is a beat, and so is that it goes on."""
        self._beat()
        stop = await self.must_stop(seconds)
        self._beat()
        return stop

    def _beat(self) -> None:
        if not self._look():
            self._renewer.beat(self._record)


class StopSignal:
    """Ends `Candidate.run`: its campaign or its term."""

    def __init__(self, engine: Engine[Any], name: str) -> None:
        """Not set. `done` is set by the faces when `Candidate.run` has returned."""
        self._engine = engine
        self._name = name
        self._set = False
        self._event: Event | None = None
        self.done = False

    def is_set(self) -> bool:
        """Tell whether to stop."""
        return self._set

    def wakes(self, event: Event) -> None:
        """Have `set` also set the event of the present term."""
        self._event = event
        if self._set:
            event.set()

    def set(self) -> None:
        """Stop. From any thread."""
        self._set = True
        if self._event is not None:
            self._event.set()
        self._engine.acquisitions.wake(self._name)


def with_value(record: LeaseRecord, metadata: str | Mapping[str, object] | None) -> str | Mapping[str, object] | None:
    """Return the metadata that replaces a leader's, with its value unless they have another one."""
    value = json.loads(record.metadata).get("value")
    if value is None or not (metadata is None or isinstance(metadata, str | Mapping)):
        return metadata
    return {"value": value, **({"text": metadata} if isinstance(metadata, str) else metadata or {})}


# -- the election ----------------------------------------------------------------------------------------------------


class Candidate(Generic[T]):
    """One client's part in an election."""

    def __init__(
        self,
        engine: Engine[Any],
        name: str,
        make_term: Callable[[Engine[Any], LeaseRecord], T],
        *,
        ttl: Seconds | timedelta | None,
        grace: Seconds | timedelta | None,
        stall: Seconds | timedelta | None,
        value: object,
        label: str | None,
    ) -> None:
        """Describe an election as ``Client.election`` does; `make_term` is the term class of the API in use."""
        metadata = None if value is None else {"value": value}
        settings = engine.settings(name, ttl=ttl, timeout=None, stall=stall, metadata=metadata, label=label)
        self._engine = engine
        self._grace = None if grace is None else self._checked_grace(grace, settings)
        grace_seconds = settings.ttl / GRACE_SHARE if self._grace is None else self._grace
        self._settings = replace(settings, grace=grace_seconds, make_lease=make_term)

    def _checked_grace(self, grace: Seconds | timedelta, settings: LockSettings) -> Seconds:
        name, url = settings.name, self._engine.url
        with validation.about(name, url):
            seconds = validation.seconds(grace, "grace")
        if seconds >= settings.ttl / GRACE_SHARE_MIN:
            message = (
                f"grace of election {name!r} must be below half of the ttl of {settings.ttl:g} s, not {seconds:g} s: "
                "renewals need the rest. Give a shorter grace or a longer ttl."
            )
            raise ConfigurationError(message, name=name, backend=url)
        return seconds

    @property
    def name(self) -> str:
        """Name of the election."""
        return self._settings.name

    @property
    def url(self) -> str:
        """Where the backend is, without its password."""
        return self._engine.url

    def check_run(self, work: object, stop: object) -> None:
        """Check the arguments of `run` as the application gave them."""
        awaits = self._engine.runtime.kind != "blocking"
        wait, is_set = getattr(stop, "wait", None), getattr(stop, "is_set", None)
        if not callable(work):
            problem = f"takes the function that does the leader's work, not {validation.shown(work)}"
        elif not awaits and validation.makes_coroutines(work):
            problem = "cannot run a coroutine function: use the election of a lockkit.aio client"
        elif stop is None or (callable(wait) and callable(is_set) and validation.makes_coroutines(wait) is awaits):
            return
        else:
            wanted = "an asyncio.Event" if awaits else "a threading.Event"
            given = f"{type(stop).__module__}.{type(stop).__qualname__}"
            problem = f"takes {wanted} as stop, not {given}, which it cannot wait for"
        raise ConfigurationError(f"election.run() {problem}", name=self.name, backend=self.url)

    def stop_signal(self) -> StopSignal:
        """Return a signal for one call of `run`."""
        return StopSignal(self._engine, self.name)

    def watch(self, signal: StopSignal, wait: Callable[[], bool]) -> None:
        """Set the signal when `wait`, which waits for a while, tells that the application's own event is set."""
        runtime = self._engine.runtime

        async def look() -> None:
            while not signal.done:
                if await runtime.io(wait()):
                    signal.set()
                    return

        runtime.spawn("lockkit-election-stop", look)

    # -- campaign ----------------------------------------------------------------------------------------------------

    async def campaign(self, timeout: Seconds | timedelta | None) -> T:
        """Wait to be elected."""
        seconds = validation.timeout(timeout, name=self.name, backend=self.url)
        return await self._campaign(self._settings, seconds)

    async def _campaign(self, settings: LockSettings, timeout: Seconds | None) -> T:
        runtime = self._engine.runtime
        until = inf if timeout is None else runtime.now() + timeout
        while True:
            term = cast("T", await self._engine.acquire(settings, timeout))
            try:
                await self._begin(term._record)  # noqa: SLF001 - the core of the term
            except (LockLost, BackendUnavailable) as error:
                # It ended between the grant and the first renewal, or that was not answered, and has been released. In
                # office for no instant: campaign again, which notices when an outage has lasted too long.
                if timeout is not None:
                    timeout = max(0.0, until - runtime.now())
                    if not timeout and isinstance(error, BackendUnavailable):
                        raise
            else:
                return term

    async def _begin(self, record: LeaseRecord) -> None:
        """See that a new term has enough of its ttl left; on an error give it back."""
        try:
            record.renewal.grace = self._grace_for(record.grant.ttl)
            # The answer took long, or the session was renewed some time ago: else the term would be over at once.
            if record.remaining() <= record.grant.ttl / 2:
                await self._engine.extend(record, None)
            record.check()
        except BaseException as error:
            await self._engine.releases.leave(record, error)
            raise

    def _grace_for(self, ttl: Seconds) -> Seconds:
        """Return the grace for the ttl that was granted, which may differ from the one that was asked for."""
        if self._grace is None:
            return ttl / GRACE_SHARE
        if self._grace >= ttl / GRACE_SHARE_MIN:
            message = (
                f"the backend granted election {self.name!r} at {self.url} a ttl of {ttl:g} s: the grace of "
                f"{self._grace:g} s must be below half of it. Give a shorter grace, or change the server's limits."
            )
            raise ConfigurationError(message, name=self.name, backend=self.url)
        return self._grace

    # -- run ---------------------------------------------------------------------------------------------------------

    async def run(self, work: Callable[[T], Any], signal: StopSignal) -> Any:  # noqa: ANN401 - what the work returns
        """Campaign and do the work, again after each loss; None if the signal came during a campaign."""
        settings = replace(self._settings, given_up=signal.is_set)
        while not signal.is_set():
            try:
                term = await self._campaign(settings, None)
            except LockError:
                if signal.is_set():
                    return None
                raise
            ended, result = await self._serve(term, work, signal)
            if ended:
                return result
            log.warning("term %d of election %r at %s ended; campaigning again",
                        term._record.grant.token, self.name, self.url)  # fmt: skip # noqa: SLF001 - as above
        return None

    async def _serve(self, term: T, work: Callable[[T], Any], signal: StopSignal) -> tuple[bool, Any]:
        """Do the work of one term and resign; returns whether the work ended by itself, and what it returned."""
        record, tenure = term._record, term._tenure  # noqa: SLF001 - as above
        releases, runtime = self._engine.releases, self._engine.runtime
        record.blocks += 1
        try:
            tenure.follow(signal)
            result = await runtime.io(work(term))
        except BaseException as error:
            await releases.leave(record, error)
            # By term.check(), or by storage that a later leader has written to.
            noticed = isinstance(error, StaleToken) or (isinstance(error, LockLost) and error.name == self.name)
            if noticed and record.lost and not signal.is_set():
                return False, None
            raise
        try:
            await releases.leave(record, None)
        except LockLost:
            return signal.is_set(), result
        return signal.is_set() or not tenure.failed, result

    # -- who leads -----------------------------------------------------------------------------------------------------

    async def leader(self) -> Leader | None:
        """Ask the backend who leads now."""
        holders = await self._engine.holders(self.name)
        return _leader_of(holders[0]) if holders else None

    def observe(self) -> Observer:
        """Follow the leaders from now on."""
        return Observer(self._engine, self)


class ObservingEnded(Exception):
    """The client was closed."""


class Observer:
    """
    Follows the leaders of an election by asking the backend from time to time.

    No backend tells those who do not wait in its queue of a change, so this polls: between two looks
    `LOOK_SECONDS` pass at most, or a tenth of the ttl if that is shorter. Terms and vacancies that are shorter may be
    missed. During an outage it retries, and reports nothing.
    """

    def __init__(self, engine: Engine[Any], candidate: Candidate[Any]) -> None:
        """Made by `Candidate.observe`."""
        self._engine = engine
        self._candidate = candidate
        self._pause_max = min(LOOK_SECONDS, candidate._settings.ttl / LOOK_SHARE)  # noqa: SLF001 - same module
        self._seen: tuple[tuple[str, int | None] | None] | None = None
        self._newest = 0
        self._stale = 0
        self._failing = False

    async def next(self) -> Leader | None:
        """Return the leader, None while there is none: the first at once, then each change, to `ObservingEnded`."""
        client = self._engine.client
        while not client.closed:
            try:
                leader = await self._candidate.leader()
            except BackendUnavailable as error:
                self._note_outage(error)
            except LockError:
                if not self._is_closed():
                    raise
            else:
                self._failing = False
                if self._is_news(leader):
                    return leader
            await client.sleep(self._pause_max * client.runtime.random.uniform(0.5, 1.0))
        raise ObservingEnded

    def _is_closed(self) -> bool:
        """Tell whether the client has been closed, perhaps by another thread."""
        return self._engine.client.closed

    def _note_outage(self, error: BackendUnavailable) -> None:
        if not self._failing and not self._is_closed():
            self._failing = True
            log.warning("observing election %r: %s; lockkit retries", self._candidate.name, error)

    def _is_news(self, leader: Leader | None) -> bool:
        """Tell whether this differs from what was reported last, and is not older."""
        if leader is not None and leader.term is not None:
            if leader.term < self._newest:
                self._note_stale(leader.term)
                return False
            self._newest = leader.term
        seen = (None if leader is None else (leader.owner, leader.term),)
        if seen == self._seen:
            return False
        self._seen = seen
        return True

    def _note_stale(self, term: int) -> None:
        """A server that lags behind answered; or it lost its data, and its terms start anew."""
        if term != self._stale:
            self._stale = term
            log.warning(
                "observing election %r at %s: ignored term %d, which is older than %d. If the server has lost its "
                "data, observe anew.", self._candidate.name, self._candidate.url, term, self._newest,
            )  # fmt: skip
