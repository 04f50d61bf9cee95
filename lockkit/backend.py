"""
What a backend is: nine questions that it answers about the world, and the data that goes with them.

A backend holds **no policy**.
Waiting lines inside the process, timeouts, retries, renewal schedules, deadlines, loss, reentrancy, metadata,
validation and error texts of a wait are the engine's (`lockkit.engine.engine`), written once for all backends.

The life of one acquisition, seen from the backend::

    engine                            backend
    ------                            -------
    try_acquire(request)          ->  Grant                       the lock is ours: done
                                  ->  Busy                        somebody holds it; a place in the queue may be taken
    wait(request, busy, until)    ->  None                        woken, or `until` passed: look again
    try_acquire(request)          ->  ...
    abandon(request)              ->  None                        given up: leave nothing of the request behind
    renew([grant, ...])           ->  [Renewed | Gone | Unknown]
    release(grant, answer_by)     ->  True | False                False: it was no longer ours
    release_all(grants, answer_by)  ->  None                      the client is being closed

All methods are ``async def``, also those of a backend that only blocks:
the blocking face drives them without an event loop (see `lockkit.runtime`), so under ``runtime.kind == "blocking"``
they must never suspend except through the runtime that the host hands over.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from lockkit.errors import LockError

if TYPE_CHECKING:
    from lockkit.runtime import Event, Runtime
    from lockkit.url import Url

__all__ = [
    "CALL_SECONDS",
    "Busy",
    "Capabilities",
    "Gone",
    "Grant",
    "Holder",
    "Host",
    "LockBackend",
    "LossReason",
    "Option",
    "Renewal",
    "Renewed",
    "Request",
    "Unknown",
    "decode_metadata",
    "seconds_left",
]

CALL_SECONDS = 5.0
"""Longest time that one call of a backend may take, `LockBackend.wait` excepted. Longer hides a server that hangs;
shorter gives up on one that is only slow."""

LossReason = Literal["expired", "taken", "gone", "session", "broken"]
"""
Why a lease was lost.

- ``expired``: its deadline passed on the client's clock.
- ``taken``: the backend says that another owner holds the lock.
- ``gone``: the backend says that nobody holds it (deleted, flushed, table dropped).
- ``session``: the session, connection or process that the lease belonged to has ended.
- ``broken``: somebody called ``break_lock``, and the backend can tell.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """
    What a backend promises, as data. The comparison page, the conformance suite and ``lockkit backends`` read it.

    Attributes:
        crash_release: What frees the lock when its holder dies: ``ttl`` (it runs out), ``session`` (the server ends the
            session after the ttl), ``connection`` (the end of the connection) or ``process`` (seen at once).
        min_ttl: Shortest ttl, seconds. Below it `ConfigurationError`.
        ttl_granularity: A ttl is rounded up to a multiple of this, seconds (0: not rounded).
        fair: Waiters of different clients are served first come, first served.
        wakeup: ``push``: a release wakes the next waiter. ``poll``: waiters look again after a jittered back-off.
        token_source: Where fencing tokens come from and what they survive, one sentence.
        survives_node_loss: A held lock stays exclusive when one server (or disk) of the backend is lost for good.
        survives_data_loss: Tokens go on increasing when the backend comes back without its data.
        shared_mode: Has shared (reader) locks.
        clock_assumption: Which clocks must run right for mutual exclusion, one sentence.
        waiters_visible: `Holder.waiters` is filled in.
        scope: Who is excluded: ``process``, ``machine`` or ``network``.
        caveat: The honest sentence: what this backend does not promise.
    """

    crash_release: Literal["ttl", "session", "connection", "process"]
    min_ttl: float
    ttl_granularity: float
    fair: bool
    wakeup: Literal["push", "poll"]
    token_source: str
    survives_node_loss: bool
    survives_data_loss: bool
    shared_mode: bool
    clock_assumption: str
    waiters_visible: bool
    scope: Literal["process", "machine", "network"]
    caveat: str


class Request:
    """
    One acquisition attempt series under one owner. Made by the engine, kept until granted or abandoned.

    Attributes:
        name: Lock name, already validated.
        owner: Random id of this acquisition; what release and renewal compare at the server.
        ttl: Lease time asked for, seconds.
        metadata: JSON object text (ASCII) to store beside the lock, for `holders`.
        queue: The caller will wait if the lock is busy, so a place in a queue is worth taking.
        answer_by: Client monotonic time by which the call under way (`LockBackend.try_acquire`, `LockBackend.wait`,
            `LockBackend.abandon`) must have returned or raised `BackendUnavailable`. The engine sets it before each;
            ``inf`` leaves `CALL_SECONDS`.
        uncertain: A `try_acquire` of this request ended without an answer: the lock may have been granted to it.
        state: The backend's own: its place in the queue, a connection, a subscription. None at first.
        wake: Set to end a `LockBackend.wait` early, from any thread. Made on first use.
    """

    __slots__ = ("_runtime", "_wake", "answer_by", "metadata", "name", "owner", "queue", "state", "ttl", "uncertain")

    def __init__(self, name: str, owner: str, ttl: float, metadata: str, *, queue: bool, runtime: Runtime) -> None:
        """Keep the values; nothing else is made until it is needed."""
        self.name = name
        self.owner = owner
        self.ttl = ttl
        self.metadata = metadata
        self.queue = queue
        self.answer_by = inf
        self.uncertain = False
        self.state: Any = None
        self._runtime = runtime
        self._wake: Event | None = None

    @property
    def wake(self) -> Event:
        """The event that ends a wait."""
        if self._wake is None:
            self._wake = self._runtime.event()
        return self._wake

    def __repr__(self) -> str:
        """Show what identifies the request."""
        return f"Request(name={self.name!r}, owner={self.owner!r}, ttl={self.ttl!r})"


