"""
Observers: what lockkit tells logs, metrics and traces about the life of locks.

Each observer has a queue and a thread of its own, so it can delay neither a renewal nor an event loop nor another
observer. A call that acquires or releases waits until the observers have seen its event, at most `WAIT_SECONDS` and
never by blocking an event loop: so what an observer has counted is up to date when the call returns. An observer that
takes longer is behind; until it has caught up, nothing waits for it. Renewals never wait.
"""

from __future__ import annotations

import atexit
import contextvars
import inspect
import logging
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

from lockkit.backend import Mode
from lockkit.errors import ConfigurationError
from lockkit.runtime import BlockingRuntime, Event, Runtime, drive, in_forked_child
from lockkit.units import Seconds

__all__ = ["CALLS", "Call", "LockEvent", "Observer", "add_observer", "remove_observer"]

log = logging.getLogger("lockkit")

Call = Literal["waiting", "granted", "refused", "renewed", "jeopardy", "stalled", "lost", "released", "undone"]
"""The calls of an `Observer`."""

CALLS: tuple[Call, ...] = get_args(Call)

_ENDS: tuple[Call, ...] = ("lost", "released")

QUEUE_EVENTS = 10_000
"""How many events wait for one observer; then the oldest is dropped, unless it is the end of a lease whose grant the
observer has seen: what counts leases would be wrong for ever. More keeps more of a burst and takes more memory (about
1 KB each) when an observer hangs."""

WAIT_SECONDS = 0.05
"""How long a call waits until an observer has seen its event, seconds. Longer makes the first call after an observer
hangs slower; shorter returns before an observer on a busy machine has seen the event."""

LAST_SECONDS = 0.5
"""How long removing an observer, and the interpreter's exit, wait for what it has not seen yet, seconds. Longer delays
the exit when an observer hangs; shorter loses events of an observer on a busy machine."""


@dataclass(frozen=True, slots=True)
class LockEvent:
    """
    What an observer is called with. What does not apply to a call is None.

    Attributes:
        name: Name of the lock, semaphore or once key. There may be very many: for logs, never for labels of metrics.
        label: Template of the name, where the application gave one: the decorator's (``seat:{seat}``) or ``label=``.
            For labels of metrics.
        backend: URL of the backend, without its password.
        mode: ``exclusive``, ``shared`` or ``permit``.
        token: Fencing token of the lease.
        owner: Id of the acquisition, as in ``Holder.owner``. No two acquisitions have the same, so it ties the events
            of one lease together.
        waited: How long the caller has waited so far, seconds.
        held: How long the lease has been held, seconds, counted from before the granted request was sent.
        reason: Why, in one word. Of ``refused``: ``busy``, ``unavailable``, ``cancelled`` or ``error``. Of ``lost``:
            one of ``lockkit.backend.LossReason``. Of ``jeopardy``: ``unavailable``. Of ``released``: None; or
            ``unconfirmed`` (no answer), ``closed`` (with the client), ``handed_over`` (by a ticket) or ``dropped``
            (collected as garbage).
        at: When it happened, Unix time, seconds, by this machine's clock.
        waits: Of ``granted`` and ``refused``: whether the call had begun to wait, so that `waiting` came before.
        late: Of ``renewed``: how much later than planned the renewal was sent, seconds. A large value means that this
            process runs too rarely, or that the renewals before it took long.
    """

    name: str
    label: str | None
    backend: str
    mode: Mode
    token: int | None
    owner: str | None
    waited: Seconds | None
    held: Seconds | None
    reason: str | None
    at: float
    waits: bool = False
    late: Seconds | None = None

    @property
    def template(self) -> str:
        """`label`, or the name where the application gave none."""
        return self.name if self.label is None else self.label


