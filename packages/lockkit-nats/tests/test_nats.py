"""Locks in NATS: what every backend must do, and what is particular to this one (revisions as tokens, the bucket)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import nats
import nats.js.errors
import pytest
from nats.js.api import StreamConfig
from nats.js.client import JetStreamContext

import lockkit
import lockkit_nats.backend
from lockkit.backend import Busy, Grant, Host, Request
from lockkit.runtime import AsyncioRuntime, BlockingRuntime, Runtime, drive
from lockkit.testing.conformance import ConformanceSuite
from lockkit.testing.faults import Faults, FaultSuite, Step, Target
from lockkit.testing.timing import PATIENCE
from lockkit.url import parse
from lockkit_nats import NatsBackend
from lockkit_nats.backend import Attempt, WrongRevision
from lockkit_tools.servers import FaultProxy, require, wait_until
from lockkit_tools.servers.nats import NatsServer
from tests.conformance.faulty import PASSWORD, ServerFaults

NAME = "seat:12A"
SUBJECT = "$KV.{}.lock.seat=3A12A"


@pytest.fixture(scope="module")
def server() -> Iterator[NatsServer]:
    """One with JetStream and a login; if it is missing, the tests are skipped, and fail in CI."""
    require("nats", local=True)
    with NatsServer(password=PASSWORD) as server:
        yield server


class TestNatsConformance(ConformanceSuite):
    """All cases, in the sync and the async API."""

    @pytest.fixture
    def lockkit_url(self, server: NatsServer) -> str:
        """A bucket of its own."""
        return f"{server.url}/conformance"


class NatsFaults(ServerFaults):
    """A server behind a proxy."""

    def sign(self, step: Step, name: str) -> bytes:  # noqa: ARG002 - a read has the name too
        """Records are written with their token, except the one that takes the lock, and released by a marker."""
        return {"acquire": b'"token": null', "renew": b'"token": ', "release": b"KV-Operation: DEL"}[step]

    def without_rights(self) -> Target:
        return replace(self.target, url=self.target.url.replace("app:", "weak:"))


@pytest.fixture(scope="module")
def behind_proxy(server: NatsServer) -> Iterator[Faults]:
    """The server, which ends with the tests of this file."""
    with NatsFaults(server) as faults:
        yield faults


class TestNatsFaults(FaultSuite):
    """All cases that can be provoked; nothing fills the server."""

    @pytest.fixture
    def lockkit_faults(self, behind_proxy: Faults) -> Faults:
        """The server and a proxy."""
        return behind_proxy


def administer(server: NatsServer, work: Callable[[JetStreamContext], Awaitable[Any]]) -> None:
    """Do something at the server, not through lockkit."""

    async def connected() -> None:
        client = await nats.connect(server.url)
        try:
            await work(client.jetstream())
        finally:
            await client.close()

    asyncio.run(connected())


def take(url: str) -> int:
    """Take and release the lock; give its token."""
    with lockkit.connect(url) as client, client.lock(NAME, timeout=PATIENCE) as lease:
        return lease.token


def test_token_grows_when_the_bucket_is_purged(server: NatsServer) -> None:
    """The stream goes on counting."""
    url = f"{server.url}/purged"
    before = [take(url) for _ in range(3)]

    administer(server, lambda jetstream: jetstream.purge_stream("KV_purged"))

    assert take(url) > max(before)


def test_token_starts_again_when_the_bucket_is_deleted(server: NatsServer) -> None:
    """That is why `survives_data_loss` is False; the bucket is made anew by the next call, also of an old client."""
    url = f"{server.url}/deleted"
    with lockkit.connect(url) as client:
        before = client.lock(NAME).acquire(PATIENCE)
        administer(server, lambda jetstream: jetstream.delete_key_value("deleted"))
        after = client.lock(f"{NAME}?").acquire(PATIENCE)

        assert before.token == after.token == 1


@pytest.mark.parametrize("ask", ["extend", "release"])
def test_server_that_lost_its_data_gives_nobody_another_s_lock(ask: str) -> None:
    """Revisions count from 1 again: the new holder's record has the one that the former holder's had."""
    with NatsServer() as server, lockkit.connect(server.url) as former, lockkit.connect(server.url) as client:
        lost = former.lock(NAME, renew=False).acquire(PATIENCE)
        server.kill()
        server.erase()
        server.start()
        lease = client.lock(NAME).acquire(PATIENCE)
        assert lease.token == lost.token

        with pytest.raises(lockkit.LockLost):
            getattr(lost, ask)()

        assert lease.confirm()


def without_engine(url: str, runtime: Runtime | None = None) -> tuple[NatsBackend, Request]:
    """Make a backend and a request of its engine."""
    runtime = runtime or BlockingRuntime()
    host = cast("Host", SimpleNamespace(runtime=runtime, confirm_soon=lambda: None, lost=lambda *_: None))
    request = Request(NAME, runtime.owner(), 30.0, "{}", queue=False, runtime=runtime)
    return NatsBackend.open(parse(url), {}, host), request


def test_pair_takes_three_requests_and_a_renewal_one(server: NatsServer) -> None:
    """A lock that is free, on a connection that is there."""
    backend, request = without_engine(f"{server.url}/requests")
    drive(backend.ping())

    def sent() -> int:
        client, _ = drive(backend._call(backend._connection.open()))
        return client.stats["out_msgs"]

    counts = [sent()]
    grant = drive(backend.try_acquire(request))
    assert isinstance(grant, Grant)
    counts.append(sent())
    drive(backend.renew([grant]))
    counts.append(sent())
    drive(backend.release(grant))
    counts.append(sent())
    drive(backend.close())

    assert [after - before for before, after in pairwise(counts)] == [2, 1, 1]


def test_connection_that_ended_unnoticed_is_replaced(server: NatsServer) -> None:
    """The client learns of it while it waits for an answer: that is no error, as long as it has only read."""

    async def cut_and_acquire() -> Grant | Busy:
        backend, request = without_engine(f"{server.url}/cut", AsyncioRuntime())
        await backend.ping()
        client, _ = await backend._connection.open()
        cast("Any", client)._transport._io_writer.transport.abort()
        try:
            return await backend.try_acquire(request)
        finally:
            await backend.close()

    assert isinstance(asyncio.run(cut_and_acquire()), Grant)


def test_server_that_is_cut_off_is_passed_over(server: NatsServer) -> None:
    """Its connections stay open, and new ones get no answer; also a call with little time leads on to the next one."""
    with FaultProxy(server.host, server.port) as proxy:
        url = server.url.replace("@", f"@{proxy.address},")
        with lockkit.connect(f"{url}/silent") as client:
            client.ping()
            proxy.blackhole()

            def ask() -> str | None:
                with suppress(lockkit.BackendUnavailable, lockkit.LockTimeout):  # of what an earlier one has left
                    client.lock(NAME).acquire(0).release()
                    return None
                return "no answer"

            wait_until(ask, timeout=PATIENCE)


def test_client_outlives_the_tasks_of_its_driver(server: NatsServer) -> None:
    """A program that ends cancels all tasks, and then releases its locks."""

    async def cancel_and_acquire() -> Grant | Busy:
        backend, request = without_engine(f"{server.url}/cancelled", AsyncioRuntime())
        await backend.ping()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        request.answer_by = AsyncioRuntime().now() + 0.4
        with suppress(lockkit.BackendUnavailable):
            await backend.try_acquire(request)
        request.answer_by = inf
        try:
            return await backend.try_acquire(request)
        finally:
            await backend.close()

    assert isinstance(asyncio.run(cancel_and_acquire()), Grant)


def test_end_of_a_connection_that_nobody_told_is_noticed(server: NatsServer) -> None:
    """Leases are confirmed and waiters woken; when it is told later, the next connection stays."""

    async def close_and_open() -> None:
        backend, request = without_engine(f"{server.url}/untold", AsyncioRuntime())
        confirmed: list[None] = []
        backend._host.confirm_soon = lambda: confirmed.append(None)  # type: ignore[method-assign]
        client, _ = await backend._connection.open()
        await backend._begin_watch(request)
        told, cast("Any", client)._closed_cb = cast("Any", client)._closed_cb, None
        await client.close()

        replaced, _ = await backend._connection.open()

        assert confirmed
        assert await request.wake.wait(PATIENCE)
        await told()
        assert (await backend._connection.open())[0] is replaced
        await backend.close()

    asyncio.run(close_and_open())


def test_watch_that_fails_late_leaves_its_successor(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter's watch ended with its connection, and it began another; a release still wakes it."""

    async def watch_twice() -> None:
        runtime = AsyncioRuntime()
        backend, request = without_engine(f"{server.url}/twice", runtime)
        holder = await backend.try_acquire(Request(NAME, "holder", 30.0, "{}", queue=False, runtime=runtime))
        assert isinstance(holder, Grant)
        late = asyncio.Event()

        async def fail() -> None:
            await late.wait()
            raise OSError

        with monkeypatch.context() as patch:
            patch.setattr(backend._connection, "open", fail)
            await backend._begin_watch(request)
            await runtime.sleep(0)
        backend._disconnected()
        request.wake.clear()
        await backend._begin_watch(request)
        late.set()
        await asyncio.wait(backend._tasks)

        await backend.release(holder)

        assert await request.wake.wait(PATIENCE)
        await backend.abandon(request)
        await backend.close()

    asyncio.run(watch_twice())


