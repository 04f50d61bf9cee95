"""
The node of a Redis Cluster that serves a lock's slot.

Source: "Redis cluster specification" in the Redis documentation: the slot of a key, MOVED and ASK redirection.
lockkit does not use redis-py's Cluster clients: the sync and async ones share no code, and finding the node takes
several times as long as the node's answer.

All keys of a lock have the same hash tag and so the same slot (`lockkit.backends.redis.script`).
"""

from __future__ import annotations

import binascii
import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any, TypeAlias, cast

from lockkit.backend import Host, seconds_left, unsent
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.errors import code_of, nothing_done, sent_before
from lockkit.backends.redis.handshake import Handshake
from lockkit.backends.redis.node import RedisNode, Topology, end_of_call
from lockkit.backends.redis.parallel import ask_all, ask_first, raise_configuration
from lockkit.backends.redis.resp import Reply, ServerSaid, pack
from lockkit.backends.redis.script import Command
from lockkit.backends.redis.wakeup import WakeupListener
from lockkit.errors import BackendUnavailable, LockError
from lockkit.units import Instant

log = logging.getLogger("lockkit")

SLOTS_COUNT = 16384

REDIRECTS_MAX = 8
"""Redirections followed in one call. More waits longer for a slot that is moving, fewer gives up earlier."""

TRY_AGAIN_SECONDS = 0.05
"""Seconds between tries while a slot moves key by key."""

Address: TypeAlias = tuple[str, int]
Remap: TypeAlias = "Callable[[Address], Address]"


def slot_of(key: str) -> int:
    """Return the hash slot of a lock's key, which has no hash tag itself."""
    # binascii's CRC-CCITT with a start of 0 is the CRC16 of the specification (XMODEM).
    return binascii.crc_hqx(key.encode(), 0) % SLOTS_COUNT


