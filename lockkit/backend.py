"""
The interface of a backend, and the data that it exchanges with the engine.

A backend holds **no policy**. The engine (`lockkit.engine.engine`) does all that is the same for every backend: queues
inside the process, timeouts, retries, renewal schedules, deadlines, loss, reentrancy, metadata, validation, and the
error messages of a wait.

One acquisition, as the backend sees it::

    engine                            backend
    ------                            -------
    try_acquire(request)          ->  Grant                       the request has the lock: done
                                  ->  Busy                        another owner holds it; may have queued the request
    wait(request, busy, until)    ->  None                        woken, or `until` passed: try again
    try_acquire(request)          ->  ...
    abandon(request)              ->  None                        given up: remove all traces of the request
    renew([grant, ...])           ->  [Renewed | Gone | Unknown]
    release(grant, answer_by)     ->  True | False                False: the owner no longer held it
    release_all(grants, answer_by)  ->  None                      the client closes
    write_note(grant, text, keep) ->  True | False                False: the owner does not hold it
    read_note(name, answer_by)    ->  Note | None

All methods are ``async def``, also in a backend that only blocks: the sync API runs them without an event loop (see
`lockkit.runtime`). So under ``runtime.kind == "blocking"`` they must wait only through the runtime of their host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar, Literal, Protocol

from lockkit.errors import BackendUnavailable, LockError, Unsupported
from lockkit.runtime import Event, Runtime, wall_clock
from lockkit.units import Instant, Seconds
from lockkit.url import Url
from lockkit.validation import decode_json

__all__ = [
    "CALL_SECONDS",
    "NOTE_BYTES_MAX",
    "SINCE_EXACT_SECONDS",
    "SPACES",
    "Busy",
    "Capabilities",
    "Gone",
    "Grant",
    "Holder",
    "Host",
    "LockBackend",
    "LossReason",
    "Mode",
    "NamesPage",
    "Note",
    "Option",
    "Renewal",
    "Renewed",
    "Request",
    "Unknown",
    "apart",
    "decode_metadata",
    "granted_at",
    "in_space",
    "seconds_left",
    "since_stored",
    "split_space",
    "unproven",
    "unsent",
    "with_since",
]

CALL_SECONDS = 5.0
"""Longest time that one call of a backend may take, except `LockBackend.wait`, seconds. Longer hides a server that
hangs; shorter gives up on one that is only slow."""

Mode = Literal["exclusive", "shared", "permit"]
"""
Beside whom a lease is held.

- ``exclusive``: beside nobody: an ordinary lock, the write side of a read/write lock.
- ``shared``: beside other shared ones: the read side.
- ``permit``: beside other permits, at most so many as the limit: of a semaphore.
"""

NOTE_BYTES_MAX = 65 * 1024
"""Longest note, UTF-8 bytes: 64 KiB for what the application stores, and 1 KiB for what a primitive adds to it. Longer
ones would not fit into one request of every server."""

FOREIGN_TEXT_CHARS = 4096
"""Longest text that is kept of metadata that lockkit did not write: as long as lockkit's own may be."""

SINCE_KEY = "lockkit:since"
"""Key of the grant's time in stored metadata, see `with_since`."""

SINCE_EXACT_SECONDS = 1.0
"""How long a request may wait and still count as granted when it came, where a place in a queue becomes the lock by
itself. Longer is less exact; shorter costs one more write for each lock that changes hands."""

TOKEN_TIME_MIN_US = 10**15
"""Tokens from here on may be times in µs, since 2001; smaller ones were counted."""

CLOCKS_APART_SECONDS = 3600.0
"""How far a server's clock may be ahead of this machine's. A token further ahead is no time of a grant."""

SPACES = ("once", "sem", "limit")
"""Names of the spaces apart from locks, see `apart`: records of once, semaphores, and what operators limit them to."""

