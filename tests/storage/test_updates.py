"""Optimistic updates lose nothing and end: in every store, through both APIs, on real servers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

import lockkit
from lockkit.optimistic import DELETE, update_node
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import FaultProxy
from tests.storage.sql.support import Base
from tests.storage.stores import DATABASES, SERVERS, Store, ZooKeeperStore, opened
from tests.tries import beside


@pytest.fixture(scope="module", params=[*SERVERS, *DATABASES])
def kept(request: pytest.FixtureRequest, bases: dict[str, Base]) -> Iterator[Store]:
    """Each store in turn."""
    with opened(request.param, bases) as store:
        yield store


@pytest.fixture
def store(kept: Store) -> Store:
    """The same, without a value."""
    kept.put(None)
    return kept


@pytest.fixture(params=["sync", "asyncio"])
def face(request: pytest.FixtureRequest) -> str:
    """Each API in turn."""
    return str(request.param)


def test_function_gets_the_value_and_gives_the_next(store: Store, face: str) -> None:
    """None where there is nothing, which is then created; None leaves the value, DELETE removes it."""
    seen: list[str | None] = []

    def add(now: str | None) -> str:
        seen.append(now)
        return str(int(now or 0) + 5)

    assert [store.update(face, add), store.update(face, add)] == ["5", "10"]
    assert seen == [None, "5"]
    assert store.update(face, lambda _: None) is None
    assert store.value() == "10"
    assert [store.update(face, lambda _: DELETE) for _ in range(2)] == [DELETE] * 2
    assert store.value() is None


@pytest.mark.parametrize("rival", ["changes", "deletes", "creates"])
def test_who_was_slower_tries_again(store: Store, face: str, rival: str) -> None:
    """Whatever the other one did meanwhile: nothing is overwritten unread."""
    before = None if rival == "creates" else "old"
    store.put(before)
    after = None if rival == "deletes" else "rival"
    seen: list[str | None] = []

    def change(now: str | None) -> str:
        seen.append(now)
        if len(seen) == 1:
            store.put(after)
        return "new"

    assert store.update(face, change) == "new"
    assert seen == [before, after]
    assert store.value() == "new"


def test_deletion_that_was_slower_looks_again(store: Store, face: str) -> None:
    """It deletes no value that the function has not seen."""
    store.put("old")
    seen: list[str | None] = []

    def delete_old(now: str | None) -> object:
        seen.append(now)
        if now == "old":
            store.put("rival")
            return DELETE
        return None

    store.update(face, delete_old)

    assert seen == ["old", "rival"]
    assert store.value() == "rival"


def test_others_that_are_always_faster_end_it(store: Store, face: str) -> None:
    """By attempts, or by the time; the loser has written nothing."""
    store.put("old")
    asked: list[object] = []

    def slow(now: object) -> str:
        asked.append(now)
        store.put(f"rival {len(asked)}")
        return "mine"

    with pytest.raises(lockkit.LockTimeout, match="other writers were faster in all of 3 tries") as caught:
        store.update(face, slow, attempts=3, timeout=None)
    with pytest.raises(lockkit.LockTimeout, match="all of 1 tries"):
        store.update(face, slow, timeout=0)

    assert isinstance(caught.value, TimeoutError)
    assert caught.value.name == store.name
    assert store.value() == "rival 4"


def test_what_the_function_raises_changes_nothing(store: Store, face: str) -> None:
    """It is raised here as it is."""
    store.put("1")

    def fail(_: object) -> str:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        store.update(face, fail)
    assert store.value() == "1"


def test_function_may_be_async_with_asyncio_only(store: Store) -> None:
    """It is awaited between reading and writing; in the sync API its coroutine would never run."""

    async def slowly(now: str | None) -> str:
        await asyncio.sleep(0)
        return f"{now}!"

    assert store.update("asyncio", slowly) == "None!"
    with pytest.raises(lockkit.ConfigurationError, match="use the function that ends in _async"):
        store.update("sync", slowly)
    assert store.value() == "None!"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fn": "no function"}, "fn must be a function"),
        ({"fn": lambda _: True}, "fn returned True"),
        ({"fn": lambda _: ["a"]}, r"fn returned \['a'\]: it must return .*, lockkit\.optimistic\.DELETE, or None"),
        ({"attempts": 0}, "1 or more, or None; not 0"),
        ({"attempts": 1.5}, r"or None; not 1\.5"),
        ({"attempts": True}, "or None; not True"),
        ({"attempts": None, "timeout": None}, "give attempts or timeout"),
        ({"timeout": -1}, "timeout must be 0 or more seconds, not -1"),
    ],
)
@pytest.mark.parametrize("kept", ["redis", "sqlite"], indirect=True)
def test_bad_input_is_named(store: Store, face: str, arguments: dict[str, Any], message: str) -> None:
    """Wrong calls tell what is right, and change nothing."""
    with pytest.raises(lockkit.ConfigurationError, match=message):
        store.update(face, **{"fn": lambda _: "1", **arguments})
    assert store.value() is None


@pytest.mark.parametrize("kept", ["zookeeper", "etcd", "postgresql", "mariadb"], indirect=True)
def test_change_whose_answer_was_lost_is_not_made_twice(store: Store, face: str) -> None:
    """The error says that it may have been made, and here it was. Of Redis, see its own tests."""
    store.put("1")
    host, _, port = store.address.rpartition(":")
    with FaultProxy(host, int(port)) as proxy:
        behind = store.at(proxy.address)

        def count(now: str | None) -> str:
            assert now == "1"
            dropped.append(proxy.drop_next_reply(**store.lost))
            return "counted"

        dropped: list[threading.Event] = []
        with pytest.raises(lockkit.BackendUnavailable, match="may have been made"):
            behind.update(face, count)
        assert dropped[0].wait(PATIENCE)
    assert store.value() == "counted"


@pytest.mark.parametrize("kept", ["zookeeper"], indirect=True)
def test_node_that_cannot_be_changed_is_told(kept: Store) -> None:
    """With what would be right; without a connection nothing is left for kazoo to send later."""
    assert isinstance(kept, ZooKeeperStore)
    kept.client.ensure_path("/parent/child")
    unchecked: Any = update_node
    for client, path, fn, problem in (
        ("zk", "/x", bytes, "KazooClient"),
        (kept.client, "x", bytes, "slash"),
        (kept.client, b"/x", bytes, "slash"),
        (kept.client, "/x", lambda _: 5, "bytes or a str"),
        (kept.client, "/none/x", lambda _: b"", "parent"),
        (kept.client, "/parent", lambda _: DELETE, "children"),
    ):
        with pytest.raises(lockkit.ConfigurationError, match=problem):
            unchecked(client, path, fn)
    with pytest.raises(lockkit.BackendUnavailable, match="started"):
        update_node(KazooClient(kept.address), "/x", lambda _: b"")


def test_changes_of_many_writers_are_all_counted(store: Store) -> None:
    """Four threads add 10 each."""
    asked: list[object] = []

    def add(now: str | None) -> str:
        asked.append(now)
        return str(int(now or 0) + 1)

    def work() -> None:
        for _ in range(10):
            store.update("sync", add, attempts=None, timeout=PATIENCE)

    for writer in [beside(work) for _ in range(4)]:
        writer.result(4 * PATIENCE)

    assert store.value() == "40"
    # Some were asked again: otherwise they never met, and this shows nothing.
    assert len(asked) > 40
