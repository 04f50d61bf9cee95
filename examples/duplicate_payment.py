"""
A queue delivers each order several times, as queues do. Each is paid once.

On asyncio, in one process, so it also runs on memory://.

    LOCKKIT_URL=memory:// python examples/duplicate_payment.py
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import TYPE_CHECKING

import lockkit.aio

if TYPE_CHECKING:
    from lockkit.aio import Client

ORDERS = {"order 1": 1999, "order 2": 500, "order 3": 12_50}
DELIVERIES_EACH = 4


class Provider:
    """Somebody else's payment service: slow, and it charges whenever it is asked."""

    def __init__(self) -> None:
        self.charges: list[tuple[str, int]] = []

    async def charge(self, order: str, cents: int) -> None:
        """Take the money. A good provider also takes a key by which it knows a repetition: give it the order."""
        await asyncio.sleep(random.uniform(0.01, 0.05))
        self.charges.append((order, cents))


async def pay(client: Client, provider: Provider, paid: dict[str, int], order: str) -> str:
    """Handle one delivery of an order."""
    # If the lease is lost the body is cancelled where it waits: nobody is charged by two at a time.
    async with client.lock(f"payment:{order}", ttl=10, timeout=60, cancel_on_lost=True) as lease:
        if order in paid:
            return "repeated"
        await provider.charge(order, ORDERS[order])
        paid[order] = lease.token
        return "paid"


async def main() -> int:
    """Deliver everything in a random order, all at once."""
    provider = Provider()
    paid: dict[str, int] = {}
    deliveries = list(ORDERS) * DELIVERIES_EACH
    random.shuffle(deliveries)
    async with lockkit.aio.connect() as client:
        outcomes = await asyncio.gather(*(pay(client, provider, paid, order) for order in deliveries))
    print(f"{len(deliveries)} deliveries: {outcomes.count('paid')} paid, {outcomes.count('repeated')} repeated")
    return 0 if sorted(provider.charges) == sorted(ORDERS.items()) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