class Observer(Protocol):
    """
    What `add_observer` takes. Every method is optional; a class that derives from this one has them all.

    They are called one after the other, in the order of the events, by a thread that belongs to this observer, with the
    context variables of the code that acquired or released. What they raise is logged once per observer.

    After ``waiting`` comes ``granted`` or ``refused``; after ``granted``, ``released`` or ``lost``.
    """

    def waiting(self, event: LockEvent, /) -> None:
        """The lock is busy, and the caller begins to wait."""
        del event

    def granted(self, event: LockEvent, /) -> None:
        """The caller has the lock."""
        del event

    def refused(self, event: LockEvent, /) -> None:
        """The caller does not get the lock."""
        del event

    def renewed(self, event: LockEvent, /) -> None:
        """The backend has renewed the lease."""
        del event

    def jeopardy(self, event: LockEvent, /) -> None:
        """A renewal got no answer, for the first time. lockkit retries until the deadline."""
        del event

    def stalled(self, event: LockEvent, /) -> None:
        """The holder has made no progress for ``stall=`` seconds: lockkit renews its lease with the next beat only."""
        del event

    def lost(self, event: LockEvent, /) -> None:
        """The lease has ended before its holder released it."""
        del event

    def released(self, event: LockEvent, /) -> None:
        """The holder has given the lock back."""
        del event

    def undone(self, event: LockEvent, /) -> None:
        """A request that may have been granted without the caller receiving the answer in time has been withdrawn."""
        del event


active: tuple[Channel, ...] | None = None
"""The observers; None without any, which is all that a lock looks at then."""

_mutex = threading.Lock()


def add_observer(observer: object) -> None:
    """
    Have an observer called for the locks of all clients of this process. See `Observer`.

    Adding it twice has no further effect.

    Raises:
        ConfigurationError: It is a class, or one of its calls is a coroutine function.
    """
    global active  # noqa: PLW0603 - a module attribute is the fastest to look at
    if isinstance(observer, type):
        message = f"add_observer() takes an object, not the class {observer.__name__}: write {observer.__name__}()"
        raise ConfigurationError(message)
    for call in CALLS:
        if inspect.iscoroutinefunction(getattr(observer, call, None)):
            message = (
                f"{type(observer).__name__}.{call} is a coroutine function, and observers are called by a thread of "
                "their own: make it a plain function"
            )
            raise ConfigurationError(message)
    with _mutex:
        channels = active or ()
        if any(channel.observer is observer for channel in channels):
            return
        channel = Channel(observer)
        channel.start()
        active = (*channels, channel)


def remove_observer(observer: object) -> None:
    """
    Stop calling an observer. Does nothing if it was not added.

    It has seen what happened before, unless that takes it more than half a second or this is called in a thread that
    runs an event loop, which does not wait.
    """
    global active  # noqa: PLW0603 - see add_observer
    with _mutex:
        removed = [channel for channel in active or () if channel.observer is observer]
        active = tuple(channel for channel in active or () if channel.observer is not observer) or None
    for channel in removed:
        if not (channel.is_current() or BlockingRuntime().blocks_event_loop()):
            channel.flush(LAST_SECONDS)
        channel.close()


def post(call: Call, event: LockEvent) -> None:
    """Hand an event to all observers without waiting for them. Also allowed in ``__del__``, but never under a mutex."""
    for channel in active or ():
        channel.put(call, event, None)


async def tell(runtime: Runtime, call: Call, event: LockEvent) -> None:
    """
    Hand an event to all observers, and wait until they have seen it unless that takes long.

    Args:
        runtime: To wait with.
        call: Of the observers.
        event: Its argument.
    """
    pending = []
    for channel in active or ():
        channel.start()
        unawaited = channel.behind or channel.is_current() or runtime.kind == "simulated"
        done = None if unawaited else runtime.event()
        channel.put(call, event, done)
        if done is not None:
            pending.append((channel, done))
    for channel, done in pending:
        if not await done.wait(WAIT_SECONDS):
            channel.behind = True


_Item: TypeAlias = "tuple[Call, LockEvent, contextvars.Context, Event | None] | Event"
"""An event with the context of its call, and what is set when the observer has seen it; or that alone."""


