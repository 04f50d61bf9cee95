"""What is special about locks on several independent nodes; what all backends share is in the conformance suite."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from math import inf
from typing import Any, NamedTuple, cast
from unittest.mock import ANY

import pytest
import redis
import redis.asyncio

import lockkit
import lockkit.aio
from lockkit.backend import Busy, Gone, Grant, Renewed, Request, Unknown
from lockkit.backends.redis.keys import IDLE_SECONDS
from lockkit.backends.redlock import backend as redlock_backend
from lockkit.backends.redlock import network
from lockkit.backends.redlock.backend import RedlockBackend
from lockkit.backends.redlock.delayed_restart import AHEAD_MS_MAX, FORGOTTEN_MS
from lockkit.backends.redlock.network import Nodes
from lockkit.backends.redlock.nodes import ACQUIRE, ADMIT, FENCE, HOLDERS, LOOK, RELEASE, UNDO, Answer, LockKeys, Op
from lockkit.configuration.registry import split_options
from lockkit.engine import engine
from lockkit.errors import BackendUnavailable, ConfigurationError, NoQuorum
from lockkit.runtime import drive
from lockkit.testing.stopwatch import Stopwatch
from lockkit.testing.timing import PATIENCE
from lockkit.url import parse
from lockkit_tools.servers import FaultProxy, RedisNodes, RedisServer, require, wait_until
from lockkit_tools.servers.base import Server
from tests.backends.redis.faces import both, sync_only
from tests.backends.redis.support import Face, Keyspace, token_in
from tests.backends.support import StubHost, granted
from tests.tries import busy

MARK = "{lockkit}:redlock"
LOCK = "lockkit:x"
PATIENT_TIMEOUT = 4.0
"""Time limit of nodes where every one must answer, however busy the machine is."""


@pytest.fixture(scope="module")
def five() -> Iterator[RedisNodes]:
    """Five nodes for all tests of this module."""
    require("redis", local=True)
    with RedisNodes(5) as nodes:
        yield nodes


@pytest.fixture
def nodes(five: RedisNodes) -> Iterator[RedisNodes]:
    """All up, and without any data, also without marks."""
    for node in five.nodes:
        node.start()
        on(node)("FLUSHALL")
    yield five
    for node in five.nodes:
        if node.running:
            node.resume()


def on(node: Server) -> Keyspace:
    """Look at one node's keys."""
    assert isinstance(node, RedisServer)
    return Keyspace(node)


def open_redlock(url: str, host: StubHost, **given: object) -> RedlockBackend:
    """Open a backend as the registry does."""
    parsed = parse(url)
    _, options = split_options(RedlockBackend, parsed, given)
    return RedlockBackend.open(parsed, options, host)


@asynccontextmanager
async def redlock(
    nodes: RedisNodes | Sequence[RedisServer | FaultProxy], host: StubHost, *, user: str = "", **given: object
) -> AsyncIterator[RedlockBackend]:
    """Open a backend and close it at the end; every node has time to answer, unless the test gives another limit."""
    chosen = nodes.nodes if isinstance(nodes, RedisNodes) else nodes
    url = f"redlock://{','.join(f'{user}{node.address}' for node in chosen)}"
    backend = open_redlock(url, host, **{"node_timeout": PATIENT_TIMEOUT, **given})
    try:
        yield backend
    finally:
        await backend.close()


@contextmanager
def proxied(nodes: RedisNodes) -> Iterator[Sequence[FaultProxy]]:
    """Put a proxy before each node."""
    with ExitStack() as opened:
        yield [opened.enter_context(FaultProxy(node.host, node.port)) for node in nodes.nodes]


async def busy_at(backend: RedlockBackend, request: Request) -> Busy:
    """Look, and find the lock busy."""
    outcome = await backend.try_acquire(request)
    assert isinstance(outcome, Busy), outcome
    return outcome


def nodes_of(backend: RedlockBackend) -> Nodes:
    """The connections of a backend."""
    return backend._nodes


def restart_empty(*nodes: RedisServer) -> None:
    """Kill and start again: without persistence all is lost."""
    for node in nodes:
        node.restart(crash=True)


def has_lock(node: RedisServer, key: str = LOCK) -> bool:
    """Tell whether a node has the key of the lock."""
    return bool(on(node)("EXISTS", key))


def age_marks(*nodes: RedisServer) -> None:
    """Let the first start be long ago."""
    for node in nodes:
        on(node)("SET", MARK, str(mark_of(node)._replace(since_us=1)))


class Mark(NamedTuple):
    """The mark of a node; see ``admit.lua``."""

    run: str
    ttl_ms: int
    since_us: int
    until_us: int

    def __str__(self) -> str:
        return " ".join(map(str, self))


def mark_of(node: RedisServer) -> Mark:
    """Read the mark of a node."""
    run, *numbers = str(on(node)("GET", MARK)).split(" ")
    return Mark(run, *map(int, numbers))


async def until(host: StubHost, condition: Callable[[], bool]) -> None:
    """Wait for something that another thread or task does, generously."""
    deadline = host.runtime.now() + 20.0
    while not condition():
        assert host.runtime.now() < deadline
        await host.runtime.sleep(0.01)


async def until_it(host: StubHost, ask: Callable[[], Awaitable[object]], wanted: object) -> None:
    """The same with something that is asked: perhaps often, because a busy machine takes time where little is left."""
    deadline = host.runtime.now() + 20.0
    while (answer := await ask()) != wanted:
        assert host.runtime.now() < deadline, answer


# -- what lies at the nodes --------------------------------------------------------------------------------------------


async def test_every_node_has_the_lock_and_the_token(nodes: RedisNodes, host: StubHost) -> None:
    """The lock is a plain string on each node; the token stands beside it, and a release leaves only that."""
    async with redlock(nodes, host) as backend:
        request = host.request(ttl=30.0)
        grant = granted(await backend.try_acquire(request))
        for node in nodes.nodes:
            assert on(node)("GET", LOCK) == request.owner
            assert 29_000 < on(node)("PTTL", LOCK) <= 30_000
            assert token_in(on(node)("GET", f"{{{LOCK}}}:fence")) == str(grant.token)

        assert await backend.release(grant)
        assert all(on(node).keys() == {MARK, f"{{{LOCK}}}:fence"} for node in nodes.nodes)
        assert not await backend.release(grant)


async def test_holder_has_it_as_long_as_a_majority(nodes: RedisNodes, host: StubHost) -> None:
    """What `holders` says is left ends with the third of five keys."""
    async with redlock(nodes, host) as backend:
        granted(await backend.try_acquire(host.request()))
        for node, seconds in zip(nodes.nodes, (500, 100, 300, 400, 200), strict=True):
            on(node)("PEXPIRE", LOCK, seconds * 1000)
        (holder,) = await backend.holders("x")
        assert holder.remaining is not None
        assert 200 < holder.remaining <= 300

        on(nodes.nodes[2])("PERSIST", LOCK)
        (holder,) = await backend.holders("x")
        assert holder.remaining is not None
        assert 300 < holder.remaining <= 400


async def test_waiter_behind_a_client_that_may_be_of_another_kind(nodes: RedisNodes, host: StubHost) -> None:
    """
    A value of lockkit's form without a record is another kind's, or its lease is just being granted.

    The waiter retries soon, and is woken all the same; if the form is another one, it polls.
    """
    async with redlock(nodes, host) as backend:
        await backend.release(granted(await backend.try_acquire(host.request())))
        for value, poll in (("0" * 32, False), ("A foreign one", True)):
            for node in nodes.nodes:
                on(node)("SET", LOCK, value, "PX", 60_000)
            outcome = await busy_at(backend, host.request(queue=False))
            assert (outcome.owner, outcome.poll) == (value, poll)
            assert outcome.retry_after is not None
            assert (outcome.retry_after <= 0.25) is not poll


