"""
Free TCP ports on 127.0.0.1 that stay reserved while a server is down.

"Bind to port 0 and hope" fails in three ways that look like flaky locks:

- another test process is handed the same port before the server binds it;
- a server that restarts finds its port taken by somebody's *outgoing* connection;
- a client that keeps connecting to a dead server's port connects to itself, because the
  kernel may choose the destination as the source port (TCP simultaneous open).

All three need ports of the ephemeral range, or two users of one port.  So ports come from
below that range, and each is reserved by a lock on a small file, which the kernel frees
when this process ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket

from lockkit_tools.servers.temporary import shared_directory

# Linux hands out 32768-60999 for outgoing connections, macOS 49152-65535.
FIRST_PORT, LAST_PORT = 15_000, 29_999

HOST = "127.0.0.1"


class NoFreePort(OSError):
    """Every port that was tried is in use."""


class Ports:
    """Ports reserved by this object; freed by `close` or the end of the process."""

    def __init__(self) -> None:
        self._locks: dict[int, int] = {}

    def reserve(self) -> int:
        """Reserves a port that nobody listens on."""
        for _ in range(1000):
            # Not the module's generator: tests seed that, so that several processes
            # would try the same ports in the same order.
            port = random.SystemRandom().randint(FIRST_PORT, LAST_PORT)
            if self._lock(port):
                if is_free(port):
                    return port
                self.release(port)
        raise NoFreePort(f"no free port on {HOST} between {FIRST_PORT} and {LAST_PORT}")

    def release(self, port: int) -> None:
        """Gives one port back."""
        os.close(self._locks.pop(port))

    def close(self) -> None:
        """Gives all ports back."""
        for port in list(self._locks):
            self.release(port)

    def _lock(self, port: int) -> bool:
        # Another user's locks cannot be seen here; is_free() still sees their servers.
        path = shared_directory("ports") / str(port)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._locks[port] = descriptor
        return True


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of 127.0.0.1 now."""
    with socket.socket() as probe:
        # As servers do it: a port with connections in TIME_WAIT is free, one that
        # somebody listens on is not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
