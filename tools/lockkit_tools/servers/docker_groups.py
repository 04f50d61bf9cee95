"""Several containers that are one service: Sentinels, Redis Cluster, independent nodes, ensembles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from typing import Any, Self

from lockkit.units import Seconds
from lockkit_tools.servers._ports import HOST, Ports
from lockkit_tools.servers.base import STOP_TIMEOUT, Group, wait_until
from lockkit_tools.servers.docker import Adapt, ContainerServer, Image, new_container, publish
from lockkit_tools.servers.resp import RespConnection, fields

# Time without an answer until Sentinels and Cluster nodes take a node for dead, in ms: as for local groups.
DOWN_AFTER_MS = 1_000

MASTER_NAME = "mymaster"


class ContainerGroup(Group):
    """
    Containers that are started, stopped and removed together.

    Args:
        containers: The members, in the order in which they are started.
        url: Made of the addresses of the members.
        shared: What they share, as a context manager that is entered before the first start; None: nothing.
        arrange: Makes one service of members that answer; called after each start.
    """

    def __init__(
        self,
        kind: str,
        containers: Sequence[ContainerServer],
        url: Callable[[Sequence[str]], str],
        *,
        shared: Network | SharedAddress | None = None,
        arrange: Callable[[Sequence[ContainerServer]], None] = lambda _: None,
    ) -> None:
        self.kind = kind
        self.containers = list(containers)
        self._url = url
        self._shared = shared
        self._arrange = arrange
        self._stack = ExitStack()
        self._entered = False

    @property
    def servers(self) -> Sequence[ContainerServer]:
        return self.containers

    @property
    def url(self) -> str:
        """The lockkit URL, with all members."""
        return self._url([container.address for container in self.containers])

    def start(self) -> Self:
        if self._shared is not None and not self._entered:
            self._stack.enter_context(self._shared)
            self._entered = True
        for container in self.containers:
            container.launch()
        for container in self.containers:
            container.wait_ready()
        self._arrange(self.containers)
        return self

    def stop(self, timeout: Seconds = STOP_TIMEOUT) -> None:
        for container in reversed(self.containers):
            container.stop(timeout)

    def close(self) -> None:
        for container in reversed(self.containers):
            container.close()
        self._stack.close()
        self._entered = False


class Network:
    """A network of Docker's in which the members find each other by name; a context manager."""

    def __init__(self) -> None:
        self._network: Any = None

    def __enter__(self) -> Self:
        self._network = import_module("testcontainers.core.network").Network()
        self._network.create()
        return self

    def __exit__(self, *_: object) -> None:
        self._network.remove()

    def member(self, name: str) -> Adapt:
        """What puts a container into the network under this name."""
        return lambda container: container.with_network(self._network).with_network_aliases(name)


class SharedAddress:
    """
    The network of one container that does nothing else, for members whose address must mean the same everywhere.

    Sentinels and Cluster nodes tell clients where the others are. In here all of them are 127.0.0.1 with different
    ports, which are published under the same numbers. A context manager.

    Args:
        image: One with the program ``sleep``; that of the members, as it is there anyway.
    """

    def __init__(self, image: str, count: int) -> None:
        self._image = image
        self._reserved = Ports()
        self.ports = [self._reserved.reserve() for _ in range(count)]
        self._container: Any = None

    def __enter__(self) -> Self:
        self._container = new_container(self._image)
        # Docker's own little init: `sleep` alone would not be ended by a signal.
        self._container.with_kwargs(entrypoint=["sleep", "infinity"], init=True)
        for port in self.ports:
            publish(self._container, port, port)
        self._container.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._container.stop()
        self._reserved.close()

    def join(self, container: Any) -> None:  # noqa: ANN401 - testcontainers' object
        """Lets a container use this network."""
        container.with_kwargs(network_mode=f"container:{self._container.get_container_id()}")


def redis_nodes(kind: str, image: Image, *, count: int = 3) -> ContainerGroup:
    """Independent Redis nodes, as Redlock wants them."""
    nodes = [ContainerServer(kind, image) for _ in range(count)]
    return ContainerGroup(kind, nodes, lambda addresses: "redlock://" + ",".join(addresses))


def sentinels(kind: str, image: Image) -> ContainerGroup:
    """A master and its replica under three Sentinels."""
    shared = SharedAddress(image.name, 5)
    master, replica, *watchers = shared.ports

    def made(port: int, *command: str) -> ContainerServer:
        return ContainerServer(kind, replace(image, command=command), port=port, adapt=shared.join)

    def watcher(port: int) -> ContainerServer:
        lines = [
            f"port {port}",
            f"sentinel monitor {MASTER_NAME} {HOST} {master} 2",
            f"sentinel down-after-milliseconds {MASTER_NAME} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {MASTER_NAME} {2 * DOWN_AFTER_MS}",
        ]
        # Written once: a Sentinel keeps what it learnt in its configuration.
        written = f"[ -e /tmp/sentinel.conf ] || printf '%s\\n' {' '.join(map(repr, lines))} >/tmp/sentinel.conf"
        return made(port, "sh", "-c", f"{written}; exec redis-server /tmp/sentinel.conf --sentinel")

    return ContainerGroup(
        kind,
        [
            made(master, "redis-server", "--port", str(master)),
            made(replica, "redis-server", "--port", str(replica), "--replicaof", HOST, str(master)),
            *map(watcher, watchers),
        ],
        lambda addresses: f"redis+sentinel://{','.join(addresses[2:])}/{MASTER_NAME}/0",
        shared=shared,
        arrange=lambda members: wait_until(lambda: _first(map(_missing_in_view, members[2:]))),
    )


