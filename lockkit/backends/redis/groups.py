"""
Several servers behind one URL: the master that Sentinels name, and the node of a Cluster that serves a lock's slot.

Sources: "Guidelines for Redis clients with support for Redis Sentinel" in the Redis documentation. As described there,
lockkit asks the Sentinels in turn, moves the one that answers to the front, and uses an address only after its node has
said that it is a master (`Handshake` with ``masters_only``). "Redis cluster specification" there: the slot of a key,
MOVED and ASK redirection. lockkit does not use redis-py's Cluster clients: the sync and async ones share no code, and
finding the node takes several times as long as the node's answer.

All keys of a lock have the same hash tag and so the same slot (`lockkit.backends.redis.keys`).
"""

from __future__ import annotations

import binascii
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import inf
from typing import Any, TypeAlias, TypeVar, cast

from lockkit.backend import Host, seconds_left, unsent
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.errors import code_of, nothing_done
from lockkit.backends.redis.handshake import Handshake
from lockkit.backends.redis.keys import Command
from lockkit.backends.redis.node import RedisNode, Topology, end_of_call
from lockkit.backends.redis.resp import Reply, ServerSaid, pack
from lockkit.backends.redis.wakeup import WakeupListener
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import Runtime, Work
from lockkit.units import Instant

log = logging.getLogger("lockkit")

DEFAULT_SENTINEL_PORT = 26379

SENTINEL_TIMEOUT = 0.5
"""Seconds for an answer of one Sentinel. Longer delays finding the master while some Sentinels are down."""

SLOTS_COUNT = 16384

REDIRECTS_MAX = 8
"""Redirections followed in one call. More waits longer for a slot that is moving, fewer gives up earlier."""

TRY_AGAIN_SECONDS = 0.05
"""Seconds between tries while a slot moves key by key."""

HEDGE_SECONDS = 0.1
"""Seconds until the next node is asked as well. Longer delays finding the servers while one hangs; shorter asks a
second one although the first is only slow."""

T = TypeVar("T")
Ask: TypeAlias = "tuple[str, Callable[[], Awaitable[T]]]"
"""The node's address, and what calls it."""

Address: TypeAlias = tuple[str, int]
Remap: TypeAlias = "Callable[[Address], Address]"


def slot_of(key: str) -> int:
    """Return the hash slot of a lock's key, which has no hash tag itself."""
    # binascii's CRC-CCITT with a start of 0 is the CRC16 of the specification (XMODEM).
    return binascii.crc_hqx(key.encode(), 0) % SLOTS_COUNT


async def ask_nodes(
    runtime: Runtime, asks: Sequence[Ask[T]], until: Instant, *, one_answers: bool = False
) -> list[T | LockError]:
    """
    Call several nodes in the background, so that one that hangs does not delay the others.

    All at the same time; or, if it is enough that `one_answers`, the next one when the last has failed or is slow.
    """
    advice = "did not answer in time: is it overloaded, stopped or cut off?"
    unanswered = [BackendUnavailable(f"{label} {advice}") for label, _ in asks]
    answers: list[T | LockError] = [*unanswered]
    news = runtime.event()

    async def run(index: int) -> None:
        try:
            answers[index] = await asks[index][1]()
        except LockError as error:
            answers[index] = error
        finally:
            news.set()

    async def enough(count: int) -> bool:
        """Wait for the calls that have begun; tell whether one of them has an answer."""
        while True:
            if one_answers and any(not isinstance(answer, LockError) for answer in answers):
                return True
            left_seconds = until - runtime.now()
            if left_seconds <= 0 or all(answers[index] is not unanswered[index] for index in range(count)):
                return False
            heard = await news.wait(left_seconds if count == len(asks) else min(HEDGE_SECONDS, left_seconds))
            news.clear()
            if not heard:
                return False

    for index in range(len(asks)):
        await _begin(runtime, partial(run, index), here=len(asks) == 1)
        if (one_answers or index + 1 == len(asks)) and await enough(index + 1):
            break
    return list(answers)  # a late answer must not change it


async def _begin(runtime: Runtime, work: Work, *, here: bool) -> None:
    """Work in the background: a blocking call cannot be abandoned, only its thread can."""
    try:
        if not here:
            runtime.spawn("lockkit-redis-ask", work)
    except RuntimeError as error:  # no thread could be started (Python 3.12 and later start none at exit)
        log.debug("calling without a thread: %s", error)
        here = True
    if here:
        await work()


