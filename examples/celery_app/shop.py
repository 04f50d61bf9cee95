"""
A shop on Celery: orders that arrive twice are paid once, and of two beats one sends the report.

``python shop.py`` starts a worker and two beats, shows what they do, and ends. It needs no server: messages (in SQLite,
by SQLAlchemy), results and locks are files in ``var/``, unless ``BROKER_URL``, ``RESULT_URL`` and ``LOCKKIT_URL`` name
better places.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from celery import Celery

from lockkit.integrations.celery import LockedTask

VAR = Path("var").absolute()
(VAR / "results").mkdir(parents=True, exist_ok=True)

app = Celery(
    "shop",
    # Not "filesystem://", whose worker ends when it reads a message that is not written yet.
    broker=os.environ.get("BROKER_URL", f"sqla+sqlite:///{VAR}/messages?timeout=60"),
    backend=os.environ.get("RESULT_URL", f"file://{VAR}/results"),
)
app.conf.update(
    lockkit_url=os.environ.get("LOCKKIT_URL", f"file://{VAR}/locks"),
    lockkit_beat_ttl=5,
    beat_schedule={"report": {"task": "shop.report", "schedule": 1.0}},
    beat_max_loop_interval=1,
)

REPORTS = 3
PATIENCE = 120.0
COMMANDS = """
celery -A shop worker --concurrency=2
celery -A shop beat -S lockkit.integrations.celery.LeaderScheduler -s var/beat-1 --pidfile=
celery -A shop beat -S lockkit.integrations.celery.LeaderScheduler -s var/beat-2 --pidfile=
"""


def note(**facts: object) -> None:
    """Append to the journal."""
    with (VAR / "journal").open("a") as journal:
        journal.write(json.dumps(facts) + "\n")


@app.task(
    bind=True, base=LockedTask, name="shop.pay", lock="account:{account}", once="order:{order}", busy_countdown=0.5
)
def pay(self: LockedTask, order: int, account: str) -> str:
    """Pay an order: one at a time for each account, and each order once."""
    note(paid=order, account=account, fence=self.request.lockkit_token)
    return f"receipt {order}"


@app.task(bind=True, name="shop.report")
def report(self: LockedTask) -> None:
    """Report; the beat says for when."""
    note(report=self.request.lockkit_due)


def journal() -> list[dict[str, str]]:
    """Return what was done."""
    path = VAR / "journal"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    """Start everything, send orders, and look at what was done."""
    (VAR / "journal").unlink(missing_ok=True)
    # Before the others start: the first message makes the tables, which two cannot do at the same time.
    results = [pay.delay(order, "ada") for order in (1, 2, 3) for _ in range(2)]
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (VAR / "log").open("w") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", *command.split()], env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log
            )
            for command in COMMANDS.strip().splitlines()
        ]
    try:
        receipts = [result.get(timeout=PATIENCE) for result in results]
        deadline = time.monotonic() + PATIENCE
        while sum("report" in entry for entry in journal()) < REPORTS and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()

    payments = Counter(entry["paid"] for entry in journal() if "paid" in entry)
    reports = Counter(entry["report"] for entry in journal() if "report" in entry)
    print(f"{len(receipts)} messages, {len(set(receipts))} receipts, {payments.total()} payments")
    enough = "at least" if len(reports) >= REPORTS else "not even"
    print(f"{enough} {REPORTS} reports of two beats, {reports.total() - len(reports)} of them twice")
    return 0 if payments.total() == len(payments) == 3 and reports.total() == len(reports) >= REPORTS else 1


if __name__ == "__main__":
    sys.exit(main())
