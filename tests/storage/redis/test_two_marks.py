"""Readers do not shut out one another: guards in Redis with the tokens of readers and of writers, on both faces."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import redis
import redis.asyncio
from hypothesis import example, given, settings
from redis.crc import key_slot

import lockkit
from lockkit.fencing import TOKEN_MAX, AsyncRedisGuard, RedisGuard
from lockkit.storage.redis.guard import mark_of
from lockkit_tools.servers import RedisServer, require
from tests.storage.redis.support import Face

READ = "return redis.call('GET', KEYS[1])"
LARGE = 2**53
"""Around here Lua's numbers no longer tell neighbours apart."""


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
        yield client


@pytest.fixture(params=["sync", "sync-resp3", "asyncio", "asyncio-decoded"])
def face(request: pytest.FixtureRequest, server: RedisServer) -> Face:
    """Each face, with settings of the client."""
    name, _, setting = request.param.partition("-")
    options: dict[str, dict[str, Any]] = {"decoded": {"decode_responses": True}, "resp3": {"protocol": 3}}
    return Face(name, server.port, options.get(setting, {}))


def test_readers_do_not_shut_out_one_another(face: Face, data: redis.Redis) -> None:
    """Reader 7 and reader 6 hold the lock together; writer 5 came before them, writer 8 comes after."""
    face.guard(lambda guard: guard.set("x", "1", token=5))
    assert face.guard(lambda guard: guard.run(READ, keys=["x"], token=7, shared=True)) in ("1", b"1")
    assert data.get("lockkit:guard:{x}") == "5"  # what a lockkit without readers has written and reads

    face.guard(lambda guard: guard.accept("x", token=6, shared=True))
    with pytest.raises(lockkit.StaleToken, match=r"the change to 'x' at .* token 7 .* yours, 5"):
        face.guard(lambda guard: guard.set("x", "late", token=5))
    with pytest.raises(lockkit.StaleToken):
        face.guard(lambda guard: guard.delete("x", token=7))
    assert face.guard(lambda guard: guard.last("x")) == 7
    face.guard(lambda guard: guard.set("x", "2", token=8))
    with pytest.raises(lockkit.StaleToken, match=r"the read .* token 8 .* yours, 7"):
        face.guard(lambda guard: guard.run(READ, keys=["x"], token=7, shared=True))

    assert data.get("x") == "2"
    assert face.guard(lambda guard: guard.last("x")) == 8


def test_downgraded_lease_reads_only(face: Face, data: redis.Redis) -> None:
    """Its token is the same; what it writes from then on is refused."""
    face.guard(lambda guard: guard.set("x", "1", token=5))
    face.guard(lambda guard: guard.accept("x", token=5, shared=True))

    with pytest.raises(lockkit.StaleToken):
        face.guard(lambda guard: guard.set("x", "2", token=5))
    face.guard(lambda guard: guard.accept("x", token=5, shared=True))
    assert data.get("x") == "1"


def test_guard_without_readers_keeps_one_mark(face: Face, data: redis.Redis) -> None:
    """Under the name and in the form of before."""
    face.guard(lambda guard: guard.set("x", "1", token=5))
    assert set(data.keys()) == {"x", "lockkit:guard:{x}"}

    face.guard(lambda guard: guard.accept("x", token=6, shared=True), keep=3600)
    assert data.get("lockkit:guard-read:{x}") == "6"
    assert 3_590_000 < int(data.pttl("lockkit:guard-read:{x}")) <= 3_600_000


@pytest.mark.parametrize("content", ["nonsense", "-1", ["a", "list"]])
def test_foreign_content_of_the_mark_of_readers_is_named(face: Face, data: redis.Redis, content: Any) -> None:  # noqa: ANN401 - two types
    """Nothing is written."""
    if isinstance(content, list):
        data.rpush("lockkit:guard-read:{x}", *content)
    else:
        data.set("lockkit:guard-read:{x}", content)

    for ask in (
        lambda guard: guard.run(READ, keys=["x"], token=1, shared=True),
        lambda guard: guard.set("x", "1", token=1),
    ):
        with pytest.raises(lockkit.ConfigurationError, match=r"mark of 'x' at .* does not hold a token"):
            face.guard(ask)
    assert len(data.keys()) == 1