class _Group(Topology):
    """
    What Sentinels and Clusters have in common: a node is asked, and then perhaps another one.

    The map of who serves what is loaded again before the next call once it is `_outdated`.
    """

    def __init__(self, anywhere: Target, host: Host, prefix: str) -> None:
        self._anywhere = anywhere
        self._host = host
        self._runtime = host.runtime
        self._prefix = prefix
        self._mutex = host.runtime.mutex()
        self._outdated = True

    async def run_many(
        self, script: Command, calls: Sequence[tuple[str, bytes]], *, replicas: int = 0, answer_by: float = inf
    ) -> list[Reply | LockError]:
        """See `Topology.run_many`. Asks all nodes at the same time, then follows moved slots one by one."""
        answer_by = end_of_call(self._runtime, answer_by)
        results: list[Reply | LockError] = [None] * len(calls)
        groups = await self._grouped([key for key, _ in calls], answer_by, results)
        asks: list[Ask[list[Reply | LockError]]] = []
        for node, indexes in groups:
            own = [calls[index] for index in indexes]
            asks.append((node.label, partial(node.run_many, script, own, replicas=replicas, answer_by=answer_by)))
        answers = await ask_nodes(self._runtime, asks, answer_by)
        for (node, indexes), replies in zip(groups, answers, strict=True):
            for number, index in enumerate(indexes):
                result = results[index] = replies if isinstance(replies, LockError) else replies[number]
                if isinstance(result, LockError) and code_of(result.__cause__) in {"MOVED", "ASK", "TRYAGAIN"}:
                    try:
                        results[index] = await self.run(script, *calls[index], replicas=replicas, answer_by=answer_by)
                    except LockError as error:
                        results[index] = error
                elif isinstance(result, BackendUnavailable):
                    self._suspect(node)
        return results

    async def _grouped(
        self, keys: Sequence[str], answer_by: float, results: list[Reply | LockError]
    ) -> list[tuple[RedisNode, list[int]]]:
        """Return each node with the indexes of its keys; where there is none, put the error into `results`."""
        groups: dict[int, tuple[RedisNode, list[int]]] = {}
        failure: LockError | None = None
        for index, key in enumerate(keys):
            if failure is not None and self._outdated:
                # No node can be asked for the map: not again for each of perhaps thousands of keys.
                results[index] = failure
                continue
            try:
                node = await self.node_for(key, answer_by)
            except LockError as error:
                results[index] = failure = error
            else:
                groups.setdefault(id(node), (node, []))[1].append(index)
        return list(groups.values())

    async def run(
        self, script: Command, key: str, body: bytes, *, resend: bool = False, replicas: int = 0, answer_by: float = inf
    ) -> Reply:
        """See `Topology.run`. Calls the node of a key, the one that it redirects to, or that has taken its place."""
        answer_by = end_of_call(self._runtime, answer_by)
        node, asking = await self.node_for(key, answer_by), False
        sent, last = False, LockError("asked no node at all")
        for _ in range(REDIRECTS_MAX):
            try:
                return await node.run(
                    script, key, body, resend=resend, replicas=replicas, answer_by=answer_by, asking=asking
                )
            except LockError as error:
                code, last = code_of(error.__cause__), error
                if code in {"MOVED", "ASK"}:
                    asking = code == "ASK"
                    node = self._redirected(cast("ServerSaid", error.__cause__).text, node, key, moved=not asking)
                elif code == "TRYAGAIN" and script.alone is not None:
                    script = script.alone
                elif code == "TRYAGAIN" and self._runtime.now() + TRY_AGAIN_SECONDS < answer_by:
                    await self._runtime.sleep(TRY_AGAIN_SECONDS)
                elif code == "TRYAGAIN" or not isinstance(error, BackendUnavailable):
                    raise
                else:
                    # Perhaps it was carried out, by this call or by one before.
                    sent = error.sent = sent or not (code == "CLUSTERDOWN" or nothing_done(error))
                    successor = await self._successor(node, key, error, answer_by, resend=resend)
                    if successor is node:
                        raise
                    node, asking = successor, False
        slot, said = slot_of(key), last.__cause__
        message = f"the Cluster is moving this slot ({slot}) from node to node: try again later ({said})"
        raise BackendUnavailable(message) from said

    async def _successor(
        self, node: RedisNode, key: str, error: BackendUnavailable, answer_by: float, *, resend: bool
    ) -> RedisNode:
        """
        Find who serves the key now; the same node if nothing may be sent again.

        Also if it answered: a master that is cut off from its replicas refuses writes (``NOREPLICAS``), until it is
        replaced.
        """
        self._suspect(node)
        if self._runtime.now() >= answer_by or not (resend or nothing_done(error)):
            return node
        try:
            return await self.node_for(key, answer_by)
        except BackendUnavailable as unfound:
            unfound.sent = error.sent or unfound.sent
            raise

    def _redirected(self, text: str, asked: RedisNode, key: str, *, moved: bool) -> RedisNode:
        """Return the node that ``MOVED slot host:port`` names. Only nodes of a Cluster say that."""
        raise NotImplementedError

    def _suspect(self, node: RedisNode) -> None:
        """Ask again, before the next call, who serves what."""
        del node
        self._outdated = True


