"""Locks in DynamoDB: what every backend must do, and what is particular to this one (expiry that clients observe)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

import lockkit
from lockkit.backend import Busy, Grant, Host, Request
from lockkit.runtime import BlockingRuntime, drive, monotonic
from lockkit.testing.conformance import ConformanceSuite
from lockkit.testing.faults import Faults, FaultSuite, Step
from lockkit.testing.timing import PATIENCE
from lockkit.url import parse
from lockkit_dynamodb import DynamoBackend
from lockkit_tools.servers import Server
from tests.conformance.faulty import ServerFaults

NAME = "seat:12A"


class TestDynamoConformance(ConformanceSuite):
    """All cases, in the sync and the async API."""

    @pytest.fixture
    def lockkit_url(self, server: Server) -> str:
        """A table of its own."""
        return f"{server.url}/conformance"


class DynaliteFaults(ServerFaults):
    """A server behind a proxy."""

    def sign(self, step: Step, name: str) -> bytes:  # noqa: ARG002 - a read has the name too
        """Each step has an expression of its own."""
        return {"acquire": b"#token = :next", "renew": b"SET #ttl = :ttl ADD", "release": b"REMOVE #owner"}[step]


@pytest.fixture(scope="module")
def behind_proxy(server: Server) -> Iterator[Faults]:
    """The server, which ends with the tests of this file."""
    with DynaliteFaults(server, lacks=("wrong_password",)) as faults:
        yield faults


class TestDynamoFaults(FaultSuite):
    """All cases that can be provoked; nothing fills dynalite, and it has no users."""

    @pytest.fixture
    def lockkit_faults(self, behind_proxy: Faults) -> Faults:
        """The server and a proxy."""
        return behind_proxy


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


def without_engine(url: str) -> tuple[DynamoBackend, Request]:
    """Make a backend and a request of its engine."""
    runtime = BlockingRuntime()
    host = cast("Host", SimpleNamespace(runtime=runtime, confirm_soon=lambda: None, lost=lambda *_: None))
    request = Request(NAME, runtime.owner(), 30.0, "{}", queue=False, runtime=runtime)
    return DynamoBackend.open(parse(url), {"region": None}, host), request


def test_pair_takes_a_read_and_two_writes_and_a_renewal_one(server: Server) -> None:
    """These are what Amazon charges for. A look at a lock that is held is one read."""
    backend, request = without_engine(f"{server.url}/requests")
    drive(backend.ping())
    sent: list[str] = []
    backend._table._client.meta.events.register("before-send", lambda event_name, **_: sent.append(event_name))

    grant = drive(backend.try_acquire(request))
    assert isinstance(grant, Grant)
    drive(backend.renew([grant]))
    assert isinstance(drive(backend.try_acquire(request)), Busy)
    drive(backend.release(grant))
    drive(backend.close())

    operations = [event.rpartition(".")[2] for event in sent]
    assert operations == ["GetItem", "UpdateItem", "UpdateItem", "GetItem", "UpdateItem"]


def test_write_that_arrives_after_abandon_is_refused(server: Server) -> None:
    """Also if the item is still as the write expects it when `abandon` looks."""
    backend, request = without_engine(f"{server.url}/late")
    request.uncertain, request.state = True, 0

    drive(backend.abandon(request))

    take = "SET #owner = :owner, #version = :next, #token = :next"
    late = backend._write(NAME, take, "attribute_not_exists(#version)", owner=request.owner, next=1)
    assert not drive(late)
    assert drive(backend.holders(NAME)) == []
    drive(backend.close())


def test_grant_that_the_engine_refuses_is_undone(server: Server) -> None:
    """It came after the ttl, or after `close()`."""
    backend, request = without_engine(f"{server.url}/refused")
    request.uncertain = True
    assert isinstance(drive(backend.try_acquire(request)), Grant)

    drive(backend.abandon(request))

    assert drive(backend.holders(NAME)) == []
    drive(backend.close())


@pytest.mark.parametrize("url", ["dynamodb://user:secret@localhost/locks", "dynamodb://a,b/locks"])
def test_wrong_url_is_refused(url: str) -> None:
    """When it is given, with nothing sent."""
    with pytest.raises(lockkit.ConfigurationError, match="write dynamodb:"):
        lockkit.connect(url)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"], "credentials.*set AWS_ACCESS_KEY_ID"),
        (["AWS_DEFAULT_REGION"], r"region.*Append \?region="),
    ],
)
def test_what_the_environment_lacks_is_a_configuration_error(
    missing: list[str], says: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retrying would not help."""
    for name in missing:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")

    with (
        lockkit.connect(f"{server.url}/secret") as client,
        pytest.raises(lockkit.ConfigurationError, match=says),
    ):
        client.lock(NAME).acquire(PATIENCE)
