"""Unit tests of the box office: no server, no file of locks, milliseconds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from box_office.sales import BoxOffice, SoldOut
from box_office.store import SqliteStore

import lockkit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """Connect as the tests' environment says."""
    with lockkit.connect(profile="test") as client:
        yield client


def test_one_of_many_gets_the_seat(client: lockkit.Client, tmp_path: Path) -> None:
    """Eight customers at once."""
    office = BoxOffice(client, SqliteStore(tmp_path / "sales.db"))

    def buy(customer: str) -> bool:
        try:
            return office.book("12A", customer) > 0
        except SoldOut:
            return False

    with ThreadPoolExecutor(8) as customers:
        sold = list(customers.map(buy, "abcdefgh"))

    assert sold.count(True) == 1


def test_lost_lease_sells_nothing(client: lockkit.Client, tmp_path: Path) -> None:
    """What the lock cannot prevent, the store does: the sale of a replaced holder is refused."""
    store = SqliteStore(tmp_path / "sales.db")
    replaced = client.lock("seat:12A", ttl=0.05, renew=False).acquire()
    assert replaced.wait_lost(10)
    token = BoxOffice(client, store).book("12A", "Ben")

    assert token > replaced.token
    assert not store.sell("12A", "Ada", replaced.token)
    assert store.buyer("12A") == "Ben"
