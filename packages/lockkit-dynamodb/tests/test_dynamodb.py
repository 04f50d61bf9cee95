"""What is particular to DynamoDB: expiry that clients observe, lost answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from lockkit_dynamodb import DynamoBackend
from lockkit_dynamodb.observations import Observations

import lockkit
from lockkit.backend import Host, Request
from lockkit.runtime import BlockingRuntime, Runtime, drive, monotonic
from lockkit.url import parse
from lockkit_tools.servers import FaultProxy, Server

NAME = "seat:12A"
PATIENCE = 20.0


def test_dead_holders_lock_is_taken_after_a_ttl_of_observation(server: Server) -> None:
    """However long the holder is dead: a client that comes later finds it, and waits from then on."""
    ttl = 0.5
    with lockkit.connect(f"{server.url}/dead") as client, lockkit.connect(f"{server.url}/dead") as late:
        dead = client.lock(NAME, ttl=ttl, renew=False).acquire(PATIENCE)
        assert dead.wait_lost(PATIENCE)

        came = monotonic()
        assert [holder.owner for holder in late.holders(NAME)] == [dead.owner]
        with late.lock(NAME, timeout=PATIENCE) as lease:
            assert monotonic() - came >= ttl
            assert lease.token > dead.token


def test_each_version_is_observed_anew() -> None:
    """A waiter that sees many renewals never counts their times together, and forgets what is free."""
    runtime = BlockingRuntime()
    now = [0.0]
    clock = SimpleNamespace(mutex=runtime.mutex, now=lambda: now[0])
    observations = Observations(cast("Runtime", clock))

    ages = []
    for now[0], version in [(10.0, 1), (10.9, 1), (11.0, 2), (11.9, 2)]:
        observations.see(NAME, version)
        ages.append(observations.age(NAME, version))
    observations.forget(NAME)

    assert ages == pytest.approx([0.0, 0.9, 0.0, 0.9])
    assert observations.age(NAME, 2) == 0.0


def test_grant_whose_answer_was_lost_is_undone(server: Server) -> None:
    """The next attempt finds the lock free, long before the ttl of the lost grant ends."""
    with FaultProxy(server.host, server.port) as proxy, lockkit.connect(f"dynamodb://{proxy.address}/lost") as client:
        client.ping()
        dropped = proxy.drop_next_reply(match=b"UpdateExpression")
        lease = client.lock(NAME, ttl=600).acquire(PATIENCE)

        assert dropped.wait(PATIENCE)
        assert lease.confirm()
        lease.release()


def test_write_that_arrives_after_abandon_is_refused(server: Server) -> None:
    """Also if the item is still as the write expects it when `abandon` looks."""
    runtime = BlockingRuntime()
    host = cast("Host", SimpleNamespace(runtime=runtime, confirm_soon=lambda: None, lost=lambda *_: None))
    backend = DynamoBackend.open(parse(f"{server.url}/late"), {"region": None}, host)
    request = Request(NAME, runtime.owner(), 30.0, "{}", queue=False, runtime=runtime)
    request.uncertain, request.state = True, 0

    drive(backend.abandon(request))

    take = "SET #owner = :owner, #version = :next, #token = :next"
    late = backend._write(NAME, take, "attribute_not_exists(#version)", owner=request.owner, next=1)
    assert not drive(late)
    assert drive(backend.holders(NAME)) == []
    drive(backend.close())


@pytest.mark.parametrize("url", ["dynamodb://user:secret@localhost/locks", "dynamodb://a,b/locks"])
def test_wrong_url_is_refused(url: str) -> None:
    """When it is given, with nothing sent."""
    with pytest.raises(lockkit.ConfigurationError, match="write dynamodb:"):
        lockkit.connect(url)


def test_hanging_server_does_not_keep_the_caller(server: Server) -> None:
    """The call returns in its own time, not in that of botocore's timeouts."""
    with lockkit.connect(f"{server.url}/hanging") as client:
        client.lock(NAME).acquire(PATIENCE).release()
        server.pause()
        try:
            with pytest.raises(lockkit.BackendUnavailable, match="no answer within"):
                client.lock(NAME).acquire(0.1)
        finally:
            server.resume()


def test_missing_credentials_are_a_configuration_error(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retrying would not help."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")

    with (
        lockkit.connect(f"{server.url}/secret") as client,
        pytest.raises(lockkit.ConfigurationError, match="credentials"),
    ):
        client.lock(NAME).acquire(PATIENCE)