LossReason = Literal["expired", "paused", "stalled", "taken", "gone", "session", "broken"]
"""
Why a lease was lost.

- ``expired``: its deadline passed on the client's clock.
- ``paused``: so it did, while the process itself did not run: stopped, suspended, or its event loop blocked.
- ``stalled``: so it did, because the holder made no progress (``stall=``), and so was not renewed.
- ``taken``: the backend says that another owner holds the lock.
- ``gone``: the backend says that the lock is free (deleted, flushed, table dropped).
- ``session``: the lease's session, connection or process has ended.
- ``broken``: ``break_lock`` was called, and the backend knows it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """
    What a backend guarantees, as data for the comparison page, the conformance suite and ``lockkit backends``.

    Attributes:
        crash_release: What frees the lock when its holder dies: ``ttl`` (it runs out), ``session`` (the server ends the
            session after the ttl), ``connection`` (the connection ends) or ``process`` (noticed at once).
        min_ttl: Shortest ttl, seconds. A shorter one raises `ConfigurationError`.
        ttl_granularity: A ttl is rounded up to a multiple of this, seconds (0: not rounded).
        fair: Waiters of different clients are served first come, first served.
        wakeup: ``push``: a release wakes the next waiter. ``poll``: waiters poll with a jittered back-off.
        token_source: Where fencing tokens come from and what they survive, one sentence.
        survives_node_loss: A held lock stays exclusive when one server (or disk) of the backend is lost for good.
        survives_data_loss: Tokens keep increasing after the backend has lost its data.
        shared_mode: The backend has shared (reader) locks.
        fair_shared: Readers and writers are served first come, first served: a waiting writer stops new readers.
        downgrade: A write lease can become a read lease in one step.
        permits: Semaphores are ``native``, made of one lock for each ``slot``, or not offered (``none``).
        clock_assumption: Which clocks must be right for mutual exclusion, one sentence.
        waiters_visible: `Holder.waiters` has a value.
        scope: Within what locks exclude one another: ``process``, ``machine`` or ``network``.
        caveat: Known limits: what this backend does not guarantee.
        metadata_update: The metadata of a held lock can be replaced (`LockBackend.update`).
        listing: `LockBackend.names` lists the locks that are held.
        notes: A holder can write a note on its lock (`LockBackend.write_note`), which outlives the lease.
        transfer: A held lock can be given to another owner in one step (`LockBackend.take_over`).
        usable_after_fork: A child that was forked after its parent had used such a backend can use one, too. Otherwise
            its calls raise `ConfigurationError` at once.
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
    metadata_update: bool = False
    listing: bool = False
    fair_shared: bool = False
    downgrade: bool = False
    permits: Literal["native", "slots", "none"] = "none"
    notes: bool = False
    transfer: bool = False
    usable_after_fork: bool = True


