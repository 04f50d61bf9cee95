"""
A client of a measured scene: a process of its own, which does what it is told on stdin and reports on stdout.

Each line is a JSON object. Times are seconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import lockkit
from lockkit.errors import LockError, LockLost

if TYPE_CHECKING:
    from lockkit.sync import Lease
    from lockkit.units import Seconds

__all__ = ["main"]

LOOK_SECONDS = 0.01
"""Pause between two looks at the deadline of the lease. Longer draws renewals later."""


class Worker:
    """One client and its lease."""

    def __init__(self, url: str, name: str, ttl: Seconds) -> None:
        """Connect."""
        self._client = lockkit.connect(url, ttl=ttl)
        self._lock = self._client.lock(name, on_lost=self._lost)
        self._lease: Lease | None = None
        self._mutex = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    def report(self, what: str, **more: Any) -> None:
        """Write one line."""
        with self._mutex:
            print(json.dumps({"what": what, "at": time.monotonic(), **more}), flush=True)

    def do(self, order: dict[str, Any]) -> None:
        """Do one step, and report that it is done."""
        action = order["do"]
        if action == "acquire":
            self._acquire(order["timeout"])
        elif action == "check":
            self._check()
        elif action == "write":
            self._write(check=order["check"])
        elif self._lease is not None:
            self._release()
        self.report("done", do=action)

    def _acquire(self, timeout: Seconds | None) -> None:
        self.report("asks")
        try:
            self._lease = self._lock.acquire(timeout)
        except LockError as error:
            self.report("failed", error=type(error).__name__)
        else:
            self.report("granted", token=self._lease.token, owner=self._lease.owner, left=self._lease.remaining())

    def _check(self) -> None:
        try:
            assert self._lease is not None
            self._lease.check()
            self.report("checked", left=self._lease.remaining())
        except (AssertionError, LockLost):
            self.report("checked", left=None)

    def _write(self, *, check: bool) -> None:
        if self._lease is None or (check and not self._lease.held):
            self.report("unwritten", held=self._lease is not None)
            return
        self.report("write", token=self._lease.token)
        sys.stdin.readline()  # the storage's answer

    def _release(self) -> None:
        assert self._lease is not None, "asked before"
        self.report("releases")
        try:
            self._lease.release()
        except LockLost:
            self.report("late")
        except LockError:
            self.report("unanswered")

    def _lost(self, lease: Lease, reason: str) -> None:
        self.report("lost", token=lease.token, reason=reason)

    def _watch(self) -> None:
        """Report each new deadline."""
        last = 0.0
        while True:
            lease = self._lease
            if lease is not None and lease._record.valid_until != last:
                last = lease._record.valid_until
                self.report("renewed", token=lease.token, left=lease.remaining())
            time.sleep(LOOK_SECONDS)


def main() -> None:
    """Read orders until there are no more. Arguments: URL, name of the lock, ttl."""
    url, name, ttl = sys.argv[1:]
    worker = Worker(url, name, float(ttl))
    worker.report("ready")
    for line in iter(sys.stdin.readline, ""):
        worker.do(json.loads(line))


if __name__ == "__main__":
    main()
