"""Guards let no stale holder write: in this process, and in Redis on a real server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import redis
import redis.asyncio
from hypothesis import given
from redis.crc import key_slot

import lockkit
from lockkit.fencing import TOKEN_MAX, AsyncRedisGuard, RedisGuard, TokenGuard
from lockkit.storage.redis.guard import mark_of
from lockkit_tools.servers import RedisServer, require
from tests.forked import all_done
from tests.storage.redis import support
from tests.storage.redis.support import Face


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One node for all tests of this module."""
    require("redis", local=True)
    with RedisServer() as node:
        yield node


@pytest.fixture
def data(server: RedisServer) -> Iterator[redis.Redis]:
    """What is at the server, nothing at first."""
    with redis.Redis(port=server.port, decode_responses=True) as client:
        client.flushall()
        client.script_flush()
        yield client


@pytest.fixture(params=["sync", "sync-decoded", "sync-resp3", "asyncio", "asyncio-decoded"])
def face(request: pytest.FixtureRequest, server: RedisServer) -> Face:
    """Each face in turn, with the settings of a client that change what it answers."""
    name, _, setting = request.param.partition("-")
    options: dict[str, dict[str, Any]] = {"decoded": {"decode_responses": True}, "resp3": {"protocol": 3}}
    return Face(name, server.port, options.get(setting, {}))


def test_newer_and_equal_tokens_write_and_older_ones_are_refused(face: Face, data: redis.Redis) -> None:
    """The newest token decides, and a refusal leaves everything as it was."""
    face.guard(lambda guard: guard.set("x", "first", token=41))
    face.guard(lambda guard: guard.set("x", "again", token=41))
    face.guard(lambda guard: guard.set("x", "newer", token=42))

    with pytest.raises(lockkit.StaleToken, match=r"to 'x' at .* token 42 .* yours, 41") as refusal:
        face.guard(lambda guard: guard.set("x", "late", token=41))
    with pytest.raises(lockkit.StaleToken):
        face.guard(lambda guard: guard.delete("x", token=1))

    assert refusal.value.name == "x"
    assert refusal.value.backend == f"localhost:{data.connection_pool.connection_kwargs['port']}"
    assert data.get("x") == "newer"
    assert face.guard(lambda guard: guard.last("x")) == 42


@pytest.mark.parametrize(("newer", "older"), [(10, 9), (2**53 + 1, 2**53), (TOKEN_MAX, TOKEN_MAX - 1), (100, 99)])
def test_tokens_are_compared_exactly(face: Face, data: redis.Redis, newer: int, older: int) -> None:
    """Neither as text of different lengths nor as doubles, which take 2^53 and 2^53 + 1 for one number."""
    face.guard(lambda guard: guard.set("x", "1", token=older))
    face.guard(lambda guard: guard.set("x", "2", token=newer))

    with pytest.raises(lockkit.StaleToken):
        face.guard(lambda guard: guard.set("x", "3", token=older))

    assert data.get("x") == "2"


def test_delete_says_whether_it_was_there_and_keeps_the_mark(face: Face, data: redis.Redis) -> None:
    """Deleting is a change like others: the stale stay shut out."""
    face.guard(lambda guard: guard.set("x", "1", token=5))

    assert face.guard(lambda guard: guard.delete("x", token=6)) is True
    assert face.guard(lambda guard: guard.delete("x", token=6)) is False
    with pytest.raises(lockkit.StaleToken):
        face.guard(lambda guard: guard.set("x", "back", token=5))
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


def test_accept_shuts_out_earlier_holders_before_the_first_write(face: Face, data: redis.Redis) -> None:
    """A holder can make sure of its turn as soon as it has the lock."""
    face.guard(lambda guard: guard.accept("x", token=9))

    with pytest.raises(lockkit.StaleToken):
        face.guard(lambda guard: guard.set("x", "late", token=8))
    with pytest.raises(lockkit.StaleToken):
        face.guard(lambda guard: guard.accept("x", token=8))
    assert face.guard(lambda guard: guard.last("never")) is None
    assert data.keys() == ["lockkit:guard:{x}"]


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
def test_mark_is_in_the_slot_of_its_scope(key: str) -> None:
    """A Cluster runs the script only if all keys are in one slot (checked with redis-py's own slots)."""
    mark = mark_of("lockkit", key.encode())

    assert mark == str(mark_of("lockkit", key)).encode()
    assert key_slot(mark) == key_slot(key.encode())


def test_different_scopes_have_different_marks() -> None:
    """A tag in a scope does not make it another one's."""
    scopes = ["x", "{x}", "{x}:y", "x:y", "{x:y}", "guard:{x}"]

    assert len({mark_of("lockkit", scope) for scope in scopes}) == len(scopes)


def test_forgotten_script_is_sent_again(face: Face, data: redis.Redis) -> None:
    """SCRIPT FLUSH and restarts go unnoticed."""
    face.guard(lambda guard: guard.set("x", "1", token=1))
    data.script_flush()
    face.guard(lambda guard: guard.set("x", "2", token=1))

    assert data.get("x") == "2"


@pytest.mark.parametrize("content", ["nonsense", "-1", "", ["a", "list"]])
def test_foreign_content_of_a_mark_is_named(face: Face, data: redis.Redis, content: Any) -> None:  # noqa: ANN401 - two types
    """Nothing is written, and no other program's key is overwritten."""
    if isinstance(content, list):
        data.rpush("lockkit:guard:{x}", *content)
    else:
        data.set("lockkit:guard:{x}", content)

    with pytest.raises(lockkit.ConfigurationError, match=r"mark of 'x' at .* does not hold a token"):
        face.guard(lambda guard: guard.set("x", "1", token=1))
    assert data.get("x") is None


