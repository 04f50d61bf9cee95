"""The guard in Redis on a real server: what is its own. For all guards, see `tests.storage.test_guards`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.crc import key_slot

import lockkit
from lockkit.fencing import AsyncRedisGuard, RedisGuard
from lockkit.optimistic import with_retry
from lockkit.storage.redis import mark_of
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import FaultProxy, RedisServer
from tests.forked import all_done
from tests.storage.redis import support
from tests.storage.redis.support import Face


def test_delete_says_whether_it_was_there_and_keeps_the_mark(face: Face, data: redis.Redis) -> None:
    """Deleting is a change like others: the stale stay shut out."""
    face.guard(lambda guard: guard.set("x", "1", token=5))

    assert face.guard(lambda guard: guard.delete("x", token=6)) is True
    assert face.guard(lambda guard: guard.delete("x", token=6)) is False
    with pytest.raises(lockkit.StaleToken, match=r"to 'x' at .* token 6 .* yours, 5") as refusal:
        face.guard(lambda guard: guard.set("x", "back", token=5))
    assert refusal.value.name == "x"
    assert refusal.value.backend == f"localhost:{data.connection_pool.connection_kwargs['port']}"
    assert data.get("x") is None


def test_ttl_is_set_and_without_it_an_expiry_is_removed(face: Face, data: redis.Redis) -> None:
    """The same as Redis' own SET."""
    face.guard(lambda guard: guard.set("x", "1", token=5, ttl=30.5))
    assert 29_000 < int(data.pttl("x")) <= 30_500

    face.guard(lambda guard: guard.set("x", "1", token=5))
    assert data.pttl("x") == -1


def test_script_sees_its_keys_and_arguments_and_returns_as_usual(face: Face, data: redis.Redis) -> None:
    """An application's script needs no change to be guarded."""
    data.set("a", "1")
    text = "redis.call('SET', KEYS[2], ARGV[1])\nreturn {#KEYS, #ARGV, redis.call('GET', KEYS[1]), ARGV[2]} -- end"

    answer = face.guard(lambda guard: guard.run(text, keys=["a", "b"], args=["new", 7], token=3, scope="ab"))
    nothing = face.guard(lambda guard: guard.run("return nil", keys=["a"], token=3))

    assert [part.decode() if isinstance(part, bytes) else part for part in answer] == [2, 2, "1", "7"]
    assert nothing is None
    assert data.get("b") == "new"


def test_script_takes_as_many_arguments_as_redis_does(face: Face, data: redis.Redis) -> None:
    """Lua's unpack would end at some thousand."""
    assert face.guard(lambda guard: guard.run("return #ARGV", keys=["a"], args=["v"] * 20_000, token=3)) == 20_000
    assert data.get(mark_of("lockkit", "a")) == "3"


def test_error_of_a_script_is_the_application_s_own(face: Face, data: redis.Redis) -> None:
    """It comes as the driver's, with the script's line; what was written until then is protected by its token."""
    text = "redis.call('SET', KEYS[1], 'half')\nreturn redis.error_reply('SOLD OUT')"
    with pytest.raises(redis.ResponseError, match="SOLD OUT"):
        face.guard(lambda guard: guard.run(text, keys=["x"], token=7))
    with pytest.raises(redis.ResponseError, match="script:2:"):
        face.guard(lambda guard: guard.run("local x = 1\nreturn missing.part", keys=["x"], token=7))

    with pytest.raises(lockkit.StaleToken):
        face.guard(lambda guard: guard.set("x", "late", token=6))
    assert data.get("x") == "half"


def test_keys_of_one_scope_are_guarded_together(face: Face, data: redis.Redis) -> None:
    """A replaced holder can change nothing that the lock protects, not even what the next holder has not written."""
    face.guard(lambda guard: guard.set("{seat}:customer", "Ben", token=8, scope="{seat}"))

    with pytest.raises(lockkit.StaleToken):
        face.guard(lambda guard: guard.set("{seat}:price", "0", token=7, scope="{seat}"))
    face.guard(lambda guard: guard.set("{seat}:price", "1", token=7))  # another scope

    assert data.get("{seat}:price") == "1"


def test_mark_is_kept_for_ever_or_as_long_as_told(face: Face, data: redis.Redis) -> None:
    """A pause can take any time, so a mark has no expiry unless the application gives it one; each change renews it."""
    face.guard(lambda guard: guard.accept("x", token=9))
    assert data.pttl("lockkit:guard:{x}") == -1

    face.guard(lambda guard: guard.accept("x", token=9), keep=3600)
    assert 3_590_000 < int(data.pttl("lockkit:guard:{x}")) <= 3_600_000


def test_prefix_and_bytes_name_the_mark(face: Face, data: redis.Redis) -> None:
    """Text and bytes are the same key, another prefix is another mark."""
    face.guard(lambda guard: guard.set("schlüssel", "1", token=2), prefix="app")
    face.guard(lambda guard: guard.set("schlüssel", "1", token=1))

    assert face.guard(lambda guard: guard.last("schlüssel".encode()), prefix="app") == 2
    assert data.get("app:guard:{schlüssel}") == "2"


