"""
A lock service of one node: records with an owner, a token and an end, and a queue of waiters to wake.

Its own implementation, on purpose: what the checker learns from it shares no code with the backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lockkit.backend import Holder, Host, LossReason, Note, decode_metadata
from lockkit.units import Instant, Seconds
from lockkit_tools.simulation.history import DataLost, Freed, Granted, History, Kept, Quiet, Undone, Wrote
from lockkit_tools.simulation.network import Network, NoAnswer, Node
from lockkit_tools.simulation.world import Process, World

Wakeup = Literal["fair", "all", "none"]
"""
Who is woken when a lock becomes free: ``fair``: the head of the queue, which for a while nobody may overtake.
``all``: every waiter, whoever comes first. ``none``: nobody, waiters poll.
"""

GRACE_MAX = 1.0
"""Longest time that a free lock is kept for the head of a fair queue, seconds (at most half of its ttl)."""


@dataclass(slots=True)
class Record:
    """Who holds a lock, until when on the node's monotonic clock."""

    client: str
    owner: str
    token: int
    until: float
    metadata: str


@dataclass(slots=True)
class Waiting:
    """A place in the queue. It is gone at `until`, should the waiter not ask again before."""

    owner: str
    ttl: float
    client: Process
    wake: Callable[[], object]
    until: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """The lock is busy: by whom, if anybody, and for how long at most."""

    retry_after: float
    owner: str | None