@pytest.mark.parametrize("token", [0, -1, 1.0, True, "7", None, TOKEN_MAX + 1])
def test_what_is_no_token_is_refused(face: Face, token: Any) -> None:  # noqa: ANN401 - also nonsense
    """Before anything is sent."""
    with pytest.raises(lockkit.ConfigurationError, match=r"give the token of your lease, lease\.token"):
        face.guard(lambda guard: guard.set("x", "1", token=token))


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
    ],
)
def test_client_of_another_kind_is_refused(make: Any, client: object, message: str) -> None:  # noqa: ANN401 - two classes
    """The message names the guard for it."""
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


def test_guard_in_this_process_lets_no_older_token_in() -> None:
    """`TokenGuard` by itself."""
    assert TokenGuard().last is None
    guard = TokenGuard("seat")

    guard.accept(5)
    guard.accept(5)
    with pytest.raises(lockkit.StaleToken, match="to 'seat' was refused") as refusal:
        guard.accept(4)
    ran = []
    with pytest.raises(lockkit.StaleToken), guard.writing(4):
        ran.append(4)
    with guard.writing(6):
        assert guard.last == 6
    with pytest.raises(lockkit.ConfigurationError):
        guard.accept(0)

    assert ran == []
    assert (refusal.value.name, guard.last) == ("seat", 6)


def test_guard_in_this_process_writes_one_at_a_time() -> None:
    """Eight threads with tokens in any order: what is written never goes back."""
    guard = TokenGuard()
    tokens = iter(range(1, 4001))
    log: list[int] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for token in tokens:
            try:
                with guard.writing(token):
                    log.append(token)
            except lockkit.StaleToken:
                continue

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert log == sorted(log)
    assert log


def test_guard_in_this_process_is_free_after_an_error() -> None:
    """A body that raises does not shut the next one out."""
    guard = TokenGuard()
    with pytest.raises(RuntimeError, match="mine"), guard.writing(1):
        raise RuntimeError("mine")

    with guard.writing(1):
        pass


def test_guard_in_this_process_does_not_wait_for_itself() -> None:
    """A body that writes through the same guard again, or awaits while another task does, would wait for ever."""
    guard = TokenGuard("seat")

    async def write() -> None:
        with guard.writing(3):
            await asyncio.sleep(0)

    async def both() -> list[BaseException | None]:
        return [*await asyncio.gather(write(), write(), return_exceptions=True)]

    with guard.writing(1):
        with pytest.raises(lockkit.LockError, match=r"inside writing\(\) of the guard of 'seat' already"):
            guard.accept(2)
        with pytest.raises(lockkit.LockError, match="already"), guard.writing(2):
            pytest.fail("the body ran")
    assert guard.last == 1
    first, second = asyncio.run(both())
    assert first is None
    assert isinstance(second, lockkit.LockError)
    guard.accept(4)


def test_driver_is_loaded_by_the_guard_that_needs_it() -> None:
    """To guard a dict you need no Redis."""
    script = (
        "import sys, lockkit\n"
        "lockkit.fencing.TokenGuard().accept(1); lockkit.optimistic.with_retry\n"
        "assert 'redis' not in sys.modules\n"
        "sys.modules['redis'] = None\n"
        "try: lockkit.fencing.RedisGuard\n"
        "except lockkit.ConfigurationError as error: print(error)\n"
        "try: lockkit.optimistic.with_retry(None, 'x', str)\n"
        "except lockkit.ConfigurationError as error: print(error)\n"
    )

    said = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, text=True, timeout=60)

    assert said.stdout.count("pip install 'lockkit[redis]'") == 2
    assert "RedisGuard" in dir(lockkit.fencing)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lockkit.fencing.nothing


def test_readers_do_not_shut_out_one_another() -> None:
    """Two marks: reader 7 and reader 6 hold the lock together; writer 5 came before them, writer 8 comes after."""
    guard = TokenGuard("prices")
    guard.accept(5)
    guard.accept(7, shared=True)

    guard.accept(6, shared=True)
    with pytest.raises(lockkit.StaleToken, match="the write"):
        guard.accept(5)
    guard.accept(8)
    with pytest.raises(lockkit.StaleToken, match="the read"):
        guard.accept(7, shared=True)
    assert guard.last == 8


def test_downgraded_lease_reads_only() -> None:
    """Its token is the same; what it writes from then on is refused."""
    guard = TokenGuard()
    guard.accept(5)
    guard.accept(5)
    guard.accept(5, shared=True)

    with pytest.raises(lockkit.StaleToken):
        guard.accept(5)
    guard.accept(5, shared=True)


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=12))
def test_only_what_a_newer_holder_excludes_is_refused(history: list[tuple[int, bool]]) -> None:
    """Whatever the order in which tokens arrive: a newer write excludes all, a reader's token excludes older writes."""
    guard = TokenGuard()
    writes, reads = [0], [0]
    for token, shared in history:
        stale = token < max(writes) or (not shared and token <= max(reads))
        try:
            guard.accept(token, shared=shared)
        except lockkit.StaleToken:
            assert stale
        else:
            assert not stale
            (reads if shared else writes).append(token)