async def test_token_is_above_the_highest_of_a_majority(nodes: RedisNodes, host: StubHost) -> None:
    """One node with a high counter raises all, also when that node's own clock is behind."""
    async with redlock(nodes, host) as backend:
        grant = granted(await backend.try_acquire(host.request()))
        await backend.release(grant)
        ahead = grant.token + 10**9
        on(nodes.nodes[4])("SET", f"{{{LOCK}}}:fence", ahead)

        assert granted(await backend.try_acquire(host.request())).token == ahead + 1
        assert token_in(on(nodes.nodes[0])("GET", f"{{{LOCK}}}:fence")) == str(ahead + 1)


async def test_late_token_does_not_lower_a_newer_one(nodes: RedisNodes, host: StubHost) -> None:
    """Round two of an old attempt that arrives late changes nothing."""
    async with redlock(nodes, host) as backend:
        grant = granted(await backend.try_acquire(host.request()))
        held = cast("Any", grant.state)
        answers = await backend._nodes.ask(FENCE, held.keys, (held.value, grant.token - 5, 1000, "{}"))

        assert answers == [1] * 5
        assert token_in(on(nodes.nodes[0])("GET", f"{{{LOCK}}}:fence")) == str(grant.token)
        assert await backend._nodes.ask(FENCE, held.keys, ("another", grant.token + 5, 1000, "{}")) == [0] * 5