class LockServer:
    """The service. Its public methods are what a client has a `Node` run; each is atomic."""

    def __init__(
        self, node: Node, network: Network, history: History, *, wakeup: Wakeup = "fair", tells: bool = False
    ) -> None:
        self.node = node
        self.wakeup = wakeup
        self.tells = tells
        self.clients: dict[str, tuple[Process, Host]] = {}
        self.history = history
        self.records: dict[str, Record] = {}  # who holds what; a record that has ended stays until somebody asks
        self.tokens: dict[str, int] = {}  # the last one of each name, also of free locks
        self.notes: dict[str, tuple[str, float]] = {}  # on each lock, and when its life ends
        self._queues: dict[str, list[Waiting]] = {}
        self._offered_until: dict[str, float] = {}
        self._network = network
        node.stopped.append(self._stopped)

    # -- what clients ask for --------------------------------------------------------------------------------------

    def acquire(
        self,
        client: Process,
        name: str,
        owner: str,
        ttl: Seconds,
        *,
        metadata: str = "",
        wake: Callable[[], object] | None = None,
    ) -> Refusal | int:
        """Give the lock to an owner if it is free."""
        now = self.node.now()
        record = self._live(name, now)
        queue = self._queue(name, now)
        if record is None and self._may_take(name, owner, queue, now):
            return self._take(client, name, owner, ttl, metadata)
        until = record.until if record is not None else self._offered_until.get(name, now)
        if wake is not None and self.wakeup != "none":
            place = next((waiting for waiting in queue if waiting.owner == owner), None)
            if place is None:
                place = Waiting(owner, ttl, client, wake, 0.0)
                queue.append(place)
            # It looks again when the present lease is over, if nobody wakes it before.
            place.until = until + max(ttl, 1.0)
        return Refusal(until - now, None if record is None else record.owner)

    def abandon(self, name: str, owner: str) -> None:
        """Leave nothing of an owner."""
        self.history.append(Undone(self.node.world.now, owner))
        record = self.records.get(name)
        if record is not None and record.owner == owner:
            self._free(name, record, owner, "undone")
        queue = self._queues.get(name, [])
        was_head = bool(queue) and queue[0].owner == owner
        queue[:] = [waiting for waiting in queue if waiting.owner != owner]
        if was_head and name not in self.records:
            self._wake(name)

    def renew(self, name: str, owner: str, ttl: Seconds) -> LossReason | None:
        """Start the ttl anew where the owner still holds the lock, else say why not."""
        record = self._live(name, self.node.now())
        if record is None:
            return "gone"
        if record.owner != owner:
            return "taken"
        record.until = self.node.now() + ttl
        self.history.append(Kept(self.node.world.now, name, owner, self.node.clock.true_time(record.until)))
        return None

    def release(self, name: str, owner: str) -> bool:
        """Free the lock if the owner holds it; tell whether it did."""
        self.history.append(Undone(self.node.world.now, owner))
        record = self._live(name, self.node.now())
        if record is None or record.owner != owner:
            return False
        self._free(name, record, owner, "released")
        return True

    def take_over(
        self, client: Process, name: str, former: str, owner: str, *, ttl: Seconds, metadata: str
    ) -> int | None:
        """Give the lock of one owner to another; the token, or None if that one does not hold it."""
        record = self._live(name, self.node.now())
        if record is None or record.owner not in {former, owner}:
            return None
        return record.token if record.owner == owner else self._take(client, name, owner, ttl, metadata)

    def holders(self, name: str) -> Sequence[Holder]:
        """Who holds it."""
        now = self.node.now()
        record = self._live(name, now)
        if record is None:
            return []
        waiters = len(self._queue(name, now))
        return [Holder(record.owner, record.token, record.until - now, decode_metadata(record.metadata), waiters)]

    def break_lock(self, name: str) -> bool:
        """Free it by force."""
        record = self._live(name, self.node.now())
        if record is None:
            return False
        self._free(name, record, "", "broken")
        return True

    def read_note(self, name: str) -> Note | None:
        """Give the note on a lock."""
        text, until = self.notes.get(name, ("", 0.0))
        left = until - self.node.now()
        return Note(text, left) if left > 0 else None

    def write_note(self, name: str, owner: str, text: str, keep: float) -> bool:
        """Put a note on a lock that the owner holds; tell whether it does."""
        record = self._live(name, self.node.now())
        if record is None or record.owner != owner:
            return False
        self.notes[name] = text, self.node.now() + keep
        return True

    def left(self, *, final: bool) -> Quiet:
        """Who holds something, and who waits in a queue, now. Not for clients: it looks from outside."""
        now = self.node.now()
        for name in list(self.records):
            self._live(name, now)
        waiting = [waiting for name in list(self._queues) for waiting in self._queue(name, now)]
        holders = tuple((record.client, record.owner) for record in self.records.values())
        return Quiet(self.node.world.now, final, holders, tuple((one.client.name, one.owner) for one in waiting))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _live(self, name: str, now: Instant) -> Record | None:
        record = self.records.get(name)
        if record is not None and now >= record.until:
            self._free(name, record, "", "expired")
            record = None
        return record

    def _queue(self, name: str, now: Instant) -> list[Waiting]:
        """Give the queue without those who have not asked for too long: their clients have died."""
        queue = self._queues.setdefault(name, [])
        if queue and any(waiting.until <= now for waiting in queue):
            queue[:] = [waiting for waiting in queue if waiting.until > now]
        return queue

    def _may_take(self, name: str, owner: str, queue: list[Waiting], now: Instant) -> bool:
        if self.wakeup != "fair" or not queue or queue[0].owner == owner:
            return True
        if now < self._offered_until.get(name, 0.0):
            return False
        del queue[0]  # it has missed its turn
        return True

    def _take(self, client: Process, name: str, owner: str, ttl: Seconds, metadata: str) -> int:
        queue = self._queues[name]
        queue[:] = [waiting for waiting in queue if waiting.owner != owner]
        token = self.tokens[name] = self._next_token(name)
        self._put(name, Record(client.name, owner, token, self.node.now() + ttl, metadata))
        return token

    def _next_token(self, name: str) -> int:
        return max(self.tokens.get(name, 0) + 1, self.node.wall_us())

    def _put(self, name: str, record: Record) -> None:
        self.records[name] = record
        until = self.node.clock.true_time(record.until)
        self.history.append(Granted(self.node.world.now, record.client, name, record.owner, record.token, until))

    def _free(self, name: str, record: Record, by: str, how: str) -> None:
        del self.records[name]
        at = self.node.world.now
        # An expiry is noticed late; it happened when the lease was over.
        at = min(at, self.node.clock.true_time(record.until)) if how == "expired" else at
        self.history.append(Freed(at, name, record.owner, by, how))
        if self.tells and how in {"broken", "expired"} and record.client in self.clients:
            process, host = self.clients[record.client]
            reason: LossReason = "broken" if how == "broken" else "session"
            self._network.push(self.node, process, lambda: host.lost(record.owner, reason))
            self._network.push(self.node, process, host.confirm_soon)
        self._wake(name, since=record.until if how == "expired" else None)

    def _wake(self, name: str, since: Instant | None = None) -> None:
        """Offer a free lock to the head of its queue, and wake it; all waiters if nobody has precedence."""
        queue = self._queues.get(name)
        if not queue:
            return
        now = self.node.now()
        self._offered_until[name] = (now if since is None else since) + min(queue[0].ttl / 2, GRACE_MAX)
        # The second too, so that it looks again when a stopped head has let its offer pass.
        for waiting in queue[:2] if self.wakeup == "fair" else queue:
            self._network.push(self.node, waiting.client, waiting.wake)

    def _stopped(self, lose_data: bool) -> None:  # noqa: FBT001 - the only thing there is to say
        """Lose the connections of the waiters; the records are on disk, if that is not lost too."""
        self._queues.clear()
        self._offered_until.clear()
        if lose_data:
            at = self.node.world.now
            for name, record in self.records.items():
                self.history.append(Freed(at, name, record.owner, "", "lost"))
            self.records.clear()
            self.tokens.clear()
            self.notes.clear()
            self.history.append(DataLost(at))


class Storage:
    """What the locks protect: it compares fencing tokens, so a late write of a former holder is refused."""

    def __init__(self, world: World, network: Network, history: History) -> None:
        self.node = Node(world, "storage")
        self._network = network
        self._history = history
        self._newest: dict[str, int] = {}

    async def write(self, process: Process, name: str, token: int, timeout: Seconds) -> None:
        """Send a write, and wait for the answer for a while; whether it was accepted is for the history."""
        try:
            await self._network.call(process, self.node, lambda: self._accept(name, token), timeout)
        except NoAnswer:
            return  # it may have been written or not, as any write

    def _accept(self, name: str, token: int) -> None:
        accepted = token >= self._newest.get(name, 0)
        if accepted:
            self._newest[name] = token
        self._history.append(Wrote(self.node.world.now, name, token, accepted))
