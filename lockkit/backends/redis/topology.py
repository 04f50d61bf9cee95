"""
Which node has a lock: the one way for single nodes, Sentinel and Cluster to be asked.

A `Station` is a node as this client uses it: the connections for commands, and the subscription for wake-ups.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from lockkit.backends.redis.node import ServerSaid, Target, WireNode, open_node, pack, translate
from lockkit.backends.redis.wakeup import Ears
from lockkit.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockkit.backend import Host
    from lockkit.backends.redis.node import Reply, Wire
    from lockkit.backends.redis.script import Command

__all__ = ["Greeter", "Route", "SingleRoute", "Station", "run_group"]

log = logging.getLogger("lockkit")


class Runner(Protocol):
    """How a script is run."""

    def __call__(
        self, script: Command, key: str, body: bytes, /, *, resend: bool = False, answer_by: float = inf
    ) -> Coroutine[Any, Any, Reply]:
        """See `WireNode.run`."""
        ...


class Station:
    """One node: how to ask it, and how to be woken by it."""

    __slots__ = ("_runtime", "ears", "node")

    def __init__(self, node: WireNode, host: Host, prefix: str) -> None:
        """Ask and hear nothing yet."""
        self._runtime = host.runtime
        self.node = node
        self.ears = Ears(host.runtime, node, prefix)

    @classmethod
    def at(cls, target: Target, host: Host, prefix: str, greeter: Greeter) -> Station:
        """Make one with connections of our own."""
        return cls(open_node(host.runtime, target, greeter), host, prefix)

    async def close(self) -> None:
        """Close the connections that are ours."""
        self.ears.close()
        await self.node.close()
        # An event loop closes sockets in its next round: without it they would be open until the program ends.
        await self._runtime.sleep(0)


class Route(ABC):
    """
    Finds the node of a lock and asks it. Raises our errors, by `answer_by` (client monotonic time) at the latest.

    Attributes:
        several: There are several nodes, and one that hangs must not keep the leases at the others.
        listening: There is, or has been, a subscription: `ears` is worth asking.
    """

    several = False
    listening = False

    def runner(self) -> Runner:
        """Give the function that runs a script on the node that has a key: ``run(script, key, body, resend=…)``."""
        return self.run

    async def run(
        self, script: Command, key: str, body: bytes, /, *, resend: bool = False, answer_by: float = inf
    ) -> Reply:
        """Run a script on the node that has `key`; as `WireNode.run`."""
        node = (await self.station(key, answer_by)).node
        return await node.run(script, key, body, resend=resend, answer_by=answer_by)

    async def listen(self, key: str, answer_by: float) -> None:
        """Subscribe at the node of `key`, if that has not been done."""
        station = await self.station(key, answer_by)
        await station.ears.open(answer_by)
        self.listening = True

    async def run_replicated(
        self, script: Command, key: str, body: bytes, replicas: int, answer_by: float
    ) -> tuple[Reply, int]:
        """As `WireNode.run_replicated`, on the node that has `key`."""
        node = (await self.station(key, answer_by)).node
        return await node.run_replicated(script, body, replicas, answer_by=answer_by)

    @abstractmethod
    async def run_many(
        self, script: Command, calls: Sequence[tuple[str, bytes]], *, replicas: int = 0, answer_by: float = inf
    ) -> list[Reply | LockError]:
        """Run a script for many keys, pipelined per node. What could not be asked or was refused is an error."""

    @abstractmethod
    def ears(self, key: str) -> Ears | None:
        """Give the subscription at the node of `key`; None if the node is not known yet. No I/O."""

    @abstractmethod
    async def station(self, key: str, answer_by: float = inf) -> Station:
        """Find the node of `key`."""

    @abstractmethod
    async def ping(self) -> None:
        """Ask for any answer."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections that are ours."""


