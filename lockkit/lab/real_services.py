"""
The lock services of measured scenes: throw-away servers, the network between them and the clients, and its faults.

A message to a server of its own goes directly. What is to be cut off, slowed down or led elsewhere goes through a proxy
on loopback, one for each client and server.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from lockkit.backends.redis.keys import lock_key
from lockkit.lab.services import NAME
from lockkit.testing.servers import EtcdCluster, RedisServer, ServerError, ZooKeeperEnsemble
from lockkit.testing.servers.base import start_all, wait_until
from lockkit.testing.servers.proxy import FaultProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from lockkit.lab.scenario import Scene, Step
    from lockkit.testing.servers.base import Server

__all__ = ["PARTS", "RealService", "Road", "open_real_service", "why_not"]

LATENCY_SHOWN = 0.01
"""Least latency of a scene that the proxies imitate, seconds. Shorter ones are those of loopback anyway."""

PATIENCE = 30.0
"""Seconds after which a server that should have answered never will."""

LOOK_SECONDS = 0.01
"""Pause between two looks at the key of the lock. Longer draws the server's lane less exactly."""

HOLDER_LOOK_SECONDS = 0.05
"""The same for etcd and ZooKeeper, where a look is several requests."""

CLOCKS: Final = (
    "a server's clock is that of its machine, and nobody sets that for a scene (libfaketime is no way around it: "
    "redis-server does not start with it)"
)

PARTS: Final = {
    "redis": "measured: lockkit in real processes, on a real Redis",
    "redis+sentinel": "measured: lockkit in real processes, on a real Redis with a replica; a proxy of the lab leads "
    "clients to the master, in place of Sentinels",
    "redlock": "measured: lockkit in real processes, on five real Redis nodes",
    "etcd": "measured: lockkit in real processes, on a real etcd",
    "zookeeper": "measured: lockkit in real processes, on a real ZooKeeper",
    "by-hand": "measured: no lockkit; a lock written by hand, in real processes on a real Redis",
}
"""What is real in the measured scenes of each backend."""

_CLIENT_STEPS: Final = {
    "acquire", "lead", "check", "write", "release", "pause", "kill", "cut", "clock"
}  # fmt: skip
_NODE_STEPS: Final = {
    "redis": {"stop", "pause"},
    "by-hand": {"stop", "pause"},
    "redis+sentinel": {"lag", "failover"},
    "redlock": {"stop", "pause"},
    "etcd": {"pause", "failover"},
    "zookeeper": {"pause", "failover"},
}


def why_not(scene: Scene) -> str:
    """Say why a scene cannot be played for real; empty if it can."""
    kind = scene.backends[0].kind
    for step in steps_of(scene):
        if step.action not in (_NODE_STEPS[kind] if step.on_node else _CLIENT_STEPS):
            if step.action == "clock":
                return CLOCKS
            return f"{step.action!r} cannot be done to a real {kind}"
    return ""


def steps_of(scene: Scene) -> list[Step]:
    """Give the steps of a scene that concern its backend."""
    backend = scene.backends[0]
    return [
        step
        for step in scene.steps
        if (not step.backends or backend.kind in step.backends) and (not step.on_node or step.who in backend.nodes)
    ]


class Road(FaultProxy):
    """The way to a server, which can lead to another one later."""

    def lead_to(self, server: Server) -> None:
        """Lead new connections to another server, and close those that there are."""

        def step() -> None:
            self._network.target = (server.host, server.port)

        self._do(step)
        self.cut(reset=True)