class SentinelTopology(_Group):
    """All locks are at the master, whichever node that is."""

    def __init__(self, sentinels: Sequence[Target], service_name: str, master: Target, host: Host, prefix: str) -> None:
        super().__init__(master, host, prefix)
        # The one that answered last comes first.
        self.sentinels: list[RedisNode] = [RedisNode(host.runtime, target) for target in sentinels]
        self.service_name = service_name
        # The same for every master, so that it notices a change.
        self._handshake = Handshake(host, masters_only=True)
        self._master: RedisNode | None = None

    def listener_for(self, key: str) -> WakeupListener | None:
        del key
        return None if self._master is None else self._master.listener

    async def node_for(self, key: str, answer_by: float = inf) -> RedisNode:
        del key
        master = self._master
        if master is not None and not self._outdated:
            return master
        target = self._anywhere.moved(*await self._ask(answer_by))
        with self._mutex:
            if self._master is not None and self._master is not master:
                return self._master  # another thread has found it meanwhile
            self._outdated = False
            if master is not None and master.label == target.label:
                return master  # its connections and its subscription may still be good
            self._master = successor = RedisNode(self._runtime, target, self._prefix, self._handshake)
        log.info("the master of %r is at %s", self.service_name, target.label)
        if master is not None:
            await master.close()
        return successor

    async def _ask(self, answer_by: float) -> Address:
        """Ask the Sentinels for the master's address."""
        # Half of the time: the call to the master comes after that.
        now = self._runtime.now()
        until = now + seconds_left(answer_by, now) / 2
        sentinels = self.sentinels
        asks = [(sentinel.label, partial(self._ask_one, sentinel, until)) for sentinel in sentinels]
        answers = await ask_nodes(self._runtime, asks, until, one_answers=True)
        for sentinel, answer in zip(sentinels, answers, strict=True):
            if not isinstance(answer, LockError):
                # In one step: another thread may do the same.
                self.sentinels = [sentinel, *(other for other in sentinels if other is not sentinel)]
                return answer
        message = f"no Sentinel names the master {self.service_name!r}: {'; '.join(map(str, answers))}"
        if all(isinstance(error, _UnknownMasterError) for error in answers):
            raise ConfigurationError(f"{message}. Check the name in the path of the URL")
        raise _unfound(message, answers)

    async def _ask_one(self, sentinel: RedisNode, until: Instant) -> Address:
        question = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service_name)
        try:
            reply = await sentinel.call(question, resend=True, answer_by=until)
        except ConfigurationError as error:
            # A Sentinel has its own login, and no other server knows its commands.
            code = code_of(error.__cause__)
            if code == "unknown command" and "SENTINEL" in str(error.__cause__):  # else HELLO or AUTH
                advice = "is no Sentinel: give the addresses of the Sentinels, not of the servers that they watch"
            elif code in {"NOAUTH", "WRONGPASS"}:
                advice = "refuses the login; a Sentinel has its own: see sentinel_username=, sentinel_password="
            else:
                raise
            raise ConfigurationError(f"{sentinel.label} {advice} ({error.__cause__})") from error.__cause__
        if reply is None:
            raise _UnknownMasterError(f"{sentinel.label} knows no master {self.service_name!r}")
        host, port = cast("list[bytes]", reply)
        return host.decode(), int(port)

    async def close(self) -> None:
        for node in [*self.sentinels, self._master]:
            if node is not None:
                await node.close()


class _UnknownMasterError(BackendUnavailable):
    """A Sentinel answered that it watches no master of that name."""