class SingleRoute(Route):
    """Always the same node."""

    def __init__(self, station: Station) -> None:
        """Take the node."""
        self._station = station
        self._node = station.node
        self._ears = station.ears

    def runner(self) -> Runner:
        """See `Route.runner`: the node's own, one coroutine less."""
        return self._node.run

    async def run_many(
        self, script: Command, calls: Sequence[tuple[str, bytes]], *, replicas: int = 0, answer_by: float = inf
    ) -> list[Reply | LockError]:
        """See `Route.run_many`."""
        return await run_group(self._node, script, [body for _, body in calls], replicas, answer_by)

    def ears(self, key: str) -> Ears:
        """See `Route.ears`."""
        del key
        return self._ears

    async def station(self, key: str, answer_by: float = inf) -> Station:
        """See `Route.station`."""
        del key, answer_by
        return self._station

    async def ping(self) -> None:
        """See `Route.ping`."""
        await self._node.call(pack("PING"), resend=True)

    async def close(self) -> None:
        """See `Route.close`."""
        await self._station.close()


async def run_group(
    node: WireNode, script: Command, bodies: Sequence[bytes], replicas: int, answer_by: float
) -> list[Reply | LockError]:
    """Run a script several times on one node; see `Route.run_many`."""
    try:
        replies = await node.run_many(script, bodies, replicas=replicas, answer_by=answer_by)
    except LockError as error:
        return [error] * len(bodies)
    if replicas:
        acknowledged = replies.pop()
        if not isinstance(acknowledged, int) or acknowledged < replicas:
            message = f"{acknowledged!r} of {replicas} replicas of {node.label} acknowledged in time"
            return [BackendUnavailable(message)] * len(bodies)
    return [_refused(reply, node.label) if isinstance(reply, ServerSaid) else reply for reply in replies]


def _refused(reply: ServerSaid, label: str) -> LockError:
    error = translate(reply, label)
    error.__cause__ = reply
    return error


class Greeter:
    """
    Looks at the server behind each new connection: is it still the same, and does it keep what it is given?

    One for all nodes that stand for the same data: behind a Sentinel the node changes, and that is what to notice.
    """

    def __init__(self, host: Host, *, masters_only: bool = False) -> None:
        """
        Know no server yet.

        Args:
            host: Told when the server is another one than before.
            masters_only: Refuse a replica (Sentinel may still name a master that was just replaced).
        """
        self._host = host
        self._masters_only = masters_only
        self._run_id: str | None = None
        self._role: str | None = None
        self._warned = False

    async def __call__(self, wire: Wire, until: float) -> None:
        """
        Look at the server.

        Raises:
            ServerSaid: It is a replica, and only a master will do; or it wants a password.
        """
        sections = [pack("INFO", section) for section in ("server", "replication", "memory")]
        replies = await self._host.runtime.io(wire.call_many(b"".join(sections), len(sections), until))
        facts: dict[str, str] = {}
        for reply in replies:
            if isinstance(reply, ServerSaid) and reply.code == "NOAUTH":
                raise reply
            # A user without the right to INFO gets an error; then nothing is known, and nothing is said.
            if isinstance(reply, bytes):
                facts.update(_facts(reply))
        role, run_id = facts.get("role"), facts.get("run_id")
        if role == "slave" and self._masters_only:
            message = "READONLY it is a replica now"
            raise ServerSaid(message)
        self._warn_of_eviction(facts)
        changed = self._run_id is not None and (run_id, role) != (self._run_id, self._role)
        self._run_id, self._role = run_id, role
        if changed:
            log.info("the Redis server is another one than before (restart or failover): asking for all leases")
            self._host.confirm_soon()

    def _warn_of_eviction(self, facts: dict[str, str]) -> None:
        policy = facts.get("maxmemory_policy", "noeviction")
        if policy != "noeviction" and facts.get("maxmemory", "0") != "0" and not self._warned:
            self._warned = True
            log.warning(
                "the Redis server may evict locks that are held when its memory is full (maxmemory-policy %s): "
                "set maxmemory-policy noeviction, or give the locks a server of their own",
                policy,
            )


def _facts(info: bytes) -> dict[str, str]:
    """Read the ``name:value`` lines of INFO."""
    lines = (line.partition(":") for line in info.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}
