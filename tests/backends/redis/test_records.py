"""The record of a lock's last grant: how long it stays, and records of other versions of lockkit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest

import lockkit
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import RedisNodes, RedisServer, require
from tests.backends.redis.support import Keyspace
from tests.tries import until

FENCE = "{lockkit:x}:fence"


@pytest.fixture(scope="module", params=["redis", "redlock"])
def servers(request: pytest.FixtureRequest) -> Iterator[RedisServer | RedisNodes]:
    """One node, or three."""
    require("redis", local=True)
    with RedisServer() if request.param == "redis" else RedisNodes(3) as made:
        yield made


@pytest.fixture
def keyspaces(servers: RedisServer | RedisNodes) -> Sequence[Keyspace]:
    """The keys of each node, without a record of the lock."""
    made = [Keyspace(node) for node in (servers.nodes if isinstance(servers, RedisNodes) else [servers])]
    for keyspace in made:
        keyspace("DEL", FENCE, "lockkit:x")
    return made


@pytest.mark.parametrize("idle_ttl", [120, "120", timedelta(minutes=2)])
def test_record_of_a_released_name_stays_for_idle_ttl(
    servers: RedisServer | RedisNodes, keyspaces: Sequence[Keyspace], idle_ttl: object
) -> None:
    """From the last grant or renewal; but at least for ten ttls."""

    def stays(least_ms: int, most_ms: int) -> bool:
        kept = [least_ms < int(str(keyspace("PTTL", FENCE))) <= most_ms for keyspace in keyspaces]
        return sum(kept) > len(kept) / 2

    # A vote needs two of three nodes: the last one may be late, or refuse since the release before came late.
    with lockkit.connect(servers.url, idle_ttl=idle_ttl, ttl=5) as client:
        with client.lock("x", timeout=PATIENCE) as lease:
            lease.extend()
        until(lambda: stays(90_000, 120_000))
        with client.lock("x", ttl=60, timeout=PATIENCE):
            pass
        until(lambda: stays(570_000, 600_000))
    with lockkit.connect(servers.url) as client:
        with client.lock("x", timeout=PATIENCE):
            pass
        until(lambda: stays(86_000_000, 86_400_000))


def test_idle_ttl_has_a_least_value(servers: RedisServer | RedisNodes) -> None:
    """Below a minute a step of the server's clock could be longer."""
    with pytest.raises(lockkit.ConfigurationError, match="at least 60 seconds"):
        lockkit.connect(servers.url, idle_ttl=59)


RECORDS = {
    "the token alone": "12",
    "the token alone, with a queue": "12+",
    "without metadata": "12 {owner}",
    "further fields": '12 {owner} {{"pid":1}} 5 later',
    "a reader without its end": "12 lockkit:shared {owner} -",
    "a reader with further fields": '12 lockkit:shared {owner} - 99999999999999 {{"pid":1}} later',
    "a permit of another kind": '12 lockkit:shared {owner} a7 99999999999999 {{"pid":1}}',
    "another layout": '9:{{"token":12}}',
    "nothing": "",
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_record_of_another_version(
    servers: RedisServer | RedisNodes, keyspaces: Sequence[Keyspace], record: str, *, held: bool
) -> None:
    """Fields that are missing, or that this version does not know, make no script fail, and tokens increase."""
    owner = "0" * 32
    for keyspace in keyspaces:
        keyspace("SET", FENCE, record.format(owner=owner))
        if held:
            keyspace("SET", "lockkit:x", "lockkit:shared" if "shared" in record else owner, "PX", 60_000)
    with lockkit.connect(servers.url) as client:
        list(client.holders("x"))
        if held:
            with pytest.raises(lockkit.LockTimeout):
                client.lock("x", timeout=0.5).acquire()
            if "shared" in record and isinstance(servers, RedisServer):
                client.rwlock("x", timeout=PATIENCE).read().acquire().release()
            client.break_lock("x")
            for keyspace in keyspaces:
                keyspace("DEL", "lockkit:x")
        with client.lock("x", timeout=PATIENCE, metadata="mine") as lease:
            assert lease.token > 12
            assert [holder.owner for holder in client.holders("x")] == [lease.owner]


def test_readers_of_another_version() -> None:
    """As above, for the record of one of several holders."""
    require("redis", local=True)
    with RedisServer() as server, lockkit.connect(server.url) as client:
        keyspace = Keyspace(server)
        for lease in ('12 {"pid":1} later', '9:12 {"pid":1}', "12", ""):
            keyspace("SET", "lockkit:x", "lockkit:shared", "PX", 60_000)
            keyspace("ZADD", "{lockkit:x}:shares", 99999999999999, "0" * 32)
            keyspace("HSET", "{lockkit:x}:leases", "0" * 32, lease)
            with client.rwlock("x", timeout=PATIENCE).read() as mine:
                assert {holder.owner for holder in client.holders("x")} == {"0" * 32, mine.owner}, lease
            assert client.break_lock("x")
            with client.lock("x", timeout=PATIENCE):
                pass


def test_mark_of_a_later_version() -> None:
    """The node votes, and the fields that this version does not know stay where they are."""
    require("redis", local=True)
    mark = "{lockkit}:redlock"
    with RedisNodes(3) as nodes:
        keyspaces = [Keyspace(node) for node in nodes.nodes]
        with lockkit.connect(nodes.url) as client, client.lock("x", ttl=5, timeout=PATIENCE):
            pass
        for keyspace in keyspaces:
            keyspace("SET", mark, f"{keyspace('GET', mark)} later=1")
        with lockkit.connect(nodes.url) as client, client.lock("x", ttl=10, timeout=PATIENCE) as lease:
            lease.extend(20)
        for keyspace in keyspaces:
            _, ttl_ms, *_, further = str(keyspace("GET", mark)).split()
            assert (ttl_ms, further) == ("20000", "later=1")