def test_write_that_arrives_after_abandon_is_refused(server: NatsServer) -> None:
    """Also if the key is still as the write expects it when `abandon` looks."""
    backend, request = without_engine(f"{server.url}/late")
    request.uncertain, request.state = True, Attempt(expected=0)

    drive(backend.abandon(request))

    late = {"owner": request.owner, "token": None, "ttl": 30.0, "metadata": "{}"}
    with pytest.raises(WrongRevision):
        drive(backend._call(backend._write(NAME, late, 0)))
    assert drive(backend.holders(NAME)) == []
    drive(backend.close())


def test_abandon_leaves_the_record_of_another_owner(server: NatsServer) -> None:
    """After a loss of data its revision may be the one that the abandoned write expects."""
    backend, request = without_engine(f"{server.url}/another")
    with lockkit.connect(f"{server.url}/another") as client, client.lock(NAME) as lease:
        request.uncertain, request.state = True, Attempt(expected=lease.token)

        drive(backend.abandon(request))

        assert lease.confirm()
    drive(backend.close())


def test_ttl_beyond_the_age_limit_of_the_bucket_is_refused(server: NatsServer) -> None:
    """Such a bucket, which lockkit does not make, would delete the record of a held lock."""
    administer(server, lambda jetstream: jetstream.create_key_value(bucket="aging", ttl=20))

    with lockkit.connect(f"{server.url}/aging") as client:
        with pytest.raises(lockkit.ConfigurationError, match="deletes keys after 20 s"):
            client.lock(NAME, ttl=30).acquire(PATIENCE)
        client.lock(NAME, ttl=10).acquire(PATIENCE).release()


