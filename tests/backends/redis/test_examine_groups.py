"""The doctor on Sentinels, Clusters and Redlock nodes, each with one thing set wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

import lockkit
from lockkit.backends.redlock.backend import RedlockBackend
from lockkit.doctor import Severity, examine, timing
from lockkit.doctor.examination import Examination
from lockkit.testing.timing import PATIENCE
from lockkit.url import parse
from lockkit_tools.servers import RedisCluster, RedisNodes, RedisSentinels, RedisServer, wait_until
from tests.doctor.support import SECRET, complaints, found


def harden(nodes: Sequence[RedisServer]) -> None:
    """Sets nodes up well before their first start."""
    for node in nodes:
        node.appendonly = True
        node.appendfsync = "always"


class NodeAt(RedisServer):
    """A node on a loopback address of its own, as if on a machine of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(password=SECRET)
        self.host = f"127.0.0.{number}"
        self.settings["bind"] = self.host


@pytest.fixture(scope="module")
def sentinels() -> Iterator[RedisSentinels]:
    """A master with a replica that guards it, under three Sentinels."""
    group = RedisSentinels(password=SECRET)
    harden(group.nodes)
    for node in group.nodes:
        node.settings["min-replicas-to-write"] = "1"
    with group:
        yield group


def test_silent_on_good_sentinels(sentinels: RedisSentinels) -> None:
    """What remains is what replication cannot do."""
    diagnosis = examine(sentinels.url)

    assert complaints(diagnosis) == []
    assert [finding.check.id for finding in diagnosis.findings] == ["redis-failover"]


def test_quorum_of_sentinels(sentinels: RedisSentinels) -> None:
    """Below a majority, and above what there is; the same at all Sentinels is one finding."""
    for quorum, id_ in ((1, "sentinel-quorum-low"), (4, "sentinel-quorum-unreachable")):
        set_quorum(sentinels, quorum)

        finding = found(sentinels.url)[id_]

        assert f"quorum is {quorum}" in finding.seen
        assert set(finding.where) == {sentinel.address for sentinel in sentinels.sentinels}
        assert "quorum 2" in finding.fix
    set_quorum(sentinels, 2)


def set_quorum(group: RedisSentinels, quorum: int) -> None:
    """Sets it at all Sentinels."""
    for sentinel in group.sentinels:
        with sentinel.connect() as connection:
            connection.call("SENTINEL", "SET", group.name, "quorum", quorum)


def test_url_with_one_sentinel_and_with_one_that_is_down(sentinels: RedisSentinels) -> None:
    """Who names one Sentinel depends on it; who names one that is down has one less."""
    one = f"redis+sentinel://:{SECRET}@{sentinels.sentinels[0].address}/{sentinels.name}"
    assert "sentinel-one-named" in found(one)

    port = sentinels.sentinels[0].port_for("nobody")
    finding = found(f"redis+sentinel://:{SECRET}@127.0.0.1:{port},{sentinels.sentinels[0].address}/{sentinels.name}")
    assert finding["sentinel-down"].where == (f"127.0.0.1:{port}",)


def test_sentinels_that_watch_different_masters(sentinels: RedisSentinels) -> None:
    """Both names lead to a server, and not to the same one."""
    with RedisSentinels(replicas=0, sentinels=1, password=SECRET) as others:
        hosts = f"{sentinels.sentinels[0].address},{others.sentinels[0].address}"
        findings = found(f"redis+sentinel://:{SECRET}@{hosts}/{sentinels.name}")

        assert findings["sentinel-disagree"].check.severity is Severity.ERROR
        assert findings["sentinel-few"].where == (others.sentinels[0].address,)
        assert findings["sentinel-no-replica"].where == (others.sentinels[0].address,)

    with pytest.raises(lockkit.ConfigurationError, match="no Sentinel names the master"):
        examine(f"redis+sentinel://{sentinels.sentinels[0].address}/another")


def test_cluster() -> None:
    """Silent with replicas; a lost master, missing slots and missing replicas are found."""
    cluster = RedisCluster(replicas=1, password=SECRET)
    harden(cluster.nodes)
    for node in cluster.nodes:
        node.settings["min-replicas-to-write"] = "1"
        node.settings["cluster-require-full-coverage"] = "no"
    with cluster:
        wait_until(lambda: None if all(has_replica(node) for node in cluster.nodes[:3]) else "replicas are joining")
        assert complaints(examine(cluster.url)) == []

        first, *_, last = cluster.nodes
        last.kill()
        with last_master(cluster).connect() as connection:
            connection.call("CLUSTER", "DELSLOTS", *range(16_380, 16_384))
        url = f"redis+cluster://:{SECRET}@{last_master(cluster).address}"
        findings = found(url)
        assert "16380 of 16384" in findings["cluster-slots-missing"].seen
        assert findings["cluster-slots-missing"].where == (last_master(cluster).address,)

        first.kill()
        cluster.nodes[3].kill()
        assert found(url)["cluster-node-down"].where == (first.address,)


def has_replica(node: RedisServer) -> bool:
    """Whether a replica follows it and is up to date enough to write to."""
    with node.connect() as connection:
        return connection.info("replication").get("min_slaves_good_slaves") == "1"


def last_master(cluster: RedisCluster) -> RedisServer:
    """The master of the highest slots."""
    return cluster.nodes[2]