class ClusterTopology(Topology):
    """Each lock is at the node that serves its slot."""

    several = True

    def __init__(
        self, seeds: Sequence[Address], node: Target, host: Host, prefix: str, *, remap: Remap | None = None
    ) -> None:
        self._seeds = list(seeds)
        self._anywhere = node
        self._remap = remap
        self._host = host
        self._prefix = prefix
        self._mutex = host.runtime.mutex()
        self._nodes: dict[Address, RedisNode] = {}
        self._failed: set[Address] = set()  # asked last for the slots
        self._slots: list[RedisNode | None] = [None] * SLOTS_COUNT
        self._outdated = True

    # -- asking ----------------------------------------------------------------------------------------------------

    async def run(
        self, script: Command, key: str, body: bytes, /, *, resend: bool = False, answer_by: float = inf
    ) -> Reply:
        answer_by = end_of_call(self._host.runtime, answer_by)
        return await self._follow(script.in_cluster, key, body, 0, answer_by, resend=resend)

    async def run_many(
        self, script: Command, calls: Sequence[tuple[str, bytes]], *, replicas: int = 0, answer_by: float = inf
    ) -> list[Reply | LockError]:
        """See `Topology.run_many`. Asks all nodes at the same time, then follows moved slots one by one."""
        answer_by = end_of_call(self._host.runtime, answer_by)
        script = script.in_cluster
        results: list[Reply | LockError] = [None] * len(calls)
        groups = await self._grouped([key for key, _ in calls], answer_by, results)
        asks = [
            (
                node.label,
                partial(
                    node.run_many, script, [calls[index] for index in indexes], replicas=replicas, answer_by=answer_by
                ),
            )
            for node, indexes in groups
        ]
        answers = await ask_all(self._host.runtime, asks, answer_by)
        for (_, indexes), replies in zip(groups, answers, strict=True):
            for number, index in enumerate(indexes):
                results[index] = replies if isinstance(replies, LockError) else replies[number]
        for index, result in enumerate(results):
            if isinstance(result, LockError) and _code(result) in {"MOVED", "ASK", "TRYAGAIN"}:
                try:
                    results[index] = await self._follow(script, *calls[index], replicas, answer_by)
                except LockError as error:
                    results[index] = error
            elif isinstance(result, LockError) and not isinstance(result.__cause__, ServerSaid):
                self._suspect(self._slots[slot_of(calls[index][0])])
        return results

    async def _grouped(
        self, keys: Sequence[str], answer_by: float, results: list[Reply | LockError]
    ) -> list[tuple[RedisNode, list[int]]]:
        """Return each node with the indexes of its keys; where there is none, put the error into `results`."""
        groups: dict[int, tuple[RedisNode, list[int]]] = {}
        failure: LockError | None = None
        for index, key in enumerate(keys):
            if failure is not None and self._outdated:
                # No node can be asked for the slots: not again for each of perhaps thousands of keys.
                results[index] = failure
                continue
            try:
                node = await self.node_for(key, answer_by)
            except LockError as error:
                results[index] = failure = error
            else:
                groups.setdefault(id(node), (node, []))[1].append(index)
        return list(groups.values())

    async def _follow(
        self, script: Command, key: str, body: bytes, replicas: int, answer_by: float, *, resend: bool = False
    ) -> Reply:
        """Call the node of a key, or the one that it redirects to."""
        now = self._host.runtime.now
        node, asking = await self.node_for(key, answer_by), False
        last: LockError | None = None
        sent = False
        for _ in range(REDIRECTS_MAX):
            try:
                return await _call(node, script, body, replicas, answer_by, asking=asking, resend=resend)
            except LockError as error:
                code, last = _code(error), error
                sent = _note_sent(error, sent)
                if code in {"MOVED", "ASK"}:
                    asking = code == "ASK"
                    node = self._named(cast("ServerSaid", error.__cause__).text, node, key, moved=not asking)
                elif code == "TRYAGAIN" and script.alone is not None:
                    script = script.alone
                elif code == "TRYAGAIN":
                    if now() + TRY_AGAIN_SECONDS >= answer_by:
                        raise
                    await self._host.runtime.sleep(TRY_AGAIN_SECONDS)
                elif isinstance(error.__cause__, ServerSaid) and code != "CLUSTERDOWN":
                    raise
                else:
                    # Perhaps another node serves the slot now.
                    self._suspect(node)
                    if now() >= answer_by or not (resend or nothing_done(error)):
                        raise
                    with sent_before(sent):
                        successor = await self.node_for(key, answer_by)
                    if successor is node:
                        raise
                    node, asking = successor, False
        assert last is not None, "asked no node at all"
        slot, said = slot_of(key), last.__cause__
        message = f"the Cluster is moving this slot ({slot}) from node to node: try again later ({said})"
        raise BackendUnavailable(message) from said

    def _suspect(self, node: RedisNode | None) -> None:
        """Load the slots anew before the next call, from this node only if no other answers."""
        self._outdated = True
        self._failed.update(address for address, one in list(self._nodes.items()) if one is node)

    def _named(self, text: str, asked: RedisNode, key: str, *, moved: bool) -> RedisNode:
        """Return the node that ``MOVED slot host:port`` names."""
        host, _, port = text.split()[2].rpartition(":")
        node = self._node_told(asked, host, int(port))
        if moved:
            log.info("slot %d is served by %s now", slot_of(key), node.label)
            self._slots[slot_of(key)] = node
            self._outdated = True
            # Other locks of this client may have moved too, perhaps in a failover that lost them.
            self._host.confirm_soon()
        return node

    async def listen(self, key: str, answer_by: float) -> None:
        """See `Topology.listen`. The channel's slot is at the node: messages to it need not go to all nodes."""
        node = await self.node_for(key, answer_by)
        await node.listener.open(answer_by, key)
        self.listening = True

    # -- the map of slots ------------------------------------------------------------------------------------------

    def listener_for(self, key: str) -> WakeupListener | None:
        node = self._slots[slot_of(key)]
        return None if node is None else node.listener

    async def node_for(self, key: str, answer_by: float = inf) -> RedisNode:
        node = self._slots[slot_of(key)]
        if node is not None and not self._outdated:
            return node
        await self._load_slots(answer_by)
        node = self._slots[slot_of(key)]
        if node is None:
            message = f"no node of the Cluster serves slot {slot_of(key)}: see CLUSTER INFO"
            raise unsent(message)
        return node

    async def masters(self) -> list[RedisNode]:
        """Load the slots, and return the nodes that serve any."""
        await self._load_slots(inf)
        return list(dict.fromkeys(node for node in self._slots if node is not None))

    async def _load_slots(self, answer_by: float) -> None:
        """Ask any node for the slots, without waiting for those that hang."""
        now = self._host.runtime.now()
        # Half of the time: the call itself comes after that.
        until = now + seconds_left(answer_by, now) / 2
        # Nodes of the last map first, because seeds may be long gone; nodes that have failed last.
        addresses = sorted(dict.fromkeys([*self._nodes, *self._seeds]), key=self._failed.__contains__)
        asks = [(self._anywhere.moved(*address).label, partial(self._ask, address, until)) for address in addresses]
        found = await ask_first(self._host.runtime, asks, until)
        if isinstance(found, list):
            raise_configuration(found)
            message = f"no node of the Cluster can be asked: {'; '.join(map(str, found))}"
            raise unsent(message) from found[0].__cause__
        address, ranges = found
        self._failed.discard(address)
        await self._use_map(ranges, self._node_at(address))

    async def _ask(self, address: Address, until: Instant) -> tuple[Address, list[Any]]:
        node = self._node_at(address)
        try:
            reply = await node.call(pack("CLUSTER", "SLOTS"), resend=True, answer_by=until)
        except BackendUnavailable:
            self._failed.add(address)
            raise
        if not reply:
            message = f"{node.label} knows no slots"
            raise BackendUnavailable(message)
        return address, cast("list[Any]", reply)

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
            target = self._anywhere.moved(*address)
            node = RedisNode(self._host.runtime, target, self._prefix, Handshake(self._host, in_cluster=True))
            # Another thread may have opened one meanwhile. Nothing is connected yet.
            node = self._nodes.setdefault(address, node)
        return node

    async def ping(self) -> None:
        await self._load_slots(inf)

    async def close(self) -> None:
        """See `Topology.close`. The nodes stay known: a call that is under way must not open others in their place."""
        for node in list(self._nodes.values()):
            await node.close()


def _note_sent(error: LockError, before: bool) -> bool:  # noqa: FBT001
    """Tell whether the request may have been carried out, by the last call or one before; note it on the error."""
    if isinstance(error, BackendUnavailable) and not isinstance(error.__cause__, ServerSaid):
        error.sent = before or error.sent
        return error.sent
    return before


def _code(error: LockError) -> str:
    return "" if error.__cause__ is None else code_of(error.__cause__)


async def _call(
    node: RedisNode, script: Command, body: bytes, replicas: int, answer_by: float, *, asking: bool, resend: bool
) -> Reply:
    """Run a script at one node; `asking` (the command ASKING) is needed while the node takes over the slot."""
    if asking:
        commands = [pack("ASKING"), script.loading_command(body)]
        if replicas:
            commands.append(node.wait_command(replicas, answer_by))
        _, *replies = await node.call_many(commands, alone=True, answer_by=answer_by)
        (result,) = node.results(replies, replicas)
    elif replicas:
        (result,) = await node.run_many(script, [("", body)], replicas=replicas, answer_by=answer_by)
    else:
        return await node.run(script, "", body, resend=resend, answer_by=answer_by)
    if isinstance(result, LockError):
        raise result
    return result
