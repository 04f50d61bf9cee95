"""The doctor on single Redis servers, each with one thing set wrongly."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

import lockkit
from lockkit.backends.redis import examine as redis_examine
from lockkit.backends.redis.handshake import VERSION_MIN, version_of
from lockkit.doctor import Severity, addresses, examine
from lockkit.runtime import wall_clock
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import FaultProxy, RedisCluster, RedisSentinels, RedisServer, wait_until
from tests.doctor.support import SECRET, complaints, found

RULES = "~lockkit:* ~{lockkit:* &lockkit:wake:*"
COMMANDS = (
    "+ping +hello +select +eval +evalsha +set +get +mget +exists +del +pexpire +pttl +time +rpush +lpop "
    "+lpos +lrange +lrem +publish +subscribe +pubsub|numsub +info +client +zadd +zrem +zscore +zcount +zrange "
    "+zrangebyscore +lpush +hset +hget +hdel +hexists +hkeys"
)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One that is set up well, for tests that put right what they set."""
    with RedisServer(appendonly=True, appendfsync="always", password=SECRET) as made:
        yield made


@pytest.fixture
def setting(server: RedisServer) -> Iterator[SetOnce]:
    """Sets things at the server for one test."""
    with server.connect() as connection, ExitStack() as stack:

        def set_once(name: str, value: str) -> None:
            old = str(connection.call_list("CONFIG", "GET", name)[1])
            stack.callback(connection.call, "CONFIG", "SET", name, old)
            connection.call("CONFIG", "SET", name, value)

        yield set_once


if TYPE_CHECKING:
    from collections.abc import Callable

    SetOnce = Callable[[str, str], None]


def test_silent_on_a_good_server(server: RedisServer) -> None:
    """Nothing at all is found where all is well, and what was measured is there."""
    diagnosis = examine(server.url)

    assert diagnosis.findings == ()
    assert diagnosis.ttl == 30
    assert f"round trip to {server.address}" in diagnosis.facts
    assert diagnosis.facts[f"version of {server.address}"].startswith(("redis ", "valkey "))
    assert SECRET not in repr(diagnosis)


def test_changes_nothing(server: RedisServer) -> None:
    """The server has the same keys and the same settings afterwards."""
    with server.connect() as connection:
        connection.call("SET", "lockkit:held", "somebody", "PX", 60_000)
        before = connection.call_list("CONFIG", "GET", "*")

        examine(server.url)

        assert connection.call_list("KEYS", "*") == ["lockkit:held"]
        assert connection.call_list("CONFIG", "GET", "*") == before
        assert connection.call("DEL", "lockkit:held") == 1


def test_eviction_policy_without_a_limit_is_none(server: RedisServer, setting: SetOnce) -> None:
    """Memory that has no limit is never full."""
    setting("maxmemory-policy", "allkeys-lru")

    assert "redis-eviction" not in found(server.url)


def test_memory_nearly_full(server: RedisServer, setting: SetOnce) -> None:
    """Above nine tenths of maxmemory."""
    with server.connect() as connection:
        used = int(connection.info("memory")["used_memory"])
    setting("maxmemory", str(int(used / 0.95)))

    assert "% of maxmemory" in found(server.url)["redis-memory"].seen


def test_connections_nearly_used_up(server: RedisServer, setting: SetOnce) -> None:
    """Above nine tenths of maxclients."""
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(server.connect())
        setting("maxclients", "15")

        assert "of 15 connections" in found(server.url)["redis-connections"].seen


@pytest.mark.parametrize(
    ("settings", "id_", "severity"),
    [
        # Locks have an expiry, so the volatile policies remove them too.
        ({"maxmemory": "100mb", "maxmemory-policy": "volatile-lru"}, "redis-eviction", Severity.ERROR),
        # Less than always loses something with the machine.
        ({"appendfsync": "no"}, "redis-appendfsync-no", Severity.WARNING),
        ({"appendfsync": "everysec"}, "redis-appendfsync-everysec", Severity.INFO),
    ],
)
def test_setting(server: RedisServer, setting: SetOnce, settings: dict[str, str], id_: str, severity: Severity) -> None:
    """Each is found, and as dangerous as it is."""
    for name, value in settings.items():
        setting(name, value)

    finding = found(server.url)[id_]

    assert finding.check.severity is severity
    assert [*settings.values()][-1] in finding.seen


