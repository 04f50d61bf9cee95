"""
Payments on Dramatiq: one at a time for each account, and each order once.

``python payments.py`` needs no server: the broker and the locks are in memory. In production name a broker, and
``LOCKKIT_URL``; then ``dramatiq payments`` runs the workers.
"""

from __future__ import annotations

import os
import sys
import threading

import dramatiq
from dramatiq.brokers.stub import StubBroker

from lockkit.integrations.dramatiq import current_lease, locked_actor

broker = StubBroker()
dramatiq.set_broker(broker)

LOCKS = os.environ.get("LOCKKIT_URL", "memory://")
PAUSE = threading.Event()
paid: list[tuple[int, int]] = []
inside: list[str] = []
crowded: list[str] = []


@locked_actor("account:{account}", once="order:{order}", busy_countdown=0.1, max_retries=None, url=LOCKS)
def pay(order: int, account: str) -> None:
    """Pay an order."""
    crowded.extend(inside)
    inside.append(account)
    PAUSE.wait(0.02)  # the bank's answer
    inside.remove(account)
    paid.append((order, current_lease().token))


def main() -> int:
    """Send each order three times to a worker with eight threads."""
    broker.emit_after("process_boot")
    worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=8)
    worker.start()
    try:
        for order in (1, 2, 3, 4):
            for _ in range(3):
                pay.send(order, "ada")
        broker.join("default", timeout=120_000)
    finally:
        worker.stop()
    tokens = [token for _, token in paid]
    print(f"12 messages, {len(paid)} payments, {len(crowded)} at the same time")
    return 0 if sorted(order for order, _ in paid) == [1, 2, 3, 4] and tokens == sorted(tokens) and not crowded else 1


if __name__ == "__main__":
    sys.exit(main())
