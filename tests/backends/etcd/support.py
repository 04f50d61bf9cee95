"""What the tests of the etcd backend read from the server, and how they interrupt."""

from __future__ import annotations

import base64
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import lockkit
from lockkit.sync import Lease, Lock, Semaphore
from lockkit.testing.timing import PATIENCE
from lockkit_tools.servers import EtcdServer, wait_until
from lockkit_tools.servers.binaries import find_program
from tests.tries import beside

WAITING_SECONDS = 40.0


def begin(lock: Lock | Semaphore) -> Future[Lease]:
    """Acquire in a thread, which waits longer than a test for its result: a missed wake-up is noticed."""
    return beside(lock.acquire, 3 * WAITING_SECONDS)


def queue_of(server: EtcdServer, prefix: str = "lockkit/") -> list[str]:
    """List the keys below a prefix in the order in which they were created."""
    text = base64.b64encode(prefix.encode()).decode()
    end = base64.b64encode(prefix[:-1].encode() + b"0").decode()
    answer = server.call("/v3/kv/range", key=text, range_end=end, sort_order="ASCEND", sort_target="CREATE")
    return [base64.b64decode(kv["key"]).decode() for kv in answer.get("kvs", [])]


def stored(server: EtcdServer, key: str) -> dict[str, str]:
    """Return what is stored at a key."""
    (kv,) = server.call("/v3/kv/range", key=base64.b64encode(key.encode()).decode())["kvs"]
    return dict(kv)


def session_of(server: EtcdServer, key: str) -> int:
    """Return the id of the etcd lease that a key is attached to."""
    return int(stored(server, key)["lease"])


def value_of(server: EtcdServer, key: str) -> bytes:
    """Return the value of a key."""
    return base64.b64decode(stored(server, key)["value"])


def leases_of(server: EtcdServer) -> set[int]:
    """Return the ids of all etcd leases."""
    return {int(lease["ID"]) for lease in server.call("/v3/lease/leases").get("leases", [])}


def until_waiting(client: lockkit.Client, name: str, waiters_count: int = 1) -> None:
    """Return once so many contenders wait behind the holder."""
    wait_until(
        lambda: (
            None
            if {one.waiters for one in client.holders(name)} == {waiters_count}
            else f"not {waiters_count} waiters for {name!r}"
        )
    )


def calls_of(server: EtcdServer, label: str = 'grpc_type="unary"') -> int:
    """Count the unary calls at the member, or those with another label."""
    return sum(
        int(float(value))
        for name, value in server.metrics().items()
        if name.startswith("grpc_server_started_total") and label in name
    )


def settled_calls_of(server: EtcdServer) -> int:
    """Count the calls at the member once there are no more for a while."""
    counts = [calls_of(server)]

    def settled() -> str | None:
        time.sleep(0.3)
        counts.append(calls_of(server))
        return None if counts[-1] == counts[-2] else "calls go on"

    wait_until(settled)
    return counts[-1]


@contextmanager
def etcdctl_runs(server: EtcdServer, *arguments: str) -> Iterator[Any]:
    """Run `etcdctl` as a process, and end it in order, so that it takes its key along; give it."""
    with subprocess.Popen(
        [str(find_program("etcdctl")), f"--endpoints={server.endpoint}", *arguments],
        env={"ETCDCTL_API": "3"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=4 * PATIENCE)
