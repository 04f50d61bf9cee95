"""
A client of a measured scene: a process of its own, which does what it is told on stdin and reports on stdout.

Each line is a JSON object. Times are seconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from lockkit.errors import LockError, LockLost, LockTimeout

if TYPE_CHECKING:
    from lockkit.sync import Lease, Term
    from lockkit.units import Seconds

__all__ = ["main"]

LOOK_SECONDS = 0.01
"""Pause between two looks at the deadline of the lease. Longer draws renewals later."""

POLL_SHARE = 0.02
"""Pause between two tries of a lock by hand, as a share of the ttl."""

PATIENCE = 30.0
"""Seconds after which a server that should have answered never will."""


class Way(Protocol):
    """A client's way to lock."""

    def warm_up(self) -> None:
        """Connect, as a client that has been running for a while has done."""

    def acquire(self, order: dict[str, Any]) -> dict[str, Any]:
        """Get the lock; give its token, its owner and the seconds that are left."""

    def left(self) -> float | None:
        """Give the seconds that are left of the lease; None if it is lost."""

    def release(self) -> None:
        """Release the lock."""


class Worker:
    """One client, and the storage that it writes to."""

    def __init__(self, name: str, way: Way, storage: tuple[str, int]) -> None:
        """Connect to the storage."""
        self._name = name
        self._way = way
        self._grants = 0
        self._holds = False
        self._mutex = threading.Lock()
        self._storage = socket.create_connection(storage).makefile("rw", encoding="utf-8")

    def report(self, what: str, **more: Any) -> None:
        """Write one line."""
        with self._mutex:
            print(json.dumps({"what": what, "at": time.monotonic(), **more}), flush=True)

    def do(self, order: dict[str, Any]) -> None:
        """Do one step, and report that it is done."""
        action = order["do"]
        self.report("begins")
        if action in {"acquire", "lead"}:
            self._acquire(order)
        elif action == "check":
            self.report("checked", left=self._way.left() if self._holds else None)
        elif action == "write":
            self._write(check=order["check"])
        elif action == "clock":
            shift_time_of_day(order["by"])
        elif self._holds:
            self._release()
        self.report("done")

    def _acquire(self, order: dict[str, Any]) -> None:
        self.report("asks")
        try:
            granted = self._way.acquire(order)
        except LockError as error:
            self.report("failed", error=type(error).__name__)
            return
        self._grants += 1
        self._holds = True
        self.report("granted", **granted)

    def _write(self, *, check: bool) -> None:
        if not self._holds or (check and self._way.left() is None):
            self.report("unwritten", held=self._holds)
            return
        self.report("writes")
        line = {"client": self._name, "grant": self._grants, "sent": time.monotonic()}
        self._storage.write(json.dumps(line) + "\n")
        self._storage.flush()
        self._storage.readline()  # accepted or refused: the storage itself has taken it down

    def _release(self) -> None:
        self._holds = False
        self.report("releases")
        try:
            self._way.release()
        except LockLost:
            self.report("late")
        except LockError:
            self.report("unanswered")


