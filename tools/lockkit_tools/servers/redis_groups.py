"""
Several Redis nodes that belong together: Sentinels, Cluster, independent nodes.

All are set up over the nodes' own commands; nothing needs `redis-cli` or a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from lockkit_tools.servers.base import Server, ServerGroup, wait_until
from lockkit_tools.servers.errors import ServerError
from lockkit_tools.servers.redis import RedisProgram, RedisServer, quoted
from lockkit_tools.servers.resp import Reply, fields

# All of Cluster's hash slots.
SLOTS_COUNT = 16_384

# Time without an answer until Sentinels and Cluster nodes take a node for dead, in ms.
# Shorter makes failovers quick but starts them on a machine that is only busy.
DOWN_AFTER_MS = 1_000


class RedisNodes(ServerGroup):
    """
    Independent Redis nodes, as Redlock wants them.

    Faults of single nodes: ``nodes.servers[2].kill()``.

    Args:
        make: Makes one node, e.g. ``lambda: RedisServer(appendonly=True)``.
    """

    kind = "redlock"

    def __init__(self, count: int = 3, *, make: Callable[[], RedisServer] = RedisServer) -> None:
        self.nodes = [make() for _ in range(count)]

    @property
    def servers(self) -> Sequence[RedisServer]:
        return self.nodes

    @property
    def url(self) -> str:
        """``redlock://…`` (with TLS ``redlocks://…``) with all nodes."""
        hosts = ",".join(f"{node.userinfo}{node.address}" for node in self.nodes)
        if not self.nodes[0].tls:
            return f"redlock://{hosts}"
        return f"redlocks://{hosts}/0?{self.nodes[0].tls_query}"


class Sentinel(RedisProgram):
    """
    One Sentinel that watches `master`.

    Args:
        master: The master at the time of the first start.
        quorum: Sentinels that must agree that the master is down.
        down_after_ms: Time without an answer until it counts as down.
    """

    kind = "redis-sentinel"
    file = "sentinel.conf"

    def __init__(self, master: RedisServer, *, quorum: int, down_after_ms: int) -> None:
        super().__init__()
        self._master = master
        self._quorum = quorum
        self._down_after_ms = down_after_ms

    @property
    def url(self) -> str:
        """``redis+sentinel://…`` with this Sentinel only."""
        return f"redis+sentinel://{self.address}/{RedisSentinels.name}/0"

    def master(self) -> dict[str, str]:
        """What this Sentinel knows of the master now."""
        with self.connect() as connection:
            return _pairs(connection.call("SENTINEL", "MASTER", RedisSentinels.name))

    def replicas(self) -> list[dict[str, str]]:
        """What this Sentinel knows of each replica."""
        with self.connect() as connection:
            return [_pairs(reply) for reply in connection.call_list("SENTINEL", "REPLICAS", RedisSentinels.name)]

    def command(self) -> Sequence[str]:
        return [*super().command(), "--sentinel"]

    def configuration(self) -> list[tuple[str, str]]:
        name, master = RedisSentinels.name, self._master
        lines = [
            ("bind", self.host),
            ("port", str(self.port)),
            ("dir", str(self.data)),
            ("daemonize", "no"),
            ("protected-mode", "no"),
            ("sentinel monitor", f"{name} {master.host} {master.port} {self._quorum}"),
            ("sentinel down-after-milliseconds", f"{name} {self._down_after_ms}"),
            # A failover that did not come off is tried again after twice this time.
            ("sentinel failover-timeout", f"{name} {2 * self._down_after_ms}"),
        ]
        if master.password is not None:
            lines.append(("sentinel auth-pass", f"{name} {quoted(master.password)}"))
        return lines

    def ask(self) -> str | None:
        """Ready when it answers PING."""
        with self.connect() as connection:
            connection.call("PING")
        return None


