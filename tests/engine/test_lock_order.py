"""LOCKKIT_DEBUG_ORDER: locks that are taken in different orders."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import lockkit
from lockkit.engine import lock_order
from lockkit.engine.lock_order import LockOrder
from lockkit.runtime import AsyncioRuntime
from lockkit.testing.timing import PATIENCE
from tests.engine.scripted import scripted
from tests.tries import begin_to_wait


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> LockOrder:
    """Recorded from now on, by clients that are made now."""
    order = LockOrder()
    begin_to_wait(monkeypatch)
    monkeypatch.setattr(lock_order, "_order", order)
    monkeypatch.setenv("LOCKKIT_DEBUG_ORDER", "1")
    return order


BRIEF = 0.02
"""Seconds that a call waits in vain, see `begin_to_wait`."""


def waits_for(client: lockkit.Client, other: lockkit.Client, held: str, wanted: str) -> None:
    """Wait for a lock in vain while another one is held."""
    with other.lock(wanted, timeout=PATIENCE), client.lock(held, timeout=PATIENCE):
        assert client.lock(wanted).try_acquire(BRIEF) is None


def clients() -> tuple[Any, Any]:
    """Return two clients that share their locks."""
    client, backend = scripted()
    return client, scripted(space=backend.url.removeprefix("memory://"))[0]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages about the order."""
    return [message for message in caplog.messages if "different orders" in message]


@pytest.mark.usefixtures("order")
def test_two_orders_are_one_warning_with_both_stacks(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waited for ever: that each order was seen once is enough."""
    client, other = clients()

    def first_way() -> None:
        thread = threading.Thread(target=waits_for, args=(client, other, "a", "b"))
        thread.start()
        thread.join()

    def other_way() -> None:
        waits_for(client, other, "b", "a")

    first_way()
    assert warnings(caplog) == []
    other_way()
    other_way()
    first_way()
    waits_for(client, other, "c", "a")
    waits_for(client, other, "d", "c")  # which leads into that circle, and no further

    (warning,) = warnings(caplog)
    assert "'b' -> 'a' -> 'b'" in warning
    assert "holding 'b'" in warning
    assert "holding 'a'" in warning
    assert "in other_way" in warning
    assert warning.count("in waits_for") == 2
    assert "client.locks([...])" in warning
    assert "/lockkit/engine/" not in warning


@pytest.mark.parametrize("recorded", [True, False])
def test_circle_of_three_is_found(
    order: LockOrder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, recorded: bool
) -> None:
    """No two of them were taken both ways. Nothing is recorded unless asked, and never without a bound."""
    monkeypatch.setattr(lock_order, "EDGES_MAX", 3)
    if not recorded:
        monkeypatch.delenv("LOCKKIT_DEBUG_ORDER")
    client, other = clients()

    for held, wanted in ("ab", "bc", "ca", "bd"):
        waits_for(client, other, held, wanted)

    assert [warning.count("holding ") for warning in warnings(caplog)] == [3] * recorded
    assert sum(map(len, order._edges.values())) == 3 * recorded


@pytest.mark.usefixtures("order")
def test_one_order_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Nor are locks that were free, and those that a set takes, in whichever order it names them."""
    client, other = clients()
    with client.lock("b"), client.lock("a"):
        pass
    for names in ("ab", "ba"):
        with other.lock("b"):
            assert client.locks(list(names)).try_acquire(BRIEF) is None
    waits_for(client, other, "a", "c")
    waits_for(client, other, "b", "c")
    assert warnings(caplog) == []

    waits_for(client, other, "b", "a")  # the set took them the other way

    assert len(warnings(caplog)) == 1


@pytest.mark.usefixtures("order")
def test_tasks_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    """What another task of the thread holds is not held by this one."""

    async def main() -> None:
        client, _ = scripted(AsyncioRuntime())

        async def wait(name: str) -> None:
            assert await client.lock(name).try_acquire(BRIEF) is None

        async def nested(held: str, wanted: str) -> None:
            async with client.lock(held):
                await wait(wanted)

        async with client.lock("b"):
            await asyncio.create_task(wait("b"))
            await asyncio.create_task(nested("a", "b"))
        async with client.lock("a"):
            assert warnings(caplog) == []
            await asyncio.create_task(nested("b", "a"))
        await client.close()

    asyncio.run(main())

    assert len(warnings(caplog)) == 1