class ClusterTopology(_Group):
    """Each lock is at the node that serves its slot."""

    several = True

    def __init__(
        self, seeds: Sequence[Address], node: Target, host: Host, prefix: str, *, remap: Remap | None = None
    ) -> None:
        super().__init__(node, host, prefix)
        self._seeds = list(seeds)
        self._remap = remap
        self._nodes: dict[Address, RedisNode] = {}
        self._failed: set[Address] = set()  # asked last for the slots: they may be cut off from the others
        self._slots: list[RedisNode | None] = [None] * SLOTS_COUNT

    def _suspect(self, node: RedisNode) -> None:
        super()._suspect(node)
        self._failed.update(address for address, one in list(self._nodes.items()) if one is node)

    def _redirected(self, text: str, asked: RedisNode, key: str, *, moved: bool) -> RedisNode:
        host, _, port = text.split()[2].rpartition(":")
        node = self._node_told(asked, host, int(port))
        if moved:
            log.info("slot %d is served by %s now", slot_of(key), node.label)
            self._slots[slot_of(key)] = node
            self._outdated = True
            # Other locks of this client may have moved too, perhaps in a failover that lost them.
            self._host.confirm_soon()
        return node

    def listener_for(self, key: str) -> WakeupListener | None:
        node = self._slots[slot_of(key)]
        return None if node is None else node.listener

    async def node_for(self, key: str, answer_by: float = inf) -> RedisNode:
        slot = slot_of(key)
        node = self._slots[slot]
        if node is None or self._outdated:
            await self._load_slots(answer_by)
            node = self._slots[slot]
        if node is None:
            raise unsent(f"no node of the Cluster serves slot {slot}: see CLUSTER INFO")
        return node

    async def masters(self) -> list[RedisNode]:
        """Load the slots, and return the nodes that serve any."""
        await self._load_slots(inf)
        return list(dict.fromkeys(node for node in self._slots if node is not None))

    async def _load_slots(self, answer_by: float) -> None:
        """Ask any node for the slots."""
        # Half of the time: the call itself comes after that.
        now = self._runtime.now()
        until = now + seconds_left(answer_by, now) / 2
        # Nodes of the last map first, because seeds may be long gone.
        addresses = sorted(dict.fromkeys([*self._nodes, *self._seeds]), key=self._failed.__contains__)
        nodes = [self._node_at(address) for address in addresses]
        asks = [(node.label, partial(self._ask, node, until)) for node in nodes]
        answers = await ask_nodes(self._runtime, asks, until, one_answers=True)
        for node, address, ranges in zip(nodes, addresses, answers, strict=True):
            if not isinstance(ranges, LockError):
                self._failed.discard(address)
                await self._use_map(ranges, node)
                return
        raise _unfound(f"no node of the Cluster can be asked: {'; '.join(map(str, answers))}", answers)

    async def _ask(self, node: RedisNode, until: Instant) -> list[Any]:
        reply = await node.call(pack("CLUSTER", "SLOTS"), resend=True, answer_by=until)
        if not reply:
            raise BackendUnavailable(f"{node.label} knows no slots")
        return cast("list[Any]", reply)

    async def _use_map(self, ranges: list[Any], asked: RedisNode) -> None:
        """Use a new map of slots: ranges of ``[first, last, [host, port, …] of the master, replicas…]``."""
        slots: list[RedisNode | None] = [None] * SLOTS_COUNT
        # Another thread may have another map. Under the mutex, so that neither uses a node that the other closes.
        with self._mutex:
            for first, last, (host, port, *_), *_ in ranges:
                node = self._node_told(asked, (host or b"").decode(), port)
                slots[first : last + 1] = [node] * (last + 1 - first)
            changed = any(old is not None and old is not new for old, new in zip(self._slots, slots, strict=True))
            self._slots = slots
            self._outdated = False
        if changed:
            self._host.confirm_soon()
        for address, node in list(self._nodes.items()):
            with self._mutex:
                if node in self._slots:
                    continue
                self._nodes.pop(address, None)
                self._failed.discard(address)
            await node.close()

    def _node_told(self, asked: RedisNode, host: str, port: int) -> RedisNode:
        """Return the node at an address that another one tells; an empty host is that of the one that was asked."""
        address = host or str(asked.target.arguments["host"]), port
        return self._node_at(address if self._remap is None else self._remap(address))

    def _node_at(self, address: Address) -> RedisNode:
        node = self._nodes.get(address)
        if node is None:
            handshake = Handshake(self._host, in_cluster=True)
            node = RedisNode(self._runtime, self._anywhere.moved(*address), self._prefix, handshake)
            # Another thread may have opened one meanwhile. Nothing is connected yet.
            node = self._nodes.setdefault(address, node)
        return node

    async def close(self) -> None:
        """See `Topology.close`. The nodes stay known: a call that is under way must not open others in their place."""
        for node in list(self._nodes.values()):
            await node.close()


def _unfound(message: str, answers: Sequence[object]) -> LockError:
    """Return the error when nobody could be asked: one that retrying cannot fix, if there is one."""
    errors = [answer for answer in answers if isinstance(answer, LockError)]
    for error in errors:
        if isinstance(error, ConfigurationError):
            return error
    unfound = unsent(message)
    unfound.__cause__ = errors[0].__cause__
    return unfound