@dataclass(slots=True)
class Grant:
    """
    A lock that was granted.

    Attributes:
        name: Lock name.
        owner: The request's owner.
        token: Fencing token: above 0, increasing per name in the order of grants.
        ttl: Seconds for which the server keeps the lock from `anchor` on (it may have rounded the request's).
        anchor: Client monotonic time from which ttl counts, if it is not the time just before the `try_acquire` that
            returned this (a session whose last heartbeat was earlier). Never later than the truth.
        state: The backend's own (a connection, a node path).
    """

    name: str
    owner: str
    token: int
    ttl: float
    anchor: float | None = None
    state: Any = None


@dataclass(frozen=True, slots=True)
class Busy:
    """
    Somebody else holds the lock.

    Attributes:
        retry_after: Seconds after which looking again is worthwhile even if nobody wakes us (the holder's ttl left);
            None if the backend does not know.
        poll: Nobody will wake us (a foreign client holds the lock): the engine backs off and asks again.
        owner: Who holds it, for messages, if known.
    """

    retry_after: float | None = None
    poll: bool = False
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class Renewed:
    """
    The lock is still ours and its ttl has started anew.

    Attributes:
        anchor: As `Grant.anchor`; None means the time just before `renew` was called.
        ttl: Seconds for which the server now keeps it, if not the grant's ttl.
    """

    anchor: float | None = None
    ttl: float | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """The server answered: the lock is not ours any more. Final."""

    reason: LossReason = "gone"


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer about this one lock. The engine asks again until the deadline; `error` is for the log."""

    error: BaseException


Renewal = Renewed | Gone | Unknown
"""The three outcomes of a renewal."""


@dataclass(frozen=True, slots=True)
class Holder:
    """
    Who holds a lock now, as the backend sees it.

    Attributes:
        owner: Owner id of the lease (of a foreign client: whatever stands there).
        token: Fencing token, or None for a foreign client's lock.
        remaining: Seconds until the backend frees it unless renewed; None if the backend does not know.
        metadata: ``host``, ``pid``, ``started`` (Unix time) of the holder, and what the application added.
        waiters: How many wait for the lock, or None where the backend does not know.
    """

    owner: str
    token: int | None
    remaining: float | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    waiters: int | None = None


def decode_metadata(text: str | bytes | None) -> Mapping[str, Any]:
    """
    Read the JSON text of a `Request.metadata` back. Whatever is no JSON object is a foreign client's: ``{"text": …}``.

    Args:
        text: What the backend stored, or None.

    Returns:
        The mapping; empty for None or an empty text.
    """
    if not text:
        return {}
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"text": value}


def seconds_left(answer_by: float, now: float) -> float:
    """
    How long a call may still wait for its server, seconds: until `answer_by`, at most `CALL_SECONDS`, never negative.

    Args:
        answer_by: ``request.answer_by``, or the argument of that name; ``inf`` where the caller has no deadline.
        now: The same clock (client monotonic time).
    """
    return max(0.0, min(answer_by - now, CALL_SECONDS))


@dataclass(frozen=True, slots=True)
class Option:
    """
    One option that a backend takes, as query parameter of its URL or keyword of ``connect``.

    Attributes:
        parse: Turns the text of a query parameter, or the keyword's value, into the value wanted. Raises `ValueError`
            or `TypeError` with a message that says what is accepted.
        help: One line for the documentation.
        default: The value when the option is not given.
    """

    parse: Callable[[Any], Any]
    help: str
    default: Any = None


class Host(Protocol):
    """What the engine offers to its backend."""

    @property
    def runtime(self) -> Runtime:
        """Clock, sleep, events, I/O and random numbers of the face in use."""
        ...

    def lost(self, owner: str, reason: LossReason) -> None:
        """Tell that a held lock has gone (a session expired). From any thread; without effect for an unknown owner."""
        ...

    def confirm_soon(self) -> None:
        """Ask for a renewal of everything held, now: the server changed its role or connection. From any thread."""
        ...


class LockBackend(ABC):
    """
    One lock service.

    Subclass it, implement the abstract methods, and register the class under a URL scheme in the entry-point group
    ``lockkit.backends``.

    Errors: raise `BackendUnavailable` (from the driver's exception) when there was no usable answer,
    `ConfigurationError` for what retrying cannot mend (wrong credentials, missing rights), `Unsupported` for what the
    service cannot do. No other exception may leave a method.
    Every call returns within `CALL_SECONDS`: give the driver timeouts that see to it. Those that are told a time
    (``request.answer_by``, ``answer_by``; client monotonic clock) have returned or raised `BackendUnavailable` by then,
    also when the server hangs: a caller waits for them who has a deadline.

    Concurrency: under the blocking runtime methods are called from several threads at once;
    under asyncio from several tasks of one loop. For one name at most one request is in `try_acquire` or `wait`.
    """

    capabilities: Capabilities
    """What this backend promises, set on the class. An instance may refine it once it has seen its server."""

    options: ClassVar[Mapping[str, Option]] = {}
    """Options of lockkit's own that it takes, beside ``ttl`` and ``unavailable_after``, which the engine takes."""

    @classmethod
    def driver_options(cls) -> Mapping[str, Option]:
        """Options that its driver takes and that are passed on. Asked only when an option is not in `options`."""
        return {}

    @classmethod
    @abstractmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> LockBackend:
        """
        Make a backend for a URL. No I/O: the first call that needs the server connects.

        Args:
            url: The parsed URL.
            options: Every option of `options` (parsed, or its default) and the driver's that were given.
            host: The engine's side.

        Raises:
            ConfigurationError: The URL lacks something or has too much.
        """

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> LockBackend | None:
        """
        Make a backend on a connection that the application has (``lockkit.from_client``); None if it is not of ours.

        The connection stays the application's: `close` leaves it open.
        """
        del client, options, host
        return None

    @property
    @abstractmethod
    def url(self) -> str:
        """Where this is, without a password: for messages."""

    @abstractmethod
    async def try_acquire(self, request: Request) -> Grant | Busy:
        """
        One attempt, decided atomically at the server.

        Grant only if nobody holds the lock; never wait for a holder. With ``request.queue`` a place in the server's
        queue may be taken and kept in ``request.state``; it must survive until the next `try_acquire` or `abandon`.
        When it raises, the engine calls `abandon` and never uses this request (its owner) again.
        """

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        """
        Return when it is worth trying again: woken, or at `until` (client monotonic time). Too early is allowed.

        A wake-up between `try_acquire` and this call must not be missed: subscribe first, then look again (return at
        once after subscribing), or have taken the place in `try_acquire`.
        This default sleeps until ``request.wake`` is set, which a backend with a listener of its own does. The engine
        sets it too, when the client is closed. Not called while `Busy.poll` or when `capabilities.wakeup` is ``poll``.
        """
        del busy
        runtime = request._runtime  # noqa: SLF001 - same module
        if await request.wake.wait(max(0.0, until - runtime.now())):
            request.wake.clear()

    @abstractmethod
    async def abandon(self, request: Request) -> None:
        """
        Leave nothing of a request behind that was not granted.

        Neither its place in the queue nor, when ``request.uncertain``, a grant whose answer was lost. Compares the
        owner at the server. Idempotent. Without I/O when there is nothing to undo. Called again later if it raises.
        """

    @abstractmethod
    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """
        Start the ttl (``grant.ttl``) of each anew, where the owner still holds it; one outcome for each, in order.

        In as few round trips as the server allows. Never creates a lock that is gone. Never adds to the time left.
        Raising counts as `Unknown` for all.
        """

    @abstractmethod
    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """
        Free the lock if the owner still holds it; False if it was no longer ours. Wakes the next waiter.

        Has returned or raised `BackendUnavailable` by `answer_by` (client monotonic time), and within `CALL_SECONDS`.

        Sent once: a driver that silently sends it again after a lost answer would turn True into False. The engine
        calls again after it raised; the comparison of the owner makes that safe.
        """

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """
        Free all these locks by `answer_by` (client monotonic time): the client is being closed.

        This default calls `release` for each. A server that can end them together (a session, a pipeline, one
        statement) should, so that thousands of leases do not take longer than one.

        Raises:
            LockError: Some may still be held; their ttl frees them.
        """
        failed: LockError | None = None
        for grant in grants:
            try:
                await self.release(grant, answer_by)
            except LockError as error:
                failed = error
        if failed is not None:
            raise failed

    @abstractmethod
    async def holders(self, name: str) -> Sequence[Holder]:
        """Who holds the lock now; empty if it is free."""

    async def confirm(self, grant: Grant) -> Gone | None:
        """
        Ask whether the owner still holds the lock, without renewing it: None if it surely does.

        This default asks for the holders. One that tells of a holder who perhaps is none (servers that did not answer
        may have its votes) raises `BackendUnavailable` here.
        """
        holders = await self.holders(grant.name)
        if any(holder.owner == grant.owner for holder in holders):
            return None
        return Gone("taken" if holders else "gone")

    @abstractmethod
    async def break_lock(self, name: str) -> bool:
        """Free the lock whoever holds it; False if it was free. The next token is higher than the broken one."""

    @abstractmethod
    async def ping(self) -> None:
        """Ask the server for any answer."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections that are ours. Idempotent. Everything held has been released or given up before."""
