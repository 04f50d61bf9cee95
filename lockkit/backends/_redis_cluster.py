"""
The node of a Redis Cluster that serves a lock's slot.

Source: "Redis cluster specification" in the Redis documentation: the slot of a key, MOVED and ASK redirection.
redis-py's own Cluster clients are not used, because their two faces share no code and their way to a node costs several
times what the node takes to answer.

All keys of a lock have the same hash tag and so the same slot (`lockkit.backends._redis_script`).
"""

from __future__ import annotations

import binascii
import logging
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from lockkit.backends._redis_errors import code_of, nothing_done, translate
from lockkit.backends._redis_io import ServerSaid, Target, pack, wait_command
from lockkit.backends._redis_route import Greeter, Route, Station, run_group
from lockkit.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence
    from typing import Any

    from lockkit.backend import Host
    from lockkit.backends._redis_io import Reply, Script
    from lockkit.backends._redis_wake import Ears

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

    def __call__(self, station: Station, *, asking: bool) -> Awaitable[T_co]:
        """Ask it; with `asking` the node is about to take the slot over and must be told that we know."""
        ...


def slot_of(key: str) -> int:
    """Give the hash slot of a lock's key, which has no hash tag of its own."""
    # binascii's CRC-CCITT with a start of 0 is the CRC16 of the specification (XMODEM).
    return binascii.crc_hqx(key.encode(), 0) % SLOTS_COUNT


class ClusterRoute(Route):
    """Each lock's own node."""

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
        self._slots: list[Station | None] = [None] * SLOTS_COUNT
        self._outdated = True

    # -- asking ----------------------------------------------------------------------------------------------------

    async def run(self, script: Script, key: str, body: bytes, /, *, resend: bool = False) -> Reply:
        """See `Route.run`."""

        async def attempt(station: Station, *, asking: bool) -> Reply:
            if not asking:
                return await station.node.run(script, key, body, resend=resend)
            _, reply = await station.node.call_many([pack("ASKING"), script.loading_command(body)], alone=True)
            return _checked(reply, station)

        return await self._follow(key, attempt, resend=resend)

    async def run_replicated(self, script: Script, key: str, body: bytes, replicas: int) -> tuple[Reply, int]:
        """See `Route.run_replicated`."""

        async def attempt(station: Station, *, asking: bool) -> tuple[Reply, int]:
            if not asking:
                return await station.node.run_replicated(script, body, replicas)
            commands = [pack("ASKING"), script.loading_command(body), wait_command(replicas)]
            _, reply, acknowledged = await station.node.call_many(commands, alone=True)
            return _checked(reply, station), cast("int", _checked(acknowledged, station))

        return await self._follow(key, attempt)

    async def run_many(
        self, script: Script, calls: Sequence[tuple[str, bytes]], *, replicas: int
    ) -> list[Reply | LockError]:
        """See `Route.run_many`. What has moved is followed one by one."""
        results: list[Reply | LockError] = [None] * len(calls)
        groups: dict[int, tuple[Station, list[int]]] = {}
        for index, (key, _) in enumerate(calls):
            try:
                station = await self.station(key)
            except LockError as error:
                results[index] = error
            else:
                groups.setdefault(id(station), (station, []))[1].append(index)
        for station, indexes in groups.values():
            replies = await run_group(station.node, script, [calls[index][1] for index in indexes], replicas)
            for index, reply in zip(indexes, replies, strict=True):
                results[index] = reply
        for index, result in enumerate(results):
            if isinstance(result, LockError) and _code(result) in {"MOVED", "ASK", "TRYAGAIN"}:
                results[index] = await self._renew_moved(script, *calls[index], replicas)
            elif isinstance(result, LockError) and not isinstance(result.__cause__, ServerSaid):
                self._outdated = True
        return results

    async def _renew_moved(self, script: Script, key: str, body: bytes, replicas: int) -> Reply | LockError:
        try:
            if not replicas:
                return await self.run(script, key, body)
            reply, acknowledged = await self.run_replicated(script, key, body, replicas)
        except LockError as error:
            return error
        if acknowledged < replicas:
            return BackendUnavailable(f"{acknowledged} of {replicas} replicas acknowledged in time")
        return reply

    async def _follow(self, key: str, attempt: Attempt[T], *, resend: bool = False) -> T:
        """Ask the node of a key, and whom it names instead."""
        station, asking = await self.station(key), False
        last: LockError | None = None
        for _ in range(REDIRECTS_MAX):
            try:
                return await attempt(station, asking=asking)
            except LockError as error:
                code, last = _code(error), error
                if code in {"MOVED", "ASK"}:
                    asking = code == "ASK"
                    station = self._named(cast("ServerSaid", error.__cause__).text, station, key, moved=not asking)
                elif code == "TRYAGAIN":
                    await self._host.runtime.sleep(TRY_AGAIN_PAUSE)
                elif isinstance(error.__cause__, ServerSaid) and code != "CLUSTERDOWN":
                    raise
                else:
                    # Perhaps another node serves the slot now.
                    self._outdated = True
                    if not (resend or nothing_done(error)):
                        raise
                    successor = await self.station(key)
                    if successor is station:
                        raise
                    station, asking = successor, False
        assert last is not None, "asked no node at all"
        raise last

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

    async def station(self, key: str) -> Station:
        """See `Route.station`."""
        station = self._slots[slot_of(key)]
        if station is not None and not self._outdated:
            return station
        await self._learn()
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
        await self._learn()
        return list(dict.fromkeys(station for station in self._slots if station is not None))

    async def _learn(self) -> None:
        """Ask any node who serves which slots."""
        failures: list[str] = []
        # Those of the last map first, because seeds may be long gone.
        for address in dict.fromkeys([*self._stations, *self._seeds]):
            station = self._station_at(address)
            try:
                reply = await station.node.call(pack("CLUSTER", "SLOTS"), resend=True)
            except BackendUnavailable as error:
                failures.append(str(error))
                continue
            if not reply:
                failures.append(f"{station.node.label} knows no slots")
                continue
            await self._redraw(cast("list[Any]", reply), station)
            return
        raise BackendUnavailable(f"no node of the Cluster can be asked: {'; '.join(failures)}")

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
                del self._stations[address]
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
        await self._learn()

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
