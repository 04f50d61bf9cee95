"""A Redis that hangs: every call ends by the time that its caller gave, and costs no other caller anything."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import lockkit
import lockkit.aio
from lockkit.backend import Grant
from lockkit.backends.redis.address import CONNECT_TIMEOUT
from lockkit.backends.redis.backend import RedisBackend
from lockkit.backends.redis.groups import slot_of
from lockkit.errors import BackendUnavailable, LockError
from lockkit.runtime import drive
from lockkit.testing.face_driver import FaceDriver
from lockkit.testing.stopwatch import Stopwatch
from lockkit.testing.target import Face
from lockkit_tools.servers import RedisCluster, RedisServer, require
from tests.backends.redis.faces import both, sync_only
from tests.backends.redis.support import Keyspace, backend_at
from tests.backends.support import StubHost, granted, play
from tests.conventions.sources import ROOT

# In whole runs of all tests the garbage collector found transports of asyncio here, never when these ran alone: most
# likely of TLS handshakes at the server that hangs, cut short when their event loop ended. lockkit never had those.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <(socket.socket|function _SelectorTransport):pytest.PytestUnraisableExceptionWarning"
)

LEFT = 0.4
"""What a caller with ``timeout=0`` leaves for its one try, seconds."""

PROMPT = 1.5
"""Far above `LEFT`, for a busy machine; below the time limit of one read from a socket, 2.5 s."""

PATIENCE = 60.0


@pytest.fixture(autouse=True, scope="module")
def _redis() -> None:
    require("redis", local=True)


@contextmanager
def frozen(*servers: RedisServer) -> Iterator[None]:
    """Stop processes: the kernel goes on accepting connections for them, and nobody answers."""
    for server in servers:
        server.pause()
    try:
        yield
    finally:
        for server in servers:
            server.resume()


async def ends_in_time(host: StubHost, call: Callable[[float], Awaitable[object]]) -> None:
    """Call with a time to answer by, and see that there is no answer, in time."""
    began = host.runtime.now()
    watch = Stopwatch()
    with pytest.raises(BackendUnavailable):
        await call(began + LEFT)
    assert watch.stop() < PROMPT


async def every_call_ends_in_time(host: StubHost, backend: RedisBackend, grant: Grant | None) -> None:
    """Make each of the calls that are told a time."""

    async def acquire(answer_by: float) -> None:
        request = host.request("other", queue=False)
        request.answer_by = answer_by
        await backend.try_acquire(request)

    async def abandon(answer_by: float) -> None:
        request = host.request("other")
        request.uncertain = True
        request.answer_by = answer_by
        await backend.abandon(request)

    await ends_in_time(host, acquire)
    await ends_in_time(host, abandon)
    if grant is not None:
        held = grant
        await ends_in_time(host, lambda answer_by: backend.release(held, answer_by))
        await ends_in_time(host, lambda answer_by: backend.release_all([held], answer_by))


@both
async def test_calls_end_in_time_at_a_server_that_hangs(host: StubHost) -> None:
    """On a connection that is there, and while one is opened: TCP, TLS, login. Other targets: the fault suite."""
    with RedisServer(tls=True) as server:
        async with backend_at(server.url, host) as used, backend_at(server.url, host) as fresh:
            grant = granted(await used.try_acquire(host.request()))
            with frozen(server):
                await every_call_ends_in_time(host, used, grant)
                await every_call_ends_in_time(host, fresh, None)


@both
async def test_calls_end_in_time_while_a_name_server_hangs(
    server: RedisServer, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look-up has no limit of its own."""
    look_up, go_on = socket.getaddrinfo, threading.Event()

    def slow(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401 - as what it stands for
        if "flags" not in keywords:  # else nobody is asked
            assert go_on.wait(PATIENCE)
        return look_up(*arguments, **keywords)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    async with backend_at(f"redis://localhost:{server.port}", host) as backend:
        await every_call_ends_in_time(host, backend, None)
        go_on.set()
        await backend.ping()


@both
async def test_address_that_does_not_answer_leaves_time_for_the_next(
    server: RedisServer, host: StubHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where IPv6 leads nowhere, or one of several addresses is that of a dead machine."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,  # the kernel drops the second connection
        socket.create_connection(full.getsockname()),
    ):
        addresses = [full.getsockname(), (server.host, server.port)]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        request = host.request()
        request.answer_by = host.runtime.now() + CONNECT_TIMEOUT
        async with backend_at("redis://several", host) as backend:
            grant = granted(await backend.try_acquire(request))
            assert host.runtime.now() < request.answer_by
            await backend.release(grant)


ON_GEVENT = """
from gevent import monkey

monkey.patch_all()
import sys

import lockkit
from lockkit.backends.redis import node

# So that the connection counts as one that was used just now, on a slow machine too.
node.TRUSTED_SECONDS = 600.0
client = lockkit.connect(sys.argv[1])
lease = client.lock("never released", ttl=600).acquire()
print("held", flush=True)
sys.stdin.readline()
try:
    lease.release()
except lockkit.BackendUnavailable as error:
    print(error, flush=True)
client.close()
"""


def test_calls_end_on_gevent(server: RedisServer) -> None:
    """Its sockets never block in the kernel, which therefore does not limit their time."""
    with subprocess.Popen(
        [sys.executable, "-c", ON_GEVENT, f"{server.url}?socket_timeout=0.5"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            with frozen(server):
                said, _ = process.communicate("go on\n", timeout=PATIENCE)
        finally:
            process.kill()

    assert "did not answer in time" in said


async def test_caller_that_gives_up_leaves_the_others_their_answers(server: RedisServer, host: StubHost) -> None:
    """On the connection that all tasks share, one that has less time does not end it for the others."""
    async with backend_at(server.url, host) as backend:
        first = granted(await backend.try_acquire(host.request("first")))
        Keyspace(server)("CLIENT", "PAUSE", 1000)
        hasty = host.request("hasty", queue=False)
        hasty.answer_by = host.runtime.now() + 0.1
        patient = asyncio.ensure_future(backend.try_acquire(host.request("patient", queue=False)))

        with pytest.raises(BackendUnavailable):
            await backend.try_acquire(hasty)

        second = granted(await patient)
        assert [one.token for one in await backend.holders("patient")] == [second.token]
        assert [one.token for one in await backend.holders("first")] == [first.token]
        # What was asked for in vain was granted all the same: it is the engine's to undo.
        assert [one.owner for one in await backend.holders("hasty")] == [hasty.owner]


@both
@pytest.mark.parametrize("operation", ["acquire", "acquire later", "release all", "replicated"])
async def test_connection_is_not_kept_after_a_call_without_an_answer(
    server: RedisServer, operation: str, host: StubHost
) -> None:
    """Its reply may still come, and would be taken for that of the next call."""
    Keyspace(server)("FLUSHALL")
    given = {"replicas": 1} if operation == "replicated" else {}
    async with backend_at(server.url, host, **given) as backend, backend_at(server.url, host) as plain:
        grants = [granted(await plain.try_acquire(host.request(f"lock {index}"))) for index in range(3)]
        await backend.holders("free")  # there is a kept connection, used just now
        if operation == "acquire later":
            await host.runtime.sleep(0.05)
        Keyspace(server)("CLIENT", "PAUSE", 600)
        request = host.request("late", queue=False)
        request.answer_by = host.runtime.now() + 0.1
        with suppress(LockError):
            if operation == "release all":
                await backend.release_all(grants, host.runtime.now() + 0.1)
            else:
                await backend.try_acquire(request)

        # At once: when that reply has come, the connection is seen to be stale.
        assert await backend.holders("nobody's") == []
        for grant in grants:
            owners = [one.owner for one in await backend.holders(grant.name)]
            assert owners == [one.owner for one in await plain.holders(grant.name)]
        assert granted(await plain.try_acquire(host.request("free", queue=False))).name == "free"
        assert await backend.holders("nobody's") == []


def names_on(cluster: RedisCluster, each: int = 1) -> list[list[str]]:
    """Give names of locks, so many for each node."""
    names = [f"lock {index}" for index in range(1000)]
    slots = [set(cluster.slots_of(node)) for node in cluster.nodes]
    return [[name for name in names if slot_of(f"lockkit:{name}") in own][:each] for own in slots]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    """Three masters that nobody gives up in these tests."""
    with RedisCluster(node_timeout_ms=120_000) as group:
        yield group


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_hung_master_costs_no_lease_at_the_others(cluster: RedisCluster, face: Face) -> None:
    """Nodes are renewed at the same time, and none that hangs is waited for while others' leases run out."""
    ttl = 2.0

    async def body(driver: FaceDriver) -> None:
        client = await driver.connect()
        while True:
            watch = Stopwatch()
            leases = [await client.lock(name, ttl=ttl).acquire(timeout=PATIENCE) for (name,) in names_on(cluster)]
            with frozen(cluster.nodes[0]):
                assert await leases[0].wait_lost(PATIENCE)
                await driver.sleep(ttl)
                held = [lease.held for lease in leases]
            for lease in leases[1:]:
                with suppress(lockkit.LockLost):
                    await lease.release()
            watch.stop()
            if held == [False, True, True]:
                return
            assert watch.longest_stall > ttl / 4, held  # by which any lease may be lost

    play(face, cluster.url, body)


@both
async def test_hung_master_keeps_no_other_lock_from_being_released(cluster: RedisCluster, host: StubHost) -> None:
    """``close()`` frees what it can, by the time that it is given."""
    names = names_on(cluster, each=5)

    async with backend_at(cluster.url, host) as backend, backend_at(cluster.url, host) as other:
        grants = [granted(await backend.try_acquire(host.request(name))) for group in names for name in group]
        with frozen(cluster.nodes[0]):
            began = host.runtime.now()
            watch = Stopwatch()
            with pytest.raises(BackendUnavailable, match="5 of 15 locks"):
                await backend.release_all(grants, began + 2.5)
            assert watch.stop() < 2.5 + PROMPT
            for group in names[1:]:
                for name in group:
                    assert await other.holders(name) == []
        await backend.release_all(grants, host.runtime.now() + 20.0)
        assert await other.holders(names[0][0]) == []


@sync_only
async def test_waiters_that_share_a_subscription_end_in_time(server: RedisServer, host: StubHost) -> None:
    """The one that opens it hangs; the others do not wait for it for ever."""
    async with backend_at(server.url, host) as backend:
        await backend.holders("a")
        listener = backend._topology.listener_for("a")
        assert listener is not None
        with frozen(server):
            opening = threading.Thread(target=lambda: _swallow(listener.open(host.runtime.now() + 3.0)))
            opening.start()
            await host.runtime.sleep(0.2)
            began = host.runtime.now()
            watch = Stopwatch()
            await listener.open(began + LEFT)
            assert watch.stop() < PROMPT
        opening.join(PATIENCE)


def _swallow(coroutine: Coroutine[Any, Any, None]) -> None:
    with suppress(LockError):
        drive(coroutine)
