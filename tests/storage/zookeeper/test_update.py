"""Optimistic updates in ZooKeeper, on a real server, through the sync and async APIs: they lose nothing, and end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kazoo.client import KazooClient

import lockkit
from lockkit.optimistic import DELETE, update_node, update_node_async
from lockkit_tools.servers import FaultProxy, ZooKeeperServer, require
from tests.backends.zookeeper.support import PATIENCE, kazoo_client


@pytest.fixture(scope="module")
def server() -> Iterator[ZooKeeperServer]:
    """One server for all tests of this module."""
    require("zookeeper", local=True)
    with ZooKeeperServer() as running:
        yield running


@pytest.fixture
def data(server: ZooKeeperServer) -> Iterator[KazooClient]:
    """A client, with a directory that is empty at first."""
    with kazoo_client(server.address) as client:
        client.ensure_path("/data")
        yield client
        client.delete("/data", recursive=True)


@pytest.fixture(params=["blocking", "asyncio"])
def update(request: pytest.FixtureRequest) -> Any:  # noqa: ANN401 - a function with the signature of both
    """Either face, called the same way."""
    if request.param == "blocking":
        return update_node
    return lambda *arguments, **options: asyncio.run(update_node_async(*arguments, **options))


def test_function_gets_the_value_and_gives_the_next(update: Any, data: KazooClient) -> None:  # noqa: ANN401
    """None where there is no node, which is then created; DELETE removes it, None leaves it."""
    seen: list[bytes | None] = []

    def add(now: bytes | None) -> str:
        seen.append(now)
        return str(int(now or 0) + 5)

    assert update(data, "/data/x", add) == "5"
    assert update(data, "/data/x", add) == "10"
    assert update(data, "/data/x", lambda _: None) is None
    assert data.get("/data/x")[0] == b"10"
    assert update(data, "/data/x", lambda _: DELETE) is DELETE
    assert update(data, "/data/x", lambda _: DELETE) is DELETE

    assert seen == [None, b"5"]
    assert not data.exists("/data/x")


@pytest.mark.parametrize("rival", ["set", "delete", "create"])
def test_who_was_slower_tries_again(update: Any, data: KazooClient, rival: str) -> None:  # noqa: ANN401
    """Whatever the other one did meanwhile: nothing is overwritten unread."""
    if rival != "create":
        data.create("/data/x", b"old")
    seen: list[bytes | None] = []

    def change(now: bytes | None) -> bytes:
        if not seen:
            if rival == "create":
                data.create("/data/x", b"rival")
            elif rival == "set":
                data.set("/data/x", b"rival")
            else:
                data.delete("/data/x")
        seen.append(now)
        return b"new"

    update(data, "/data/x", change)

    assert seen == [None if rival == "create" else b"old", None if rival == "delete" else b"rival"]
    assert data.get("/data/x")[0] == b"new"


def test_deletion_that_was_slower_looks_again(update: Any, data: KazooClient) -> None:  # noqa: ANN401
    """It deletes no value that the function has not seen."""
    data.create("/data/x", b"old")
    seen: list[bytes | None] = []

    def delete_old(now: bytes | None) -> object:
        seen.append(now)
        if now == b"old":
            data.set("/data/x", b"rival")
            return DELETE
        return None

    update(data, "/data/x", delete_old)

    assert seen == [b"old", b"rival"]
    assert data.get("/data/x")[0] == b"rival"


def test_concurrent_changes_are_all_counted(server: ZooKeeperServer, data: KazooClient) -> None:
    """Four clients add 25 each."""

    def work() -> None:
        with kazoo_client(server.address) as client:
            for _ in range(25):
                update_node(client, "/data/x", lambda now: str(int(now or 0) + 1), timeout=PATIENCE, attempts=None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)

    assert data.get("/data/x")[0] == b"100"


def test_others_that_are_always_quicker_end_it(update: Any, data: KazooClient) -> None:  # noqa: ANN401
    """With the error of a lock that stays busy, and nothing changed."""
    data.create("/data/x", b"")

    def slow(_: bytes | None) -> bytes:
        data.set("/data/x", b"rival")
        return b"mine"

    with pytest.raises(lockkit.LockTimeout, match="all of 3 tries") as raised:
        update(data, "/data/x", slow, attempts=3)

    assert raised.value.name == "/data/x"
    assert data.get("/data/x")[0] == b"rival"


def test_change_whose_answer_was_lost_is_not_made_twice(server: ZooKeeperServer, data: KazooClient) -> None:
    """The error says that it may have been made, and here it was."""
    data.create("/data/x", b"1")
    with FaultProxy(server.host, server.port) as proxy, kazoo_client(proxy.address) as client:
        proxy.drop_next_reply(match=b"counted")

        with pytest.raises(lockkit.BackendUnavailable, match="may have been made"):
            update_node(client, "/data/x", lambda _: b"counted")

    value, stat = data.get("/data/x")
    assert (value, stat.version) == (b"counted", 1)


def test_client_without_connection(data: KazooClient) -> None:
    """Nothing is left for kazoo to send later."""
    stopped = KazooClient(data.hosts[0][0])

    with pytest.raises(lockkit.BackendUnavailable, match="started"):
        update_node(stopped, "/data/x", lambda _: b"")


def test_what_the_function_raises_changes_nothing(update: Any, data: KazooClient) -> None:  # noqa: ANN401
    """It is raised here as it is."""

    def fail(_: bytes | None) -> bytes:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        update(data, "/data/x", fail)

    assert not data.exists("/data/x")


def test_asyncio_function_may_be_async(data: KazooClient) -> None:
    """It is awaited."""

    async def change(now: bytes | None) -> str:
        await asyncio.sleep(0)
        return f"{now!r}"

    assert asyncio.run(update_node_async(data, "/data/x", change)) == "None"


def test_refused_arguments(data: KazooClient) -> None:
    """Each with what would be right."""
    data.create("/data/parent/child", makepath=True)
    unchecked: Any = update_node
    for client, path, fn, problem in (
        ("zk", "/data/x", bytes, "KazooClient"),
        (data, "data/x", bytes, "slash"),
        (data, b"/data/x", bytes, "slash"),
        (data, "/data/x", 5, "function"),
        (data, "/data/x", lambda _: 5, "bytes or a str"),
        (data, "/data/none/x", lambda _: b"", "parent"),
        (data, "/data/parent", lambda _: DELETE, "children"),
    ):
        with pytest.raises(lockkit.ConfigurationError, match=problem):
            unchecked(client, path, fn)
    with pytest.raises(lockkit.ConfigurationError, match="attempts or timeout"):
        unchecked(data, "/data/x", bytes, attempts=None, timeout=None)
