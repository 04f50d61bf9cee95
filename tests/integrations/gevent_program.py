"""
A program on gevent: ``python gevent_program.py URL``, run by ``tests/integrations/test_gevent.py``.

It prints what it saw as JSON. A wait that blocks the thread and not the greenlet alone would never end, since another
greenlet frees the lock: after a minute a thread of faulthandler's ends the program, with all stacks.
"""

from gevent import monkey

monkey.patch_all()

import faulthandler  # noqa: E402 - nothing may be imported before the patches
import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from contextlib import suppress  # noqa: E402

import gevent  # noqa: E402

import lockkit  # noqa: E402

faulthandler.dump_traceback_later(90, exit=True)

GREENLETS = 8
TTL = 2.0
ATTEMPTS = 10
"""At what a very busy machine may be too slow for."""


def exclusion(client: lockkit.Client, _: lockkit.Client) -> dict[str, int]:
    """Let greenlets count with a pause between reading and writing."""
    state = {"count": 0, "inside": 0, "most": 0}

    def add() -> None:
        with client.lock("count", timeout=40):
            state["inside"] += 1
            state["most"] = max(state["most"], state["inside"])
            count = state["count"]
            gevent.sleep(0.005)
            state["count"] = count + 1
            state["inside"] -= 1

    gevent.joinall([gevent.spawn(add) for _ in range(GREENLETS)], raise_error=True)
    return {"count": state["count"], "most": state["most"]}


def waiting(client: lockkit.Client, other: lockkit.Client) -> list[str]:
    """Wait for a lock of another client, which another greenlet frees."""
    order: list[str] = []

    def wait() -> None:
        with client.lock("wait", timeout=40):
            order.append("granted")

    with other.lock("wait"):
        waiter = gevent.spawn(wait)
        gevent.sleep(0.3)
        order.append("released")
    waiter.get()
    return order


def renewal(client: lockkit.Client, other: lockkit.Client) -> dict[str, object]:
    """Hold a lock for longer than its ttl, in a greenlet that sleeps."""
    for _ in range(ATTEMPTS):
        with suppress(lockkit.LockLost), client.lock("renew", ttl=TTL) as lease:
            gevent.sleep(TTL + 0.3)
            if lease.confirm():
                return {"confirmed": True, "free": other.lock("renew").try_acquire() is not None}
    return {"confirmed": False}


def loss(client: lockkit.Client, other: lockkit.Client) -> dict[str, object]:
    """Have a lock broken, and wait for the news."""
    reasons: list[str] = []
    lease = client.lock("loss", ttl=TTL, on_lost=lambda _, reason: reasons.append(reason)).acquire()
    other.break_lock("loss")
    lost = lease.wait_lost(30)
    while not reasons:
        gevent.sleep(0.01)
    return {"lost": lost, "told": len(reasons)}


def timeout(client: lockkit.Client, other: lockkit.Client) -> str:
    """Time out."""
    with other.lock("timeout"):
        try:
            client.lock("timeout", timeout=0.5).acquire()
        except lockkit.LockTimeout:
            return "LockTimeout"
    return "granted"


def reentrancy(client: lockkit.Client, _: lockkit.Client) -> list[bool]:
    """Acquire a reentrant lock again, in the greenlet that holds it and in another one."""
    lock = client.lock("again", reentrant=True)

    def acquire() -> bool:
        lease = lock.try_acquire()
        if lease is not None:
            lease.release()
        return lease is not None

    with lock:
        return [acquire(), gevent.spawn(acquire).get()]


def killed(client: lockkit.Client, _: lockkit.Client) -> int:
    """Kill a greenlet that holds a lock, and one that waits for it."""
    with_lock = []

    def work() -> None:
        with client.lock("killed", timeout=40) as lease:
            with_lock.append(lease)
            gevent.sleep(3600)

    holder = gevent.spawn(work)
    while not with_lock:
        gevent.sleep(0.01)
    waiter = gevent.spawn(work)
    gevent.sleep(0.1)
    waiter.kill()
    holder.kill()
    with client.lock("killed", timeout=40):
        return len(with_lock)


def patient(function: Callable[[lockkit.Client, lockkit.Client], object], *clients: lockkit.Client) -> object:
    """Call it again if the server had no time to answer."""
    for _ in range(ATTEMPTS):
        with suppress(lockkit.BackendUnavailable):
            return function(*clients)
    return "unavailable"


def main(url: str) -> None:
    """Try all at the same time."""
    with lockkit.connect(url) as client, lockkit.connect(url) as other:
        tried = (exclusion, waiting, renewal, loss, timeout, reentrancy, killed)
        greenlets = {function.__name__: gevent.spawn(patient, function, client, other) for function in tried}
        sys.stdout.write(json.dumps({name: greenlet.get() for name, greenlet in greenlets.items()}))


if __name__ == "__main__":
    if sys.argv[1].startswith("etcd"):
        from grpc.experimental.gevent import init_gevent

        init_gevent()
    main(sys.argv[1])
