"""What is special about locks on Redis; what they share with the other backends is in the conformance suite."""

from __future__ import annotations

import asyncio
import json
from math import inf
from typing import Any

import pytest

from lockkit.backend import Gone, Grant, Renewed
from lockkit.backends.redis import handshake
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import Connection
from lockkit.backends.redis.groups import ClusterTopology, SentinelTopology, ask_nodes, slot_of
from lockkit.backends.redis.handshake import Handshake
from lockkit.backends.redis.keys import Script
from lockkit.backends.redis.listing import Scan
from lockkit.backends.redis.node import RedisNode
from lockkit.backends.redis.resp import Reply, ServerSaid, pack
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.runtime import BlockingRuntime, drive
from lockkit_tools.servers import RedisServer, wait_until
from tests.backends.redis.faces import both, sync_only
from tests.backends.redis.support import Keyspace, backend_at, busy_at, queue_up, token_in, woken
from tests.backends.support import StubHost, granted


@pytest.fixture
def redis(server: RedisServer) -> Keyspace:
    """The server's keys, none at first."""
    keyspace = Keyspace(server)
    keyspace("FLUSHALL")
    keyspace("SCRIPT", "FLUSH")
    return keyspace


def until_one_subscribes(redis: Keyspace) -> None:
    """Return once one client listens: the server learns a little later that those of the tests before have gone."""

    def subscribed() -> str | None:
        channels = redis("PUBSUB", "CHANNELS", "lockkit:wake:[0-9a-f]*")
        return None if len(channels) == 1 else f"subscribed: {channels}"

    wait_until(subscribed)


def until_no_more_than_two_ask(redis: Keyspace) -> None:
    """Return once there is one connection beside that which asks; as `until_one_subscribes`."""

    def connected() -> str | None:
        clients = redis("CLIENT", "LIST", "TYPE", "normal").splitlines()
        return None if len(clients) <= 2 else f"connected: {clients}"

    wait_until(connected)


