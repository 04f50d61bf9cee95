"""
Locks inside one process: ``memory://`` or ``memory://SPACE``.

Algorithm: a `Ledger` per name (holder, queue, token) under one mutex per space.
A release sets the wake-up event of the next waiter, in whichever thread or event loop it waits.
All clients of the process that name the same space share its locks: threads, tasks of any event loop, both faces.

What the server must offer: nothing; the "server" is this module's dictionary and the machine's monotonic clock.

What it cannot promise: nothing beyond this process. Another process, also a forked child, has spaces of its own.
Nothing notices that a thread died: its lease ends by its ttl, or when the lease is collected.

Tokens: ``max(last of the space + 1, wall clock µs)``, so they also increase from one run of the program to the next as
long as the clock is not set back by more than the pause between them.
The record of a lock is removed as soon as nobody holds it or waits for it; the last token is kept per space.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

from lockkit.backend import (
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    LockBackend,
    Option,
    Renewal,
    Renewed,
    Request,
    decode_metadata,
)
from lockkit.backends.lock_state import Ledger
from lockkit.errors import ConfigurationError
from lockkit.runtime import in_forked_child

if TYPE_CHECKING:
    from lockkit.url import Url

__all__ = ["MemoryBackend"]

# The wall clock of this machine is the "server time" of the hybrid token; it decides nothing else.
_wall_clock_ns = time.time_ns  # noqa: TID251


class MemoryBackend(LockBackend):
    """Threads and tasks of this process."""

    capabilities = Capabilities(
        crash_release="ttl",
        min_ttl=0.01,
        ttl_granularity=0.0,
        fair=True,
        wakeup="push",
        token_source="max(last of the space + 1, wall clock in µs); grows across restarts of the process",  # noqa: S106
        survives_node_loss=False,
        survives_data_loss=True,
        shared_mode=False,
        clock_assumption="none beyond this machine's monotonic clock",
        waiters_visible=True,
        scope="process",
        caveat="Excludes only within this process; a forked child or another process has locks of its own.",
    )
    options: ClassVar[Mapping[str, Option]] = {}

    def __init__(self, space: str, host: Host) -> None:
        """Join the space of that name."""
        self._runtime = host.runtime
        self._host = host
        self._space = _spaces.setdefault(space, _Space())
        self._space.clients.add(self)
        self._url = f"memory://{space}"

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> MemoryBackend:
        """See `LockBackend.open`."""
        del options
        if len(url.hosts) > 1 or url.port is not None or url.username is not None or url.path.strip("/"):
            message = (
                f"{url.safe_text} is not understood: write memory:// or memory://SPACE, "
                "where SPACE is any word that the clients which share locks have in common"
            )
            raise ConfigurationError(message, backend=url.safe_text)
        return cls(url.host or "", host)

    @property
    def url(self) -> str:
        """See `LockBackend.url`."""
        return self._url

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """See `LockBackend.try_acquire`."""
        space = self._space
        name = request.name
        with space.mutex:
            ledger = space.ledgers.get(name)
            if ledger is None:
                ledger = space.ledgers[name] = Ledger()
            elif request.queue:
                # Before a releaser can see the request: it would make a second event in its own thread.
                request.state = request.wake
            # Read under the mutex: a time from before it may lie before a lease that was granted meanwhile.
            now = self._runtime.now()
            floor = max(space.token + 1, _wall_clock_ns() // 1000)
            granted, wake = ledger.acquire(request, now, floor, queue=request.queue, dead=_never)
            outcome: Grant | Busy
            if granted:
                space.token = ledger.token
                request.state = None
                outcome = Grant(name, request.owner, ledger.token, request.ttl)
            else:
                assert ledger.holder is not None or ledger.queue, "refused a free lock"
                outcome = Busy(ledger.retry_after(now), owner=ledger.holder.owner if ledger.holder else None)
        _wake(wake)
        return outcome

    async def abandon(self, request: Request) -> None:
        """See `LockBackend.abandon`."""
        if request.state is None and not request.uncertain:
            return
        with self._space.mutex:
            ledger = self._space.ledgers.get(request.name)
            wake = () if ledger is None else ledger.abandon(request.owner, self._runtime.now())
            self._tidy(request.name, ledger)
        request.state = None
        _wake(wake)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`."""
        with self._space.mutex:
            now = self._runtime.now()
            return [self._renew(grant, now) for grant in grants]

    def _renew(self, grant: Grant, now: float) -> Renewal:
        ledger = self._space.ledgers.get(grant.name)
        if ledger is None:
            return Gone()
        reason = ledger.renew(grant.owner, grant.ttl, now)
        if reason is None:
            return Renewed()
        return Gone(reason)

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """See `LockBackend.release`."""
        del answer_by
        space = self._space
        with space.mutex:
            ledger = space.ledgers.get(grant.name)
            if ledger is None:
                return False
            ours, wake = ledger.release(grant.owner, self._runtime.now())
            self._tidy(grant.name, ledger)
        _wake(wake)
        return ours

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `LockBackend.holders`."""
        with self._space.mutex:
            ledger = self._space.ledgers.get(name)
            now = self._runtime.now()
            if ledger is None or ledger.holder is None or now >= ledger.until:
                return []
            request = ledger.holder
            waiters = len(ledger.queue)
            token, remaining = ledger.token, ledger.until - now
        return [Holder(request.owner, token, remaining, decode_metadata(request.metadata), waiters)]

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`."""
        with self._space.mutex:
            ledger = self._space.ledgers.get(name)
            if ledger is None:
                return False
            holder = ledger.holder
            broken, wake = ledger.break_lock(self._runtime.now(), _never)
            ledger.broken = ""  # its client is told below
            self._tidy(name, ledger)
        _wake(wake)
        if broken and holder is not None:
            self._tell_broken(holder.owner)
        return broken

    def _tell_broken(self, owner: str) -> None:
        """Notify the client that holds the lease; it is one of this process."""
        for client in tuple(self._space.clients):
            client._host.lost(owner, "broken")  # noqa: SLF001 - of this class

    async def ping(self) -> None:
        """See `LockBackend.ping`. There is nothing that could fail to answer."""

    async def close(self) -> None:
        """See `LockBackend.close`. There is nothing to close: the space belongs to the process."""

    def _tidy(self, name: str, ledger: Ledger[Request] | None) -> None:
        """Remove a record that says nothing."""
        if ledger is not None and ledger.idle:
            self._space.ledgers.pop(name, None)


class _Space:
    """The locks of one ``memory://SPACE``."""

    __slots__ = ("clients", "ledgers", "mutex", "token")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        # A real lock, whatever the runtime: clients of several threads and event loops share the space.
        # It is held for a few microseconds and never across an await.
        self.mutex = threading.Lock()
        self.ledgers: dict[str, Ledger[Request]] = {}
        self.clients: weakref.WeakSet[MemoryBackend] = weakref.WeakSet()
        self.token = 0


_spaces: dict[str, _Space] = {}


def _never(claim: Request) -> bool:
    """No client of this process has ended without this process having ended too."""
    del claim
    return False


def _wake(waiters: Sequence[Request]) -> None:
    """Wake waiters. Outside the mutex: an event may call into its loop."""
    for waiter in waiters:
        waiter.wake.set()


def _forget_parent() -> None:
    """Empty all spaces in a forked child: the parent's holders are not here, and a mutex may be held by none."""
    for space in _spaces.values():
        space.reset()


in_forked_child(_forget_parent)
