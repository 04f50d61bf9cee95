"""
A lock service with read/write locks and permits: the state machine of memory and file, behind a simulated network.

What decides is `lockkit.backends.lock_state.LockState`, as it runs for users. Only the node and the way to it are
models. A request is never overtaken by a later one of the same client, as in one process or on one disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lockkit.backend import Busy, Capabilities, Grant, Holder, Mode, Renewal, Request
from lockkit.backends.lock_state import LockState
from lockkit.units import Seconds
from lockkit_tools.simulation.backend import CAPABILITIES, NodeBackend
from lockkit_tools.simulation.history import Granted, History
from lockkit_tools.simulation.network import Network, Node
from lockkit_tools.simulation.world import Process

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ProcessClaim:
    """One acquisition of a process, as the server knows it: a `lockkit.backends.lock_state.Claim`."""

    owner: str
    ttl: float
    metadata: str
    mode: Mode
    limit: int
    process: Process
    wake: Callable[[], object]  # run in the process when it should ask again


class ClaimServer:
    """The service. Its public methods are what a client has a `Node` run; each is atomic."""

    def __init__(
        self,
        node: Node,
        network: Network,
        history: History,
        *,
        notices_death: bool = False,
        state: type[LockState[ProcessClaim]] = LockState,
    ) -> None:
        self.node = node
        self.locks: dict[str, LockState[ProcessClaim]] = {}  # by name
        self._network = network
        self._history = history
        self._notices_death = notices_death
        self._make_state = state

    def acquire(self, name: str, claim: ProcessClaim, *, queue: bool) -> Grant | Busy:
        """Give the lock to a claim if it is its turn; with `queue` it takes a place otherwise."""
        lock, now = self._lock(name), self.node.now()
        outcome, notify = lock.acquire(name, claim, now, self.node.wall_us(), queue=queue, dead=self._is_dead)
        if isinstance(outcome, Grant):
            until = self.node.clock.true_time(now + claim.ttl)
            granted = Granted(self.node.world.now, claim.process.name, name, claim.owner, outcome.token, until)
            self._history.append(granted)
        self._notify(notify)
        return outcome

    def abandon(self, name: str, owner: str) -> None:
        """Leave nothing of an owner."""
        self._notify(self._lock(name).abandon(owner, self.node.now()))

    def renew(self, name: str, owner: str, ttl: Seconds) -> Renewal:
        """Start the ttl anew where the owner still holds the lock, else say why not."""
        return self._lock(name).renew(owner, ttl, self.node.now())

    def release(self, name: str, owner: str) -> bool:
        """Free what the owner holds; tell whether it did."""
        in_time, notify = self._lock(name).release(owner, self.node.now())
        self._notify(notify)
        return in_time

    def downgrade(self, name: str, owner: str) -> bool:
        """Turn the lease of a writer into that of a reader; tell whether the owner held it."""
        held, notify = self._lock(name).downgrade(owner, self.node.now())
        self._notify(notify)
        return held

    def holders(self, name: str) -> Sequence[Holder]:
        """Who holds it."""
        return self._lock(name).holders(self.node.now(), self._is_dead)

    def break_lock(self, name: str) -> bool:
        """Free it by force."""
        broken, notify = self._lock(name).break_lock(self.node.now(), self._is_dead)
        self._notify(notify)
        return broken

    def _lock(self, name: str) -> LockState[ProcessClaim]:
        lock = self.locks.get(name)
        if lock is None:
            lock = self.locks[name] = self._make_state()
        return lock

    def _notify(self, claims: Sequence[ProcessClaim]) -> None:
        for claim in claims:
            self._network.push(self.node, claim.process, claim.wake)

    def _is_dead(self, claim: ProcessClaim) -> bool:
        return self._notices_death and claim.process.dead


class ClaimBackend(NodeBackend):
    """One process's connection to a `ClaimServer`."""

    capabilities = replace(
        Capabilities(**CAPABILITIES, fair=True, wakeup="push"),
        survives_data_loss=False,
        shared_mode=True,
        fair_shared=True,
        downgrade=True,
        permits="native",
        notes=False,
        transfer=False,
        caveat="Exists in a simulation only.",
    )
    _server: ClaimServer

    async def try_acquire(self, request: Request) -> Grant | Busy:
        claim = ProcessClaim(
            request.owner, request.ttl, request.metadata, request.mode, request.limit, self._process, request.wake.set
        )
        name, queue = request.name, request.queue
        if queue:
            # The place may have been taken even if the answer never comes.
            request.state = claim
        outcome = await self._call(lambda: self._server.acquire(name, claim, queue=queue), request.answer_by)
        if isinstance(outcome, Grant):
            request.state = None
        return outcome

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        # What is sent is what stands in the grants now, not when it arrives.
        wanted = [(grant.name, grant.owner, grant.ttl) for grant in grants]
        return await self._call(lambda: [self._server.renew(*lease) for lease in wanted])

    async def downgrade(self, grant: Grant) -> bool:
        return await self._call(lambda: self._server.downgrade(grant.name, grant.owner))