def test_cluster_without_replicas_or_majority() -> None:
    """Two masters and nobody behind them."""
    cluster = RedisCluster(masters=2, password=SECRET)
    harden(cluster.nodes)
    with cluster:
        findings = found(cluster.url)

    assert set(findings) == {"cluster-few-masters", "cluster-no-replica"}
    assert len(findings["cluster-no-replica"].where) == 2


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[NodeAt]]:
    """Four nodes at addresses of their own, without persistence: a Redlock does without."""
    made = [NodeAt(number) for number in range(1, 5)]
    group = RedisNodes(0)
    group.nodes = list(made)
    with group:
        yield made


def redlock(nodes: Sequence[RedisServer]) -> str:
    """The URL of these."""
    return f"redlock://:{SECRET}@{','.join(node.address for node in nodes)}"


def test_silent_on_a_good_redlock(nodes: list[NodeAt]) -> None:
    """Three independent nodes."""
    assert found(redlock(nodes[:3])) == {}


def test_even_or_few_redlock_nodes(nodes: list[NodeAt]) -> None:
    """Four are no better than three, two no better than one."""
    assert set(found(redlock(nodes))) == {"redlock-even-nodes"}
    assert set(found(redlock(nodes[:2]))) == {"redlock-few-nodes"}


def test_same_server_twice(nodes: list[NodeAt]) -> None:
    """Under two names, which no URL shows: by its run_id."""
    with RedisServer(password=SECRET) as server:
        names = [f"localhost:{server.port}", server.address, nodes[1].address]
        findings = found(f"redlock://:{SECRET}@{','.join(names)}")

    assert "the same run_id" in findings["redlock-same-server"].seen


def test_nodes_on_the_same_host(nodes: list[NodeAt]) -> None:
    """Two servers at one address fall together."""
    with RedisServer(password=SECRET) as server:
        findings = found(redlock([nodes[0], server, nodes[1]]))

    assert set(findings) == {"redlock-same-host"}
    assert "127.0.0.1" in findings["redlock-same-host"].seen


def test_node_that_is_a_replica_or_down(nodes: list[NodeAt]) -> None:
    """A replica of another node has no vote of its own; one that is down has none at all."""
    replica = NodeAt(5)
    replica.replica_of = nodes[0]
    with replica:
        findings = found(redlock([nodes[0], nodes[1], replica]))
        assert findings["redis-replica"].where == (replica.address,)
    url = f"{redlock(nodes[:2])},127.0.0.5:{nodes[0].port_for('nobody')}"
    assert "redlock-node-down" in found(url)


def test_majority_down(nodes: list[NodeAt]) -> None:
    """That is an error as everywhere, and not a finding; it says of each node what is wrong."""
    closed = nodes[0].port_for("nobody")
    with pytest.raises(lockkit.NoQuorum, match="1 of 3 nodes") as caught:
        examine(f"{redlock(nodes[:1])},127.0.0.5:{closed},127.0.0.6:{closed}")

    assert SECRET not in str(caught.value)
    for node in (f"127.0.0.5:{closed}", f"127.0.0.6:{closed}"):
        assert node in str(caught.value).partition("no majority: ")[2]


def test_durable_nodes_that_are_not(nodes: list[NodeAt]) -> None:
    """The URL promises what the nodes do not keep."""
    url = f"{redlock(nodes[:3])}?durable=on"

    assert len(found(url)["redlock-not-durable"].where) == 3
    for node in nodes[:3]:
        with node.connect() as connection:
            connection.call("CONFIG", "SET", "appendonly", "yes")
            connection.call("CONFIG", "SET", "appendfsync", "always")
    assert found(url) == {}


def test_redlock_node_that_does_not_vote_yet() -> None:
    """After a restart; the doctor says how long to wait before the next one."""
    nodes = RedisNodes(3, make=lambda: RedisServer(password=SECRET))
    with nodes, lockkit.connect(nodes.url, ttl=50) as client:

        def seen() -> str | None:
            finding = found(nodes.url).get("redlock-node-not-voting")
            return None if finding is None else finding.seen

        assert seen() is None
        client.lock("x").acquire(timeout=PATIENCE).release()
        assert seen() is None
        assert examine(nodes.url).facts["wait between restarts of two nodes"] == "51 s"

        nodes.nodes[1].restart(crash=True)

        assert "51 s after the next acquisition" in str(seen())

        def vote() -> str | None:
            client.lock("x").acquire(timeout=PATIENCE).release()
            return None if "votes again in" in str(seen()) else str(seen())

        wait_until(vote)  # the client has to reach the node first


def test_redlock_user_without_info(nodes: list[NodeAt]) -> None:
    """Such a node does not vote, unless none loses anything."""
    for node in nodes[:3]:
        with node.connect() as connection:
            connection.call("ACL", "SETUSER", "app", "on", f">{SECRET}", "~*", "&*", "+@all", "-@dangerous")
    url = f"redlock://app:{SECRET}@{','.join(node.address for node in nodes[:3])}"

    finding = found(url)["redlock-run-hidden"]
    assert len(finding.where) == 3
    assert "ACL SETUSER app +info" in finding.fix
    assert finding.check.severity == Severity.ERROR
    assert "redlock-run-hidden" not in found(f"{url}?durable=on")


def test_clocks_of_nodes_differ() -> None:
    """By more than the doubt about them, or than a short ttl."""
    examination = Examination(parse("redlock://a,b,c"), {}, RedlockBackend, 30.0)
    timing.judge_clocks(examination, {"a": (0.1, 0.01), "b": (-0.2, 0.01), "c": (0.0, 2.0)})
    assert examination.diagnosis().findings == ()

    timing.judge_clocks(examination, {"a": (5.0, 0.01), "b": (-0.2, 0.01)})
    (finding,) = examination.diagnosis().findings
    assert finding.check.id == "clocks-differ"
    assert "5.2 s ahead of that of b" in finding.seen
