"""What the tests of the etcd backend read from the server, and how they interrupt."""

from __future__ import annotations

import base64
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockkit.testing.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import lockkit
    from lockkit.testing.servers import EtcdServer

__all__ = ["interrupted", "leases_of", "queue_of", "session_of", "until_waiting"]


def queue_of(server: EtcdServer, prefix: str = "lockkit/") -> list[str]:
    """List the keys below a prefix in the order in which they were created."""
    text = base64.b64encode(prefix.encode()).decode()
    end = base64.b64encode(prefix[:-1].encode() + b"0").decode()
    answer = server.call("/v3/kv/range", key=text, range_end=end, sort_order="ASCEND", sort_target="CREATE")
    return [base64.b64decode(kv["key"]).decode() for kv in answer.get("kvs", [])]


def session_of(server: EtcdServer, key: str) -> int:
    """Return the id of the etcd lease that a key is attached to."""
    (kv,) = server.call("/v3/kv/range", key=base64.b64encode(key.encode()).decode())["kvs"]
    return int(kv["lease"])


def leases_of(server: EtcdServer) -> set[int]:
    """Return the ids of all etcd leases."""
    return {int(lease["ID"]) for lease in server.call("/v3/lease/leases").get("leases", [])}


def until_waiting(client: lockkit.Client, name: str, waiters_count: int = 1) -> None:
    """Return once so many contenders wait behind the holder."""
    wait_until(
        lambda: (
            None
            if [one.waiters for one in client.holders(name)] == [waiters_count]
            else f"not {waiters_count} waiters for {name!r}"
        )
    )


@contextmanager
def interrupted(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread after so many seconds, unless the block is over by then."""
    armed = True

    def strike(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.0001))
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
