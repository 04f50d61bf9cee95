"""
The node of a Redis Cluster that serves a lock's slot.

Source: "Redis cluster specification" in the Redis documentation: the slot of a key, MOVED and ASK redirection.
redis-py's own Cluster clients are not used, because their two faces share no code and their way to a node costs several
times what the node takes to answer.

All keys of a lock have the same hash tag and so the same slot (`lockkit.backends.redis.script`).
"""

from __future__ import annotations

import binascii
import logging
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from lockkit.backend import seconds_left
from lockkit.backends.redis.errors import code_of, nothing_done, translate
from lockkit.backends.redis.node import ServerSaid, Target, pack
from lockkit.backends.redis.parallel import ask_all, ask_first, raise_configuration
from lockkit.backends.redis.topology import Greeter, Route, Station, run_group
from lockkit.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence
    from typing import Any

    from lockkit.backend import Host
    from lockkit.backends.redis.node import Reply
    from lockkit.backends.redis.script import Command
    from lockkit.backends.redis.wakeup import Ears

__all__ = ["ClusterRoute", "slot_of"]

log = logging.getLogger("lockkit")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

SLOTS_COUNT = 16384

REDIRECTS_MAX = 8
"""How often one call is sent on. More waits longer for a slot that is moving, fewer gives up earlier."""

TRY_AGAIN_PAUSE = 0.05
"""Seconds between tries while a slot moves key by key."""

Address = tuple[str, int]


class Attempt(Protocol[T_co]):
    """Something that is asked of one node."""

    def __call__(self, station: Station, script: Command, *, asking: bool) -> Awaitable[T_co]:
        """Run the script; with `asking` the node is about to take the slot over and must be told that we know."""
        ...


def slot_of(key: str) -> int:
    """Give the hash slot of a lock's key, which has no hash tag of its own."""
    # binascii's CRC-CCITT with a start of 0 is the CRC16 of the specification (XMODEM).
    return binascii.crc_hqx(key.encode(), 0) % SLOTS_COUNT