def redis_cluster(kind: str, image: Image, *, masters: int = 3) -> ContainerGroup:
    """A Redis Cluster without replicas."""
    shared = SharedAddress(image.name, 2 * masters)
    pairs = zip(shared.ports[:masters], shared.ports[masters:], strict=True)

    def node(port: int, peers: int) -> ContainerServer:
        options = {
            "port": port,
            "cluster-port": peers,
            "cluster-enabled": "yes",
            "cluster-node-timeout": DOWN_AFTER_MS,
        }
        command = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        made = replace(image, command=("redis-server", *command))
        return ContainerServer(kind, made, port=port, adapt=shared.join)

    return ContainerGroup(
        kind,
        [node(port, peers) for port, peers in pairs],
        lambda addresses: "redis+cluster://" + ",".join(addresses),
        shared=shared,
        arrange=_join_cluster,
    )


def zookeeper_ensemble(kind: str, image: Image, *, count: int = 3) -> ContainerGroup:
    """ZooKeeper servers that elect a leader."""
    network = Network()
    names = [f"zookeeper-{number}" for number in range(1, count + 1)]
    members = " ".join(f"server.{number}={name}:2888:3888;2181" for number, name in enumerate(names, start=1))

    def member(number: int, name: str) -> ContainerServer:
        env = (*image.env, ("ZOO_MY_ID", str(number)), ("ZOO_SERVERS", members))
        return ContainerServer(kind, replace(image, env=env), adapt=network.member(name))

    return ContainerGroup(
        kind,
        [member(number, name) for number, name in enumerate(names, start=1)],
        lambda addresses: "zookeeper://" + ",".join(addresses),
        shared=network,
    )


def etcd_cluster(kind: str, image: Image, *, count: int = 3) -> ContainerGroup:
    """Members of etcd that elect a leader."""
    network = Network()
    names = [f"etcd-{number}" for number in range(1, count + 1)]
    cluster = ",".join(f"{name}=http://{name}:2380" for name in names)

    def member(name: str) -> ContainerServer:
        flags = {
            "name": name,
            "listen-client-urls": "http://0.0.0.0:2379",
            # Clients use the addresses that they are given; they do not ask for these.
            "advertise-client-urls": f"http://{name}:2379",
            "listen-peer-urls": "http://0.0.0.0:2380",
            "initial-advertise-peer-urls": f"http://{name}:2380",
            "initial-cluster": cluster,
        }
        command = ("etcd", *(f"--{flag}={value}" for flag, value in flags.items()))
        return ContainerServer(kind, replace(image, command=command), adapt=network.member(name))

    return ContainerGroup(
        kind,
        [member(name) for name in names],
        lambda addresses: "etcd://" + ",".join(addresses),
        shared=network,
    )


def _first(missing: Iterable[str | None]) -> str | None:
    """The first thing that is missing, if any is."""
    return next(filter(None, missing), None)


def _missing_in_view(sentinel: ContainerServer) -> str | None:
    """What one Sentinel does not know yet of the others."""
    with RespConnection((HOST, sentinel.port)) as connection:
        words = [str(word) for word in connection.call_list("SENTINEL", "MASTER", MASTER_NAME)]
    state = dict(zip(words[::2], words[1::2], strict=True))
    seen = state["num-slaves"], state["num-other-sentinels"], state["flags"]
    return None if seen == ("1", "2", "master") else f"a Sentinel sees replicas, other Sentinels and master as {seen}"


def _join_cluster(nodes: Sequence[ContainerServer]) -> None:
    """Shares the slots among nodes that do not know each other, and waits until all of them call it healthy."""
    if _cluster_info(nodes[0])["cluster_known_nodes"] == "1":
        nodes[0].run("redis-cli", "--cluster", "create", *(node.address for node in nodes), "--cluster-yes")
    wait_until(lambda: _first(map(_missing_health, nodes)))


def _missing_health(node: ContainerServer) -> str | None:
    state = _cluster_info(node)["cluster_state"]
    return None if state == "ok" else f"the Cluster node at {node.address} calls its state {state}"


def _cluster_info(node: ContainerServer) -> dict[str, str]:
    with RespConnection((HOST, node.port)) as connection:
        return fields(connection.call_str("CLUSTER", "INFO"))