class RedisSentinels(ServerGroup):
    """
    A master and replicas, watched by Sentinels.

    Args:
        sentinels: How many Sentinels; a majority must agree on a failover.
        password: Password of the Redis nodes (the Sentinels have none).
        down_after_ms: Time without an answer until a node counts as down.
    """

    kind = "redis-sentinel"
    name = "mymaster"

    def __init__(
        self,
        *,
        replicas: int = 1,
        sentinels: int = 3,
        password: str | None = None,
        down_after_ms: int = DOWN_AFTER_MS,
    ) -> None:
        first = RedisServer(password=password)
        # The first master is to know the password of the next one, when it comes back.
        if password is not None:
            first.settings["masterauth"] = quoted(password)
        self.nodes = [first, *(RedisServer(password=password, replica_of=first) for _ in range(replicas))]
        quorum = sentinels // 2 + 1
        self.sentinels = [Sentinel(first, quorum=quorum, down_after_ms=down_after_ms) for _ in range(sentinels)]

    @property
    def servers(self) -> Sequence[Server]:
        return [*self.nodes, *self.sentinels]

    @property
    def url(self) -> str:
        """``redis+sentinel://…`` with all Sentinels."""
        hosts = ",".join(sentinel.address for sentinel in self.sentinels)
        return f"redis+sentinel://{self.nodes[0].userinfo}{hosts}/{self.name}/0"

    @property
    def master(self) -> RedisServer:
        """The node that the Sentinels name as master now."""
        return self._master_of(self._running_sentinels()[0])

    @property
    def replicas(self) -> list[RedisServer]:
        """The other nodes, running or not."""
        master = self.master
        return [node for node in self.nodes if node is not master]

    def failover(self) -> RedisServer:
        """Kills the master, and waits until all Sentinels agree on another one, which knows it."""
        old = self.master
        old.kill()
        wait_until(lambda: self._missing_after_failover(old))
        return self.master

    def arrange(self) -> None:
        """Waits until every Sentinel knows all nodes and all other Sentinels."""
        for sentinel in self.sentinels:
            self._hurry(sentinel)
        wait_until(self._missing_in_view)

    def _hurry(self, sentinel: Sentinel) -> None:
        """
        Lets a Sentinel look around every 200 ms instead of every 2 to 10 s.

        And shortens the time for which it trusts nothing after its own process was
        delayed ("tilt mode", 30 s), so that a busy machine does not fail a test.

        PING-PERIOD does not go below 500: with the master down a Sentinel asks replicas
        every second, and promotes none whose answer is older than five ping periods.
        """
        with sentinel.connect() as connection:
            version = connection.info("server")["redis_version"]
            if int(version.partition(".")[0]) < 7:
                return  # they find each other all the same, later
            connection.call(
                *("SENTINEL", "DEBUG", "INFO-PERIOD", 200, "PUBLISH-PERIOD", 200),
                *("PING-PERIOD", 500, "ASK-PERIOD", 200, "TILT-PERIOD", 1000),
            )

    def _missing_in_view(self) -> str | None:
        for sentinel in self._running_sentinels():
            master = sentinel.master()
            others = (int(master["num-slaves"]), int(master["num-other-sentinels"]))
            if others != (len(self.nodes) - 1, len(self.sentinels) - 1):
                return f"{sentinel} sees {others[0]} replicas and {others[1]} other Sentinels"
            if master["flags"] != "master":
                return f"{sentinel} sees the master as {master['flags']}"
            if lagging := [one for one in sentinel.replicas() if not _may_be_promoted(one)]:
                return f"{sentinel} would not promote {lagging}"
        return None

    def _missing_after_failover(self, old: RedisServer) -> str | None:
        for sentinel in self._running_sentinels():
            node = self._master_of(sentinel)
            if node is old:
                return f"{sentinel} still names the old master"
            if (role := node.role()) != "master":
                return f"{node} is still {role}"
        return None

    def _running_sentinels(self) -> list[Sentinel]:
        return [sentinel for sentinel in self.sentinels if sentinel.running]

    def _master_of(self, sentinel: Sentinel) -> RedisServer:
        with sentinel.connect() as connection:
            host, port = connection.call_list("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
        for node in self.nodes:
            if node.address == f"{host}:{port}":
                return node
        raise ServerError(f"the Sentinels name {host}:{port} as master, which is none of our nodes")


def _pairs(reply: Reply) -> dict[str, str]:
    assert isinstance(reply, list)
    words = [str(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=True))


def _may_be_promoted(replica: dict[str, str]) -> bool:
    return replica["flags"] == "slave" and replica["master-link-status"] == "ok"


class ClusterNode(RedisServer):
    """One node of a Redis Cluster."""

    kind = "redis-cluster"

    def __init__(self, *, password: str | None = None, node_timeout_ms: int) -> None:
        super().__init__(password=password)
        self.settings |= {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": str(node_timeout_ms),
        }
        if password is not None:
            self.settings["masterauth"] = quoted(password)

    def node_id(self) -> str:
        """What the node calls itself."""
        return str(self.call("CLUSTER", "MYID"))

    def cluster_info(self) -> dict[str, str]:
        """CLUSTER INFO as fields."""
        return fields(str(self.call("CLUSTER", "INFO")))

    def slot_ranges(self) -> list[tuple[range, int]]:
        """Which slots are served by the master at which port, as this node sees it."""
        # First and last slot, and host and port of the master, before its replicas.
        replies: Any = self.call("CLUSTER", "SLOTS")
        return [(range(first, last + 1), master[1]) for first, last, master, *_ in replies]


class RedisCluster(ServerGroup):
    """
    A Redis Cluster, its slots shared evenly among the masters.

    Args:
        node_timeout_ms: Time without an answer until a node counts as down.
    """

    kind = "redis-cluster"

    def __init__(
        self,
        *,
        masters: int = 3,
        replicas: int = 0,
        password: str | None = None,
        node_timeout_ms: int = DOWN_AFTER_MS,
    ) -> None:
        count = masters * (1 + replicas)
        self.nodes = [ClusterNode(password=password, node_timeout_ms=node_timeout_ms) for _ in range(count)]
        self._masters_count = masters

    @property
    def servers(self) -> Sequence[ClusterNode]:
        return self.nodes

    @property
    def url(self) -> str:
        """``redis+cluster://…`` with all nodes."""
        return f"redis+cluster://{self.nodes[0].userinfo}{','.join(node.address for node in self.nodes)}"

    def arrange(self) -> None:
        """Joins the nodes unless they know each other, and waits until all call it healthy."""
        if int(self.nodes[0].cluster_info()["cluster_known_nodes"]) == 1:
            self._share_slots()
            for node in self.nodes[1:]:
                self.nodes[0].call("CLUSTER", "MEET", node.host, node.port, node.port_for("peers"))
            wait_until(self._missing_peers)
            masters, replicas = self.nodes[: self._masters_count], self.nodes[self._masters_count :]
            for index, replica in enumerate(replicas):
                replica.call("CLUSTER", "REPLICATE", masters[index % len(masters)].node_id())
        wait_until(self._missing_health)

    def failover(self) -> ClusterNode:
        """Kills the first node that is a master, and waits until its replica serves its slots."""
        old = self._running_masters()[0]
        slot = self.slots_of(old)[0]
        old.kill()
        wait_until(lambda: self._missing_after_failover(slot, old))
        wait_until(self._missing_health)
        return self.owner_of(slot)

    def slot_of(self, key: str) -> int:
        """The hash slot of a key."""
        return int(str(self._anyone().call("CLUSTER", "KEYSLOT", key)))

    def owner_of(self, slot: int) -> ClusterNode:
        """The master that serves a slot."""
        (port,) = (port for slots, port in self._anyone().slot_ranges() if slot in slots)
        return next(node for node in self.nodes if node.port == port)

    def slots_of(self, node: ClusterNode) -> list[int]:
        """The hash slots that a master serves."""
        ranges = self._anyone().slot_ranges()
        return [slot for slots, port in ranges if port == node.port for slot in slots]

    def move_slot(self, slot: int, target: ClusterNode) -> None:
        """Moves a slot with its keys to another master, as resharding does."""
        source = self.owner_of(slot)
        if source is target:
            return
        self.begin_move(slot, source, target)
        password = ["AUTH", source.password] if source.password is not None else []
        while keys := self._keys_in(slot, source):
            source.call("MIGRATE", target.host, target.port, "", 0, 5000, *password, "KEYS", *keys)
        # The target first: were the source told first, and died, nobody would serve it.
        others = [node for node in self._running_masters() if node not in (source, target)]
        owner = target.node_id()
        for node in [target, source, *others]:
            node.call("CLUSTER", "SETSLOT", slot, "NODE", owner)

    def begin_move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        """Only the first half of `move_slot`: keys that are not there yet get ASK answers."""
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source.node_id())
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", target.node_id())

    @staticmethod
    def _keys_in(slot: int, node: ClusterNode) -> list[str]:
        keys = node.call("CLUSTER", "GETKEYSINSLOT", slot, 100)
        assert isinstance(keys, list)
        return [str(key) for key in keys]

    def _share_slots(self) -> None:
        count = self._masters_count
        bounds = [SLOTS_COUNT * index // count for index in range(count + 1)]
        for index, (first, end) in enumerate(pairwise(bounds)):
            self.nodes[index].call("CLUSTER", "ADDSLOTS", *range(first, end))
            # Distinct epochs from the start: nodes that find two equal ones first
            # have to settle which of them gives way.
            self.nodes[index].call("CLUSTER", "SET-CONFIG-EPOCH", index + 1)

    def _missing_peers(self) -> str | None:
        for node in self.nodes:
            known = node.cluster_info()["cluster_known_nodes"]
            if int(known) < len(self.nodes):
                return f"{node} knows {known} of {len(self.nodes)} nodes"
        return None

    def _missing_after_failover(self, slot: int, old: ClusterNode) -> str | None:
        for node in self.nodes:
            if node.running and any(slot in slots and port == old.port for slots, port in node.slot_ranges()):
                return f"{node} still takes {old} for the master"
        return None

    def _missing_health(self) -> str | None:
        """Why not every running node says that all slots are served."""
        for node in self.nodes:
            if not node.running:
                continue
            info = node.cluster_info()
            if info["cluster_state"] != "ok" or int(info["cluster_slots_ok"]) < SLOTS_COUNT:
                return f"{node} calls the cluster {info['cluster_state']}, with {info['cluster_slots_ok']} slots served"
        return None

    def _running_masters(self) -> list[ClusterNode]:
        return [node for node in self.nodes if node.running and node.role() == "master"]

    def _anyone(self) -> ClusterNode:
        return next(node for node in self.nodes if node.running)