async def test_grant_needs_a_majority_in_round_two(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who loses the keys between the rounds is not granted, and leaves nothing behind."""
    async with redlock(nodes, host) as backend:
        granted(await backend.try_acquire(host.request("warm")))
        backend._ahead_us = None

        async def lose(op: Op) -> None:
            for node in nodes.nodes[:3] if op is FENCE else ():
                on(node)("DEL", LOCK)

        intercept(monkeypatch, backend, before=lose)
        await busy_at(backend, host.request())
        assert not any(has_lock(node) for node in nodes.nodes)


def rounds_of(monkeypatch: pytest.MonkeyPatch, backend: RedlockBackend) -> list[Op]:
    """Note the operations that nodes are asked for, all at the same time, from now on."""
    asked: list[Op] = []

    async def note(op: Op) -> None:
        asked.append(op)

    intercept(monkeypatch, backend, before=note)
    return asked


def intercept(
    monkeypatch: pytest.MonkeyPatch,
    backend: RedlockBackend,
    *,
    before: Callable[[Op], Awaitable[None]] | None = None,
    after: Callable[[Op, Sequence[Any], list[Answer]], None] | None = None,
) -> None:
    """Do something before each operation at the nodes, or change their answers."""
    ask = backend._nodes.ask

    async def asked(op: Op, keys: LockKeys, arguments: Sequence[Any], **options: Any) -> list[Answer]:
        if before is not None:
            await before(op)
        answers = await ask(op, keys, arguments, **options)
        if after is not None:
            after(op, arguments, answers)
        return answers

    monkeypatch.setattr(backend._nodes, "ask", asked)


async def test_round_one_is_enough_if_a_majority_accepts_the_proposed_token(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then written, with the metadata, as round two would."""
    async with redlock(nodes, host) as backend:
        granted(await backend.try_acquire(host.request("warm")))
        asked = rounds_of(monkeypatch, backend)

        async def acquire() -> tuple[list[Op], int]:
            asked.clear()
            grant = granted(await backend.try_acquire(host.request()))
            rounds = list(asked)
            (holder,) = await backend.holders("x")
            assert (holder.token, holder.metadata) == (grant.token, {"pid": 1})
            written = [token_in(on(node)("GET", f"{{{LOCK}}}:fence")) for node in nodes.nodes]
            await backend.release(grant)
            return rounds, written.count(str(grant.token))

        await until_it(host, acquire, ([ACQUIRE], 5))  # a node that a busy machine delays writes it later


@pytest.mark.parametrize("wrong_us", [-1_000_000, 1_000_000], ids=["behind", "ahead"])
async def test_proposal_that_nodes_refuse_takes_a_second_round(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch, wrong_us: int
) -> None:
    """A client whose idea of the time is wrong, as after a pause, cannot take a token down, nor ahead of the time."""
    async with redlock(nodes, host) as backend:
        grant = granted(await backend.try_acquire(host.request()))
        await backend.release(grant)
        asked = rounds_of(monkeypatch, backend)
        assert backend._ahead_us is not None
        backend._ahead_us += wrong_us
        newer = granted(await backend.try_acquire(host.request()))

        assert asked == [ACQUIRE, FENCE]
        assert grant.token < newer.token <= max(times_us(nodes))


def times_us(nodes: RedisNodes) -> list[int]:
    """Ask the nodes for the time, µs."""
    times = (on(node)("TIME") for node in nodes.nodes)
    return [int(seconds) * 1_000_000 + int(micros) for seconds, micros in times]


async def test_proposals_that_are_too_high_do_not_add_up(nodes: RedisNodes, host: StubHost) -> None:
    """No token is further ahead of the nodes' time than a restarted node waits, however many grants precede it."""
    async with redlock(nodes, host) as backend:
        for _ in range(20):
            grant = granted(await backend.try_acquire(host.request()))
            assert grant.token <= max(times_us(nodes)) + AHEAD_MS_MAX * 1000
            await backend.release(grant)
            assert backend._ahead_us is not None
            backend._ahead_us += 8000


async def test_proposal_that_a_minority_accepts_takes_a_second_round(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fewer than a majority have written is no token: the next holder might not see it."""
    async with redlock(nodes, host) as backend:
        await backend.release(granted(await backend.try_acquire(host.request())))
        accepted = False

        def refuse(op: Op, arguments: Sequence[Any], answers: list[Answer]) -> None:
            nonlocal accepted
            if op is ACQUIRE:
                accepted = answers[0] == answers[1] == arguments[4]
                answers[2:] = [1, 1, 1]  # as nodes whose clocks are far behind

        intercept(monkeypatch, backend, after=refuse)
        asked = rounds_of(monkeypatch, backend)

        async def acquire() -> bool:
            asked.clear()
            await backend.release(granted(await backend.try_acquire(host.request())))
            assert asked == [ACQUIRE, FENCE, RELEASE]
            return accepted

        await until_it(host, acquire, wanted=True)


async def test_one_round_without_fencing(nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its token grows with each lease also at nodes whose clocks are behind the last one."""
    last = 9 * 10**15

    for node in nodes.nodes:
        on(node)("SET", "{lockkit:x}:fence", f"{last} ")
    async with redlock(nodes, host, fencing="off") as backend:
        granted(await backend.try_acquire(host.request("warm")))
        asked = rounds_of(monkeypatch, backend)
        for token in (last + 1, last + 2):
            grant = granted(await backend.try_acquire(host.request()))
            assert [holder.token for holder in await backend.holders("x")] == [grant.token] == [token]
            assert await backend.release(grant)
        assert ACQUIRE in asked
        assert FENCE not in asked


async def test_late_release_of_an_earlier_attempt_frees_nothing(nodes: RedisNodes, host: StubHost) -> None:
    """Each attempt has a value of its own: what is still under way of a former one finds nothing."""
    async with redlock(nodes, host) as backend:
        await backend.release(granted(await backend.try_acquire(host.request())))
        for node in nodes.nodes[:3]:
            on(node)("SET", LOCK, "somebody else")
        request = host.request()
        await busy_at(backend, request)
        for node in nodes.nodes[:3]:
            on(node)("DEL", LOCK)
        grant = granted(await backend.try_acquire(request))

        assert await backend._nodes.ask(UNDO, grant.state.keys, (request.owner,)) == [0] * 5
        (holder,) = await backend.holders("x")
        assert (holder.owner, holder.token) == (request.owner, grant.token)


# -- nodes that fail ---------------------------------------------------------------------------------------------------


@both
async def test_three_of_five_down(nodes: RedisNodes, host: StubHost) -> None:
    """The error names the nodes and comes at once, and the votes of the others are given back."""
    async with redlock(nodes, host) as backend:
        granted(await backend.try_acquire(host.request("warm")))
        for node in nodes.nodes[:3]:
            node.kill()
        watch = Stopwatch()
        with pytest.raises(NoQuorum) as caught:
            await backend.try_acquire(host.request())

        assert watch.stop() < 5.0
        assert all(node.address in str(caught.value) for node in nodes.nodes[:3])
        assert "2 of 5 nodes answered" in str(caught.value)
        assert "closed here" not in str(caught.value)
        assert not any(has_lock(node) for node in nodes.nodes[3:])
        for question in (backend.ping(), backend.holders("x"), backend.break_lock("x")):
            with pytest.raises(NoQuorum):
                await question


async def all_names(backend: RedlockBackend, prefix: str) -> list[str]:
    """Read all pages."""
    page = await backend.names(prefix)
    names = list(page.names)
    while page.next is not None:
        page = await backend.names(prefix, page)
        names += page.names
    return sorted(names)


async def test_names_need_a_majority(nodes: RedisNodes, host: StubHost) -> None:
    """Which any three of five nodes know of: two may be down, and two may have keys that hold no lock."""
    async with redlock(nodes, host) as backend:
        granted(await backend.try_acquire(host.request("n:all")))
        for node in nodes.nodes[:2]:
            on(node)("SET", "lockkit:n:minority", "foreign", "PX", 60_000)
        for node in nodes.nodes[2:]:
            on(node)("SET", "lockkit:n:majority", "foreign", "PX", 60_000)
        for node in nodes.nodes:
            on(node)("SET", "lockkit:n:split", f"of {node.address}", "PX", 60_000)
        assert await all_names(backend, "n:") == ["n:all", "n:majority"]

        for node in nodes.nodes[:2]:
            node.kill()
        assert await all_names(backend, "n:a") == ["n:all"]

        nodes.nodes[2].kill()
        with pytest.raises(NoQuorum, match="the keys of 3 of 5 nodes are needed"):
            await all_names(backend, "n:")


@both
async def test_hanging_node_is_waited_for_once(nodes: RedisNodes, host: StubHost) -> None:
    """A stopped node takes connections and answers nothing: after the first time it is not asked until it answers."""
    async with redlock(nodes, host, node_timeout=1.0) as backend:
        granted(await backend.try_acquire(host.request("warm")))
        node = nodes_of(backend).all[1]
        nodes.nodes[1].pause()
        grant = granted(await backend.try_acquire(host.request()))
        assert not node.up
        assert await backend.release(grant)
        await host.runtime.sleep(0.5)  # several tries to connect
        assert not node.up
        watch = Stopwatch()
        for _ in range(30):
            await backend.release(granted(await backend.try_acquire(host.request())))
        assert watch.stop() < 30 * 1.0  # not even one in thirty waited for it

        nodes.nodes[1].resume()
        await until(host, lambda: node.up)
        # What it had taken in before it was stopped has been done by now, and undone.
        wait_until(lambda: "key left" if has_lock(nodes.nodes[1]) else None)


@both
@pytest.mark.parametrize("what", ["release", "entry in the queue"])
async def test_what_is_unsent_is_sent_without_another_call(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A client that has nothing else to do goes on looking for the node."""
    monkeypatch.setattr(network, "RECONNECT_IDLE_SECONDS", 0.0)
    node = nodes.nodes[2]

    async with redlock(nodes, host, node_timeout=0.2) as backend:
        grant = granted(await backend.try_acquire(host.request(ttl=600.0)))
        waiter = host.request()
        await queue_up(backend, waiter)
        await until_queued(backend, waiter, nodes, 1)
        node.pause()
        nodes_of(backend).all[2].lost(TimeoutError())  # so that it is not even sent
        if what == "release":
            assert await backend.release(grant)
        else:
            await backend.abandon(waiter)
        await host.runtime.sleep(1.0)  # some tries to connect
        node.resume()
        left = LOCK if what == "release" else f"{{{LOCK}}}:queue"
        await until(host, lambda: not has_lock(node, left))


@pytest.mark.parametrize(
    ("face", "hanging", "warm"),
    [("sync", 2, True), ("asyncio", 2, True), ("asyncio", 2, False), ("sync", 3, False), ("asyncio", 3, True)],
    indirect=["face"],
)
async def test_hanging_nodes_leave_the_caller_its_time(
    nodes: RedisNodes, host: StubHost, *, hanging: int, warm: bool
) -> None:
    """Whatever the nodes are allowed, each call is back when its caller wants it; and a majority is enough."""
    # A majority must answer within it. Without one, all of it passes.
    wanted = 3.0 if hanging < 3 else 1.0

    def by() -> float:
        return host.runtime.now() + wanted

    def outcome() -> AbstractContextManager[object]:
        return pytest.raises(NoQuorum) if hanging >= 3 else nullcontext()

    async with redlock(nodes, host) as first:
        await first.release(granted(await first.try_acquire(host.request())))
    async with redlock(nodes, host, node_timeout=60.0) as backend:
        names = "abc" if warm else ""
        held = [granted(await backend.try_acquire(host.request(name))) for name in names]
        for node in nodes.nodes[:hanging]:
            node.pause()
        watch, request = Stopwatch(), host.request()
        request.answer_by = by()
        with outcome():
            held.append(granted(await backend.try_acquire(request)))
        request.answer_by = by()
        await backend.abandon(request)
        if held:
            with outcome():
                await backend.release(held[0], by())
            with outcome():
                await backend.release_all(held[1:], by())
        assert watch.stop() < 30.0  # four calls, each at most as long as wanted
        for node in nodes.nodes:
            node.resume()
        await until(host, lambda: not any(has_lock(node) for node in nodes.nodes))


@both
async def test_many_leases_are_renewed_and_released_together(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches, also by nodes that must be taught the script, while others hang or have lost the keys."""
    monkeypatch.setattr(network, "BATCH", 8)
    async with redlock(nodes, host, node_timeout=2.0) as backend:
        grants = [granted(await backend.try_acquire(host.request(f"{number}"))) for number in range(20)]
        on(nodes.nodes[4])("SCRIPT", "FLUSH")
        on(nodes.nodes[3])("DEL", *(f"lockkit:{grant.name}" for grant in grants))
        assert await backend.renew(grants) == [Renewed()] * len(grants)
        on(nodes.nodes[4])("SCRIPT", "FLUSH")
        nodes.nodes[0].pause()
        await backend.release_all(grants, host.runtime.now() + 20.0)
        for node in nodes.nodes[1:]:
            assert on(node)("KEYS", "lockkit:*") == []
        nodes.nodes[1].pause()
        nodes.nodes[2].pause()
        with pytest.raises(NoQuorum):
            await backend.release_all(grants, host.runtime.now() + 5.0)


def test_connecting_goes_on_after_everything_was_cancelled(nodes: RedisNodes) -> None:
    """A program that cancels all tasks of its event loop takes lockkit's with it: they are started anew."""

    async def scenario() -> None:
        async with await lockkit.aio.connect(nodes.url, durable=True) as client:
            await (await client.lock("x").acquire(5.0)).release()
            for node in nodes.nodes[:3]:
                node.kill()
            with pytest.raises(NoQuorum):
                await client.lock("x").acquire(0.5)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            for node in nodes.nodes[:3]:
                node.start()
            await (await client.lock("x").acquire(20.0)).release()

    asyncio.run(scenario())


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a client that nobody closed
def test_event_loop_that_ends_takes_everything_with_it(
    nodes: RedisNodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that ends without closing its client, while a node hangs: nothing is begun that nobody would end."""
    monkeypatch.setattr(engine, "EXIT_SECONDS", PATIENCE)

    async def main() -> None:
        client = await lockkit.aio.connect(nodes.url)
        lease = await client.lock("x", ttl=600).acquire(5.0)
        nodes.nodes[0].pause()
        await asyncio.sleep(0.2)
        assert lease.held
        raise SystemExit

    with pytest.raises(SystemExit):
        asyncio.run(main())
    gc.collect()

    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
    assert not any(has_lock(node) for node in nodes.nodes[1:])


def test_threads_share_the_connections_that_are_being_opened(
    nodes: RedisNodes, caplog: pytest.LogCaptureFixture
) -> None:
    """Each waits for its turn: that a connection is not open yet is no outage, so nobody is warned."""
    threads_count, calls_count = 40, 5
    ready = threading.Barrier(threads_count)
    tokens: list[int] = []

    def use(name: str) -> None:
        ready.wait()
        for _ in range(calls_count):
            with client.lock(name, timeout=PATIENCE) as lease:
                tokens.append(lease.token)

    with (
        lockkit.connect(nodes.url, node_timeout=PATIENT_TIMEOUT) as client,
        caplog.at_level(logging.WARNING, logger="lockkit"),
    ):
        threads = [threading.Thread(target=use, args=(f"x{number}",)) for number in range(threads_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(tokens) == threads_count * calls_count
    assert caplog.messages == []


@sync_only
async def test_caller_with_little_time_does_not_count_as_an_outage(nodes: RedisNodes, host: StubHost) -> None:
    """A node is down when it had its own time to answer, not when a caller had less."""
    async with redlock(nodes, host, node_timeout=30.0) as backend:
        granted(await backend.try_acquire(host.request("first")))
        nodes.nodes[0].pause()
        request = host.request("second")
        request.answer_by = host.runtime.now() + 0.5
        granted(await backend.try_acquire(request))
        assert all(node.up for node in nodes_of(backend).all)
        nodes.nodes[0].resume()
        later = granted(await backend.try_acquire(host.request("third")))
        assert len(later.state.voters) == 5


@pytest.mark.parametrize("tls", [False, True], ids=["plain port", "TLS port"])
async def test_scheme_that_the_ports_do_not_speak(host: StubHost, *, tls: bool) -> None:
    """No outage to be waited for: the URL is wrong, and the error says how."""
    require("redis", local=True)
    with ExitStack() as opened:
        first = opened.enter_context(RedisServer(tls=True))
        certificates = first.certificates if tls else None
        own = opened.enter_context(RedisNodes(3, make=lambda: RedisServer(tls=tls, certificates=certificates)))
        hosts = ",".join(node.address for node in own.nodes)
        backend = open_redlock(f"redlock://{hosts}" if tls else f"redlocks://{hosts}/0?{first.tls_query}", host)
        try:
            # The first try may end before all ports were asked.
            with suppress(NoQuorum, ConfigurationError):
                await backend.try_acquire(host.request())
            await until(host, lambda: all(isinstance(one.error, ConfigurationError) for one in nodes_of(backend).all))
            with pytest.raises(ConfigurationError, match=f" or {'redlocks' if tls else 'redlock'}://"):
                await backend.try_acquire(host.request())
        finally:
            await backend.close()


async def test_retries_without_a_pause_let_the_nodes_be_reconnected(nodes: RedisNodes, host: StubHost) -> None:
    """A task that tries again and again must let the event loop do it."""
    with proxied(nodes) as proxies:
        async with redlock(proxies, host, durable=True, node_timeout=0.5) as backend:
            await backend.release(granted(await backend.try_acquire(host.request())))
            for proxy in proxies:
                proxy.refuse()
                proxy.cut()
            began, outcome = host.runtime.now(), None
            while not isinstance(outcome, Grant):
                assert host.runtime.now() < began + 15.0
                if host.runtime.now() > began + 0.5:
                    for proxy in proxies:
                        proxy.accept()
                request = host.request(queue=False)
                request.answer_by = host.runtime.now() + 0.5
                with suppress(NoQuorum):
                    outcome = await backend.try_acquire(request)


async def test_cut_connections_to_slow_nodes_are_replaced_in_time(nodes: RedisNodes, host: StubHost) -> None:
    """Opening one takes several answers, each of which may take as long as a node has for it."""
    with proxied(nodes) as proxies:
        async with redlock(proxies, host, durable=True, node_timeout=1.0) as backend:
            await backend.release(granted(await backend.try_acquire(host.request())))
            for proxy in proxies:
                proxy.delay(to_client=0.6)
                proxy.cut()
            await until(host, lambda: not any(node.up for node in nodes_of(backend).all))
            granted(await backend.try_acquire(host.request()))


# -- delayed restart ---------------------------------------------------------------------------------------------------


async def hold_on_last_three(backend: RedlockBackend, host: StubHost, nodes: RedisNodes, ttl: float) -> Grant:
    """Acquire while the first two nodes hang, so that only the last three have the lock."""
    await backend.release(granted(await backend.try_acquire(host.request())))
    for node, known in zip(nodes.nodes[:2], nodes_of(backend).all, strict=False):
        node.pause()
        known.lost(TimeoutError())  # so that it is not even sent
    grant = granted(await backend.try_acquire(host.request(ttl=ttl)))
    assert [has_lock(node) for node in nodes.nodes[2:]] == [True] * 3
    return grant


async def refused(backend: RedlockBackend, request: Request) -> str:
    """Try, and get no lock."""
    try:
        outcome = await backend.try_acquire(request)
    except NoQuorum as error:
        return str(error)
    assert isinstance(outcome, Busy), "a second holder"
    return ""


@both
@pytest.mark.parametrize("fresh", [False, True], ids=["same client", "new client"])
async def test_node_restarted_empty_makes_no_second_holder(nodes: RedisNodes, host: StubHost, *, fresh: bool) -> None:
    """A holds 3, 4 and 5. If 3 loses its data, 1, 2 and 3 are a majority without the lock: so 3 does not vote."""
    async with redlock(nodes, host) as backend, redlock(nodes, host) as other:
        if not fresh:
            await backend.release(granted(await other.try_acquire(host.request())))
        grant = await hold_on_last_three(backend, host, nodes, ttl=30.0)
        for node in nodes.nodes[:2]:
            node.resume()
        age_marks(*nodes.nodes)
        restart_empty(nodes.nodes[2])

        for _ in range(3):
            await refused(other, host.request())
        assert isinstance((await backend.renew([grant]))[0], (Gone, Unknown))


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "running"])
async def test_node_that_is_replaced_must_be_stopped_first(nodes: RedisNodes, host: StubHost, *, stopped: bool) -> None:
    """While processes still have the old list, others have the new one: two majorities need not share a node."""
    one, two, old, new, _ = nodes.nodes
    async with redlock([one, two, old], host) as before, redlock([one, two, new], host) as after:
        granted(await before.try_acquire(host.request("warm", ttl=2.0)))
        age_marks(one, two, old)
        on(two)("SET", LOCK, "slow", "PX", 60_000)
        grant = granted(await before.try_acquire(host.request(ttl=2.0)))
        began = host.runtime.now()
        assert await before.renew([grant]) == [Renewed()]
        if stopped:
            old.kill()
        request, outcome = host.request(ttl=2.0), None
        on(two)("DEL", LOCK)
        while not await is_granted(after, request):
            on(two)("SET", LOCK, "slow", "PX", 60_000)  # a renewal would take it
            (outcome,) = await before.renew([grant])
            await host.runtime.sleep(0.05)
            on(two)("DEL", LOCK)

        assert (outcome == Renewed()) is not stopped
        assert host.runtime.now() > began + 2.0


async def is_granted(backend: RedlockBackend, request: Request) -> bool:
    """Try once; a node that a busy machine delays is no failure."""
    with suppress(NoQuorum):
        return isinstance(await backend.try_acquire(request), Grant)
    return False


async def test_three_nodes_restarted_empty_while_two_are_down(nodes: RedisNodes, host: StubHost) -> None:
    """None of those that answer has a mark, but not all answer: that is no first start."""
    async with redlock(nodes, host) as backend:
        await hold_on_last_three(backend, host, nodes, ttl=5.0)
        for node in nodes.nodes[:2]:
            node.kill()
        restart_empty(*nodes.nodes[2:])
    async with redlock(nodes, host) as other:
        message = await refused(other, host.request())

        assert message.count("lost its data") == 3
        for node in nodes.nodes[2:]:
            waits_us = mark_of(node).until_us - mark_of(node).since_us
            assert waits_us >= FORGOTTEN_MS * 1000
        assert "votes again in" in await refused(other, host.request())


async def test_restarted_node_votes_after_the_longest_ttl(nodes: RedisNodes, host: StubHost) -> None:
    """The longest that any node has voted for, not that of the client that notices."""
    async with redlock(nodes, host) as backend:
        await backend.release(granted(await backend.try_acquire(host.request(ttl=1.5))))
    age_marks(*nodes.nodes)
    restart_empty(nodes.nodes[0])
    async with redlock(nodes, host) as other:
        first = nodes.nodes[0]
        await other.release(granted(await other.try_acquire(host.request("y", ttl=0.5))))
        await until(host, lambda: on(first)("EXISTS", MARK) == 1)
        waits_us = mark_of(first).until_us - mark_of(first).since_us
        assert 1_517_000 <= waits_us < 1_600_000  # with the clock-drift margin

        started = host.runtime.now()
        while not has_lock(first, f"{{{LOCK}}}:fence"):
            assert host.runtime.now() < started + 20.0
            outcome = await other.try_acquire(host.request(ttl=0.5))
            if isinstance(outcome, Grant):  # else it took longer than the ttl
                await other.release(outcome)
            await host.runtime.sleep(0.05)


async def test_flushed_node_does_not_vote(nodes: RedisNodes, host: StubHost) -> None:
    """No connection ended, so only the vote itself can notice that the data are gone."""
    async with redlock(nodes, host) as backend:
        grant = granted(await backend.try_acquire(host.request()))
        await backend.release(grant)
        on(nodes.nodes[0])("FLUSHALL")
        granted(await backend.try_acquire(host.request()))

        assert not has_lock(nodes.nodes[0])


@sync_only
async def test_restart_with_data_waits_too_unless_durable(nodes: RedisNodes, host: StubHost) -> None:
    """The file may lack the last writes; ``durable=1`` says that it does not."""
    del nodes
    with RedisNodes(3, make=lambda: RedisServer(appendonly=True, appendfsync="always")) as own:
        first, *others = own.nodes
        async with redlock(own, host) as backend:
            await backend.release(granted(await backend.try_acquire(host.request(ttl=600.0))))
            age_marks(*own.nodes)
            first.restart()
            await until(host, lambda: nodes_of(backend).all[0].up or not nodes_of(backend).all[0].opening)
            await backend.release(granted(await backend.try_acquire(host.request())))
            await until(host, lambda: mark_of(first).until_us > 0)
            granted(await backend.try_acquire(host.request()))
            assert not has_lock(first)
        async with redlock(own, host, durable="yes") as backend:
            await backend.release(granted(await backend.try_acquire(host.request("y"))))
            for node in others:
                node.restart()
            granted(await backend.try_acquire(host.request("y")))
            assert all(has_lock(node, "lockkit:y") for node in others)


APP = "app:secret@"


def set_rights(nodes: RedisNodes, *rights: str) -> Sequence[RedisServer]:
    """Set what the user `APP` may do, at as many nodes, which are returned."""
    chosen = nodes.nodes[: len(rights)]
    for node, rules in zip(chosen, rights, strict=True):
        on(node)("ACL", "SETUSER", "app", "reset", "on", ">secret", *rules.split())
    return chosen


async def test_one_node_without_info_does_not_vote_unless_durable(nodes: RedisNodes, host: StubHost) -> None:
    """
    The others are a majority that can tell; and where nothing is forgotten, a restart does not matter.

    If a majority cannot tell, no lock is granted, and the error says what to do.
    """
    without = "~* &* +@all -@dangerous"
    three = set_rights(nodes, without, f"{without} +info", f"{without} +info")
    async with redlock(three, host) as warm:
        await warm.release(granted(await warm.try_acquire(host.request())))
    async with redlock(three, host, user=APP) as backend:
        granted(await backend.try_acquire(host.request()))
        assert [has_lock(node) for node in three] == [False, True, True]
    set_rights(nodes, *[without] * 3)
    async with redlock(three, host, user=APP, durable=True) as backend:
        assert await backend.release(granted(await backend.try_acquire(host.request("y"))))
    async with redlock(three, host, user=APP) as backend:
        with pytest.raises(ConfigurationError, match=r"\+info.*durable"):
            await backend.try_acquire(host.request("y"))


def test_first_start_by_many_clients_at_once(nodes: RedisNodes) -> None:
    """A new set of nodes works at once, whichever client comes first."""

    async def use(number: int) -> None:
        host = StubHost()
        async with redlock(nodes, host) as backend:
            granted(await backend.try_acquire(host.request(f"lock {number}")))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: drive(use(number)), range(8)))
    assert all(mark_of(node).until_us <= mark_of(node).since_us for node in nodes.nodes)


async def test_late_first_start_does_not_shorten_a_wait(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two clients that decide at the same time the first one's decision stands."""
    async with redlock(nodes, host) as backend:

        async def decide(op: Op) -> None:
            if op is ADMIT:
                on(nodes.nodes[0])("SET", MARK, str(Mark(_run_id(nodes.nodes[0]), 1, 1, 10**16)))

        intercept(monkeypatch, backend, before=decide)
        await backend._delayed_restart.run()

        assert mark_of(nodes.nodes[0]).until_us == 10**16
        assert on(nodes.nodes[1])("EXISTS", MARK) == 1


async def test_first_start_that_is_decided_late_admits_no_node_that_has_restarted(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client sees a new set and is stopped; another starts the set and gets the lock; a majority forgets that."""
    async with redlock(nodes, host) as late, redlock(nodes, host) as first:

        async def start(op: Op) -> None:
            if op is ADMIT and not has_lock(nodes.nodes[-1]):
                granted(await first.try_acquire(host.request(ttl=60.0)))
                restart_empty(*nodes.nodes[:-2])
                await _until_connected(host, late)

        intercept(monkeypatch, late, before=start)
        await late._delayed_restart.run()

        assert has_lock(nodes.nodes[-1])
        assert "may not vote yet" in await refused(late, host.request(ttl=60.0))


@pytest.mark.parametrize("fencing", ["on", "off"])
async def test_vote_that_was_forgotten_during_a_first_start_does_not_count(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch, fencing: str
) -> None:
    """A first start reaches two nodes, which vote and restart empty; another start finds no mark on any node."""
    for module in (network, redlock_backend):
        monkeypatch.setattr(module, "CALL_SECONDS", 60.0)
    async with redlock(nodes, host) as warm:  # a node without the script would be asked again when all have answered
        await warm.release(granted(await warm.try_acquire(host.request())))
    for node in nodes.nodes:
        on(node)("FLUSHALL")
    async with AsyncExitStack() as opened:
        proxies = opened.enter_context(proxied(nodes))
        late = await opened.enter_async_context(redlock(proxies, host, fencing=fencing, node_timeout=60.0))
        await _until_connected(host, late)
        for node in nodes.nodes[:2]:
            on(node)("SET", MARK, str(Mark(_run_id(node), 1, 1, 0)))
        for proxy in proxies[2:]:
            proxy.blackhole()
        request = host.request()
        request.answer_by = host.runtime.now() + PATIENCE
        trying = asyncio.create_task(late.try_acquire(request))
        await until(host, lambda: all(map(has_lock, nodes.nodes[:2])))
        restart_empty(*nodes.nodes[:2])
        first = await opened.enter_async_context(redlock(nodes, host, fencing=fencing))
        granted(await first.try_acquire(host.request()))
        for node in nodes.nodes[3:]:
            on(node)("DEL", LOCK)  # as if they had not heard of it
        for proxy in proxies:
            proxy.heal()

        assert isinstance(await trying, Busy)
        assert all(map(has_lock, nodes.nodes[:3]))


async def _until_connected(host: StubHost, backend: RedlockBackend) -> None:
    """Another call of the client opens the connections that a restart has cut."""
    deadline = host.runtime.now() + 20.0
    while not all(isinstance(answer, list) for answer in await backend._nodes.ask(LOOK, backend._mark_keys, ())):
        assert host.runtime.now() < deadline
        await host.runtime.sleep(0.02)


def _run_id(node: RedisServer) -> str:
    info = str(on(node)("INFO", "server"))
    return next(line.partition(":")[2] for line in info.splitlines() if line.startswith("run_id:"))


# -- renewal -----------------------------------------------------------------------------------------------------------


async def test_renewal_by_majority_of_where_it_is_owned(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minority that lost the key gets it back, which costs nothing where none has; without a majority it is gone."""
    async with redlock(nodes, host) as backend:
        grant, other = [granted(await backend.try_acquire(host.request(name))) for name in ("x", "y")]
        asked = rounds_of(monkeypatch, backend)
        assert await backend.renew([grant, other]) == [Renewed(), Renewed()]
        assert asked == []

        for node in nodes.nodes[:2]:
            on(node)("DEL", LOCK)
        assert await backend.renew([grant, other]) == [Renewed(), Renewed()]
        assert asked == [ACQUIRE, FENCE]
        assert [on(node)("GET", LOCK) for node in nodes.nodes] == [grant.owner] * 5

        for node in nodes.nodes[:3]:
            on(node)("DEL", LOCK)
        assert await backend.renew([grant, other]) == [Gone("gone"), Renewed()]
        assert [has_lock(node) for node in nodes.nodes] == [False, False, False, True, True]


async def test_node_that_lost_its_data_gets_the_key_back_when_it_may_vote(nodes: RedisNodes, host: StubHost) -> None:
    """Not before, and with what is known of the lease; no other client needs to have asked the node."""
    first = nodes.nodes[0]
    async with redlock(nodes, host) as backend:
        grant = granted(await backend.try_acquire(host.request(ttl=2.0)))
        age_marks(*nodes.nodes)
        restart_empty(first)
        while not has_lock(first):
            assert await backend.renew([grant]) == [Renewed()]
            await host.runtime.sleep(0.1)
        assert times_us(nodes)[0] >= mark_of(first).until_us
        assert mark_of(first).until_us - mark_of(first).since_us >= 2_000_000

        assert await backend._nodes.ask(HOLDERS, grant.state.keys, (), only=[0]) == [
            [grant.owner.encode(), ANY, str(grant.token).encode(), b'{"pid":1}', 0], None, None, None, None
        ]  # fmt: skip


async def test_restored_key_does_not_lower_the_last_token(nodes: RedisNodes, host: StubHost) -> None:
    """The node may have written a higher one for an attempt that came to nothing, which is not the holder's."""
    async with redlock(nodes, host) as backend:
        grant = granted(await backend.try_acquire(host.request()))
        record = f"{grant.token + 1} another {{}}"
        on(nodes.nodes[0])("DEL", LOCK)
        on(nodes.nodes[0])("SET", f"{{{LOCK}}}:fence", record)

        assert await backend.renew([grant]) == [Renewed()]
        assert has_lock(nodes.nodes[0])
        assert on(nodes.nodes[0])("GET", f"{{{LOCK}}}:fence") == record
        assert [holder.token for holder in await backend.holders("x")] == [grant.token]


def test_rolling_restart_without_data_costs_no_lease(nodes: RedisNodes) -> None:
    """Each of three nodes forgets its votes, one after the other, and the lease is held by all three at the end."""
    three = nodes.nodes[:3]
    url = f"redlock://{','.join(node.address for node in three)}"
    with (
        lockkit.connect(url, ttl=3.0, node_timeout=PATIENT_TIMEOUT) as client,
        client.lock("x", timeout=PATIENCE) as lease,
    ):
        age_marks(*three)
        for node in three:
            restart_empty(node)
            wait_until(lambda node=node: None if has_lock(node) else "the node has no key yet")  # type: ignore[misc]
        assert lease.confirm()


async def test_renewal_tells_who_took_it(nodes: RedisNodes, host: StubHost) -> None:
    """Taken by another owner, or freed by force; values of other clients need not be text."""
    async with redlock(nodes, host) as backend:
        taken, broken = [granted(await backend.try_acquire(host.request(name))) for name in ("x", "y")]
        for node in nodes.nodes[:3]:
            on(node)("SET", LOCK, b"\xff\xfe\x80", "PX", 60_000)
        assert await backend.break_lock("y")
        assert not await backend.break_lock("z")

        assert await backend.renew([taken, broken]) == [Gone("taken"), Gone("broken")]
        assert await backend.break_lock("x")
        assert not any(has_lock(node) for node in nodes.nodes[:3])


async def test_confirmation_and_renewal_need_the_votes_of_a_majority(nodes: RedisNodes, host: StubHost) -> None:
    """Who does not answer is counted for nobody: neither is the lease confirmed then, nor is it lost."""
    async with redlock(nodes, host) as backend:
        grant, taken = [granted(await backend.try_acquire(host.request(name))) for name in ("x", "y")]
        on(nodes.nodes[0])("DEL", LOCK)
        assert await backend.confirm(grant) is None
        for node in nodes.nodes[:3]:
            on(node)("SET", LOCK.replace("x", "y"), "somebody else")
        assert await backend.confirm(taken) == Gone("taken")

        for node in nodes.nodes[1:3]:
            node.kill()

        with pytest.raises(NoQuorum):
            await backend.confirm(grant)
        (outcome,) = await backend.renew([grant])
        assert isinstance(outcome, Unknown)
        assert isinstance(outcome.error, NoQuorum)
        assert [holder.owner for holder in await backend.holders("x")] == [grant.owner]
        for node in nodes.nodes[3:]:
            on(node)("DEL", LOCK)
        assert await backend.confirm(grant) == Gone("gone")


async def test_renewal_keeps_the_counter(nodes: RedisNodes, host: StubHost) -> None:
    """A lease that is renewed for longer than idle counters are kept must not outlive its own."""
    async with redlock(nodes, host) as backend:
        grant = granted(await backend.try_acquire(host.request(ttl=30.0)))
        for node in nodes.nodes:
            for key in (f"{{{LOCK}}}:fence", LOCK):
                on(node)("PEXPIRE", key, 20_000)
        assert await backend.renew([grant]) == [Renewed()]
        for node in nodes.nodes:
            assert on(node)("PTTL", f"{{{LOCK}}}:fence") > (IDLE_SECONDS - 60) * 1000
            assert on(node)("PTTL", LOCK) > 20_000


async def test_votes_and_renewals_note_the_longest_ttl(nodes: RedisNodes, host: StubHost) -> None:
    """On every node that voted, before anybody relies on it: a node that is lost later must wait for that long."""

    def longest(node: RedisServer) -> int:
        return mark_of(node).ttl_ms

    async with redlock(nodes, host) as first:
        await first.release(granted(await first.try_acquire(host.request(ttl=1.0))))
        assert [longest(node) for node in nodes.nodes] == [1000] * 5
    async with redlock(nodes, host) as backend:
        grant = granted(await backend.try_acquire(host.request(ttl=50.0)))
        assert [longest(node) for node in nodes.nodes] == [50_000] * 5
        assert await backend.renew([dataclasses.replace(grant, ttl=70.0)]) == [Renewed()]
        assert [longest(node) for node in nodes.nodes] == [70_000] * 5
        assert await backend.renew([grant]) == [Renewed()]
        assert [longest(node) for node in nodes.nodes] == [70_000] * 5


async def test_node_that_voted_without_an_answer_is_a_voter(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two have lost it, one is silent that had voted in silence: nobody knows, so the lease goes on."""
    async with redlock(nodes, host) as backend:
        granted(await backend.try_acquire(host.request("warm")))
        unheard(monkeypatch, backend, ACQUIRE, 4)
        grant = granted(await backend.try_acquire(host.request()))
        monkeypatch.undo()
        assert has_lock(nodes.nodes[4])
        for node in nodes.nodes[:2]:
            on(node)("DEL", LOCK)
        nodes.nodes[4].kill()

        (outcome,) = await backend.renew([grant])
        assert isinstance(outcome, Unknown)
        with pytest.raises(NoQuorum):
            await backend.confirm(grant)


def unheard(monkeypatch: pytest.MonkeyPatch, backend: RedlockBackend, op: Op, *indexes: int) -> None:
    """Lose the answers of some nodes to one operation, which they have done."""

    def lose(asked: Op, _: object, answers: list[Answer]) -> None:
        for index in indexes if asked is op else ():
            answers[index] = BackendUnavailable("no answer")

    intercept(monkeypatch, backend, after=lose)


@pytest.mark.parametrize("op", [ACQUIRE, FENCE], ids=["round one", "round two"])
async def test_waiter_that_saw_a_majority_is_notified_when_the_votes_are_taken_back(
    nodes: RedisNodes, host: StubHost, monkeypatch: pytest.MonkeyPatch, op: Op
) -> None:
    """It takes them for a holder, and would wait for half of its ttl."""
    async with redlock(nodes, host) as backend, redlock(nodes, host) as other:
        granted(await backend.try_acquire(host.request()))
        waiter = host.request(ttl=600.0)
        await queue_up(other, waiter)
        for node in nodes.nodes:
            on(node)("DEL", LOCK)  # which notifies nobody
        unheard(monkeypatch, backend, op, 0, 1, 2)
        retry_after = 0.0

        async def look(asked: Op) -> None:
            nonlocal retry_after
            if asked in {RELEASE, UNDO}:
                retry_after = (await busy_at(other, waiter)).retry_after or 0.0

        intercept(monkeypatch, backend, before=look)
        # Nodes refuse a proposal that comes late: then the waiter cannot know whose votes it sees, and retries.
        while retry_after < 60.0:
            waiter.wake.clear()
            backend._ahead_us = backend._ahead_us if op is ACQUIRE else None  # so that there is a round two
            with pytest.raises(NoQuorum, match="2 of 5"):
                await backend.try_acquire(host.request(ttl=600.0, queue=False))
            assert await waiter.wake.wait(PATIENCE)
        granted(await other.try_acquire(waiter))


# -- waiting -----------------------------------------------------------------------------------------------------------


async def queue_up(backend: RedlockBackend, request: Request) -> None:
    """Look and subscribe until it stands in the queues: on a busy machine, no node may have answered the first time."""
    deadline = time.monotonic() + PATIENCE
    while True:
        busy = await busy_at(backend, request)
        if any(request.state.entries):
            return
        assert time.monotonic() < deadline
        await backend.wait(request, busy, request._runtime.now() + 10.0)


async def until_queued(backend: RedlockBackend, request: Request, nodes: RedisNodes, count: int) -> None:
    """Look until so many stand in the queue of each node: one that stalls may miss a look, as the others are enough."""
    deadline = time.monotonic() + PATIENCE
    while any(on(node)("LLEN", f"{{{LOCK}}}:queue") < count for node in nodes.nodes):
        assert time.monotonic() < deadline
        await busy_at(backend, request)


@both
async def test_release_notifies_the_first_waiter(nodes: RedisNodes, host: StubHost) -> None:
    """One waiter is told, and only one."""
    async with redlock(nodes, host) as backend, redlock(nodes, host) as other:
        grant = granted(await backend.try_acquire(host.request()))
        first, second = host.request(), host.request()
        await queue_up(backend, first)
        await queue_up(other, second)
        (holder,) = await backend.holders("x")
        assert (holder.token, holder.metadata, holder.waiters) == (grant.token, {"pid": 1}, 2)

        await backend.release(grant)
        assert await first.wake.wait(PATIENCE)
        granted(await backend.try_acquire(first))
        assert not second.wake.is_set()


async def test_stale_waiters_are_passed_over(nodes: RedisNodes, host: StubHost) -> None:
    """Who died while waiting is not told in place of one that lives."""
    async with redlock(nodes, host) as backend:
        grant = granted(await backend.try_acquire(host.request()))
        for node in nodes.nodes:
            # Several: the second one in a queue is notified a little later in any case.
            on(node)("RPUSH", f"{{{LOCK}}}:queue", *(f"dead{number} 0 lockkit:wake:nobody" for number in range(3)))
        request = host.request()
        await queue_up(backend, request)
        await backend.release(grant)

        assert await request.wake.wait(PATIENCE)


async def test_queue_outlives_the_wait_of_each_waiter(nodes: RedisNodes, host: StubHost) -> None:
    """Each has one entry; the queue ends by itself, but not before the holder's lease and a ttl of each waiter."""
    async with redlock(nodes, host) as backend:
        granted(await backend.try_acquire(host.request(ttl=40.0)))
        for count, (ttl, at_least) in enumerate(((5.0, 40_000), (60.0, 60_000), (5.0, 60_000)), start=1):
            request = host.request(ttl=ttl)
            await queue_up(backend, request)
            await until_queued(backend, request, nodes, count)
            await busy_at(backend, request)  # it is in the queue already
            for node in nodes.nodes:
                assert on(node)("LLEN", f"{{{LOCK}}}:queue") == count
                assert at_least < on(node)("PTTL", f"{{{LOCK}}}:queue") <= at_least + 10_000


async def test_waiter_retries_within_half_the_ttl(nodes: RedisNodes, host: StubHost) -> None:
    """Whatever keeps a wake-up from it; and not ever more often when the holder has died."""
    async with redlock(nodes, host) as backend:
        granted(await backend.try_acquire(host.request(ttl=60.0)))
        waiter = host.request(ttl=60.0)
        await queue_up(backend, waiter)
        looks = []
        for left in (60, 40, 25, 15, 3):
            for node in nodes.nodes:
                on(node)("PEXPIRE", LOCK, left * 1000)
            looks.append((await busy_at(backend, waiter)).retry_after or inf)
        for look, latest in zip(looks, (30, 20, 20, 15, 3), strict=True):
            assert max(0.0, latest - 5) < look < latest + 0.5, looks


async def test_second_waiter_is_notified_a_little_later(nodes: RedisNodes, host: StubHost) -> None:
    """The first may be stopped."""
    async with redlock(nodes, host) as backend:
        grant = granted(await backend.try_acquire(host.request()))
        with redis.Redis(host=nodes.nodes[0].host, port=nodes.nodes[0].port) as client, client.pubsub() as channel:
            channel.subscribe("lockkit:wake:them")
            assert channel.get_message(timeout=10.0)["type"] == "subscribe"
            for place in ("first 0 lockkit:wake:them", "second 0 lockkit:wake:them", "third 0 lockkit:wake:them"):
                on(nodes.nodes[0])("RPUSH", f"{{{LOCK}}}:queue", place)
            on(nodes.nodes[0])("SETRANGE", f"{{{LOCK}}}:fence", len(str(grant.token)), "+")  # there is a queue
            await backend.release(grant)

            told = [channel.get_message(timeout=10.0)["data"] for _ in range(2)]
            assert told == [b"first", b"second 500"]
            assert on(nodes.nodes[0])("LLEN", f"{{{LOCK}}}:queue") == 2
            assert channel.get_message(timeout=0.2) is None


async def test_split_votes_come_apart(nodes: RedisNodes, host: StubHost) -> None:
    """Two contenders that have two and three nodes each, neither a majority that may be granted: both try again."""
    async with redlock(nodes, host) as backend:
        await backend.release(granted(await backend.try_acquire(host.request())))
        for index, node in enumerate(nodes.nodes[:4]):
            on(node)("SET", LOCK, f"attempt {index % 2}", "PX", 60_000)
        outcomes = [await busy_at(backend, host.request()) for _ in range(3)]

        assert all((outcome.retry_after or inf) < 1.0 for outcome in outcomes)
        assert not has_lock(nodes.nodes[4])


# -- other clients on the same key -------------------------------------------------------------------------------------


async def test_redis_py_lock_on_a_majority_excludes(nodes: RedisNodes, host: StubHost) -> None:
    """On one node it costs a vote, on three it holds; and while we hold it cannot be had on any."""
    clients = [redis.Redis(host=node.host, port=node.port) for node in nodes.nodes]
    async with redlock(nodes, host) as backend:
        locks = [client.lock(LOCK, timeout=30, blocking=False) for client in clients]
        assert locks[0].acquire()
        grant = granted(await backend.try_acquire(host.request()))
        assert not any(lock.acquire() for lock in locks[1:])
        await backend.release(grant)

        assert all(lock.acquire() for lock in locks[1:3])
        await busy_at(backend, host.request())
        for lock in locks[:3]:
            lock.release()
    for client in clients:
        client.close()


def test_redlock_py_excludes_both_ways(nodes: RedisNodes) -> None:
    """Who holds by redlock-py's Redlock holds, and the other way round."""
    redlock_py = pytest.importorskip("redlock")
    theirs = redlock_py.Redlock([{"host": node.host, "port": node.port} for node in nodes.nodes], retry_count=1)
    with lockkit.connect(nodes.url) as client:
        lock = client.lock("x")
        held = theirs.lock(LOCK, 30_000)
        assert held
        assert busy(lock)
        theirs.unlock(held)

        with lock:
            assert not theirs.lock(LOCK, 30_000)
        held = theirs.lock(LOCK, 30_000)
        assert held
        theirs.unlock(held)


# -- opening -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("redlock:///0", "0 nodes"),
        ("redlock://" + ",".join(f"h{number}" for number in range(10)), "10 nodes"),
        ("redlock://a,b,a:6379", "a:6379 is repeated"),
        ("redlock://a,b,c/zero", "number of a database"),
        ("redlock://a,b,c/1?db=2", "different databases"),
        ("redlock://a,b,c?socket_timeout=1", "socket_timeout"),  # node_timeout is the only limit
    ],
)
def test_urls_that_are_wrong(url: str, part: str) -> None:
    """Said at once, without asking anybody."""
    with pytest.raises(ConfigurationError, match=part):
        lockkit.connect(url)


@pytest.mark.parametrize(
    ("count", "part"), [(1, "no lock can be taken"), (2, "no lock can be taken"), (4, "use 3 or 5"), (3, ""), (5, "")]
)
def test_numbers_of_nodes_that_are_unwise(count: int, part: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning says why."""
    with caplog.at_level(logging.WARNING, "lockkit"):
        lockkit.connect("redlock://" + ",".join(f"h{number}" for number in range(count))).close()

    assert part in caplog.text
    assert bool(caplog.text) == bool(part)


@both
async def test_same_server_by_two_names_votes_once(nodes: RedisNodes, host: StubHost) -> None:
    """``localhost`` and ``127.0.0.1`` are one vote."""
    first, second, *_ = nodes.nodes
    url = f"redlock://127.0.0.1:{first.port},localhost:{first.port},127.0.0.1:{second.port}"

    backend = open_redlock(url, host, durable=True)
    granted(await backend.try_acquire(host.request()))
    up = [node.up for node in nodes_of(backend).all]
    errors = [str(node.error) for node in nodes_of(backend).all if not node.up]
    await backend.close()

    assert sorted(up[:2]) == [False, True]
    assert "same server" in errors[0]


async def test_user_with_few_rights(nodes: RedisNodes, host: StubHost) -> None:
    """What the documentation lists is enough."""
    documented = (
        "~lockkit:* ~{lockkit* &lockkit:wake:* +ping +hello +select +client|setname +eval +evalsha +set +get +mget "
        "+exists +del +pexpire +pttl +time +rpush +lpop +lpos +lrange +lrem +publish +subscribe +pubsub|numsub +info"
    )
    async with redlock(set_rights(nodes, *[documented] * 3), host, user=APP) as backend:
        grant = granted(await backend.try_acquire(host.request()))
        waiter = host.request()
        await queue_up(backend, waiter)
        assert await backend.renew([grant]) == [Renewed()]
        assert len(await backend.holders("x")) == 1
        await backend.release(grant)
        assert await waiter.wake.wait(PATIENCE)
        assert await backend.release(granted(await backend.try_acquire(waiter)))
        on(nodes.nodes[0])("FLUSHALL")
        granted(await backend.try_acquire(host.request()))
        assert await backend.break_lock("x")


@both
async def test_from_client(nodes: RedisNodes, host: StubHost, face: Face) -> None:
    """A list of redis-py's clients; they stay open and are not used up."""
    module = redis if face.name == "sync" else redis.asyncio
    clients = [module.Redis(host=node.host, port=node.port, decode_responses=True) for node in nodes.nodes[:3]]
    _, options = split_options(RedlockBackend, parse("redlock://a,b,c"), {})
    backend = RedlockBackend.adopt(clients, options, host)
    assert backend is not None
    assert backend.url.startswith("redlock://127.0.0.1:")
    grant = granted(await backend.try_acquire(host.request()))
    assert await host.runtime.io(clients[0].get(LOCK)) == grant.owner
    assert await backend.release(grant)
    await backend.close()
    for one in clients:
        assert await host.runtime.io(one.ping())
        await host.runtime.io(one.close() if face.name == "sync" else one.aclose())
    if face.name == "sync":
        with pytest.raises(ConfigurationError, match="you passed a sync Redis"):
            lockkit.aio.from_client(clients)


async def test_wrong_type_on_a_majority(nodes: RedisNodes, host: StubHost) -> None:
    """Foreign data at the key is reported, not removed."""
    async with redlock(nodes, host) as backend:
        granted(await backend.try_acquire(host.request("warm")))
        for node in nodes.nodes[:3]:
            on(node)("RPUSH", LOCK, "a list")
        with pytest.raises(ConfigurationError, match="something other than a lock"):
            await backend.try_acquire(host.request())
        assert on(nodes.nodes[0])("TYPE", LOCK) == "list"
        assert not has_lock(nodes.nodes[4])
