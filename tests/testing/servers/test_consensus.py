"""ZooKeeper and etcd servers: one, and several that elect a leader."""

from __future__ import annotations

import base64
import socket
import ssl
from collections.abc import Iterator

import pytest

from lockkit_tools.servers import (
    EtcdCluster,
    EtcdServer,
    ServerError,
    ZooKeeperEnsemble,
    ZooKeeperServer,
    require,
    wait_until,
)


def leads_another_than(old: object, group: EtcdCluster | ZooKeeperEnsemble) -> str | None:
    """For `wait_until`: what is missing until a new leader is there."""
    try:
        leader = group.leader
    except ServerError as error:
        return str(error)
    return None if leader is not old else "the old leader leads"


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """One etcd member."""
    require("etcd", local=True)
    with EtcdServer() as server:
        yield server


class TestEtcd:
    """One member."""

    def test_data_survive_a_crash(self, etcd: EtcdServer) -> None:
        """What was acknowledged is in the write-ahead log."""
        etcd.etcdctl("put", "kept", "value")

        etcd.restart(crash=True)

        assert etcd.etcdctl("get", "kept", "--print-value-only").strip() == "value"

    def test_restart_without_data_is_empty(self, etcd: EtcdServer) -> None:
        """The member forgets everything and forms a new cluster of one."""
        etcd.etcdctl("put", "gone", "value")

        etcd.restart(keep_data=False)

        assert etcd.etcdctl("get", "gone") == ""

    def test_gateway_speaks_json(self, etcd: EtcdServer) -> None:
        """Calls need neither gRPC nor etcdctl."""
        key = base64.b64encode(b"key").decode()
        etcd.call("/v3/kv/put", key=key, value=key)

        (pair,) = etcd.call("/v3/kv/range", key=key)["kvs"]

        assert pair["value"] == key
        assert etcd.leads()

    def test_short_leases_are_granted_as_asked(self, etcd: EtcdServer) -> None:
        """The shortest lease follows from the election timeout, which is short for one member."""
        assert etcd.call("/v3/lease/grant", TTL=1)["TTL"] == "1"


def test_etcd_with_tls_and_users() -> None:
    """Certificates are asked for, then names and passwords; a restart knows both."""
    require("etcd", local=True)
    with EtcdServer(tls=True) as server:
        assert server.url.startswith(f"etcds://{server.address}?ca=")
        with pytest.raises(ssl.SSLError, match="certificate"):
            ask_without_certificate(server)
        server.enable_auth("secret")

        server.restart()

        assert server.etcdctl("--user=root:secret", "put", "key", "value").strip() == "OK"
        with pytest.raises(ServerError, match="authentication failed"):
            server.etcdctl("--user=root:wrong", "put", "key", "value")


def ask_without_certificate(server: EtcdServer) -> None:
    """Trusts the server, and does not say who we are."""
    context = ssl.create_default_context(cafile=str(server.certificates.ca))
    with (
        socket.create_connection((server.host, server.port), 30) as plain,
        context.wrap_socket(plain, server_hostname=server.host) as connection,
    ):
        connection.recv(1)  # in TLS 1.3 a refusal comes after the handshake


def test_full_etcd_starts_and_says_so() -> None:
    """A member over its quota is ready: tests of NOSPACE restart it."""
    require("etcd", local=True)
    with EtcdServer(settings={"quota-backend-bytes": "65536"}) as server:
        with pytest.raises(ServerError, match="space exceeded"):
            fill(server)

        server.restart()

        assert "NOSPACE" in server.etcdctl("alarm", "list")


def fill(server: EtcdServer) -> None:
    """Writes a megabyte."""
    for index in range(10):
        server.etcdctl("put", f"key{index}", "x" * 100_000)


def test_etcd_cluster_elects_another_leader() -> None:
    """And the old one joins again; without a majority there is no leader."""
    require("etcd-cluster", local=True)
    with EtcdCluster() as cluster:
        old = cluster.leader
        assert len(cluster.followers) == 2
        old.etcdctl("put", "key", "value")

        old.kill()
        wait_until(lambda: leads_another_than(old, cluster))
        old.start()
        assert old.etcdctl("get", "key", "--print-value-only").strip() == "value"

        for member in cluster.members[:2]:
            member.kill()
        assert len(cluster.members[2].etcdctl("member", "list").splitlines()) == 3
        wait_until(lambda: None if cluster.members[2].ask() else "it still has a leader")
        cluster.start()
        assert cluster.leader in cluster.members


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[ZooKeeperServer]:
    """One ZooKeeper server."""
    require("zookeeper", local=True)
    with ZooKeeperServer() as server:
        yield server