class ClusterRoute(Route):
    """Each lock's own node."""

    several = True

    def __init__(
        self, seeds: Sequence[Address], arguments: Mapping[str, Any], host: Host, prefix: str, *, tls: bool
    ) -> None:
        """
        Ask nobody yet.

        Args:
            seeds: Some nodes, to learn the others from.
            arguments: redis-py's, for all nodes.
            host: The engine's side.
            prefix: Of channels.
            tls: The nodes speak TLS.
        """
        self._seeds = list(seeds)
        self._arguments = arguments
        self._host = host
        self._prefix = prefix
        self._tls = tls
        self._stations: dict[Address, Station] = {}
        self._failed: set[Address] = set()  # are asked last who serves which slots
        self._slots: list[Station | None] = [None] * SLOTS_COUNT
        self._outdated = True

    # -- asking ----------------------------------------------------------------------------------------------------

    async def run(
        self, script: Command, key: str, body: bytes, /, *, resend: bool = False, answer_by: float = inf
    ) -> Reply:
        """See `Route.run`."""
        answer_by = self._until(answer_by)

        async def attempt(station: Station, script: Command, *, asking: bool) -> Reply:
            if not asking:
                return await station.node.run(script, key, body, resend=resend, answer_by=answer_by)
            commands = [pack("ASKING"), script.loading_command(body)]
            _, reply = await station.node.call_many(commands, alone=True, answer_by=answer_by)
            return _checked(reply, station)

        return await self._follow(script, key, attempt, answer_by, resend=resend)

    async def run_replicated(
        self, script: Command, key: str, body: bytes, replicas: int, answer_by: float
    ) -> tuple[Reply, int]:
        """See `Route.run_replicated`."""
        answer_by = self._until(answer_by)

        async def attempt(station: Station, script: Command, *, asking: bool) -> tuple[Reply, int]:
            node = station.node
            if not asking:
                return await node.run_replicated(script, body, replicas, answer_by=answer_by)
            commands = [pack("ASKING"), script.loading_command(body), node.wait_command(replicas, answer_by)]
            _, reply, acknowledged = await node.call_many(commands, alone=True, answer_by=answer_by)
            return _checked(reply, station), cast("int", _checked(acknowledged, station))

        return await self._follow(script, key, attempt, answer_by)

    def _until(self, answer_by: float) -> float:
        now = self._host.runtime.now()
        return now + seconds_left(answer_by, now)

    async def run_many(
        self, script: Command, calls: Sequence[tuple[str, bytes]], *, replicas: int = 0, answer_by: float = inf
    ) -> list[Reply | LockError]:
        """See `Route.run_many`. All nodes at the same time; what has moved is followed one by one."""
        answer_by = self._until(answer_by)
        results: list[Reply | LockError] = [None] * len(calls)
        groups: dict[int, tuple[Station, list[int]]] = {}
        for index, (key, _) in enumerate(calls):
            try:
                station = await self.station(key, answer_by)
            except LockError as error:
                results[index] = error
            else:
                groups.setdefault(id(station), (station, []))[1].append(index)
        asks = [
            partial(run_group, station.node, script, [calls[index][1] for index in indexes], replicas, answer_by)
            for station, indexes in groups.values()
        ]
        answers = await ask_all(self._host.runtime, asks, answer_by)
        for (_, indexes), replies in zip(groups.values(), answers, strict=True):
            for number, index in enumerate(indexes):
                results[index] = replies if isinstance(replies, LockError) else replies[number]
        for index, result in enumerate(results):
            if isinstance(result, LockError) and _code(result) in {"MOVED", "ASK", "TRYAGAIN"}:
                results[index] = await self._run_moved(script, *calls[index], replicas, answer_by)
            elif isinstance(result, LockError) and not isinstance(result.__cause__, ServerSaid):
                self._doubt(self._slots[slot_of(calls[index][0])])
        return results

    async def _run_moved(
        self, script: Command, key: str, body: bytes, replicas: int, answer_by: float
    ) -> Reply | LockError:
        try:
            if not replicas:
                return await self.run(script, key, body, answer_by=answer_by)
            reply, acknowledged = await self.run_replicated(script, key, body, replicas, answer_by)
        except LockError as error:
            return error
        if acknowledged < replicas:
            return BackendUnavailable(f"{acknowledged} of {replicas} replicas acknowledged in time")
        return reply

    async def _follow(
        self, script: Command, key: str, attempt: Attempt[T], answer_by: float, *, resend: bool = False
    ) -> T:
        """Ask the node of a key, and the one that it names instead."""
        now = self._host.runtime.now
        station, asking = await self.station(key, answer_by), False
        last: LockError | None = None
        for _ in range(REDIRECTS_MAX):
            try:
                return await attempt(station, script, asking=asking)
            except LockError as error:
                code, last = _code(error), error
                if code in {"MOVED", "ASK"}:
                    asking = code == "ASK"
                    station = self._named(cast("ServerSaid", error.__cause__).text, station, key, moved=not asking)
                elif code == "TRYAGAIN" and script.alone is not None:
                    script = script.alone
                elif code == "TRYAGAIN":
                    if now() + TRY_AGAIN_PAUSE >= answer_by:
                        raise
                    await self._host.runtime.sleep(TRY_AGAIN_PAUSE)
                elif isinstance(error.__cause__, ServerSaid) and code != "CLUSTERDOWN":
                    raise
                else:
                    # Perhaps another node serves the slot now.
                    self._doubt(station)
                    if now() >= answer_by or not (resend or nothing_done(error)):
                        raise
                    successor = await self.station(key, answer_by)
                    if successor is station:
                        raise
                    station, asking = successor, False
        assert last is not None, "asked no node at all"
        raise last

    def _doubt(self, station: Station | None) -> None:
        """Ask who serves which slots before the next call, and this node last."""
        self._outdated = True
        self._failed.update(address for address, one in list(self._stations.items()) if one is station)

    def _named(self, text: str, asked: Station, key: str, *, moved: bool) -> Station:
        """Give the node that ``MOVED slot host:port`` names; an empty host is that of the node which says so."""
        host, _, port = text.split()[2].rpartition(":")
        station = self._station_at((host or asked.node.label.rpartition(":")[0], int(port)))
        if moved:
            log.info("slot %d is served by %s now", slot_of(key), station.node.label)
            self._slots[slot_of(key)] = station
            self._outdated = True
            # Others of our locks may have moved with it, perhaps in a failover that has lost them.
            self._host.confirm_soon()
        return station

    # -- the map of slots ------------------------------------------------------------------------------------------

    def ears(self, key: str) -> Ears | None:
        """See `Route.ears`."""
        station = self._slots[slot_of(key)]
        return None if station is None else station.ears

    async def station(self, key: str, answer_by: float = inf) -> Station:
        """See `Route.station`."""
        station = self._slots[slot_of(key)]
        if station is not None and not self._outdated:
            return station
        await self._learn(answer_by)
        station = self._slots[slot_of(key)]
        if station is None:
            message = f"no node of the Cluster serves slot {slot_of(key)}: see CLUSTER INFO"
            raise BackendUnavailable(message)
        return station

    async def masters(self) -> list[Station]:
        """
        Ask who serves which slots, and give those who serve any.

        Raises:
            BackendUnavailable: No node can be asked, or none serves a slot.
        """
        await self._learn(inf)
        return list(dict.fromkeys(station for station in self._slots if station is not None))

    async def _learn(self, answer_by: float) -> None:
        """Ask any node who serves which slots; none that hangs is waited for."""
        now = self._host.runtime.now()
        # Half of the time: the node itself has to be asked after that.
        until = now + seconds_left(answer_by, now) / 2
        # Those of the last map first, because seeds may be long gone; those that have failed last.
        addresses = sorted(dict.fromkeys([*self._stations, *self._seeds]), key=self._failed.__contains__)
        asks = [partial(self._ask, address, until) for address in addresses]
        found = await ask_first(self._host.runtime, asks, until)
        if isinstance(found, list):
            raise_configuration(found)
            message = f"no node of the Cluster can be asked: {'; '.join(map(str, found))}"
            raise BackendUnavailable(message)
        address, ranges = found
        self._failed.discard(address)
        await self._redraw(ranges, self._station_at(address))

    async def _ask(self, address: Address, until: float) -> tuple[Address, list[Any]]:
        node = self._station_at(address).node
        try:
            reply = await node.call(pack("CLUSTER", "SLOTS"), resend=True, answer_by=until)
        except BackendUnavailable:
            self._failed.add(address)
            raise
        if not reply:
            message = f"{node.label} knows no slots"
            raise BackendUnavailable(message)
        return address, cast("list[Any]", reply)

    async def _redraw(self, ranges: list[Any], asked: Station) -> None:
        """Take over a map: ranges of ``[first, last, [host, port, …] of the master, replicas…]``."""
        slots: list[Station | None] = [None] * SLOTS_COUNT
        for first, last, (host, port, *_), *_ in ranges:
            name = host.decode() if host else asked.node.label.rpartition(":")[0]
            slots[first : last + 1] = [self._station_at((name, port))] * (last + 1 - first)
        changed = any(old is not None and old is not new for old, new in zip(self._slots, slots, strict=True))
        self._slots = slots
        self._outdated = False
        used = {id(station) for station in slots}
        for address, station in list(self._stations.items()):
            if id(station) not in used:
                self._stations.pop(address, None)
                self._failed.discard(address)
                await station.close()
        if changed:
            self._host.confirm_soon()

    def _station_at(self, address: Address) -> Station:
        station = self._stations.get(address)
        if station is None:
            target = Target.at({**self._arguments, "host": address[0], "port": address[1]}, tls=self._tls)
            station = self._stations[address] = Station.at(target, self._host, self._prefix, Greeter(self._host))
        return station

    async def ping(self) -> None:
        """See `Route.ping`."""
        await self._learn(inf)

    async def close(self) -> None:
        """See `Route.close`."""
        stations, self._stations = self._stations, {}
        self._slots = [None] * SLOTS_COUNT
        self._outdated = True
        for station in stations.values():
            await station.close()


def _code(error: LockError) -> str:
    return "" if error.__cause__ is None else code_of(error.__cause__)


def _checked(reply: Reply, station: Station) -> Reply:
    if isinstance(reply, ServerSaid):
        raise translate(reply, station.node.label) from reply
    return reply
