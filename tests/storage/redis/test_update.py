"""Optimistic updates in Redis: what is its own. For all stores, see `tests.storage.test_updates`."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

import lockkit
from lockkit.optimistic import with_retry, with_retry_async
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import FaultProxy, RedisServer
from tests.storage.redis.support import Face


class Rival:
    """A function that changes the value itself, the first few times that it is asked."""

    def __init__(self, data: redis.Redis, times: int) -> None:
        """Interfere so often."""
        self._data = data
        self._times = times
        self.asked: list[Any] = []

    def __call__(self, now: Any) -> str:  # noqa: ANN401 - bytes or str
        """Give the value with a letter more."""
        self.asked.append(now)
        if len(self.asked) <= self._times:
            self._data.append("x", "r")
        return f"{now.decode() if isinstance(now, bytes) else now}m"


def test_expiry_is_kept_unless_told(face: Face, data: redis.Redis) -> None:
    """An update of a session does not make it eternal."""
    data.set("x", "1", px=60_000)
    face.update("x", lambda _: "2")
    assert 30_000 < int(data.pttl("x")) <= 60_000

    face.update("x", lambda _: "3", ttl=25.5)
    assert 500 < int(data.pttl("x")) <= 25_500
    face.update("new", lambda _: "1")
    assert data.pttl("new") == -1


@pytest.mark.parametrize("change", ["same value", "deleted and made again", "expired"])
def test_any_touch_of_the_key_counts_as_a_change(face: Face, data: redis.Redis, change: str) -> None:
    """Also one that leaves the value as it was, and one that no client made."""
    data.set("x", "1", px=1000 if change == "expired" else None)
    asked = 0

    def once_more(now: object) -> str:
        nonlocal asked
        asked += 1
        if asked == 1:
            if now is None:  # expired before it was read: the machine stood still
                data.set("x", "1", px=20_000)
                asked = 0
            elif change == "same value":
                data.set("x", "1")
            elif change == "expired":
                while data.exists("x"):
                    time.sleep(0.02)
            else:
                data.delete("x")
                data.set("x", "1")
        return "none" if now is None else "some"

    assert face.update("x", once_more) == ("none" if change == "expired" else "some")
    assert asked == 2


def test_pauses_grow_and_are_random(server: RedisServer, data: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losers do not come back together, and long conflicts cost few tries."""
    pauses: list[float] = []

    async def no_sleep(_: object, seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("lockkit.runtime.BlockingRuntime.sleep", no_sleep)
    with redis.Redis(port=server.port) as client, pytest.raises(lockkit.LockTimeout):
        with_retry(client, "x", Rival(data, times=1000), attempts=60, timeout=None)

    assert len(set(pauses)) == 59
    assert max(pauses) <= lockkit.optimistic.PAUSE_MAX
    assert sum(pauses[:5]) < sum(pauses[-5:])


def test_connection_goes_back_to_the_pool_unwatched(server: RedisServer, data: redis.Redis) -> None:
    """An application's pipeline on the same connection is not disturbed by what we watched."""
    with redis.Redis(port=server.port, max_connections=1) as client:
        with pytest.raises(ZeroDivisionError) as caught:
            with_retry(client, "x", lambda _: 1 // 0)
        with_retry(client, "x", lambda _: None)
        data.set("x", "changed")

        with client.pipeline() as pipe:
            assert pipe.set("y", "1").execute() == [True]
    # Kept until here: what the traceback refers to is not collected, and so not given back by that.
    assert caught.tb is not None


@pytest.mark.parametrize("name", ["sync", "asyncio"])
def test_server_that_hangs_hides_no_error_and_keeps_no_connection(server: RedisServer, name: str) -> None:
    """It does not answer UNWATCH; what the function raised matters, and the pool has one connection."""
    with FaultProxy(server.host, server.port) as proxy:
        options = {"retry": _retry(name, 0), "socket_timeout": 0.5, "max_connections": 1}
        face = Face(name, proxy.port, options)

        def hang(_: object) -> None:
            proxy.blackhole()
            raise ZeroDivisionError

        def fail_and_ask(client: redis.Redis) -> None:
            with pytest.raises(ZeroDivisionError):
                with_retry(client, "x", hang)
            proxy.heal()
            client.ping()

        async def fail_and_ask_async(client: redis.asyncio.Redis) -> None:
            with pytest.raises(ZeroDivisionError):
                await with_retry_async(client, "x", hang)
            proxy.heal()
            await client.ping()

        face.client(fail_and_ask, fail_and_ask_async)


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize("name", ["sync", "asyncio"])
def test_lost_answer_is_not_tried_again(server: RedisServer, data: redis.Redis, name: str, retries: int) -> None:
    """
    The change may have been made, so a second try could make it twice.

    redis-py reports a lost answer to EXEC as a conflict, with which others start anew.
    """
    with FaultProxy(server.host, server.port) as proxy:
        face = Face(name, proxy.port, {"retry": _retry(name, retries), "socket_timeout": 5})
        dropped = proxy.drop_next_reply(match=b"EXEC")

        with pytest.raises(lockkit.BackendUnavailable, match="may have been made or not") as caught:
            face.update("x", lambda now: int(now or 0) + 1)

    assert dropped.wait(PATIENCE)
    assert caught.value.name == "x"
    assert data.get("x") == "1"


@pytest.mark.parametrize("name", ["sync", "asyncio"])
def test_connection_lost_before_the_write_is_tried_again(server: RedisServer, data: redis.Redis, name: str) -> None:
    """Nothing was sent that could have been carried out."""
    with FaultProxy(server.host, server.port) as proxy:
        face = Face(name, proxy.port, {"retry": _retry(name, 3), "socket_timeout": 5})
        dropped = proxy.drop_next_reply(match=b"GET")

        assert face.update("x", lambda now: int(now or 0) + 1) == 1

    assert dropped.wait(PATIENCE)
    assert data.get("x") == "1"


def _retry(name: str, retries: int) -> Any:  # noqa: ANN401 - two classes
    return (redis.asyncio.retry.Retry if name == "asyncio" else Retry)(NoBackoff(), retries)


def test_server_that_does_not_answer_is_unavailable(face: Face) -> None:
    """As for locks; the function is not asked."""
    gone = Face(face.name, 1, {**face.options, "retry": None})

    with pytest.raises(lockkit.BackendUnavailable, match="localhost:1"):
        gone.update("x", pytest.fail)


def test_full_server_refuses_before_anything_is_written(face: Face, data: redis.Redis) -> None:
    """The message says what is the matter, and not that the change may have been made."""
    data.set("x", "1")
    data.config_set("maxmemory", "1")
    try:
        with pytest.raises(lockkit.BackendUnavailable, match="out of memory"):
            face.update("x", lambda _: "2")
    finally:
        data.config_set("maxmemory", "0")
    assert data.get("x") == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"key": ""}, "key must be"),
        ({"key": None}, "key must be"),
        ({"ttl": 0}, "ttl must be more than 0 .* seconds, not 0"),
        ({"key": "a list"}, "value at 'a list'"),
    ],
)
def test_bad_input_is_named(face: Face, data: redis.Redis, arguments: dict[str, Any], message: str) -> None:
    """Wrong calls tell what is right, and change nothing."""
    data.rpush("a list", "1")

    with pytest.raises(lockkit.ConfigurationError, match=message):
        face.update(**{"key": "x", "fn": lambda _: "1", **arguments})
    assert data.keys() == ["a list"]


def test_asyncio_cluster_is_unsupported_with_the_reason() -> None:
    """Its transactions would not be safe, and nothing is sent."""

    async def main() -> None:
        client = redis.asyncio.RedisCluster("localhost", 1)
        with pytest.raises(lockkit.Unsupported, match="without its WATCH"):
            await with_retry_async(client, "x", lambda _: "1")
        await client.aclose()

    asyncio.run(main())


def test_cancelled_update_leaves_the_client_usable(server: RedisServer, data: redis.Redis) -> None:
    """A connection with half an answer does not go back to the pool."""

    async def main() -> None:
        async with redis.asyncio.Redis(port=server.port) as client:
            for steps in range(40):
                update = asyncio.ensure_future(with_retry_async(client, "x", lambda now: int(now or 0) + 1))
                for _ in range(steps):
                    await asyncio.sleep(0)
                update.cancel()
                await asyncio.gather(update, return_exceptions=True)
                assert await client.echo(str(steps)) == str(steps).encode()

    asyncio.run(main())
    assert int(str(data.get("x") or 0)) <= 40
