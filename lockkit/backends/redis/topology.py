"""
Which node has a lock: one interface to single nodes, Sentinel and Cluster.

Several nodes are called so that one that hangs does not delay the others: each call runs in the background, in a thread
or a task. A blocking call cannot be abandoned, only its thread can.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from typing import TypeAlias, TypeVar

from lockkit.backends.redis.errors import translate
from lockkit.backends.redis.node import RedisNode
from lockkit.backends.redis.resp import Reply, ServerSaid, pack
from lockkit.backends.redis.script import Command
from lockkit.backends.redis.wakeup import WakeupListener
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import Runtime, Work

log = logging.getLogger("lockkit")

T = TypeVar("T")

Ask: TypeAlias = "tuple[str, Callable[[], Awaitable[T]]]"
"""The node's address, and what calls it."""

HEDGE_SECONDS = 0.1
"""Seconds until the next node is asked as well. Longer delays finding the servers while one hangs; shorter asks a
second one although the first is only slow."""


class NotReplicatedError(BackendUnavailable):
    """Too few replicas have acknowledged a change in time."""


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
        self._node = node
        self.run = node.run  # type: ignore[method-assign] # two calls less for each lock

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


# -- several nodes at the same time ------------------------------------------------------------------------------------


async def ask_all(runtime: Runtime, asks: Sequence[Ask[T]], until: float) -> list[T | LockError]:
    """Make several calls at the same time."""
    answers: list[T | LockError] = [*_unanswered(asks)]
    if len(asks) == 1:
        await _note(answers, 0, asks[0])
        return answers
    ended = [runtime.event() for _ in asks]

    async def run(index: int) -> None:
        try:
            await _note(answers, index, asks[index])
        finally:
            ended[index].set()

    for index in range(len(asks)):
        await _begin(runtime, partial(run, index))
    for event in ended:
        await event.wait(max(0.0, until - runtime.now()))
    return list(answers)  # a late answer must not change it


async def ask_first(runtime: Runtime, asks: Sequence[Ask[T]], until: float) -> T | list[LockError]:
    """Make one call after the other, the next one when the last has failed or is slow, until one has an answer."""
    unanswered = _unanswered(asks)
    answers: list[T | LockError] = [*unanswered]
    news = runtime.event()

    async def run(index: int) -> None:
        try:
            await _note(answers, index, asks[index])
        finally:
            news.set()

    for count, _ in enumerate(asks, start=1):
        await _begin(runtime, partial(run, count - 1))
        last = count == len(asks)
        while (left := until - runtime.now()) > 0:
            ended = await news.wait(left if last else min(HEDGE_SECONDS, left))
            news.clear()
            for answer in answers:
                if not isinstance(answer, LockError):
                    return answer
            if not ended or all(answers[index] is not unanswered[index] for index in range(count)):
                break
    return [answer for answer in answers if isinstance(answer, LockError)]


def raise_configuration(failures: Sequence[LockError]) -> None:
    """Raise an error that retrying cannot fix, if there is one among the failures."""
    for failure in failures:
        if isinstance(failure, ConfigurationError):
            raise failure


def _unanswered(asks: Sequence[Ask[T]]) -> list[LockError]:
    """Return for each call the error to raise when the wait is over before its own."""
    advice = "did not answer in time: is it overloaded, stopped or cut off?"
    return [BackendUnavailable(f"{label} {advice}") for label, _ in asks]


async def _note(answers: list[T | LockError], index: int, ask: Ask[T]) -> None:
    try:
        answers[index] = await ask[1]()
    except LockError as error:
        answers[index] = error


async def _begin(runtime: Runtime, work: Work) -> None:
    try:
        runtime.spawn("lockkit-redis-ask", work)
    except RuntimeError as error:  # no thread could be started (Python 3.12 and later start none at exit)
        log.debug("calling without a thread: %s", error)
        await work()