class RealService:
    """
    Real servers of a scene, and their faults.

    Attributes:
        nodes: Its servers by the names of their lanes.
        look_seconds: Pause between two looks at whom a server keeps the lock for.
    """

    look_seconds = LOOK_SECONDS

    def __init__(self, scene: Scene) -> None:
        """Make the servers; nothing runs yet."""
        self.scene = scene
        self.kind = scene.backends[0].kind
        self.nodes = {name: RedisServer() for name in scene.backends[0].nodes}
        self.roads: dict[tuple[str, str], Road] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start the servers and open the roads."""
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End and remove everything."""
        self._stack.close()

    def url_for(self, client: str) -> str:
        """Give the URL at which a client reaches the service."""
        addresses = ",".join(
            (self.roads.get((client, name)) or server).address for name, server in self.members.items()
        )
        return self._url(addresses)

    @property
    def members(self) -> dict[str, Server]:
        """The servers that clients connect to, by name."""
        return dict(self.nodes)

    def members_of(self, node: str) -> list[str]:
        """Name the servers that a node of the scene stands for."""
        return [node]

    # -- faults --------------------------------------------------------------------------------------------------------

    def cut(self, client: str, nodes: Sequence[str]) -> None:
        """Let nothing through between a client and nodes."""
        for road in self._between(client, nodes):
            road.blackhole()

    def heal(self, client: str, nodes: Sequence[str]) -> None:
        """Let everything through again."""
        for road in self._between(client, nodes):
            road.heal()
        self._imitate_latency()

    def stop(self, name: str, *, lose_data: bool) -> None:
        """Crash a server."""
        self.nodes[name].kill()
        if lose_data:
            self.nodes[name].erase()

    def start(self, name: str) -> None:
        """Start it again."""
        self.nodes[name].start()

    def pause(self, name: str) -> None:
        """Stop it from answering."""
        self.nodes[name].pause()

    def resume(self, name: str) -> None:
        """Let it answer again."""
        self.nodes[name].resume()

    def lag(self, *, stall: bool) -> None:
        """Stall replication, or let it go on."""
        raise NotImplementedError

    def fail(self, name: str) -> None:
        """Crash the server that leads."""
        raise NotImplementedError

    def promote(self) -> None:
        """Have another one lead."""
        raise NotImplementedError

    def rejoin(self) -> None:
        """Bring the former leader back."""
        raise NotImplementedError

    # -- what a server keeps -------------------------------------------------------------------------------------------

    def look_at(self, name: str) -> tuple[Callable[[], str], Callable[[], None]]:
        """Give a function that tells the owner that a server keeps the lock for, or "", and one that ends it."""
        import redis  # noqa: PLC0415 - the driver

        key = lock_key("lockkit", NAME)
        client = redis.Redis.from_url(self.nodes[name].url, socket_timeout=1.0, retry=None)

        def look() -> str:
            try:
                value = client.get(key)
            except (redis.RedisError, OSError):
                return ""
            return value.decode() if isinstance(value, bytes) else ""

        return look, client.close

    # -- starting ------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        for server in self.nodes.values():
            self._stack.callback(server.close)
        start_all(list(self.nodes.values()))
        if self.kind == "redlock":
            self._let_nodes_vote()
        self._open_roads()

    def _let_nodes_vote(self) -> None:
        """
        Use new nodes of a Redlock for the first time, so that they vote, as if they had been running for long.

        With more time for an answer than the clients of the scene give them: if one does not answer at its first use,
        the others do not vote for a minute, because it could be a set that has lost its data.
        """
        import lockkit  # noqa: PLC0415 - above all that is below

        url = self._url(",".join(server.address for server in self.nodes.values()))
        url += ("&" if "?" in url else "?") + f"node_timeout={PATIENCE:g}"
        with lockkit.connect(url, ttl=self.scene.ttl) as client:
            client.lock(f"{NAME}-first").acquire(PATIENCE).release()

    def _open_roads(self) -> None:
        """Open a road where something is to happen between a client and a server; the others connect directly."""
        steps = steps_of(self.scene)
        slow = self.scene.latency[0] >= LATENCY_SHOWN
        for client in self.scene.clients:
            nodes = [
                node
                for step in steps
                if step.action == "cut" and step.who == client
                for node in step.nodes or self.scene.backends[0].nodes
            ]
            if slow or self.kind == "redis+sentinel":
                nodes = list(self.scene.backends[0].nodes)
            for name in dict.fromkeys(member for node in nodes for member in self.members_of(node)):
                if name in self.members:
                    self.roads[client, name] = self._open_road(self.members[name])
        self._imitate_latency()

    def _open_road(self, server: Server) -> Road:
        return self._stack.enter_context(Road(server.host, server.port))

    def _imitate_latency(self) -> None:
        latency = sum(self.scene.latency) / 2
        if self.scene.latency[0] >= LATENCY_SHOWN:
            for road in self.roads.values():
                road.delay(latency, latency)

    def _between(self, client: str, nodes: Sequence[str]) -> list[Road]:
        names = [member for node in nodes or self.scene.backends[0].nodes for member in self.members_of(node)]
        return [self.roads[client, name] for name in names if (client, name) in self.roads]

    def _url(self, addresses: str) -> str:
        if self.kind == "redlock":
            words = [f"{name}={'1' if value else '0'}" for name, value in self.scene.backends[0].options]
            return f"redlock://{addresses}/0" + ("?" + "&".join(words) if words else "")
        replicas = self.scene.backends[0].option("replicas", 0)
        return f"redis://{addresses}/0" + (f"?replicas={replicas}" if replicas else "")