class Channel:
    """
    The queue of one observer, and the thread that calls it.

    Putting something in takes no lock (``deque``, ``set`` and ``Lock.release`` are atomic), because the garbage
    collector may do it in a thread that holds any lock.

    Attributes:
        observer: To be called.
        behind: It took longer than `WAIT_SECONDS`, and has not caught up yet.
        dropped: How many events were dropped since it was last up to date.
    """

    def __init__(self, observer: object) -> None:
        """Start nothing yet."""
        self.observer = observer
        self._failed = False
        self.forked()

    def forked(self) -> None:
        """Forget the thread and the events: they are the parent's."""
        self.behind = False
        self.dropped = 0
        self._events: deque[_Item] = deque()
        self._kept: deque[_Item] = deque()  # older than those, and not to be dropped
        self._granted: set[str | None] = set()  # owners whose grants were not dropped, and whose ends were not seen
        self._wake = threading.Lock()
        self._wake.acquire()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Make sure that the thread runs, as far as one can be started."""
        if self._runs():
            return
        with self._starting:
            if self._runs():
                return  # another thread has started it
            thread = threading.Thread(target=self._run, name="lockkit-observer", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads: the next event tries again
                log.debug("could not start the thread of observer %r: %s", self.observer, error)
            else:
                self._thread = thread

    def _runs(self) -> bool:
        return self._thread is not None

    def is_current(self) -> bool:
        """Tell whether the observer itself is running here: it uses locks too."""
        return threading.current_thread() is self._thread

    def put(self, call: Call, event: LockEvent, done: Event | None) -> None:
        """Add an event; `done` is set when the observer has seen it."""
        if len(self._events) >= QUEUE_EVENTS:
            self._drop_oldest()
        if call == "granted":
            self._granted.add(event.owner)
        self._events.append((call, event, contextvars.copy_context(), done))
        self._notify()

    def _drop_oldest(self) -> None:
        try:
            item = self._events.popleft()
        except IndexError:
            return  # the thread has caught up
        if isinstance(item, tuple):
            call, event, _, _ = item
            if not (call in _ENDS and event.owner in self._granted):
                self.dropped += 1
                if call == "granted":
                    self._granted.discard(event.owner)
                return
        self._kept.append(item)

    def close(self) -> None:
        """End the thread after what is in the queue."""
        self._closed = True
        self._notify()

    def flush(self, seconds: Seconds) -> None:
        """Wait until the observer has seen everything, at most so many seconds."""
        if self._events:
            self.start()
        if not self._runs():
            return  # nothing has happened since a fork, or no thread can be started
        done = BlockingRuntime().event()
        self._events.append(done)
        self._notify()
        drive(done.wait(seconds))

    def _notify(self) -> None:
        with suppress(RuntimeError):  # it is awake
            self._wake.release()

    def _run(self) -> None:
        self._thread = threading.current_thread()
        while not self._closed:
            self._wake.acquire()
            self._call_all()

    def _call_all(self) -> None:
        while True:
            try:
                item = self._kept.popleft() if self._kept else self._events.popleft()
            except IndexError:
                break
            if not isinstance(item, tuple):
                item.set()
                continue
            call, event, context, done = item
            if call in _ENDS:
                self._granted.discard(event.owner)
            context.run(self._call, call, event)
            if done is not None:
                done.set()
        self.behind = False
        if self.dropped:
            log.warning("observer %r is too slow: %d events were dropped", self.observer, self.dropped)
            self.dropped = 0

    def _call(self, call: Call, event: LockEvent) -> None:
        try:
            function = getattr(self.observer, call, None)
            if function is not None:
                function(event)
        except BaseException:  # SystemExit too: the next event needs the thread
            if not self._failed:
                self._failed = True
                message = "observer %r raised in %s(); lockkit keeps calling it, but does not log its errors again"
                log.exception(message, self.observer, call)


def _forked() -> None:
    global _mutex  # noqa: PLW0603 - another thread of the parent may hold it
    _mutex = threading.Lock()
    for channel in active or ():
        channel.forked()


def _at_exit() -> None:
    for channel in active or ():
        channel.flush(LAST_SECONDS)


in_forked_child(_forked)
# The engine imports this module before it registers its own function, which is therefore called before this one.
atexit.register(_at_exit)
