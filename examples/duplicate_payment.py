"""
A queue delivers each order several times, as queues do. Each is paid once.

On asyncio, in one process, so it also runs on memory://.

    LOCKKIT_URL=memory:// python examples/duplicate_payment.py
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import lockkit.aio

if TYPE_CHECKING:
    from lockkit.aio import Client

RUN = secrets.token_hex(4)  # so that the orders of the last run are other ones
ORDERS = {f"{RUN}-1": 1999, f"{RUN}-2": 500, f"{RUN}-3": 12_50}
DELIVERIES_EACH = 4


class Provider:
    """Somebody else's payment service: slow, and it charges whenever it is asked."""

    def __init__(self) -> None:
        self.charges: list[tuple[str, int, str]] = []

    async def charge(self, order: str, cents: int, key: str) -> str:
        """Take the money. By the key a good provider knows a repetition: of an attempt that died before `done`."""
        await asyncio.sleep(random.uniform(0.01, 0.05))
        self.charges.append((order, cents, key))
        return f"receipt {len(self.charges)}"


async def pay(client: Client, provider: Provider, order: str) -> tuple[bool, str]:
    """Handle one delivery of an order: whether it was paid now, and the receipt."""
    async with client.once(f"payment:{order}", keep=timedelta(days=1), ttl=10, timeout=60) as attempt:
        if attempt.first:
            await attempt.done(await provider.charge(order, ORDERS[order], attempt.key))
        receipt: str = attempt.result
        return attempt.first, receipt


async def main() -> int:
    """Deliver everything in a random order, all at once."""
    provider = Provider()
    deliveries = list(ORDERS) * DELIVERIES_EACH
    random.shuffle(deliveries)
    async with lockkit.aio.connect() as client:
        outcomes = await asyncio.gather(*(pay(client, provider, order) for order in deliveries))
    paid = sum(first for first, _ in outcomes)
    receipts = {receipt for _, receipt in outcomes}
    print(f"{len(deliveries)} deliveries: {paid} paid, {len(outcomes) - paid} repeated, {len(receipts)} receipts")
    charged = sorted((order, cents) for order, cents, _ in provider.charges)
    return 0 if charged == sorted(ORDERS.items()) and len(receipts) == paid == len(ORDERS) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