@pytest.mark.parametrize("key", ["x", "{x}", "{x}:y", "a{x}b", "{x", "x{", "{{x}}", "ü{é}", "}{x}"])
def test_marks_are_in_the_slot_of_their_scope(key: str) -> None:
    """And differ from each other and from those of other scopes, whatever tag these have."""
    own = [mark_of("lockkit", key), mark_of("lockkit", key, "guard-read")]
    others = {"x", "{x}", "{x}:y", "x:y", "{x:y}", "guard:{x}", "read:x", "{read}", "guard-read:{x}"} - {key}

    assert {key_slot(str(mark).encode()) for mark in own} == {key_slot(key.encode())}
    assert len({*own, *(mark_of("lockkit", other) for other in others)}) == len(own) + len(others)
    assert mark_of("lockkit", key.encode()) == str(own[0]).encode()


def test_readers_have_a_mark_of_their_own(face: Face, data: redis.Redis) -> None:
    """The one of writers keeps the name and the form of before, which a lockkit without readers reads."""
    face.guard(lambda guard: guard.set("x", "1", token=5))
    assert set(data.keys()) == {"x", "lockkit:guard:{x}"}

    read = "return redis.call('GET', KEYS[1])"
    assert face.guard(lambda guard: guard.run(read, keys=["x"], token=6, shared=True), keep=3600) in ("1", b"1")
    assert (data.get("lockkit:guard:{x}"), data.get("lockkit:guard-read:{x}")) == ("5", "6")
    assert 3_590_000 < int(data.pttl("lockkit:guard-read:{x}")) <= 3_600_000
    face.guard(lambda guard: guard.set("x", "2", token=8))
    with pytest.raises(lockkit.StaleToken, match=r"the read .* token 8 .* yours, 7"):
        face.guard(lambda guard: guard.run(read, keys=["x"], token=7, shared=True))


def test_forgotten_script_is_sent_again(face: Face, data: redis.Redis) -> None:
    """SCRIPT FLUSH and restarts go unnoticed."""
    face.guard(lambda guard: guard.set("x", "1", token=1))
    data.script_flush()
    face.guard(lambda guard: guard.set("x", "2", token=1))

    assert data.get("x") == "2"


@pytest.mark.parametrize("content", ["nonsense", "-1", "", ["a", "list"]])
@pytest.mark.parametrize("mark", ["guard", "guard-read"])
def test_foreign_content_of_a_mark_is_named(face: Face, data: redis.Redis, mark: str, content: str | list[str]) -> None:
    """Nothing is written, and no other program's key is overwritten."""
    key = f"lockkit:{mark}:{{x}}"
    if isinstance(content, list):
        data.rpush(key, *content)
    else:
        data.set(key, content)

    asks: list[Callable[[Any], object]] = [
        lambda guard: guard.set("x", "1", token=1),
        lambda guard: guard.run("return 1", keys=["x"], token=1, shared=True),
    ]
    if isinstance(content, str):
        asks.append(lambda guard: guard.last("x"))
    for ask in asks:
        with pytest.raises(lockkit.ConfigurationError, match=r"mark of 'x' at .* does not hold a token"):
            face.guard(ask)
    assert data.keys() == [key]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda guard: guard.set("", "1", token=1), "a key must be"),
        (lambda guard: guard.set(7, "1", token=1), "a key must be"),
        (lambda guard: guard.set("x", "1", token=1, ttl=0), "ttl must be more than 0 .* seconds, not 0"),
        (lambda guard: guard.set("x", "1", token=1, ttl="5"), "ttl must be .* seconds, not '5'"),
        (lambda guard: guard.set("x", "1", token=1, scope=b""), "scope must be"),
        (lambda guard: guard.set("x", None, token=1), "cannot send this to 'x'"),
        (lambda guard: guard.run("return 1", keys="xy", token=1), "keys must be a list"),
        (lambda guard: guard.run("return 1", keys=["x"], args="15", token=1), "args must be a list"),
        (lambda guard: guard.run("return 1", keys=["x", "y"], token=1), "give the scope"),
        (lambda guard: guard.run("return 1", keys=[], token=1), "give the scope"),
        (lambda guard: guard.run(" ", keys=["x"], token=1), "script must be"),
        (lambda guard: guard.run("#!lua\nreturn 1", keys=["x"], token=1), "script must be"),
        (lambda guard: guard.last(""), "scope must be"),
    ],
)
def test_bad_input_is_named(face: Face, data: redis.Redis, ask: Any, message: str) -> None:  # noqa: ANN401 - a function
    """Wrong calls tell what is right, and change nothing."""
    with pytest.raises(lockkit.ConfigurationError, match=message):
        face.guard(ask)
    assert data.keys() == []


