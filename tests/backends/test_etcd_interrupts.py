"""Ctrl-C within gRPC's code: whoever else uses the channel goes on."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import lockkit
from lockkit.testing.servers import EtcdServer, require

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

PATIENCE = 20.0
ENTER = threading.Condition.__enter__.__code__
EXIT = threading.Condition.__exit__.__code__


class Strike:
    """
    Raises KeyboardInterrupt in this thread while gRPC has one of its locks, but no ``with`` to free it.

    As an interrupt may, which Python raises between any two instructions: when the method that takes the lock returns,
    or when that which frees it begins.
    """

    def __init__(self, number: int) -> None:
        """Strike at the `number`-th of those instants, the first is 0."""
        self._left = number
        self.struck = False

    def during(self, function: Callable[[], object]) -> None:
        """Call."""
        former = sys.gettrace()
        sys.settrace(self._look)
        try:
            function()
        except KeyboardInterrupt:
            assert self.struck
        finally:
            sys.settrace(former)

    def _look(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ANN401 - see sys.settrace
        del event, argument
        caller = frame.f_back
        if caller is None or f"{os.sep}grpc{os.sep}" not in caller.f_code.co_filename:
            return None
        if frame.f_code is EXIT:
            self._perhaps()
        return self._leaving if frame.f_code is ENTER else None

    def _leaving(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ANN401 - see sys.settrace
        del frame, argument
        if event == "return":
            self._perhaps()
        return self._leaving

    def _perhaps(self) -> None:
        if self._left == 0:
            self.struck = True
            raise KeyboardInterrupt
        self._left -= 1


def elsewhere(function: Callable[[], object]) -> bool:
    """Call in another thread; tell whether that came to an end, and well."""
    done = threading.Event()

    def call() -> None:
        function()
        done.set()

    threading.Thread(target=call, daemon=True).start()
    return done.wait(PATIENCE)


def test_interrupt_within_grpc_leaves_no_lock_taken() -> None:
    """At each of the instants in a call where it would: other threads of the client ask on, and it can be closed."""
    require("etcd", local=True)
    number = 0
    with EtcdServer() as server:
        while True:
            client = lockkit.connect(server.url)
            client.ping()
            strike = Strike(number)
            strike.during(client.ping)

            assert elsewhere(client.ping), f"instant {number}"
            lease = client.lock("x", ttl=30).acquire()
            lease.release()
            assert elsewhere(client.close), f"instant {number}"
            if not strike.struck:
                break
            number += 1
    assert number > 1
