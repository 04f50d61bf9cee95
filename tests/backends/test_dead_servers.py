"""What a user reads when no server listens: what was tried, on which lock, at which backend, and what to do."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial

import grpc
import pytest

import lockkit
from lockkit.testing.face_driver import FaceDriver
from lockkit.testing.target import Face
from tests.backends.support import play
from tests.tries import until

URLS = [
    "redis://{0}",
    "redis+sentinel://{0}/mymaster/0",
    "redis+cluster://{0}",
    "redlock://{0},{1},{2}",
    "etcd://{0}",
    "zookeeper://{0}",
    "postgresql://user:hunter2@{0}/app",
    "postgresql://user:hunter2@{0}/app?mode=row",
    "mariadb://user:hunter2@{0}/app",
    "mariadb://user:hunter2@{0}/app?mode=advisory",
]


@pytest.fixture
def dead() -> Iterator[list[str]]:
    """Three addresses at which nothing listens, and no other program can: their ports are taken."""
    sockets = [socket.socket() for _ in range(3)]
    for taken in sockets:
        taken.bind(("127.0.0.1", 0))
    yield ["{}:{}".format(*taken.getsockname()) for taken in sockets]
    for taken in sockets:
        taken.close()


def printed(error: BaseException) -> Iterator[BaseException]:
    """What a traceback of an error prints above it."""
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None:
        yield earlier
        yield from printed(earlier)


def failures(face: Face, url: str, count: int | None = None) -> list[lockkit.LockError]:
    """What so many calls raise, an acquisition first."""
    found: list[lockkit.LockError] = []

    async def body(driver: FaceDriver) -> None:
        client = driver.make_client()
        lock = client.lock("seat:12A")
        calls = (partial(lock.acquire, 0), lock.locked, partial(client.holders, "seat:12A"), client.ping)
        for call in calls[:count]:
            with pytest.raises(lockkit.LockError) as caught:
                await call()
            found.append(caught.value)

    play(face, url, body)
    return found


def say(face: Face, url: str) -> str:
    """The message of an acquisition."""
    return str(failures(face, url, 1)[0])


each_face = pytest.mark.parametrize("face", ["blocking", "asyncio"])


@each_face
@pytest.mark.parametrize("form", URLS)
def test_error_says_what_to_do(form: str, face: Face, dead: list[str]) -> None:
    """The answer to "and now?" is in the message, and no password."""
    url = form.format(*dead)

    def refused() -> str | None:
        message = say(face, url)
        # On a machine that stands still, the half second of one try is over before the system has refused it.
        return message if "is it running, and reachable from here?" in message else None

    message = until(refused)

    assert message.startswith(f"could not acquire lock 'seat:12A' at {url.replace('hunter2', '***')}: ")
    assert "hunter2" not in message


@each_face
def test_error_names_an_address_of_redis_once(face: Face, dead: list[str]) -> None:
    """Three nodes of a Redlock that are down fit on a line or two."""
    message = say(face, f"redlock://{','.join(dead)}").partition(": ")[2]

    assert [message.count(address) for address in dead] == [1, 1, 1]


@each_face
@pytest.mark.parametrize("form", ["redis+sentinel://{0},{1}/mymaster/0", "redis+cluster://{0},{1}"])
def test_error_names_each_node_that_hangs(form: str, face: Face) -> None:
    """Both are asked, and which deadline ends first is chance: that of the node, or that of the search."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in (one, other)]

        message = say(face, form.format(*addresses)).partition(": ")[2]

    for address in addresses:
        assert f"{address} did not answer in time" in message
    assert message.count("is it overloaded, stopped or cut off?") == 2


@each_face
def test_one_node_is_not_one_nodes(face: Face, dead: list[str]) -> None:
    """A Redlock of one, as in a first try."""
    assert "0 of 1 node answered" in say(face, f"redlock://{dead[0]}")


@each_face
@pytest.mark.parametrize("form", [*URLS, "unix:/nowhere/redis.sock", "file:/proc/nowhere/locks"])
def test_traceback_has_only_errors_of_drivers_above_the_error(form: str, face: Face, dead: list[str]) -> None:
    """None of how lockkit looks for a connection: the first lines are of what the driver or the system said."""
    for error in failures(face, form.format(*dead)):
        earlier = list(printed(error))

        assert error.__cause__ is not None
        for one in earlier:
            of_a_driver = type(one).__module__.partition(".")[0] not in {"builtins", "lockkit"}
            assert of_a_driver or isinstance(one, (OSError, grpc.RpcError)), earlier
        if form.startswith("file:"):  # no driver: the system's own word, once
            assert len(earlier) == 1