async def test_keys_are_as_documented(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """A lock is a plain string with its owner and ttl, which other clients understand; the rest lies beside it."""
    async with backend_at(server.url, host) as backend:
        request = host.request("seat:{12}%", ttl=30.0)
        grant = granted(await backend.try_acquire(request))
        key = "lockkit:seat:%7B12%7D%25"
        side = f"{{{key}}}:"

        assert redis("GET", key) == request.owner
        assert 20_000 < redis("PTTL", key) <= 30_000
        token, owner, metadata = redis("GET", f"{side}fence").split(" ", 2)
        assert (int(token), owner) == (grant.token, request.owner)
        assert json.loads(metadata) == {"pid": 1}
        assert redis("PTTL", f"{side}fence") > 86_000_000
        assert redis.keys() == {key, f"{side}fence"}

        assert await backend.release(grant)
        assert redis.keys() == {f"{side}fence"}


async def test_too_old_server(server: RedisServer, host: StubHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said at the first connection, with the version that is needed."""
    monkeypatch.setattr(handshake, "VERSION_MIN", (999,))

    async with backend_at(server.url, host) as backend:
        with pytest.raises(ConfigurationError, match=r"is too old: it must be Redis 6\.2 or later"):
            await backend.try_acquire(host.request())


async def test_token_is_the_server_s_time_and_never_goes_back(
    server: RedisServer, redis: Keyspace, host: StubHost
) -> None:
    """At least the server's time in µs, and above the last one, also when that is in the future or gone."""
    async with backend_at(server.url, host) as backend:

        async def token() -> int:
            grant = granted(await backend.try_acquire(host.request()))
            await backend.release(grant)
            return grant.token

        seconds, micros = (int(part) for part in redis("TIME"))
        first = await token()
        redis("FLUSHALL")
        second = await token()
        redis("SET", "{lockkit:x}:fence", str(4 * 10**15))
        third = await token()
        giver = granted(await backend.try_acquire(host.request()))
        taken = await backend.take_over(host.request(), giver.owner)

        assert seconds * 10**6 + micros <= first < second < third == 4 * 10**15 + 1
        assert taken is not None
        assert taken.token == giver.token + 1 == third + 2
        assert token_in(redis("GET", "{lockkit:x}:fence")) == str(taken.token)


async def test_token_has_six_digits_of_micros(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """A time such as 1.000042 s is not written as 142: tried in the first tenth of a second, without a last token."""
    async with backend_at(server.url, host) as backend:
        await backend.ping()
        _, micros = redis("TIME")
        await host.runtime.sleep((1_000_000 - int(micros)) / 1e6)
        for _ in range(10):
            redis("FLUSHALL")
            before = [int(part) for part in redis("TIME")]
            grant = granted(await backend.try_acquire(host.request()))
            after = [int(part) for part in redis("TIME")]

            assert before[0] * 10**6 + before[1] <= grant.token <= after[0] * 10**6 + after[1]


async def test_waiter_behind_a_stopped_one_is_woken_when_its_offer_ends(
    server: RedisServer, redis: Keyspace, host: StubHost
) -> None:
    """It does not sleep until the former holder's ttl would have been over."""
    async with backend_at(server.url, host) as backend:
        grant = granted(await backend.try_acquire(host.request(ttl=600.0)))
        stopped, other = host.request(), host.request()
        await queue_up(backend, stopped)
        await queue_up(backend, other)

        assert await backend.release(grant)

        assert redis("GET", "lockkit:x") == f"next:{stopped.owner}"
        assert await woken(other)
        granted(await backend.try_acquire(other))


async def test_flushed_lock_is_its_waiter_s_as_soon_as_its_holder_knows(
    server: RedisServer, redis: Keyspace, host: StubHost
) -> None:
    """FLUSHALL removes the queue too, without notice: the client that finds the lock gone notifies its waiters."""
    async with backend_at(server.url, host) as backend, backend_at(server.url, host) as other:
        for find in ("renew", "release"):
            grant = granted(await backend.try_acquire(host.request("x", ttl=600.0)))
            elsewhere = granted(await backend.try_acquire(host.request("y", ttl=600.0)))
            waiter, uninvolved = host.request("x"), host.request("y")
            await queue_up(other, waiter)
            await queue_up(other, uninvolved)
            redis("DEL", "lockkit:x", "{lockkit:x}:queue")

            if find == "renew":
                assert await backend.renew([grant, elsewhere]) == [Gone("gone"), Renewed()]
            else:
                assert not await backend.release(grant)

            assert await woken(waiter)
            assert not uninvolved.wake.is_set()
            redis("FLUSHALL")


async def test_anything_on_the_channel_is_survived(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """Messages from other clients of the server do not end the subscription."""
    async with backend_at(server.url, host) as backend:
        grant = granted(await backend.try_acquire(host.request(ttl=600.0)))
        waiter = host.request()
        await queue_up(backend, waiter)
        channel = waiter.state.channel
        for text in (
            b"\xff\xfe",
            b"",
            b"nobody",
            b" ",
            b"%b x" % waiter.owner.encode()[:5],
            b"a 99999999999999999",
            b"nobody 12",
        ):
            redis("PUBLISH", channel, text)
            redis("PUBLISH", "lockkit:wake:gone", text)
        await host.runtime.sleep(0.2)
        assert not waiter.wake.is_set()
        assert waiter.state.listener.channel == channel

        assert await backend.release(grant)

        assert await woken(waiter)


async def test_queue_has_an_expiry(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """An abandoned queue expires, but not before its waiters have retried."""
    async with backend_at(server.url, host) as backend:
        granted(await backend.try_acquire(host.request(ttl=40.0)))
        await queue_up(backend, host.request(ttl=20.0))
        assert 40_000 < redis("PTTL", "{lockkit:x}:queue") <= 50_100
        await queue_up(backend, host.request(ttl=60.0))
        assert 60_000 < redis("PTTL", "{lockkit:x}:queue") <= 70_100


async def test_expired_lock_is_the_first_waiter_s(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """When a holder dies, the client that retries first hands the lock to the head of the queue."""
    async with backend_at(server.url, host) as backend:
        granted(await backend.try_acquire(host.request()))
        head, other = host.request(), host.request()
        await queue_up(backend, head)
        await queue_up(backend, other)
        redis("DEL", "lockkit:x")

        assert not (await busy_at(backend, other)).poll

        assert await woken(head)
        granted(await backend.try_acquire(head))


async def test_dead_waiters_do_not_pile_up(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """Behind a lease that is renewed for days, crashed waiters are removed as new ones come."""
    async with backend_at(server.url, host) as backend:
        granted(await backend.try_acquire(host.request()))
        redis("RPUSH", "{lockkit:x}:queue", *(f"owner{index} 1000 nobody:{index}" for index in range(100)))
        for _ in range(16):
            await queue_up(backend, host.request())

        assert redis("LLEN", "{lockkit:x}:queue") <= 32


async def test_foreign_holder_is_polled(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """A foreign client notifies no waiter: the engine polls, and knows the ttl if there is one."""
    async with backend_at(server.url, host) as backend:
        redis("SET", "lockkit:x", "theirs", "PX", "20000")
        busy = await busy_at(backend, host.request())
        assert (busy.poll, busy.owner) == (True, "theirs")
        assert 10.0 < (busy.retry_after or 0.0) <= 20.0
        (holder,) = await backend.holders("x")
        assert (holder.owner, holder.token, holder.metadata) == ("theirs", None, {})

        redis("SET", "lockkit:x", "for ever")
        busy = await busy_at(backend, host.request())
        assert (busy.poll, busy.retry_after) == (True, None)
        assert [holder.remaining for holder in await backend.holders("x")] == [None]


async def test_key_of_another_type_is_named(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """Waiting cannot mend it, so it is an error of configuration; a holder has lost its lock."""
    async with backend_at(server.url, host) as backend:
        grant = granted(await backend.try_acquire(host.request()))
        redis("DEL", "lockkit:x")
        redis("LPUSH", "lockkit:x", "not a lock")

        with pytest.raises(ConfigurationError, match=r"the key lockkit:x holds no string.*|.*prefix="):
            await backend.try_acquire(host.request())
        with pytest.raises(ConfigurationError, match="lockkit:x"):
            await backend.holders("x")
        assert await backend.renew([grant]) == [Gone("taken")]
        assert not await backend.release(grant)

        with pytest.raises(ConfigurationError, match="lockkit:x"):
            await backend.break_lock("x")
        assert redis("LRANGE", "lockkit:x", 0, -1) == ["not a lock"]


async def test_cancelled_background_task_is_replaced(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """An application that cancels ``asyncio.all_tasks()`` ends neither calls nor waits for good."""
    del redis

    async with backend_at(server.url, host) as backend:
        grant = granted(await backend.try_acquire(host.request(ttl=600.0)))
        waiter = host.request()
        await queue_up(backend, waiter)
        await cancel_tasks("lockkit-redis")
        assert await woken(waiter)
        waiter.wake.clear()
        await queue_up(backend, waiter)
        assert await backend.release(grant)
        assert await woken(waiter)

    async with backend_at(server.url, host) as backend:
        asking = asyncio.create_task(backend.holders("x"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await cancel_tasks("lockkit-redis-connect") == 1
        with pytest.raises(BackendUnavailable, match="cancelled"):
            await asking
        await backend.holders("x")


async def cancel_tasks(name: str) -> int:
    """Cancel the tasks whose names begin so, and wait for their end; tell how many there were."""
    tasks = [task for task in asyncio.all_tasks() if task.get_name().startswith(name)]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return len(tasks)


@sync_only
async def test_listening_thread_ends_when_nobody_waits(
    server: RedisServer, redis: Keyspace, monkeypatch: pytest.MonkeyPatch, host: StubHost
) -> None:
    """A client does not keep a thread and a connection for ever, also if it gave up while the server did not answer."""
    monkeypatch.setattr("lockkit.backends.redis.wakeup.IDLE_SECONDS_MAX", 0.1)
    async with backend_at(server.url, host) as backend:
        grant = granted(await backend.try_acquire(host.request()))
        waiter = host.request()
        await queue_up(backend, waiter)
        await host.runtime.sleep(0.5)
        until_one_subscribes(redis)

        redis("CLIENT", "PAUSE", 3000)
        waiter.answer_by = host.runtime.now() + 0.1
        with pytest.raises(BackendUnavailable):
            await backend.abandon(waiter)

        wait_until(lambda: None if redis("PUBSUB", "CHANNELS", "lockkit:wake:[0-9a-f]*") == [] else "still subscribed")
        again = host.request()
        await queue_up(backend, again)
        assert await backend.release(grant)
        assert await woken(again)
        await backend.abandon(again)


@both
async def test_forgotten_scripts_are_loaded_again(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """SCRIPT FLUSH between any two operations is not noticed, in a pipeline neither."""
    async with backend_at(server.url, host) as backend:
        grants = [granted(await backend.try_acquire(host.request(f"lock {index}"))) for index in range(300)]
        redis("SCRIPT", "FLUSH")
        assert await backend.renew(grants) == [Renewed()] * 300
        redis("SCRIPT", "FLUSH")
        granted(await backend.try_acquire(host.request()))
        redis("SCRIPT", "FLUSH")
        assert await backend.release(grants[0])
        redis("SCRIPT", "FLUSH")
        await backend.release_all(grants[1:], host.runtime.now() + 20.0)
        assert [key for key in sorted(redis.keys()) if not key.endswith(":fence")] == ["lockkit:x"]


async def test_node_that_is_closed_connects_no_more_in_the_async_api(server: RedisServer, host: StubHost) -> None:
    """Also for a call that was under way, which would send its command again: perhaps to a former master."""
    target = Target.anywhere({}, tls=False).moved(server.host, server.port)

    node = RedisNode(host.runtime, target)
    assert await node.call(pack("PING")) == b"PONG"
    under_way = asyncio.create_task(node.call(pack("PING"), resend=True))
    await asyncio.sleep(0)

    await node.close()

    with pytest.raises(BackendUnavailable, match="closed here"):
        await under_way
    with pytest.raises(BackendUnavailable, match="closed here"):
        await node.call(pack("PING"), resend=True)


async def test_cluster_that_is_away_is_asked_once_for_all_leases(
    host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time takes a thread for each node: a client with thousands of leases would do nothing else."""
    rounds: list[int] = []

    async def counted(*arguments: Any, **options: Any) -> object:
        rounds.append(options.get("one_answers", False))
        return await ask_nodes(*arguments, **options)

    monkeypatch.setattr("lockkit.backends.redis.groups.ask_nodes", counted)

    topology = ClusterTopology([("127.0.0.1", 1)], Target.anywhere({}, tls=False), host, "lockkit")
    calls = [(f"lockkit:{number}", b"") for number in range(100)]
    results = await topology.run_many(Script("clock", keys=["lock"], arguments=0), calls)

    assert {type(result) for result in results} == {BackendUnavailable}
    assert sum(rounds) == 1
    await topology.close()


@pytest.mark.parametrize("named", [b"", None])
def test_node_that_does_not_know_its_address_is_where_it_was_asked(named: bytes | None) -> None:
    """Without the brackets, in which messages and URLs show an IPv6 address."""
    topology = ClusterTopology([("::1", 7000)], Target.anywhere({}, tls=False), StubHost(BlockingRuntime()), "lockkit")
    asked = topology._node_at(("::1", 7000))
    drive(topology._use_map([[0, 16383, [named, 7000]]], asked))

    assert drive(topology.node_for("lockkit:x")) is asked
    moved = topology._redirected(f"MOVED {slot_of('lockkit:x')} :7001", asked, "lockkit:x", moved=True)
    assert moved.label == "[::1]:7001"


def test_server_that_could_not_be_asked_is_compared_with_the_one_before() -> None:
    """INFO is refused while a long script runs; afterwards it may be another run of the server."""
    host = StubHost(BlockingRuntime())
    look = Handshake(host)

    class Connected(Connection):
        def __init__(self, *replies: Reply) -> None:
            self.replies = list(replies)

        async def call_many(self, packed: bytes, count: int, until: float = inf) -> list[Reply]:
            del packed, until
            return self.replies * count

    for info, confirmations in (
        (b"run_id:1\r\nrole:master", 0),
        (ServerSaid("BUSY Redis is busy running a script."), 1),  # it may be another run
        (b"run_id:1\r\nrole:master", 1),
        (ServerSaid("BUSY Redis is busy running a script."), 2),
        (b"run_id:2\r\nrole:master", 3),
        (b"run_id:2\r\nrole:slave", 4),
    ):
        drive(look(Connected(info), inf))
        assert host.confirmations == confirmations
    # A node of a Redlock without its run id may be another run, too, and must not vote.
    with pytest.raises(ServerSaid, match=r"^BUSY"):
        drive(Handshake(host, votes=True, durable=False)(Connected(ServerSaid("BUSY Redis is busy.")), inf))


def test_master_that_two_threads_find_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same reason. A thread that asked earlier does not bring back the master from before."""
    host = StubHost(BlockingRuntime())
    asked: list[bool] = []
    found: list[RedisNode] = []
    group = SentinelTopology([], "mymaster", Target.anywhere({}, tls=False), host, "lockkit")
    named = iter([("127.0.0.1", 2), ("127.0.0.1", 1)])

    async def ask(answer_by: float) -> tuple[str, int]:
        del answer_by
        if not asked:
            asked.append(True)
            found.append(drive(group.node_for("x")))  # as another thread, at this moment
        return next(named)

    monkeypatch.setattr(group, "_ask", ask)

    master = drive(group.node_for("x"))

    assert master is found[0] is drive(group.node_for("x"))
    assert master.label == "127.0.0.1:2"


async def test_cancelled_calls_leave_the_connection_usable(
    server: RedisServer, redis: Keyspace, host: StubHost
) -> None:
    """A task that is cancelled in the middle of a call leaves no half reply to the next."""
    async with backend_at(server.url, host) as backend:
        granted(await backend.try_acquire(host.request()))
        for index in range(140):
            request = host.request(f"lock {index % 7}")
            request.uncertain = True
            task = asyncio.create_task(backend.try_acquire(request))
            for _ in range(index % 5):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await backend.abandon(request)
            assert [holder.remaining is not None for holder in await backend.holders("x")] == [True]

        assert not any(key.startswith("lockkit:lock") for key in sorted(redis.keys()))
        until_no_more_than_two_ask(redis)


async def test_grant_is_a_grant(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """A ttl that is no whole number of milliseconds is rounded up, and said so."""
    del redis
    async with backend_at(server.url, host) as backend:
        outcome = await backend.try_acquire(host.request(ttl=1.2345678))

        assert isinstance(outcome, Grant)
        assert outcome.ttl == 1.235
        assert await backend.release(outcome)
        assert granted(await backend.try_acquire(host.request(ttl=0.1 * 3))).ttl == 0.3


async def test_names_of_thousands_of_locks_come_in_pages(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """Each once, and those of foreign clients too; not keys that no lock can have, nor what is beside a lock."""
    names = {f"seat*:{number}" for number in range(3000)}
    redis("EVAL", "for i = 0, 2999 do redis.call('SET', 'lockkit:seat*:' .. i, 'foreign', 'PX', 60000) end", 0)
    for key in (b"lockkit:seat*:%zz", b"lockkit:seat*:\xff", "lockkit:seat*:" + "x" * 250, "lockkit:seat*:%41",
                "lockkit:seatX:1", "other:seat*:1", "{lockkit:seat*:1}:fence"):  # fmt: skip
        redis("SET", key, "foreign")
    redis("LPUSH", "lockkit:seat*:list", "no lock")

    async with backend_at(server.url, host) as backend:
        granted(await backend.try_acquire(host.request("seat*:{mine}", ttl=30.0)))
        listed: list[str] = []
        sizes = []
        page = await backend.names("seat*:")
        while True:
            listed += page.names
            sizes.append(len(page.names))
            if page.next is None:
                break
            page = await backend.names("seat*:", page)

        assert sorted(listed) == sorted(names | {"seat*:{mine}"})
        assert len(sizes) > 2
        assert max(sizes) < 2000


async def test_name_that_two_nodes_have_is_listed_once(server: RedisServer, redis: Keyspace, host: StubHost) -> None:
    """As when a slot moves from one master to another between two pages; a new master is asked too."""
    redis("SET", "lockkit:seat", "foreign", "PX", 60_000)

    target = Target.anywhere({}, tls=False).moved(server.host, server.port)
    nodes = [RedisNode(host.runtime, target) for _ in range(2)]

    async def masters() -> list[RedisNode]:
        return nodes

    scan = Scan("lockkit", "", nodes[:1])
    first, second = await scan.page(masters), await scan.page(masters)

    assert (first.names, first.next) == (["seat"], scan)
    assert (second.names, second.next) == ([], None)
    for node in nodes:
        await node.close()
