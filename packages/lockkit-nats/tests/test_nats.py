"""What is particular to NATS: revisions as tokens, lost answers, the bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import nats
import pytest
from lockkit_nats import NatsBackend
from lockkit_nats.backend import Attempt, WrongRevision
from nats.js.client import JetStreamContext

import lockkit
from lockkit.backend import Host, Request
from lockkit.runtime import BlockingRuntime, drive
from lockkit.url import parse
from lockkit_tools.servers import FaultProxy, Server, provide
from lockkit_tools.servers.nats import NatsServer

NAME = "seat:12A"
PATIENCE = 20.0


def administer(server: Server, work: Callable[[JetStreamContext], Awaitable[Any]]) -> None:
    """Do something at the server, not through lockkit."""

    async def connected() -> None:
        client = await nats.connect(f"nats://{server.address}")
        try:
            await work(client.jetstream())
        finally:
            await client.close()

    asyncio.run(connected())


def take(url: str) -> int:
    """Take and release the lock; give its token."""
    with lockkit.connect(url) as client, client.lock(NAME, timeout=PATIENCE) as lease:
        return lease.token


def test_token_grows_when_the_bucket_is_purged(server: Server) -> None:
    """The stream goes on counting."""
    url = f"{server.url}/purged"
    before = [take(url) for _ in range(3)]

    administer(server, lambda jetstream: jetstream.purge_stream("KV_purged"))

    assert take(url) > max(before)


def test_token_starts_again_when_the_bucket_is_deleted(server: Server) -> None:
    """That is why `survives_data_loss` is False; the bucket is made anew by the next call, also of an old client."""
    url = f"{server.url}/deleted"
    with lockkit.connect(url) as client:
        tokens = [client.lock(NAME).acquire(PATIENCE).token]
        administer(server, lambda jetstream: jetstream.delete_key_value("deleted"))
        tokens.append(client.lock(f"{NAME}?").acquire(PATIENCE).token)

    assert tokens == [1, 1]


def test_lease_outlives_a_crash_of_the_server() -> None:
    """What was acknowledged is in the files of a server that is killed."""
    with provide("nats", start_timeout=60.0) as server, lockkit.connect(server.url) as client:
        lease = client.lock(NAME, ttl=60).acquire(PATIENCE)
        server.restart(crash=True)

        with lockkit.connect(server.url) as other:
            assert [holder.token for holder in other.holders(NAME)] == [lease.token]
        assert lease.confirm()
        lease.release()
        assert take(server.url) > lease.token


def test_grant_whose_answer_was_lost_is_undone(server: Server) -> None:
    """The next attempt finds the lock free, long before the ttl of the lost grant ends."""
    with FaultProxy(server.host, server.port) as proxy, lockkit.connect(f"nats://{proxy.address}/lost") as client:
        client.ping()
        dropped = proxy.drop_next_reply(match=b'"token": null')
        lease = client.lock(NAME, ttl=600).acquire(PATIENCE)

        assert dropped.wait(PATIENCE)
        assert lease.confirm()
        lease.release()


def test_write_that_arrives_after_abandon_is_refused(server: Server) -> None:
    """Also if the key is still as the write expects it when `abandon` looks."""
    runtime = BlockingRuntime()
    host = cast("Host", SimpleNamespace(runtime=runtime, confirm_soon=lambda: None, lost=lambda *_: None))
    backend = NatsBackend.open(parse(f"{server.url}/late"), {}, host)
    request = Request(NAME, runtime.owner(), 30.0, "{}", queue=False, runtime=runtime)
    request.uncertain, request.state = True, Attempt(expected=0)

    drive(backend.abandon(request))

    late = {"owner": request.owner, "token": None, "ttl": 30.0, "metadata": "{}"}
    with pytest.raises(WrongRevision):
        drive(backend._call(backend._write(NAME, late, 0)))
    assert drive(backend.holders(NAME)) == []
    drive(backend.close())


def test_ttl_beyond_the_age_limit_of_the_bucket_is_refused(server: Server) -> None:
    """Such a bucket, which lockkit does not make, would delete the record of a held lock."""
    administer(server, lambda jetstream: jetstream.create_key_value(bucket="aging", ttl=20))

    with lockkit.connect(f"{server.url}/aging") as client:
        with pytest.raises(lockkit.ConfigurationError, match="deletes keys after 20 s"):
            client.lock(NAME, ttl=30).acquire(PATIENCE)
        client.lock(NAME, ttl=10).acquire(PATIENCE).release()


def test_key_of_somebody_else_is_an_error(server: Server) -> None:
    """It is neither taken nor waited for."""

    async def put(jetstream: JetStreamContext) -> None:
        await (await jetstream.create_key_value(bucket="foreign")).put("lock.seat=3A12A", b"mine")

    administer(server, put)

    with lockkit.connect(f"{server.url}/foreign") as client, pytest.raises(lockkit.ConfigurationError, match="delete"):
        client.lock(NAME).acquire(PATIENCE)


@pytest.mark.parametrize("url", ["nats:/bucket", "nats://localhost/a/b", "nats://localhost/a.b"])
def test_wrong_url_is_refused(url: str) -> None:
    """When it is given, with nothing sent."""
    with pytest.raises(lockkit.ConfigurationError, match="write nats://"):
        lockkit.connect(url)


class Refusing(NatsServer):
    """One that wants a login, or has no JetStream."""

    def __init__(self, *flags: str) -> None:
        """Start with other flags than the usual ones."""
        super().__init__()
        self._flags = flags

    def command(self) -> Sequence[str]:
        """The program and where it listens, without JetStream."""
        return [*super().command()[:5], *self._flags]


def test_server_without_jetstream_says_so() -> None:
    """It is no configuration error, since a server that starts may have it soon."""
    with (
        Refusing() as server,
        lockkit.connect(server.url) as client,
        pytest.raises(lockkit.BackendUnavailable, match="no JetStream"),
    ):
        client.ping()


def test_refused_login_is_a_configuration_error(tmp_path: Path) -> None:
    """Retrying would not help."""
    flags = ("--jetstream", "--store_dir", str(tmp_path), "--user", "app", "--pass", "secret")
    with (
        Refusing(*flags) as server,
        lockkit.connect(server.url) as client,
        pytest.raises(lockkit.ConfigurationError, match="refuses the login"),
    ):
        client.lock(NAME).acquire(PATIENCE)


def test_login_of_the_url_is_used(tmp_path: Path) -> None:
    """And a server that does not answer is passed over."""
    flags = ("--jetstream", "--store_dir", str(tmp_path), "--user", "app", "--pass", "secret")
    with Refusing(*flags) as server:
        assert take(f"nats://app:secret@127.0.0.1:1,{server.address}/login") == 1