def test_no_persistence_and_no_password() -> None:
    """What a server has that was just started without a thought."""
    with RedisServer() as server:
        findings = found(server.url)

        assert set(findings) == {"redis-no-persistence", "redis-no-password"}
        assert findings["redis-no-password"].where == (server.address,)


def test_snapshots_only_and_a_snapshot_that_failed() -> None:
    """Snapshots lose what came after them; one that cannot be written stops all writes."""
    with RedisServer(password=SECRET, settings={"save": "3600 1"}) as server:
        findings = found(server.url)

        assert set(findings) == {"redis-snapshots-only"}
        assert "3600 1" in findings["redis-snapshots-only"].seen

        shutil.rmtree(server.data)
        with server.connect() as connection:
            connection.call("BGSAVE")
            wait_until(lambda: None if connection.info("persistence")["rdb_last_bgsave_status"] == "err" else "saving")
        assert found(server.url)["redis-writes-refused"].check.severity is Severity.ERROR
        with lockkit.connect(server.url) as client, pytest.raises(lockkit.BackendUnavailable, match="MISCONF"):
            client.lock("a", timeout=0).acquire()


def test_replication(server: RedisServer, setting: SetOnce) -> None:
    """A replica alone is no place for locks; a master with replicas may lose them in a failover."""
    with RedisServer(appendonly=True, appendfsync="always", password=SECRET, replica_of=server) as replica:
        with server.connect() as connection:
            wait_until(lambda: None if connection.info("replication")["connected_slaves"] == "1" else "no replica")

        assert server.address in found(replica.url)["redis-replica"].seen
        assert set(found(server.url)) == {"redis-failover-unguarded"}
        assert set(found(f"{server.url}?replicas=1")) == {"redis-failover"}
        assert "replicas=2" in found(f"{server.url}?replicas=2")["redis-replicas-missing"].seen

        setting("min-replicas-to-write", "1")
        assert set(found(server.url)) == {"redis-failover"}

        with RedisServer(password=SECRET, replica_of=server), server.connect() as connection:
            wait_until(lambda: None if connection.info("replication")["connected_slaves"] == "2" else "one replica")
            assert "?replicas=2" in found(f"{server.url}?replicas=1")["redis-replicas-not-all"].fix
            assert set(found(f"{server.url}?replicas=2")) == {"redis-failover"}


def test_rights_missing() -> None:
    """Names the commands, keys and channels that the user lacks, and gives them by the command that it shows."""
    users = {"default": f"on >{SECRET} ~* &* +@all", "app": f"on >{SECRET} {RULES} {COMMANDS} -lpos -publish"}
    with RedisServer(appendonly=True, appendfsync="always", users=users, login=("default", SECRET)) as server:
        url = f"redis://app:{SECRET}@{server.address}/0"

        finding = found(url)["redis-rights"]

        assert "LPOS" in finding.seen
        assert "PUBLISH" in finding.seen
        assert "PTTL" not in finding.seen
        with server.connect() as connection:
            connection.call(*(word.strip("'") for word in finding.fix.removeprefix("redis-cli ").split()))
        assert "redis-rights" not in found(url)


def test_rights_for_readers_missing() -> None:
    """Only read locks and semaphores need them: a lock is had, waited for and handed over."""
    users = {"default": "off", "app": f"on >{SECRET} {RULES} {COMMANDS} -zadd -hset"}
    with RedisServer(appendonly=True, appendfsync="always", users=users, login=("app", SECRET)) as server:
        findings = found(server.url)

        assert "ZADD" in findings["redis-share-rights"].seen
        assert "redis-rights" not in findings
        with lockkit.connect(server.url) as client, lockkit.connect(server.url) as other, ThreadPoolExecutor(1) as pool:
            lease = client.lock("x", timeout=PATIENCE).acquire()
            waiting = pool.submit(other.lock("x", timeout=PATIENCE).acquire)
            wait_until(lambda: None if client.holders("x")[0].waiters == 1 else "nobody waits")
            lease.release()
            waiting.result().release()


