"""`Client.names` over pages: nothing is lost between two of them, and nothing is sent before the first is read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import lockkit
from lockkit import aio
from lockkit.backend import NamesPage
from lockkit.backends.memory.backend import MemoryBackend
from lockkit.errors import BackendUnavailable
from lockkit.runtime import drive

PAGE = 10
COUNT = 2 * PAGE + 1


@pytest.fixture
def client() -> Iterator[lockkit.Client]:
    """A client of a space of its own."""
    with lockkit.connect("memory://listing") as client:
        yield client


def test_names_in_pages(client: lockkit.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, also in the async API."""
    monkeypatch.setattr("lockkit.backends.memory.backend.PAGE_LOCKS", PAGE)
    leases = [client.lock(f"seat:{number}", renew=False).acquire(0) for number in range(COUNT)]
    expected = sorted(lease.name for lease in leases)

    async def read() -> list[str]:
        async with aio.connect("memory://listing") as other:
            return [name async for name in other.names("seat:")]

    assert sorted(client.names("seat:")) == expected
    assert sorted(asyncio.run(read())) == expected
    for lease in leases:
        lease.release()


def test_pages_are_read_as_they_are_needed(client: lockkit.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """None before the first name is wanted; after an outage the same page again; none of a closed client."""
    pages: list[NamesPage | BackendUnavailable] = [
        NamesPage([], next=1), NamesPage(["a"], next=2), BackendUnavailable("gone"), NamesPage(["b"], next=3),
    ]  # fmt: skip
    asked = []

    async def names(self: MemoryBackend, prefix: str, after: NamesPage | None = None) -> NamesPage:
        del self
        asked.append((prefix, None if after is None else after.next))
        page = pages.pop(0)
        if isinstance(page, BackendUnavailable):
            raise page
        return page

    monkeypatch.setattr(MemoryBackend, "names", names)
    listing = client._engine.names("p")
    assert asked == []

    assert drive(listing.page()) == ["a"]
    assert asked == [("p", None), ("p", 1)]
    with pytest.raises(BackendUnavailable, match="list the locks that are held at memory://listing: gone"):
        drive(listing.page())
    assert drive(listing.page()) == ["b"]
    assert asked == [("p", None), ("p", 1), ("p", 2), ("p", 2)]
    client.close()
    for ask in (client.names, lambda: drive(listing.page())):
        with pytest.raises(lockkit.LockError, match="closed"):
            ask()