def test_key_of_somebody_else_is_an_error(server: NatsServer) -> None:
    """It is neither taken nor waited for."""

    async def put(jetstream: JetStreamContext) -> None:
        await (await jetstream.create_key_value(bucket="foreign")).put("lock.seat=3A12A", b"mine")

    administer(server, put)

    with lockkit.connect(f"{server.url}/foreign") as client, pytest.raises(lockkit.ConfigurationError, match="delete"):
        client.lock(NAME).acquire(PATIENCE)


def test_key_that_the_server_deleted_for_its_age_is_free(server: NatsServer) -> None:
    """nats-server 2.11 can leave a marker there; the token is higher than before."""
    before = take(f"{server.url}/marked")
    marker = {"Nats-Marker-Reason": "MaxAge"}
    administer(server, lambda jetstream: jetstream.publish(SUBJECT.format("marked"), headers=marker))

    assert take(f"{server.url}/marked") > before


def headers_in(server: NatsServer, bucket: str) -> dict[str, str] | None:
    """Give the headers of the latest message of the lock; None if there is none."""
    found: list[dict[str, str] | None] = []

    async def look(jetstream: JetStreamContext) -> None:
        with suppress(nats.js.errors.NotFoundError):
            found.append((await jetstream.get_last_msg(f"KV_{bucket}", SUBJECT.format(bucket))).headers)

    administer(server, look)
    return found[0] if found else None


def test_key_of_a_lease_that_ended_is_deleted_later(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server, so that a bucket does not grow with the names that were ever used; tokens go on rising."""
    monkeypatch.setattr(lockkit_nats.backend, "KEPT_SECONDS", 1)
    with lockkit.connect(f"{server.url}/expiring") as client, client.lock(NAME, ttl=30.5):
        assert (headers_in(server, "expiring") or {})["Nats-TTL"] == "32"
    before = take(f"{server.url}/expiring")

    wait_until(lambda: "not deleted yet" if headers_in(server, "expiring") else None)

    assert take(f"{server.url}/expiring") > before


def test_bucket_without_ttl_of_messages(server: NatsServer) -> None:
    """Of nats-server before 2.11, or made for it: nothing asks for what the server would refuse."""
    config = StreamConfig(name="KV_plain", subjects=["$KV.plain.>"], max_msgs_per_subject=1, allow_rollup_hdrs=True)
    administer(server, lambda jetstream: jetstream.add_stream(config))

    take(f"{server.url}/plain")

    headers = headers_in(server, "plain") or {}
    assert "KV-Operation" in headers
    assert "Nats-TTL" not in headers


@pytest.mark.parametrize("url", ["nats:/bucket", "nats://localhost/a/b", "nats://localhost/a.b"])
def test_wrong_url_is_refused(url: str) -> None:
    """When it is given, with nothing sent."""
    with pytest.raises(lockkit.ConfigurationError, match="write nats://"):
        lockkit.connect(url)


def test_server_without_jetstream_says_so() -> None:
    """It is no configuration error, since a server that starts may have it soon."""
    with (
        NatsServer(jetstream=False) as server,
        lockkit.connect(server.url) as client,
        pytest.raises(lockkit.BackendUnavailable, match="no JetStream"),
    ):
        client.ping()


def test_server_that_does_not_answer_is_passed_over(server: NatsServer) -> None:
    """The next one of the URL is asked."""
    assert take(server.url.replace("@", "@127.0.0.1:1,") + "/next") == 1