@pytest.mark.parametrize("content", ["nonsense", "-1", ""])
@pytest.mark.parametrize("mark", ["guard", "guard-read"])
def test_foreign_content_of_a_mark_is_no_last_token(face: Face, data: redis.Redis, mark: str, content: str) -> None:
    """Asking for the newest token names it, as a change does."""
    data.set(f"lockkit:{mark}:{{x}}", content)

    with pytest.raises(lockkit.ConfigurationError, match=r"mark of 'x' at .* does not hold a token"):
        face.guard(lambda guard: guard.last("x"))


@pytest.mark.parametrize("key", ["x", "{x}", "{x}:y", "a{x}b", "{x", "x{", "ü{é}"])
def test_both_marks_are_in_the_slot_of_their_scope(key: str) -> None:
    """And differ, also from the marks of other scopes."""
    marks = {str(mark_of("lockkit", key)), str(mark_of("lockkit", key, "guard-read"))}

    assert len(marks) == 2
    assert {key_slot(mark.encode()) for mark in marks} == {key_slot(key.encode())}
    for other in ("read:x", "read", "{read}", "-read:{x}", "guard-read:{x}"):
        assert mark_of("lockkit", other) not in marks


def answers(data: redis.Redis, history: list[tuple[int, bool]]) -> list[bool]:
    """Ask the sync guard which tokens pass."""
    guard, passed = RedisGuard(data), []
    for token, shared in history:
        try:
            guard.accept("x", token=token, shared=shared)
        except lockkit.StaleToken:
            passed.append(False)
        else:
            passed.append(True)
    return passed


async def answers_async(port: int, history: list[tuple[int, bool]]) -> list[bool]:
    """Ask the asyncio guard which tokens pass."""
    passed = []
    async with redis.asyncio.Redis(port=port) as client:
        guard = AsyncRedisGuard(client)
        for token, shared in history:
            try:
                await guard.accept("x", token=token, shared=shared)
            except lockkit.StaleToken:
                passed.append(False)
            else:
                passed.append(True)
    return passed


def model(history: list[tuple[int, bool]]) -> list[bool]:
    """Say which tokens pass."""
    write_mark = read_mark = 0
    passed = []
    for token, shared in history:
        passes = token >= write_mark and (shared or token > read_mark)
        if passes and shared:
            read_mark = max(read_mark, token)
        elif passes:
            write_mark = token
        passed.append(passes)
    return passed


tokens = st.sampled_from([1, 2, 9, 10, 11, LARGE - 1, LARGE, LARGE + 1, LARGE + 2, TOKEN_MAX])


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_only_what_a_newer_holder_excludes_is_refused(server: RedisServer, data: redis.Redis, kind: str) -> None:
    """
    Whatever the order in which tokens arrive.

    A write passes from the newest write on, and above the newest read; a read passes from the newest write on.
    """

    @settings(max_examples=60, deadline=None)
    @example([(LARGE, True), (LARGE + 1, False)])
    @example([(LARGE + 1, False), (LARGE, True)])
    @given(st.lists(st.tuples(tokens, st.booleans()), max_size=12))
    def check(history: list[tuple[int, bool]]) -> None:
        data.delete("lockkit:guard:{x}", "lockkit:guard-read:{x}")
        found = answers(data, history) if kind == "blocking" else asyncio.run(answers_async(server.port, history))
        assert found == model(history)

    check()


def test_marks_follow_the_lock(server: RedisServer, data: redis.Redis) -> None:
    """The tokens of real leases: readers together, then a writer, whose lease becomes a reader's."""
    guard = RedisGuard(data)
    with lockkit.connect(server.url) as client, lockkit.connect(server.url) as other:
        first = client.rwlock("x").read().acquire(60)
        second = other.rwlock("x").read().acquire(60)
        for lease in (second, first):
            guard.accept("x", token=lease.token, shared=lease.mode == "shared")
            lease.release()
        with client.rwlock("x", timeout=60).write() as lease:
            guard.set("x", "1", token=lease.token)
            lease.downgrade()
            guard.accept("x", token=lease.token, shared=lease.mode == "shared")
            with pytest.raises(lockkit.StaleToken):
                guard.set("x", "2", token=lease.token)
        with pytest.raises(lockkit.StaleToken):
            guard.accept("x", token=second.token, shared=True)
