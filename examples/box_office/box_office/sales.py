"""What is sold, and under which lock. Knows no backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lockkit import Client


class Store(Protocol):
    """Where sales are written down."""

    def buyer(self, seat: str) -> str | None:
        """Who has the seat."""

    def sell(self, seat: str, customer: str, token: int) -> bool:
        """Write a sale down, unless one with a higher token is there."""


class SoldOut(Exception):
    """Somebody else has the seat."""


class BoxOffice:
    """Sells the seats of one hall."""

    def __init__(self, client: Client, store: Store) -> None:
        self._client = client
        self._store = store

    def book(self, seat: str, customer: str) -> int:
        """
        Sell a seat to a customer.

        Returns:
            The token of the sale, which is printed on the ticket.

        Raises:
            SoldOut: Somebody else has it.
            lockkit.LockTimeout: Somebody else has been buying it for 20 seconds.
        """
        with self._client.lock(f"seat:{seat}", timeout=20) as lease:
            if self._store.buyer(seat) not in {None, customer}:
                raise SoldOut(seat)
            lease.check()
            if not self._store.sell(seat, customer, lease.token):
                raise SoldOut(seat)
            return lease.token