def node_count(server: ZooKeeperServer) -> int:
    """How many nodes a server has, its own included."""
    lines = (line.split("\t") for line in server.four_letters("mntr").splitlines())
    return int(dict(lines)["zk_znode_count"])


def create_node(server: ZooKeeperServer, path: str) -> None:
    """Creates a persistent node over ZooKeeper's own protocol (jute)."""
    with socket.create_connection((server.host, server.port), 30) as connection:
        # Protocol 0, last zxid 0, timeout 4 s, session 0, 16 bytes of password.
        send(connection, bytes(12) + (4000).to_bytes(4) + bytes(8) + (16).to_bytes(4) + bytes(16))
        receive(connection)
        # Request 1 is of type 1 (create): path, data, one ACL (all rights, world, anyone), flags.
        acl = (1).to_bytes(4) + (31).to_bytes(4) + text("world") + text("anyone")
        send(connection, (1).to_bytes(4) + (1).to_bytes(4) + text(path) + text("") + acl + bytes(4))
        error = int.from_bytes(receive(connection)[12:16], signed=True)
        assert error == 0


def text(value: str) -> bytes:
    """A string as jute writes it."""
    return len(value).to_bytes(4) + value.encode()


def send(connection: socket.socket, packet: bytes) -> None:
    """Sends one packet with its length."""
    connection.sendall(len(packet).to_bytes(4) + packet)


def receive(connection: socket.socket) -> bytes:
    """Receives one packet."""
    stream = connection.makefile("rb")
    return stream.read(int.from_bytes(stream.read(4)))


class TestZooKeeper:
    """One server."""

    def test_nodes_survive_a_crash(self, zookeeper: ZooKeeperServer) -> None:
        """What was acknowledged is in the transaction log."""
        before = node_count(zookeeper)
        create_node(zookeeper, "/kept")

        zookeeper.restart(crash=True)

        assert node_count(zookeeper) == before + 1

    def test_restart_without_data_is_empty(self, zookeeper: ZooKeeperServer) -> None:
        """Only ZooKeeper's own nodes are left."""
        create_node(zookeeper, "/gone")
        before = node_count(zookeeper)

        zookeeper.restart(keep_data=False)

        assert node_count(zookeeper) < before

    def test_server_alone_says_so(self, zookeeper: ZooKeeperServer) -> None:
        """It is nobody's leader."""
        assert zookeeper.mode() == "standalone"
        assert zookeeper.url == f"zookeeper://{zookeeper.address}"


def test_zookeeper_with_tls_asks_for_a_certificate() -> None:
    """The URL leads to the port for TLS, and names the files for it."""
    require("zookeeper", local=True)
    with ZooKeeperServer(tls=True) as server:
        files = server.certificates
        assert f"zookeeper://{server.host}:{server.port_for('tls')}?use_ssl=true" in server.url
        context = ssl.create_default_context(cafile=str(files.ca))
        context.load_cert_chain(files.client, files.client_key)

        def asked() -> str | None:
            with (
                socket.create_connection((server.host, server.port_for("tls")), 30) as plain,
                context.wrap_socket(plain, server_hostname=server.host) as connection,
            ):
                connection.sendall(b"ruok")
                answer = connection.recv(10)
            return None if answer == b"imok" else f"it said {answer!r}"

        wait_until(asked)  # the port for TLS may open a little after the other one


def test_zookeeper_ensemble_elects_another_leader() -> None:
    """And the old one follows; without a majority nobody serves."""
    require("zookeeper-ensemble", local=True)
    with ZooKeeperEnsemble() as ensemble:
        old = ensemble.leader
        assert len(ensemble.followers) == 2

        old.kill()
        wait_until(lambda: leads_another_than(old, ensemble))
        old.start()
        assert old.mode() == "follower"

        for member in ensemble.members[:2]:
            member.kill()
        wait_until(lambda: None if ensemble.members[2].ask() else "it still serves")
        ensemble.start()
        assert ensemble.leader in ensemble.members
