"""
Forty people ask for ten coupons at once, each in a thread. Ten people get one, and nobody gets two.

One process, so it also runs on memory://.

    LOCKKIT_URL=memory:// python examples/first_come_coupons.py
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import lockkit
from lockkit.fencing import TokenGuard

if TYPE_CHECKING:
    from lockkit import Client

COUPONS = 10
PEOPLE = 40
ASKS_EACH = 2


@dataclass
class Campaign:
    """What is given away, and to whom. Its guard refuses a holder that was paused and replaced."""

    name: str
    left: int
    winners: list[str] = field(default_factory=list)
    guard: TokenGuard = field(default_factory=TokenGuard)


def claim(client: Client, campaign: Campaign, person: str) -> bool:
    """Give a person a coupon, if there is one left and they have none."""
    with client.lock(f"coupons:{campaign.name}", ttl=10, timeout=60) as lease:
        if campaign.left == 0 or person in campaign.winners:
            return False
        with campaign.guard.writing(lease.token):
            campaign.left -= 1
            campaign.winners.append(person)
        return True


def main() -> int:
    """Let everybody ask, some more than once, and see who has won."""
    campaign = Campaign("opening day", left=COUPONS)
    people = [f"person {number}" for number in range(PEOPLE)]
    with lockkit.connect() as client, ThreadPoolExecutor(PEOPLE) as threads:
        given = list(threads.map(lambda person: claim(client, campaign, person), people * ASKS_EACH))
    print(f"{sum(given)} coupons given to {len(set(campaign.winners))} people, {campaign.left} left")
    return 0 if sum(given) == len(set(campaign.winners)) == COUPONS and campaign.left == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
