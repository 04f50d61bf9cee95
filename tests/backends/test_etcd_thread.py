"""Calls that the main thread has others make, and what Ctrl-C does to them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

import lockkit
from lockkit.backends._etcd_thread import Apart
from lockkit.testing.servers import EtcdServer, require

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Any

PATIENCE = 30.0


@pytest.fixture
def apart() -> Iterator[Apart]:
    """Ended after the test."""
    made = Apart()
    yield made
    made.close()


def test_what_comes_of_a_call_is_given_or_raised(apart: Apart) -> None:
    """By one thread for all calls."""
    assert apart.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        apart.run(divmod, 7, 0)

    threads = {apart.run(threading.get_ident) for _ in range(100)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_other_threads_call_for_themselves(apart: Apart) -> None:
    """No signal handler strikes there."""
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend([apart.run(threading.get_ident), threading.get_ident()]))
    thread.start()
    thread.join()

    assert seen[0] == seen[1]


def test_interrupted_call_holds_up_nobody(apart: Apart) -> None:
    """It goes on in its thread, and the next call has another one."""
    going, on = threading.Event(), threading.Event()

    def linger() -> int:
        going.set()
        time.sleep(0.2)  # a signal that comes just before the other one begins to wait does not end that wait
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert on.wait(PATIENCE)
        return threading.get_ident()

    with pytest.raises(KeyboardInterrupt):
        apart.run(linger)
    assert going.is_set()

    assert apart.run(lambda: 42) == 42
    on.set()
    assert apart.run(lambda: 43) == 43


def test_threads_end_with_close_and_a_later_call_has_a_new_one() -> None:
    """What is still to be undone may come after that."""
    apart = Apart()
    first: threading.Thread = apart.run(threading.current_thread)
    apart.close()
    assert not first.is_alive()

    second: threading.Thread = apart.run(threading.current_thread)
    assert second is not first
    apart.close()
    assert not second.is_alive()


def test_forked_child_has_a_thread_of_its_own(apart: Apart) -> None:
    """Its parent's threads do not exist there."""
    apart.run(int)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(apart.run(lambda: 7))
        finally:
            os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_no_code_of_grpc_runs_in_the_main_thread() -> None:
    """An interrupt there can leave a lock of grpc's taken for ever, as one in some ten thousand did."""
    require("etcd", local=True)
    seen: set[str] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:  # noqa: ANN401 - see sys.settrace
        del event, argument
        code = frame.f_code
        # Of a channel that was closed, which is collected here, nobody needs the locks.
        if f"{os.sep}grpc{os.sep}" in code.co_filename and code.co_name not in {"__del__", "_unsubscribe_all"}:
            seen.add(f"{code.co_filename} {code.co_name}")

    with EtcdServer() as server:
        client, other = lockkit.connect(server.url), lockkit.connect(server.url)
        client.ping()  # making the channel is left out: nobody else has it yet
        other.ping()
        former = sys.gettrace()
        sys.settrace(look)
        try:
            lease = client.lock("x", ttl=30).acquire()
            lease.extend(60)
            assert other.lock("x", ttl=30).try_acquire(0.1) is None
            lease.release()
            client.close()
            other.close()
        finally:
            sys.settrace(former)

    assert seen == set()
