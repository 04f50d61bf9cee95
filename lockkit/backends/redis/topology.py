"""Which node has a lock: one interface to single nodes, Sentinel and Cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from math import inf
from typing import Any, Protocol

from lockkit.backends.redis.errors import translate
from lockkit.backends.redis.node import RedisNode
from lockkit.backends.redis.resp import Reply, ServerSaid, pack
from lockkit.backends.redis.script import Command
from lockkit.backends.redis.wakeup import WakeupListener
from lockkit.errors import BackendUnavailable, LockError


class NotReplicatedError(BackendUnavailable):
    """Too few replicas have acknowledged a change in time."""


class Runner(Protocol):
    """How a script is run."""

    def __call__(
        self, script: Command, key: str, body: bytes, /, *, resend: bool = False, answer_by: float = inf
    ) -> Coroutine[Any, Any, Reply]: ...


class Topology(ABC):
    """
    Finds the node of a lock and runs scripts there.

    Its methods raise `LockError`, and return or raise by `answer_by` (client monotonic time).

    Attributes:
        several: There are several nodes, and one that hangs must not delay renewals at the others.
        listening: There is or was a subscription, so `listener_for` is worth asking.
    """

    several = False
    listening = False

    def runner(self) -> Runner:
        """Return the function that runs a script on the node of a key; see `run`."""
        return self.run

    async def run(
        self, script: Command, key: str, body: bytes, /, *, resend: bool = False, answer_by: float = inf
    ) -> Reply:
        """As `RedisNode.run`, on the node of `key`."""
        node = await self.node_for(key, answer_by)
        return await node.run(script, key, body, resend=resend, answer_by=answer_by)

    async def listen(self, key: str, answer_by: float) -> None:
        """Subscribe at the node of `key`, unless there is a subscription."""
        node = await self.node_for(key, answer_by)
        await node.listener.open(answer_by)
        self.listening = True

    @abstractmethod
    async def run_many(
        self, script: Command, calls: Sequence[tuple[str, bytes]], *, replicas: int = 0, answer_by: float = inf
    ) -> list[Reply | LockError]:
        """Run a script for many keys, pipelined per node."""

    @abstractmethod
    def listener_for(self, key: str) -> WakeupListener | None:
        """Return the listener at the node of `key`; None if the node is not known yet. No I/O."""

    @abstractmethod
    async def node_for(self, key: str, answer_by: float = inf) -> RedisNode:
        """Find the node of `key`."""

    async def masters(self) -> list[RedisNode]:
        """Return the nodes that hold keys."""
        return [await self.node_for("")]

    @abstractmethod
    async def ping(self) -> None:
        """Check that the server answers."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""


class SingleTopology(Topology):
    """Always the same node."""

    def __init__(self, node: RedisNode) -> None:
        """Use this node."""
        self._node = node

    def runner(self) -> Runner:
        """See `Topology.runner`: the node's own function, which saves a coroutine."""
        return self._node.run

    async def run_many(
        self, script: Command, calls: Sequence[tuple[str, bytes]], *, replicas: int = 0, answer_by: float = inf
    ) -> list[Reply | LockError]:
        return await run_group(self._node, script, [body for _, body in calls], replicas, answer_by)

    def listener_for(self, key: str) -> WakeupListener:
        del key
        return self._node.listener

    async def node_for(self, key: str, answer_by: float = inf) -> RedisNode:
        del key, answer_by
        return self._node

    async def ping(self) -> None:
        await self._node.call(pack("PING"), resend=True)

    async def close(self) -> None:
        await self._node.close()


async def run_group(
    node: RedisNode, script: Command, bodies: Sequence[bytes], replicas: int, answer_by: float
) -> list[Reply | LockError]:
    """Run a script several times on one node; see `Topology.run_many`."""
    try:
        replies = await node.run_many(script, bodies, replicas=replicas, answer_by=answer_by)
    except LockError as error:
        return [error] * len(bodies)
    return results_of(replies, replicas, node.label)


def results_of(replies: Sequence[Reply], replicas: int, label: str) -> list[Reply | LockError]:
    """Turn replies to scripts into the results of `Topology.run_many`."""
    results: list[Reply | LockError] = []
    for reply in replies:
        if isinstance(reply, ServerSaid):
            error = translate(reply, label)
            error.__cause__ = reply
            results.append(error)
        else:
            results.append(reply)
    if replicas:
        short = results.pop()
        if isinstance(short, int):
            if short >= replicas:
                return results
            short = NotReplicatedError(f"{short} of {replicas} replicas of {label} acknowledged in time")
        return [result if _changed_nothing(result) else short for result in results]
    return results


def _changed_nothing(result: Reply | LockError) -> bool:
    """Tell whether there is nothing to acknowledge: a refusal counts at once, as that of a lease that was ended."""
    return isinstance(result, (list, LockError)) or (isinstance(result, int) and result <= 0)
