"""
Several Redis nodes that belong together: Sentinels, Cluster, independent nodes.

All are set up over the nodes' own commands; nothing needs `redis-cli` or a driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from urllib.parse import quote

from lockkit.units import Seconds
from lockkit_tools.servers.base import Server, ServerGroup, wait_until
from lockkit_tools.servers.binaries import find_program
from lockkit_tools.servers.errors import ServerError
from lockkit_tools.servers.redis import RedisServer, quoted
from lockkit_tools.servers.resp import Reply, RespConnection, fields

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


class Sentinel(Server):
    """
    One Sentinel that watches `master`.

    Args:
        master: The master at the time of the first start.
        name: What the master is called.
        quorum: Sentinels that must agree that the master is down.
        down_after_ms: Time without an answer until it counts as down.
    """

    kind = "redis-sentinel"

    def __init__(self, master: RedisServer, *, name: str, quorum: int, down_after_ms: int) -> None:
        super().__init__()
        self._master = master
        self._name = name
        self._quorum = quorum
        self._down_after_ms = down_after_ms

    @property
    def url(self) -> str:
        """``redis+sentinel://…`` with this Sentinel only."""
        return f"redis+sentinel://{self.address}/{self._name}/0"

    def connect(self, *, timeout: Seconds = 5.0) -> RespConnection:
        """A connection for administration; close it after use."""
        return RespConnection((self.host, self.port), timeout=timeout)

    def master_address(self) -> tuple[str, int]:
        """Host and port of the master, as this Sentinel sees it now."""
        with self.connect() as connection:
            host, port = connection.call_list("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._name)
        return str(host), int(str(port))

    def state(self) -> dict[str, str]:
        """What this Sentinel knows of the master (SENTINEL MASTER)."""
        with self.connect() as connection:
            return _pairs(connection.call("SENTINEL", "MASTER", self._name))

    def replicas(self) -> list[dict[str, str]]:
        """What this Sentinel knows of each replica (SENTINEL REPLICAS)."""
        with self.connect() as connection:
            replies = connection.call_list("SENTINEL", "REPLICAS", self._name)
        return [_pairs(reply) for reply in replies]

    def command(self) -> Sequence[str]:
        program = find_program("redis-server", "valkey-server")
        return [str(program), str(self.directory / "sentinel.conf"), "--sentinel"]

    def prepare(self) -> None:
        """Writes sentinel.conf unless it is there: the Sentinel keeps what it learnt in it."""
        if (self.directory / "sentinel.conf").exists():
            return
        name, master = self._name, self._master
        lines = [
            f"bind {self.host}",
            f"port {self.port}",
            f"dir {self.data}",
            "daemonize no",
            "protected-mode no",
            f"sentinel monitor {name} {master.host} {master.port} {self._quorum}",
            f"sentinel down-after-milliseconds {name} {self._down_after_ms}",
            # A failover that did not come off is tried again after twice this time.
            f"sentinel failover-timeout {name} {2 * self._down_after_ms}",
        ]
        if master.password is not None:
            lines.append(f"sentinel auth-pass {name} {quoted(master.password)}")
        self.write("sentinel.conf", "\n".join(lines) + "\n")

    def erase(self) -> None:
        """Removes what the Sentinel learnt."""
        super().erase()
        (self.directory / "sentinel.conf").unlink(missing_ok=True)

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
        name: What the master is called.
        password: Password of the Redis nodes (the Sentinels have none).
        down_after_ms: Time without an answer until a node counts as down.
    """

    kind = "redis-sentinel"

    def __init__(
        self,
        *,
        replicas: int = 1,
        sentinels: int = 3,
        name: str = "mymaster",
        password: str | None = None,
        down_after_ms: int = DOWN_AFTER_MS,
    ) -> None:
        self.name = name
        self.password = password
        first = RedisServer(password=password)
        # The first master is to know the password of the next one, when it comes back.
        if password is not None:
            first.settings["masterauth"] = quoted(password)
        copies = [RedisServer(password=password, replica_of=first) for _ in range(replicas)]
        self.nodes = [first, *copies]
        quorum = sentinels // 2 + 1
        self.sentinels = [
            Sentinel(first, name=name, quorum=quorum, down_after_ms=down_after_ms) for _ in range(sentinels)
        ]

    @property
    def servers(self) -> Sequence[Server]:
        return [*self.nodes, *self.sentinels]

    @property
    def url(self) -> str:
        """``redis+sentinel://…`` with all Sentinels."""
        userinfo = f":{quote(self.password, safe='')}@" if self.password is not None else ""
        hosts = ",".join(sentinel.address for sentinel in self.sentinels)
        return f"redis+sentinel://{userinfo}{hosts}/{self.name}/0"

    @property
    def master(self) -> RedisServer:
        """The node that the Sentinels name as master now."""
        for sentinel in self.sentinels:
            if sentinel.running:
                return self._node_at(sentinel.master_address())
        raise ServerError("no Sentinel runs, so nobody knows the master")

    @property
    def replicas(self) -> list[RedisServer]:
        """The other nodes, running or not."""
        master = self.master
        return [node for node in self.nodes if node is not master]

    def failover(self, *, crash: bool = True, timeout: Seconds = 60.0) -> RedisServer:
        """Makes the Sentinels promote another node, and waits until all agree on it."""
        old = self.master
        if crash:
            old.kill()
        else:
            # Refused while no replica has caught up: one that was just started, say.
            wait_until(lambda: self._ask_for_failover(old), timeout=timeout)
        wait_until(lambda: self._missing_after_failover(old, ask_again=not crash), timeout=timeout)
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
            state = sentinel.state()
            others = (int(state["num-slaves"]), int(state["num-other-sentinels"]))
            if others != (len(self.nodes) - 1, len(self.sentinels) - 1):
                return f"{sentinel} sees {others[0]} replicas and {others[1]} other Sentinels"
            if state["flags"] != "master":
                return f"{sentinel} sees the master as {state['flags']}"
            if lagging := [one for one in sentinel.replicas() if not _may_be_promoted(one)]:
                return f"{sentinel} would not promote {lagging}"
        return None

    def _ask_for_failover(self, old: RedisServer) -> None:
        """Asks the first Sentinel to fail over from `old`, unless it has begun or finished to do so."""
        sentinel = self._running_sentinels()[0]
        if self._node_at(sentinel.master_address()) is not old:
            return
        if "failover_in_progress" in sentinel.state()["flags"]:
            return
        with sentinel.connect() as connection:
            connection.call("SENTINEL", "FAILOVER", self.name)

    def _missing_after_failover(self, old: RedisServer, *, ask_again: bool) -> str | None:
        for sentinel in self._running_sentinels():
            node = self._node_at(sentinel.master_address())
            if node is old:
                # On a machine that stalls, a failover in order is given up after its timeout, or
                # undone when the new master is silent for too long.  Its master being well, no
                # Sentinel tries again on its own.
                if ask_again:
                    self._ask_for_failover(old)
                return f"{sentinel} still names the old master"
            if (role := node.role()) != "master":
                return f"{node} is still {role}"
        return None

    def _running_sentinels(self) -> list[Sentinel]:
        return [sentinel for sentinel in self.sentinels if sentinel.running]

    def _node_at(self, address: tuple[str, int]) -> RedisServer:
        for node in self.nodes:
            if (node.host, node.port) == address:
                return node
        raise ServerError(f"the Sentinels name {address} as master, which is none of our nodes")


def _pairs(reply: Reply) -> dict[str, str]:
    assert isinstance(reply, list)
    words = [str(word) for word in reply]
    return dict(zip(words[::2], words[1::2], strict=True))


def _may_be_promoted(replica: dict[str, str]) -> bool:
    return replica["flags"] == "slave" and replica["master-link-status"] == "ok"


class ClusterNode(RedisServer):
    """One node of a Redis Cluster, with a port for its peers."""

    kind = "redis-cluster"

    def __init__(self, *, password: str | None = None, node_timeout_ms: int) -> None:
        super().__init__(password=password)
        self._node_timeout_ms = node_timeout_ms

    def prepare(self) -> None:
        """Adds the Cluster's lines to the configuration."""
        self.settings |= {
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": str(self._node_timeout_ms),
            # By default the peers' port is the clients' + 10000, which may not be free.
            "cluster-port": str(self.port_for("peers")),
        }
        if self.password is not None:
            self.settings["masterauth"] = quoted(self.password)
        super().prepare()

    def node_id(self) -> str:
        """What the node calls itself."""
        with self.connect() as connection:
            return connection.call_str("CLUSTER", "MYID")

    def cluster_info(self) -> dict[str, str]:
        """CLUSTER INFO as fields."""
        with self.connect() as connection:
            return fields(connection.call_str("CLUSTER", "INFO"))

    def slot_ranges(self) -> list[tuple[range, int]]:
        """Which slots are served by the master at which port, as this node sees it."""
        with self.connect() as connection:
            replies = connection.call_list("CLUSTER", "SLOTS")
        found = []
        for reply in replies:
            assert isinstance(reply, list)
            first, last, master = reply[:3]
            assert isinstance(master, list)
            found.append((range(int(str(first)), int(str(last)) + 1), int(str(master[1]))))
        return found


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
        self.password = password
        self.nodes = [
            ClusterNode(password=password, node_timeout_ms=node_timeout_ms) for _ in range(masters * (1 + replicas))
        ]
        self._masters_count = masters

    @property
    def servers(self) -> Sequence[ClusterNode]:
        return self.nodes

    @property
    def url(self) -> str:
        """``redis+cluster://…`` with all nodes."""
        userinfo = f":{quote(self.password, safe='')}@" if self.password is not None else ""
        return f"redis+cluster://{userinfo}{','.join(node.address for node in self.nodes)}"

    def arrange(self) -> None:
        """Joins the nodes unless they know each other, and waits until all call it healthy."""
        if int(self.nodes[0].cluster_info()["cluster_known_nodes"]) == 1:
            self._share_slots()
            self._introduce()
            wait_until(self._missing_peers)
            self._assign_replicas()
        self.wait_healthy()

    def wait_healthy(self, *, timeout: Seconds = 60.0) -> None:
        """Waits until every running node says that all slots are served."""
        wait_until(self._missing_health, timeout=timeout)

    def failover(self, *, timeout: Seconds = 60.0) -> ClusterNode:
        """Kills the first node that is a master, and waits until its replica serves its slots."""
        old = self._running_masters()[0]
        slot = self.slots_of(old)[0]
        old.kill()
        wait_until(lambda: self._missing_after_failover(slot, old), timeout=timeout)
        self.wait_healthy(timeout=timeout)
        return self.owner_of(slot)

    def slot_of(self, key: str) -> int:
        """The hash slot of a key."""
        with self._anyone().connect() as connection:
            return int(str(connection.call("CLUSTER", "KEYSLOT", key)))

    def owner_of(self, slot: int) -> ClusterNode:
        """The master that serves a slot."""
        for slots, port in self._anyone().slot_ranges():
            if slot in slots:
                return self._node_at_port(port)
        raise ServerError(f"nobody serves slot {slot}")

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
        self._migrate_keys(slot, source, target)
        self._finish_move(slot, source, target)

    def begin_move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        """Only the first half of `move_slot`: keys that are not there yet get ASK answers."""
        with target.connect() as connection:
            connection.call("CLUSTER", "SETSLOT", slot, "IMPORTING", source.node_id())
        with source.connect() as connection:
            connection.call("CLUSTER", "SETSLOT", slot, "MIGRATING", target.node_id())

    def _migrate_keys(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        password = ["AUTH", self.password] if self.password is not None else []
        with source.connect() as connection:
            while keys := connection.call_list("CLUSTER", "GETKEYSINSLOT", slot, 100):
                names = [str(key) for key in keys]
                connection.call(
                    *("MIGRATE", target.host, target.port, "", 0, 5000),
                    *password,
                    *("KEYS", *names),
                )

    def _finish_move(self, slot: int, source: ClusterNode, target: ClusterNode) -> None:
        # The target first: were the source told first, and died, nobody would serve it.
        others = [node for node in self._running_masters() if node not in (source, target)]
        owner = target.node_id()
        for node in [target, source, *others]:
            with node.connect() as connection:
                connection.call("CLUSTER", "SETSLOT", slot, "NODE", owner)

    def _share_slots(self) -> None:
        count = self._masters_count
        bounds = [SLOTS_COUNT * index // count for index in range(count + 1)]
        for index, (first, end) in enumerate(pairwise(bounds)):
            with self.nodes[index].connect() as connection:
                connection.call("CLUSTER", "ADDSLOTS", *range(first, end))
                # Distinct epochs from the start: nodes that find two equal ones first
                # have to settle which of them gives way.
                connection.call("CLUSTER", "SET-CONFIG-EPOCH", index + 1)

    def _introduce(self) -> None:
        first = self.nodes[0]
        with first.connect() as connection:
            for node in self.nodes[1:]:
                peers = node.port_for("peers")
                connection.call("CLUSTER", "MEET", node.host, node.port, peers)

    def _assign_replicas(self) -> None:
        masters, replicas = (
            self.nodes[: self._masters_count],
            self.nodes[self._masters_count :],
        )
        for index, replica in enumerate(replicas):
            master = masters[index % len(masters)]
            with replica.connect() as connection:
                connection.call("CLUSTER", "REPLICATE", master.node_id())

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
        for node in self.nodes:
            if not node.running:
                continue
            info = node.cluster_info()
            if info["cluster_state"] != "ok":
                return f"{node} calls the cluster {info['cluster_state']}"
            if int(info["cluster_slots_ok"]) < SLOTS_COUNT:
                return f"{node} finds {info['cluster_slots_ok']} slots served"
        return None

    def _running_masters(self) -> list[ClusterNode]:
        return [node for node in self.nodes if node.running and node.role() == "master"]

    def _anyone(self) -> ClusterNode:
        for node in self.nodes:
            if node.running:
                return node
        raise ServerError("no node of the cluster runs")

    def _node_at_port(self, port: int) -> ClusterNode:
        return next(node for node in self.nodes if node.port == port)