class Lockkit:
    """Lock by lockkit."""

    def __init__(self, url: str, name: str, ttl: Seconds) -> None:
        """Connect."""
        import lockkit  # noqa: PLC0415 - a lock by hand does without

        self.report: Any = None
        self._client = lockkit.connect(url, ttl=ttl)
        self._name = name
        self._lease: Lease | None = None

    def warm_up(self) -> None:
        """See `Way.warm_up`: with another lock."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self._client.lock(f"{self._name}-{os.getpid()}").acquire(PATIENCE).release()
                break
            except LockError:  # of a Redlock on a busy machine: too few nodes answered in time
                if time.monotonic() >= deadline:
                    raise
        threading.Thread(target=self._watch, daemon=True).start()

    def acquire(self, order: dict[str, Any]) -> dict[str, Any]:
        """See `Way.acquire`."""
        if order["do"] == "lead":
            lease: Lease = self._campaign(order["timeout"])
        else:
            lease = self._client.lock(self._name, renew=order["renew"]).acquire(order["timeout"])
        self._lease = lease
        return {"token": lease.token, "owner": lease.owner, "left": lease.remaining()}

    def left(self) -> float | None:
        """See `Way.left`."""
        assert self._lease is not None, "granted"
        try:
            self._lease.check()
        except LockLost:
            return None
        return self._lease.remaining()

    def release(self) -> None:
        """See `Way.release`."""
        assert self._lease is not None, "granted"
        self._lease.release()

    def _campaign(self, timeout: Seconds | None) -> Term:
        term = self._client.election(self._name).campaign(timeout)

        def wait() -> None:
            term.must_stop(None)
            self.report("must_stop", token=term.token)

        threading.Thread(target=wait, daemon=True).start()
        return term

    def _watch(self) -> None:
        """Report each new deadline, and the end, without asking the lease: that would make it notice its loss."""
        seen: tuple[int | None, float] = (None, 0.0)
        lost: int | None = None
        while True:
            lease = self._lease
            if lease is not None:
                record, token = lease._record, lease.token
                if record.lost_reason is not None and token != lost:
                    lost = token
                    self.report("lost", token=token, reason=record.lost_reason)
                elif (token, record.valid_until) != seen:
                    seen = (token, record.valid_until)
                    self.report("renewed", token=token, left=lease.remaining())
            time.sleep(LOOK_SECONDS)


class ByHand:
    """Lock by plain commands, as `lockkit.lab.by_hand` does on a simulated Redis. Each recipe is wrong."""

    def __init__(self, url: str, key: str, ttl: Seconds, recipe: str, client: str) -> None:
        """Connect."""
        import redis  # noqa: PLC0415 - the driver

        self.report: Any = None
        self._redis = redis.Redis.from_url(url, decode_responses=True)
        self._key = key
        self._ttl = ttl
        self._try = {"setnx": self._set_nx, "delete": self._set_with_ttl, "getset": self._get_set}[recipe]
        self._client = client
        self._until = 0.0

    def warm_up(self) -> None:
        """See `Way.warm_up`."""
        self._redis.ping()

    def acquire(self, order: dict[str, Any]) -> dict[str, Any]:
        """See `Way.acquire`: poll."""
        started = time.monotonic()
        while (until := self._try()) is None:
            if order["timeout"] is not None and time.monotonic() - started >= order["timeout"]:
                message = "still held"
                raise LockTimeout(message)
            time.sleep(POLL_SHARE * self._ttl)
        self._until = until
        left = None if until == inf else until - time.monotonic()
        return {"token": None, "owner": self._client, "left": left}

    def left(self) -> float | None:
        """See `Way.left`: it never knows better."""
        return max(0.0, min(self._until - time.monotonic(), 1e6))

    def release(self) -> None:
        """See `Way.release`: without looking."""
        self._redis.delete(self._key)

    def _set_nx(self) -> float | None:
        return inf if self._redis.setnx(self._key, self._client) else None

    def _set_with_ttl(self) -> float | None:
        until = time.monotonic() + self._ttl
        return until if self._redis.set(self._key, self._client, nx=True, px=int(self._ttl * 1000)) else None

    def _get_set(self) -> float | None:
        until = time.monotonic() + self._ttl
        mine = f"{self._client}.{time.time() + self._ttl!r}"
        if self._redis.setnx(self._key, mine):
            return until
        seen: Any = self._redis.get(self._key)
        if seen is None or float(seen.partition(".")[2]) >= time.time():
            return None
        return until if self._redis.getset(self._key, mine) == seen else None


def shift_time_of_day(by: Seconds) -> None:
    """Have `time.time` of this process tell another time: a machine has one clock, and others use it."""
    before = time.time
    time.time = lambda: before() + by


def main() -> None:
    """Read orders until there are no more. The argument is a JSON object: how to connect."""
    given = json.loads(sys.argv[1])
    url, ttl, name = given["url"], given["ttl"], given["client"]
    way: Lockkit | ByHand
    if given["recipe"] is None:
        way = Lockkit(url, given["lock"], ttl)
    else:
        way = ByHand(url, given["key"], ttl, given["recipe"], name)
    worker = Worker(name, way, tuple(given["storage"]))
    way.report = worker.report
    try:
        way.warm_up()
    except Exception as error:  # noqa: BLE001 - whatever it is, the scene cannot begin
        worker.report("unable", error=str(error))
        return
    worker.report("ready")
    for line in iter(sys.stdin.readline, ""):
        worker.do(json.loads(line))


if __name__ == "__main__":
    main()