class Request:
    """
    All attempts of one acquisition, under one owner. The engine makes it and keeps it until it is granted or abandoned.

    Attributes:
        name: Lock name, already validated: 1 to 255 UTF-8 bytes, any characters but NUL. Every byte counts, so encode
            what means something to the server. With notes or permits also names of spaces apart, see `apart`.
        owner: Random id of this acquisition; release and renewal compare it at the server.
        ttl: Requested lease time, seconds: from ``capabilities.min_ttl`` to 1e9 (31 years).
        metadata: A JSON object (ASCII) to store with the lock, for `holders`.
        queue: The caller waits if the lock is busy, so the backend should queue the request.
        mode: Beside whom the lock is to be held. Only what the backend's capabilities offer is sent to it.
        limit: Of a permit: how many may be held at the same time, itself included.
        readers: It is the write side of a read/write lock, so readers may ask for the lock, too.
        answer_by: Client monotonic time by which the current call (`LockBackend.try_acquire`, `LockBackend.wait`,
            `LockBackend.abandon`) must have returned or raised `BackendUnavailable`. The engine sets it before each;
            with ``inf`` only `CALL_SECONDS` applies.
        uncertain: A `try_acquire` of this request got no answer, or was cancelled or interrupted: the lock may have
            been granted to it.
        state: The backend's own data: a position in the queue, a connection, a subscription. None at first.
        wake: Set to end a `LockBackend.wait` early, from any thread. Made on first use.
    """

    __slots__ = (
        "_runtime",
        "_wake",
        "answer_by",
        "limit",
        "metadata",
        "mode",
        "name",
        "owner",
        "queue",
        "readers",
        "state",
        "ttl",
        "uncertain",
    )

    def __init__(  # noqa: PLR0917 - faster than by their names, and each acquisition makes one
        self,
        name: str,
        owner: str,
        ttl: Seconds,
        metadata: str,
        queue: bool,  # noqa: FBT001 - as above
        runtime: Runtime,
        mode: Mode = "exclusive",
        limit: int = 1,
        readers: bool = False,  # noqa: FBT001, FBT002 - as above
    ) -> None:
        """Keep the values. The event `wake` is made when it is first needed."""
        self.name = name
        self.owner = owner
        self.ttl = ttl
        self.metadata = metadata
        self.queue = queue
        self.mode: Mode = mode
        self.limit = limit
        self.readers = readers
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
        ttl: Seconds for which the server keeps the lock, from `anchor` on (it may have rounded the request's ttl).
        anchor: Client monotonic time from which the ttl counts; None means the time just before the `try_acquire` that
            returned this. A session whose last heartbeat was earlier has an earlier one. Never later than the real one.
        state: The backend's own data (a connection, a node path).
        slot: Number of the permit, from 0 on; None for a lock.
    """

    name: str
    owner: str
    token: int
    ttl: Seconds
    anchor: float | None = None
    state: Any = None
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """
    Another owner holds the lock.

    Attributes:
        retry_after: Seconds after which to try again even without a wake-up (the rest of the holder's ttl); None if the
            backend does not know.
        poll: There will be no wake-up (a foreign client holds the lock): the engine backs off and tries again.
        owner: The holder's owner id for messages, if known.
        metadata: The holder's metadata for messages, as stored, if it is at hand.
    """

    retry_after: float | None = None
    poll: bool = False
    owner: str | None = None
    metadata: str | None = None


@dataclass(frozen=True, slots=True)
class Renewed:
    """
    The owner still holds the lock, and its ttl has started again.

    Attributes:
        anchor: As `Grant.anchor`; None means the time just before `renew` was called.
        ttl: Seconds for which the server now keeps it; None means the grant's ttl.
    """

    anchor: float | None = None
    ttl: Seconds | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """The server answered that the owner no longer holds the lock. Final."""

    reason: LossReason = "gone"


@dataclass(frozen=True, slots=True)
class Unknown:
    """No answer about this lock. The engine retries until the deadline; `error` is for the log."""

    error: BaseException


Renewal = Renewed | Gone | Unknown
"""The three outcomes of a renewal."""


@dataclass(frozen=True, slots=True)
class Holder:
    """
    The current holder of a lock, as the backend sees it.

    Attributes:
        owner: Owner id of the lease (for a foreign client: what it has stored).
        token: Fencing token, or None for a foreign client's lock.
        remaining: Seconds until the backend frees the lock unless it is renewed; None if the backend does not know.
        metadata: ``host``, ``pid``, ``started`` (Unix time) of the holder, and what the application added.
        waiters: How many requests wait for the lock, or None if the backend does not know.
        mode: Beside whom it is held.
        slot: Number of the permit, from 0 on; None for a lock.
        since: When this lease was granted, Unix time, by the server's clock where it has one; renewal, re-entry and
            downgrade leave it. None for a foreign client's lock, or if the backend does not know.
    """

    owner: str
    token: int | None
    remaining: float | None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    waiters: int | None = None
    mode: Mode = "exclusive"
    slot: int | None = None
    since: float | None = None


@dataclass(frozen=True, slots=True)
class NamesPage:
    """
    Some names of locks: what one call of `LockBackend.names` returns.

    Attributes:
        names: May be empty although more follow.
        next: The backend's own data: where the next page begins. None: this is the last one.
    """

    names: Sequence[str]
    next: Any = None


@dataclass(frozen=True, slots=True)
class Note:
    """
    A text on a lock, written by one of its holders.

    Attributes:
        text: As it was written.
        remaining: Seconds until the backend forgets it; None if finding out would take another round trip.
    """

    text: str
    remaining: float | None


class _ApartName(str):
    """The name of something apart from locks; messages show it as its users know it."""

    __slots__ = ()

    @property
    def given(self) -> str:
        """The name that the user gave."""
        return split_space(self)[1]

    def __repr__(self) -> str:
        """Show the name, and the space that it is in."""
        space, _ = split_space(self)
        return f"{self.given!r} ({'semaphore' if space == 'sem' else space})"


class SlotName(_ApartName):
    """The name of the lock of one slot of a semaphore: ``NAME#SLOT``."""

    __slots__ = ()

    @property
    def given(self) -> str:
        """The semaphore's name."""
        return super().given.rpartition("#")[0]


def apart(space: str, name: str) -> str:
    """
    Name something that lives apart from the locks: the lock of the same name is another one.

    The engine treats it as any lock name, and a backend stores it where no lock of an application can be: under its
    prefix followed by ``+`` and the space. No lock name contains NUL, so one with NUL is unmistakable.

    Args:
        space: One of `SPACES`.
        name: A valid lock name.
    """
    return _ApartName(f"\0{space}\0{name}")


def split_space(name: str) -> tuple[str, str]:
    """Split a name into its space (empty for a lock's) and the name that the user gave: the reverse of `apart`."""
    if not name.startswith("\0"):
        return "", name
    _, space, plain = name.split("\0")
    return space, plain


def in_space(name: str, prefix: str) -> bool:
    """Tell whether `LockBackend.names` lists a name for this prefix: the same space, and the same beginning."""
    return name.startswith(prefix) and name.startswith("\0") == prefix.startswith("\0")


def decode_metadata(text: str | bytes | None) -> Mapping[str, Any]:
    """
    Decode a stored `Request.metadata`. Anything but a JSON object comes from a foreign client: ``{"text": …}``.

    Never raises: what is too long, too deep or no JSON is such a text too, cut off after `FOREIGN_TEXT_CHARS`.

    Args:
        text: What the backend stored, or None.

    Returns:
        The mapping; empty for None or an empty string.
    """
    if not text:
        return {}
    try:
        value = decode_json(text)
    except ValueError:
        text = text[:FOREIGN_TEXT_CHARS]
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
        value = raw.decode("utf-8", "replace")
    return value if isinstance(value, dict) else {"text": value}


def granted_at(token: int | None) -> float | None:
    """
    Read the time of a grant from a token that is ``max(last + 1, server time in µs)``, Unix time.

    None for a foreign client's token, and for one that lies in the future: it follows a larger last one.
    """
    if token is None or not TOKEN_TIME_MIN_US <= token <= (wall_clock() + CLOCKS_APART_SECONDS) * 1e6:
        return None
    return token / 1e6


def with_since(metadata: str, unix_seconds: float) -> str:
    """
    Add the time of a grant to the `Request.metadata` that is stored, where neither token nor server knows it.

    Args:
        metadata: A JSON object.
        unix_seconds: When it was granted.
    """
    comma = "," if metadata[1:2] != "}" else ""
    return f'{{"{SINCE_KEY}":{unix_seconds:.3f}{comma}{metadata[1:]}'


def since_stored(metadata: Mapping[str, Any]) -> tuple[Mapping[str, Any], float | None]:
    """Split stored metadata into the application's and the time that `with_since` added."""
    since = metadata.get(SINCE_KEY)
    if type(since) is not float:
        return metadata, None
    return {key: value for key, value in metadata.items() if key != SINCE_KEY}, since


def unproven(url: str, name: str, why: str) -> LockError:
    """Make the error for a `LockBackend.break_lock` that might delete data of an application."""
    message = (
        f"{name!r} at {url} was not broken: {why}, so it may be data of an application. If it is a lock, break it with "
        "force=True"
    )
    return LockError(message, name=name, backend=url)


def unsent(message: str) -> BackendUnavailable:
    """Make the error of a request that certainly never left this machine, see `BackendUnavailable.sent`."""
    error = BackendUnavailable(message)
    error.sent = False
    return error


def seconds_left(answer_by: Instant, now: Instant) -> float:
    """
    Return for how many seconds a call may still wait: until `answer_by`, at most `CALL_SECONDS`, at least 0.

    Args:
        answer_by: ``request.answer_by``, or the argument of that name; ``inf`` where the caller has no deadline.
        now: The same clock (client monotonic time).
    """
    return max(0.0, min(answer_by - now, CALL_SECONDS))


@dataclass(frozen=True, slots=True)
class Option:
    """
    One option of a backend: a query parameter of its URL, or a keyword of ``connect``.

    Attributes:
        parse: Converts a query parameter (a str), or the keyword's value. Raises `ValueError` or `TypeError` with a
            message that says what is accepted.
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
        """Clock, sleep, events, I/O and random numbers of the API in use."""
        ...

    def lost(self, owner: str, reason: LossReason) -> None:
        """Report that a held lock is lost (a session expired). From any thread; ignored for an unknown owner."""
        ...

    def confirm_soon(self) -> None:
        """Request a renewal of all held locks now: the server changed its role or connection. From any thread."""
        ...


class LockBackend(ABC):
    """
    One lock service.

    Subclass it, implement the abstract methods, and register the class under a URL scheme in the entry-point group
    ``lockkit.backends``.

    Errors: raise `BackendUnavailable` (from the driver's exception) when there was no usable answer,
    `ConfigurationError` for what a retry cannot fix (wrong credentials, missing rights), `Unsupported` for what the
    service cannot do. No other exception may leave a method.
    Every call must return within `CALL_SECONDS`: set the driver's timeouts accordingly. A call with a time limit
    (``request.answer_by``, ``answer_by``; client monotonic clock) must return or raise `BackendUnavailable` by then,
    even if the server hangs, because its caller has a deadline.

    Concurrency: under the blocking runtime several threads call methods at once, under asyncio several tasks of one
    loop. For each name at most one request is in `try_acquire` or `wait`, beside any number of shared ones, and of
    permits without ``request.queue``.
    A method may be cancelled or interrupted (Ctrl-C) at any ``await``. After ``fork`` the child opens a backend of its
    own: it neither uses nor closes this object.
    """

    capabilities: Capabilities
    """What this backend guarantees, set on the class. An instance may refine it once it knows its server."""

    options: ClassVar[Mapping[str, Option]] = {}
    """Its own options, besides ``ttl``, ``timeout`` and ``unavailable_after``, which the engine reads."""

    poll_seconds: ClassVar[Seconds] = 0.25
    """
    Longest pause of a waiter between two polls, where `capabilities.wakeup` or `Busy.poll` says that it polls, seconds.

    Longer hands over later; shorter asks more often, which costs money where requests are paid for.
    """

    @classmethod
    def driver_options(cls) -> Mapping[str, Option]:
        """Return the options that it passes on to its driver. Called only for an option that is not in `options`."""
        return {}

    @classmethod
    @abstractmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> LockBackend:
        """
        Make a backend for a URL. No I/O: it connects at the first call that needs the server.

        Args:
            url: The parsed URL.
            options: All of `options` (parsed, or the default), and the driver options that were given.
            host: The engine's side.

        Raises:
            ConfigurationError: A part of the URL is missing or not allowed.
        """

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> LockBackend | None:
        """
        Make a backend on the application's own connection (``lockkit.from_client``); None for an unknown object.

        The connection belongs to the application: `close` leaves it open.
        """
        del client, options, host
        return None

    @classmethod
    def examiner(cls, url: Url) -> str | None:
        """
        Name the module that examines the servers behind a URL for ``lockkit doctor``; None if there is none.

        The module has ``async def examine(examination)``, which takes a `lockkit.doctor.examination.Examination`,
        reports what endangers locks there, and changes nothing.
        """
        del url
        return None

    @property
    @abstractmethod
    def url(self) -> str:
        """URL of the backend for messages, without a password."""

    @abstractmethod
    async def try_acquire(self, request: Request) -> Grant | Busy:
        """
        Make one attempt, which the server decides atomically.

        Grant only if the lock is free; never wait for a holder. With ``request.queue`` you may enter the server's queue
        and keep the position in ``request.state``; it must last until the next `try_acquire` or `abandon`.
        If this raises, the engine calls `abandon` and never uses this request (its owner) again.
        """

    async def wait(self, request: Request, busy: Busy, until: Instant) -> None:
        """
        Return when the engine should try again: woken, or at `until` (client monotonic time). Too early is allowed.

        Do not miss a wake-up between `try_acquire` and this call: either subscribe and return at once, so that the
        engine tries again, or enter the queue in `try_acquire`.
        This default sleeps until ``request.wake`` is set, for a backend whose listener sets it. The engine sets it,
        too, when the client is closed. Not called after `Busy.poll`, or if `capabilities.wakeup` is ``poll``.
        """
        del busy
        runtime = request._runtime  # noqa: SLF001 - same module
        if await request.wake.wait(max(0.0, until - runtime.now())):
            request.wake.clear()

    @abstractmethod
    async def abandon(self, request: Request) -> None:
        """
        Remove all traces of a request that was not granted.

        That is its position in the queue and, if ``request.uncertain``, a grant whose answer was lost. Compares the
        owner at the server. Idempotent. No I/O if there is nothing to undo. If this raises, the engine calls it again.

        What `try_acquire` has sent may still be on its way; a grant that comes of it later blocks others for its ttl.
        Unless the server keeps the order of the requests, let that write expect a version that was read before (kept in
        ``request.state``), and change the version here if it is still the same.
        """

    @abstractmethod
    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """
        Restart the ttl (``grant.ttl``) of each lock that its owner still holds; return one outcome for each, in order.

        Use as few round trips as the server allows. Never create a lock that is gone, and never add to the time left.
        An exception counts as `Unknown` for all.
        """

    @abstractmethod
    async def release(self, grant: Grant, answer_by: Instant = inf) -> bool:
        """
        Free the lock if the owner still holds it, and wake the next waiter; return False if it did not hold it.

        Must return or raise `BackendUnavailable` by `answer_by` (client monotonic time), and within `CALL_SECONDS`.

        Send the request once: a driver that silently repeats it after a lost answer would turn True into False. If this
        raises, the engine calls it again, which the comparison of the owner makes safe.
        """

    async def downgrade(self, grant: Grant) -> bool:
        """
        Turn the exclusive lease of a grant into a shared one, in one step at the server; return False if it was lost.

        No waiting writer gets in between. Called only if `Capabilities.downgrade`.

        Raises:
            Unsupported: The backend does not offer it.
        """
        message = (
            f"{self.url} cannot turn the write lease of {grant.name!r} into a read lease: release it, and acquire a "
            "read lease"
        )
        raise Unsupported(message, name=grant.name, backend=self.url)

    async def release_all(self, grants: Sequence[Grant], answer_by: Instant) -> None:
        """
        Free all these locks by `answer_by` (client monotonic time), because the client closes.

        This default calls `release` for each. If the server can free them together (a session, a pipeline, one
        statement), override it, so that thousands of leases do not take longer than one.

        Raises:
            LockError: Some may still be held until their ttl runs out.
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
        """Return the current holders of the lock; empty if it is free."""

    async def confirm(self, grant: Grant) -> Gone | None:
        """
        Ask whether the owner still holds the lock, without renewing it; return None if it certainly does.

        This default calls `holders`. Override it if that may list a holder that is not certain (servers that did not
        answer may have its votes), and raise `BackendUnavailable` then.
        """
        holders = await self.holders(grant.name)
        if any(holder.owner == grant.owner for holder in holders):
            return None
        return Gone("taken" if holders else "gone")

    async def update(self, grant: Grant, metadata: str) -> Gone | None:
        """
        Replace the metadata of a held lock, for `holders`; return None if it was replaced.

        Compares the owner at the server, in the same atomic step. Only called if ``capabilities.metadata_update``.

        Args:
            grant: The lock.
            metadata: As `Request.metadata`.

        Raises:
            Unsupported: The backend does not offer it.
        """
        del metadata
        message = f"{type(self).__name__} cannot replace the metadata of a held lock: give it to lock(metadata=...)"
        raise Unsupported(message, name=grant.name, backend=self.url)

    @abstractmethod
    async def break_lock(self, name: str) -> bool:
        """
        Free the lock, no matter who holds it; return False if it was free. The next token is higher.

        Delete only what is proven to be a lock, by lockkit or by a client that excludes with it: an application may
        store its own data where this name leads. Raise the error that `unproven` makes otherwise.
        """

    async def break_unproven(self, name: str) -> bool:
        """
        Break what `break_lock` refuses to break, because the caller says that it is a lock.

        This default calls `break_lock`, for a backend where no application can store anything at that place.
        """
        return await self.break_lock(name)

    async def break_permit(self, name: str, slot: int) -> bool:
        """
        Free one permit, no matter who holds it; return False if it was free.

        Called only if `Capabilities.permits` is ``native``.

        Args:
            name: The semaphore, as `apart` names it.
            slot: Number of the permit.

        Raises:
            Unsupported: The backend does not offer it.
        """
        del slot
        message = f"{self.url} cannot free one permit of a semaphore: wait for its ttl, or end its holder"
        raise Unsupported(message, name=split_space(name)[1], backend=self.url)

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """
        List locks that are held, or that clients wait for, a page at a time: about a thousand names in one call.

        A lock that is held while all pages are read must be in one of them, and no name twice. Never list a lock that
        is free: a lock that is released or expires meanwhile may be listed or not. Include locks of foreign clients
        under the same keys. Leave out what lockkit has not written and no lock can be called, and data of an
        application, as for `break_lock`.

        A prefix that `apart` has made lists that space instead, with names that `apart` would make (see `in_space`): of
        the semaphores, or of the runs of once that are under way. Any other prefix lists no name of a space. A backend
        that knows of no such prefix finds nothing there.

        Args:
            prefix: The beginning of the names, already validated; every character in it stands for itself. May be
                empty, also in a space.
            after: The page before this one; None begins.

        Raises:
            Unsupported: The backend cannot tell which locks are held. Then `capabilities.listing` is False.
        """
        del prefix, after
        message = f"{type(self).__name__} cannot list its locks (capabilities.listing): ask for each lock's holders"
        raise Unsupported(message, backend=self.url)

    async def detach(self, grant: Grant) -> Renewal:
        """
        Renew a lease, and keep the lock for its ttl also if this client or its process ends before.

        Called only if `capabilities.transfer`, or if `capabilities.crash_release` is ``ttl`` (for ``min_hold``). This
        default is for a backend whose locks end by their ttl alone.
        """
        (outcome,) = await self.renew([grant])
        return outcome

    async def take_over(self, request: Request, owner: str) -> Grant | None:
        """
        Give a lock that `owner` holds to the request, in one atomic step; None if that owner does not hold it.

        Called only if `capabilities.transfer`. The grant has a larger token and a full ttl; those who wait go on
        waiting. Idempotent: if the request's own owner holds the lock already, because an earlier answer was lost, it
        is granted again, as it was.
        """
        del owner
        message = f"this backend cannot give lock {request.name!r} to another owner (capabilities.transfer)"
        raise Unsupported(message, name=request.name, backend=self.url)

    async def read_note(self, name: str, answer_by: Instant = inf) -> Note | None:
        """
        Return the note on a lock, held or free; None if there is none, or its life is over by the server's clock.

        One round trip. Called only if `capabilities.notes`; so is `write_note`. `answer_by` is as for `release`.
        """
        del answer_by
        raise self._without_notes(name)

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: Instant = inf) -> bool:
        """
        Put a note on a lock, in place of the one before, if the owner still holds it; return False if it does not.

        The server compares the owner and writes in one atomic step. The note outlives the lease, and ends `keep` after
        this call, by the server's clock. Idempotent: the engine calls it again if it raises `BackendUnavailable`.

        Args:
            grant: The lease.
            text: At most `NOTE_BYTES_MAX` UTF-8 bytes, without NUL.
            keep: Life of the note, seconds.
            answer_by: As for `release`.
        """
        del text, keep, answer_by
        raise self._without_notes(grant.name)

    async def clock(self) -> float:
        """
        Return the wall clock by which the lives of notes end, Unix time.

        This default returns this machine's, for a backend whose server shows no clock to its clients.
        """
        return wall_clock()

    def _without_notes(self, name: str) -> Unsupported:
        message = f"{self.url} keeps no notes on locks"
        return Unsupported(message, name=split_space(name)[1], backend=self.url)

    @abstractmethod
    async def ping(self) -> None:
        """Check that the server answers."""

    async def erase(self) -> None:
        """
        Delete all that is stored under the prefix, in the tables or in the directory of this backend.

        That includes the spaces apart (`SPACES`), and the tokens: later ones may repeat. The conformance suite uses it
        for a prefix, table or directory of its own, after the cases.

        Raises:
            Unsupported: The backend does not offer it.
        """
        message = f"{type(self).__name__} cannot erase its locks: delete what it has stored at {self.url} manually"
        raise Unsupported(message, backend=self.url)

    @abstractmethod
    async def close(self) -> None:
        """Close lockkit's own connections. Idempotent. The engine has released or given up all locks before."""