@pytest.mark.parametrize("options", [{"prefix": ""}, {"prefix": "{x}"}, {"keep": -1}, {"keep": "1"}])
def test_bad_options_are_refused(face: Face, options: dict[str, Any]) -> None:
    """At the making of the guard."""
    with pytest.raises(lockkit.ConfigurationError):
        face.guard(lambda guard: guard, **options)


@pytest.mark.parametrize(
    ("make", "client", "message"),
    [
        (RedisGuard, redis.asyncio.Redis(), r"is asyncio: use lockkit\.fencing\.AsyncRedisGuard"),
        (AsyncRedisGuard, redis.Redis(), r"is blocking: use lockkit\.fencing\.RedisGuard"),
        (RedisGuard, redis.Redis().pipeline(), "not a pipeline"),
        (AsyncRedisGuard, redis.asyncio.Redis().pipeline(), "not a pipeline"),
        (RedisGuard, "redis://localhost", r"must be a redis\.Redis or redis\.RedisCluster, not str"),
        (AsyncRedisGuard, None, r"must be a redis\.asyncio\.Redis or"),
        (
            lambda client: with_retry(client, "x", str),
            redis.asyncio.Redis(),
            r"use lockkit\.optimistic\.with_retry_async",
        ),
    ],
)
def test_client_of_another_kind_is_refused(make: Any, client: object, message: str) -> None:  # noqa: ANN401 - a function
    """The message names the guard, or the function, for it."""
    with pytest.raises(lockkit.ConfigurationError, match=message):
        make(client)


def test_server_that_does_not_answer_is_unavailable(face: Face) -> None:
    """Not a refusal by the guard, and no exception of the driver's."""
    gone = Face(face.name, 1, {**face.options, "retry": None})

    with pytest.raises(lockkit.BackendUnavailable, match="localhost:1") as caught:
        gone.guard(lambda guard: guard.set("x", "1", token=1))
    assert caught.value.name == "x"
    with pytest.raises(lockkit.BackendUnavailable):
        gone.guard(lambda guard: guard.last("x"))


SELL = "return redis.call('DECR', KEYS[1])"


@pytest.mark.parametrize("name", ["sync", "asyncio"])
def test_lost_answer_runs_no_script_twice(server: RedisServer, data: redis.Redis, name: str) -> None:
    """redis-py sends a command again after a lost connection: one sale would be two. A value may be set again."""
    data.set("left", 10)
    with FaultProxy(server.host, server.port) as proxy:
        face = Face(name, proxy.port, {"socket_timeout": 5})
        assert face.guard(lambda guard: guard.run(SELL, keys=["left"], token=1)) == 9
        for ask in (
            lambda guard: guard.run(SELL, keys=["left"], token=1),
            lambda guard: guard.delete("left", token=1),
        ):
            dropped = proxy.drop_next_reply(match=b"EVALSHA")
            with pytest.raises(lockkit.BackendUnavailable, match=r"'left' .* may have been made or not") as caught:
                face.guard(ask)
            assert dropped.wait(PATIENCE)
            assert caught.value.name == "left"
            assert data.get("left") in {"8", None}

        dropped = proxy.drop_next_reply(match=b"EVALSHA")
        face.guard(lambda guard: guard.set("left", "10", token=1))
        assert dropped.wait(PATIENCE)
    assert data.get("left") == "10"


def test_full_server_is_unavailable_and_nothing_is_written(face: Face, data: redis.Redis) -> None:
    """Neither the mark nor the value."""
    data.config_set("maxmemory", "1")
    try:
        with pytest.raises(lockkit.BackendUnavailable, match="out of memory"):
            face.guard(lambda guard: guard.set("x", "1", token=1))
    finally:
        data.config_set("maxmemory", "0")
    assert data.keys() == []


def test_eight_processes_are_let_in_in_the_order_of_their_tokens(server: RedisServer, data: redis.Redis) -> None:
    """Without any lock, as the worst of holders: what the guard lets through never goes back."""
    accepted = all_done([support.start("append", server.port, "log", 200) for _ in range(8)])

    log = [int(token) for token in data.lrange("log", 0, -1)]
    assert log == sorted(log)
    assert sum(map(int, accepted)) == len(log)
    # Some were refused: otherwise the processes never met, and this shows nothing.
    assert 0 < len(log) < 8 * 200


def test_paused_holder_is_refused_after_the_next_one_has_written(server: RedisServer, data: redis.Redis) -> None:
    """Stopped between its check and its write, it wakes up believing; only the guard keeps it out."""
    holder = support.start("hold", server.port, "seat", "Ada")
    try:
        token = int(holder.line())
        os.kill(holder.pid, signal.SIGSTOP)
        with lockkit.connect(server.url) as client, client.lock("seat", timeout=support.PATIENCE) as lease:
            RedisGuard(data).set("seat", "Ben", token=lease.token)
            assert lease.token > token
        os.kill(holder.pid, signal.SIGCONT)
        holder.go()
        said, _ = holder.communicate(timeout=support.PATIENCE)
    finally:
        holder.close()

    assert said.startswith("StaleToken: ")
    assert data.get("seat") == "Ben"