def test_few_rights_are_enough() -> None:
    """A user with just what the page lists: the doctor says what it could not look at, and nothing else."""
    users = {"default": "off", "app": f"on >{SECRET} {RULES} {COMMANDS}"}
    with RedisServer(appendonly=True, appendfsync="always", users=users, login=("app", SECRET)) as server:
        assert complaints(examine(server.url)) == []
        assert set(found(server.url)) == {"redis-hidden"}

        assert "redis-rights" in found(f"{server.url}?prefix=other")


def test_user_who_may_not_ask_for_info() -> None:
    """Says so, and goes on with what it may."""
    users = {"default": f"on >{SECRET} ~* &* +@all", "app": f"on >{SECRET} {RULES} {COMMANDS} -info -eval"}
    with RedisServer(users=users, login=("default", SECRET)) as server:
        findings = found(f"redis://app:{SECRET}@{server.address}/0")

    assert findings["redis-hidden"].seen
    assert "EVAL" in findings["redis-rights"].seen


@pytest.mark.parametrize(
    ("ttl", "id_"), [(1.0, "ttl-near-round-trip"), (0.1, "ttl-below-round-trip"), (0.005, "ttl-below-minimum")]
)
def test_ttl_too_short_for_the_way(server: RedisServer, ttl: float, id_: str) -> None:
    """The round trip is measured, not assumed."""
    with FaultProxy(server.host, server.port) as proxy:
        proxy.delay(0.05)
        finding = found(f"redis://:{SECRET}@{proxy.address}/0", ttl=ttl)[id_]

    assert f"{ttl:g} s" in finding.seen


def test_short_ttl(server: RedisServer) -> None:
    """From the URL, too."""
    assert "0.5 s" in found(f"{server.url}?ttl=0.5")["ttl-short"].seen
    assert "ttl-short" not in found(server.url)


def test_clock_of_this_machine_is_wrong(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour between client and server, whichever of them is right."""
    monkeypatch.setattr("lockkit.doctor.timing.wall_clock", lambda: wall_clock() - 3600)

    assert "3600.0 s ahead of" in found(server.url)["clock-differs"].seen


def test_tls_absent_across_a_network(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an address that is not this machine's own."""
    monkeypatch.setattr(redis_examine, "is_loopback", lambda host: False)  # noqa: ARG005

    assert "rediss://" in found(server.url)["redis-no-tls"].fix
    with RedisServer(appendonly=True, appendfsync="always", password=SECRET, tls=True) as safe:
        assert found(safe.url) == {}


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("", False)],
)
def test_loopback_is_told_by_the_address(host: str, loopback: bool) -> None:  # noqa: FBT001
    """Names count by their addresses."""
    assert addresses.is_loopback(host) is loopback


def test_socket_needs_no_password() -> None:
    """Who may open the file is a matter of its mode."""
    with RedisServer(appendonly=True, appendfsync="always", unix_socket=True) as server:
        assert found(server.socket_url) == {}


def test_old_version(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least version, and how versions are read."""
    assert version_of("6.0.16") < VERSION_MIN
    assert version_of("6.2.0") > VERSION_MIN
    assert version_of("255.255.255-dev1") > VERSION_MIN

    monkeypatch.setattr(redis_examine, "VERSION_MIN", (999,))
    assert "redis-version" in found(server.url)


def test_node_of_a_cluster_or_sentinel_as_a_single_server() -> None:
    """The wrong scheme is said, and the right one."""
    with RedisCluster(password=SECRET) as cluster:
        url = cluster.nodes[0].url
        assert "redis+cluster://" in found(url)["redis-cluster-node"].fix
    with RedisSentinels() as sentinels:
        url = f"redis://{sentinels.sentinels[0].address}"
        assert "redis+sentinel://" in found(url)["redis-sentinel-given"].fix


def test_nobody_answers() -> None:
    """That is an error as everywhere, and not a finding."""
    with RedisServer(password=SECRET) as server:
        url, wrong = server.url, server.url.replace(SECRET, "wrong")
        with pytest.raises(lockkit.ConfigurationError, match="user name or password is wrong"):
            examine(wrong)
        server.kill()
        with pytest.raises(lockkit.BackendUnavailable):
            examine(url)