class _Replicated(RealService):
    """A Redis with a replica. A proxy leads the clients to the master."""

    def _start(self) -> None:
        super()._start()
        self._master, self._replica = self.nodes["master"], self.nodes["replica"]
        self._stalled = False
        self._replicate()

    @property
    def members(self) -> dict[str, Server]:
        """One address, that of the master."""
        return {"master": self.nodes["master"]}

    def lag(self, *, stall: bool) -> None:
        """See `RealService.lag`. The master's changes stay on their way."""
        self._stalled = stall
        if stall:
            self._replication.blackhole(to_server=False)
        else:
            self._replication.heal()

    def fail(self, name: str) -> None:
        """See `RealService.fail`. What was on its way to the replica is lost."""
        assert name == "master", "a scene of the lab fails over once"
        self._master.kill()
        self._replication.cut()

    def promote(self) -> None:
        """See `RealService.promote`."""
        with self._replica.connect() as connection:
            connection.call("REPLICAOF", "NO", "ONE")
        for (_, name), road in self.roads.items():
            assert name == "master", "clients know one address"
            road.lead_to(self._replica)
        self._master, self._replica = self._replica, self._master

    def rejoin(self) -> None:
        """See `RealService.rejoin`."""
        self._replica.start()
        self._replicate(wait=False)

    def _replicate(self, *, wait: bool = True) -> None:
        replication = self._replication = self._open_road(self._master)
        if self._stalled:
            replication.blackhole(to_server=False)
        with self._replica.connect() as connection:
            connection.call("REPLICAOF", replication.host, str(replication.port))
            if wait:
                wait_until(self._missing_link)

    def _missing_link(self) -> str | None:
        with self._replica.connect() as connection:
            status = connection.info("replication")["master_link_status"]
        return None if status == "up" else f"the replica's link is {status}"


class _Agreeing(RealService):
    """A member of etcd or ZooKeeper, or three of them if one is to fail."""

    look_seconds = HOLDER_LOOK_SECONDS

    def __init__(self, scene: Scene) -> None:
        """Make the servers; nothing runs yet."""
        super().__init__(scene)
        self.nodes = {}
        self._node = scene.backends[0].nodes[0]
        count = 3 if any(step.action == "failover" for step in steps_of(scene)) else 1
        self._group = EtcdCluster(count) if self.kind == "etcd" else ZooKeeperEnsemble(count)

    @property
    def members(self) -> dict[str, Server]:
        """See `RealService.members`."""
        return {f"{self._node}{index}": server for index, server in enumerate(self._group.servers, 1)}

    def members_of(self, node: str) -> list[str]:
        """See `RealService.members_of`."""
        assert node == self._node, "there is one"
        return list(self.members)

    def pause(self, name: str) -> None:
        """See `RealService.pause`: all members."""
        assert name == self._node, "there is one"
        self._group.pause()

    def resume(self, name: str) -> None:
        """See `RealService.resume`."""
        assert name == self._node, "there is one"
        self._group.resume()

    def fail(self, name: str) -> None:
        """See `RealService.fail`."""
        assert name == self._node, "there is one"
        self._group.leader.kill()

    def promote(self) -> None:
        """See `RealService.promote`: wait until they have elected one."""

        def missing() -> str | None:
            try:
                return None if self._group.leader.running else "the leader has ended"
            except ServerError as error:
                return str(error)

        wait_until(missing)

    def look_at(self, name: str) -> tuple[Callable[[], str], Callable[[], None]]:
        """See `RealService.look_at`. It asks by lockkit."""
        import lockkit  # noqa: PLC0415 - above all that is below

        assert name == self._node, "there is one"
        client = lockkit.connect(self._group.url)

        def look() -> str:
            try:
                holders = client.holders(NAME)
            except lockkit.BackendUnavailable:
                return ""
            return holders[0].owner if holders else ""

        return look, client.close

    def _start(self) -> None:
        self._stack.enter_context(self._group)
        self._open_roads()

    def _url(self, addresses: str) -> str:
        return f"{self.kind}://{addresses}"


def open_real_service(scene: Scene) -> RealService:
    """Make the servers of a scene; a context manager starts and ends them."""
    kind = scene.backends[0].kind
    if kind == "redis+sentinel":
        return _Replicated(scene)
    return _Agreeing(scene) if kind in {"etcd", "zookeeper"} else RealService(scene)
