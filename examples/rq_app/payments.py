"""
Payments on RQ: one at a time for each account, and each order once.

``python payments.py`` runs two workers. RQ needs a Redis: the one of ``REDIS_URL``, else one is started for the time of
the run, if ``redis-server`` is installed. Locks are in the same Redis, unless ``LOCKKIT_URL`` names another place.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from redis import Redis
from redis.exceptions import ConnectionError as NoConnection
from rq import Queue

from lockkit.integrations.rq import current_lease, locked_job

PATIENCE = 120.0
JOURNAL = "payments:journal"
REDIS = os.environ.get("REDIS_URL", "redis://localhost:6379/0")


@locked_job("account:{account}", once="order:{order}", busy_countdown=1, url=os.environ.get("LOCKKIT_URL", REDIS))
def pay(order: int, account: str) -> str:
    """Pay an order."""
    with Redis.from_url(REDIS) as connection:
        connection.rpush(JOURNAL, json.dumps([order, account, current_lease().token]))
    return f"receipt {order}"


def start_redis() -> tuple[str, subprocess.Popen[bytes]]:
    """Start a Redis that keeps nothing, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    return f"redis://127.0.0.1:{port}/0", subprocess.Popen(command, stdout=subprocess.DEVNULL)


def demonstrate(url: str) -> int:
    """Send each order twice to two workers."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "REDIS_URL": url}
    worker = [sys.executable, "-m", "rq.cli", "worker", "--url", url, "--with-scheduler", "--quiet", "payments"]
    deadline = time.monotonic() + PATIENCE
    with Redis.from_url(url) as connection:
        while time.monotonic() < deadline:
            try:
                connection.delete(JOURNAL)
                break
            except NoConnection:
                time.sleep(0.05)
        workers = [subprocess.Popen(worker, env=environment) for _ in range(2)]
        try:
            queue = Queue("payments", connection=connection)
            jobs = [queue.enqueue("payments.pay", order, "ada") for order in (1, 2, 3) for _ in range(2)]
            while not all(job.get_status(refresh=True) in {"finished", "failed"} for job in jobs):
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(0.05)
            receipts = {str(job.return_value()) for job in jobs}
            payments = Counter(json.loads(line)[0] for line in connection.lrange(JOURNAL, 0, -1))
        finally:
            for process in workers:
                process.terminate()
            for process in workers:
                process.wait()
    print(f"{len(jobs)} jobs, {len(receipts)} receipts, {payments.total()} payments")
    return 0 if payments.total() == len(payments) == len(receipts) == 3 else 1


def main() -> int:
    """Use the Redis that is there, or start one."""
    if "REDIS_URL" in os.environ:
        return demonstrate(REDIS)
    url, server = start_redis()
    try:
        return demonstrate(url)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
