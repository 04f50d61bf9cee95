"""
Wake-ups between the clients of a lock directory, by one inotify(7) instance per client.

==================================  ============================================================================
event                               meaning
==================================  ============================================================================
ATTRIB on this client's own file    another client called `Directory.notify`: one of the locks that we wait for may be
                                    free, and each of our requests tries again
CLOSE_WRITE on another client file  that client has ended; it held a lock that we wait for, or waited before us
==================================  ============================================================================

A waiter is woken only by the end of the client before it in the queue, as in ZooKeeper's lock recipe, so that the end
of a client does not wake all waiters. The first two wait for that of the holder: the first may be stopped.

A listener ends for good when no request waits any more, so that an idle client has neither thread nor inotify instance.
It also ends if it fails or is cancelled: then it wakes all requests, and they poll until they have another listener.

The kernel reports the end of a client a moment before it drops the flock by which other clients see it
(``__fput`` in fs/file_table.c: ``fsnotify_close``, then ``locks_remove_file``), so the listener waits for the flock to
be gone before it wakes a request.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Iterator, Mapping

from lockkit.backend import Request
from lockkit.backends.file.directory import Directory
from lockkit.runtime import Event, Runtime

log = logging.getLogger("lockkit")

LINGER_SECONDS = 2.0
"""How long a listener stays when no request waits any more. Shorter starts more threads and takes more inotify
instances; longer keeps one of each for nothing."""

_FLOCK_CHECK_SECONDS_MIN = 0.0001
_FLOCK_CHECKS_MAX = 10  # the pause doubles from 0.1 ms: 0.1 s in all

# <sys/inotify.h>
_ATTRIB = 0x00000004
_CLOSE_WRITE = 0x00000008
_EVENT = struct.Struct("iIII")
_READ_SIZE = 64 * 1024


class Inotify:
    """One inotify instance, through the C library; Linux only. `fd` is readable when there are events."""

    def __init__(self) -> None:
        """Open it."""
        import ctypes  # noqa: PLC0415 - takes some milliseconds, and only waiters need it

        self.fd = -1
        self._ctypes = ctypes
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self.fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        except AttributeError:
            raise OSError(errno.ENOSYS, "this system has no inotify") from None
        if self.fd < 0:
            raise self._error("inotify")

    def add(self, path: str, mask: int) -> int:
        """Watch a file or a directory for the events in `mask`; return the number that its events have."""
        number: int = self._libc.inotify_add_watch(self.fd, os.fsencode(path), self._ctypes.c_uint32(mask))
        if number < 0:
            raise self._error(path)
        return number

    def read(self) -> Iterator[tuple[int, str]]:
        """Yield the events that have arrived: watch number (-1: some were lost), and the name in a directory."""
        try:
            data = os.read(self.fd, _READ_SIZE)
        except BlockingIOError:
            return
        offset = 0
        while offset < len(data):
            number, _, _, length = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size + length
            yield number, os.fsdecode(data[offset - length : offset].rstrip(b"\0"))

    def close(self) -> None:
        """Close it. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        """Close it: a user has 128 of them, and a client may be dropped without being closed."""
        if hasattr(self, "fd"):
            self.close()

    def _error(self, path: str) -> OSError:
        code = self._ctypes.get_errno()
        return OSError(code, os.strerror(code), path)


class WakeupListener:
    """Wakes the requests of one client. May be used from several threads under the blocking runtime."""

    def __init__(self, runtime: Runtime, directory: Directory, requests: Mapping[str, Request]) -> None:
        """Watch the client's own file; reading of the events begins with the first `start`."""
        self._runtime = runtime
        self._directory = directory
        self._requests = requests
        self._mutex = runtime.mutex()
        self._watched: dict[str, str] = {}  # by the request's owner: the client whose end wakes it
        self._stopped: Event | None = None
        self._closed = False
        self._inotify = Inotify()
        try:
            self._own = self._inotify.add(directory.client_path, _ATTRIB)
            self._inotify.add(directory.clients, _CLOSE_WRITE)
        except BaseException:
            self._inotify.close()
            raise

    def watch(self, owner: str, client_id: str) -> bool:
        """Wake a request when another client ends, and no longer when a former one does; False if it has ended."""
        self._watched[owner] = client_id
        return not self._directory.has_ended(client_id)

    def unwatch(self, owner: str) -> None:
        """End what `watch` began."""
        self._watched.pop(owner, None)

    def start(self) -> bool:
        """Have the events read while requests wait; False if this has ended."""
        with self._mutex:
            if self._closed or self._stopped is not None:
                return not self._closed
            self._stopped = self._runtime.event()
        try:
            self._runtime.spawn("lockkit-file-wakeups", self._run)
        except RuntimeError as error:  # too many threads
            log.info("waiters at %s are not woken, and look once a second: %s", self._directory.path, error)
        return True

    async def _run(self) -> None:
        try:
            while await self._runtime.readable(self._inotify.fd, LINGER_SECONDS) or not self._close_if_idle():
                if self._closed:
                    break
                for client_id in self._read():
                    await self._client_ended(client_id)
        except Exception:
            log.exception("reading the events of %s failed", self._directory.clients)
        finally:
            with self._mutex:
                self._closed = True
                self._inotify.close()
            self.wake_all()
            if self._stopped is not None:
                self._stopped.set()

    def _close_if_idle(self) -> bool:
        """Close if no request waits; tell whether this is closed."""
        # Under the mutex: this sees a request that is added in this instant, or `start` tells it that this has ended.
        with self._mutex:
            if not self._requests:
                self._closed = True
            return self._closed

    def wake_all(self) -> None:
        """Have all requests try again."""
        for request in list(self._requests.values()):
            request.wake.set()

    def _read(self) -> list[str]:
        """Read the events; wake the requests after a notification, and return the clients that ended."""
        with self._mutex:
            events = [] if self._closed else list(self._inotify.read())
        if any(number in {self._own, -1} for number, _ in events):  # -1: the kernel's queue was full
            self.wake_all()
        ended = {name for number, name in events if number not in {self._own, -1}}
        return [client_id for client_id in {*self._watched.values()} if client_id in ended]

    async def _client_ended(self, client_id: str) -> None:
        """Wake the requests behind a client, once the kernel has dropped its flock."""
        pause = _FLOCK_CHECK_SECONDS_MIN
        for _ in range(_FLOCK_CHECKS_MAX):
            try:
                if self._directory.has_ended(client_id):
                    break
            except OSError:
                break  # the requests will get the same error, and can raise it
            await self._runtime.sleep(pause)
            pause *= 2
        for request in list(self._requests.values()):
            if self._watched.get(request.owner) == client_id:
                request.wake.set()

    def stop(self) -> Event | None:
        """End the listener and close the inotify instance; return the event that tells when it is done, if it runs."""
        with self._mutex:
            self._closed = True
            stopped = self._stopped
            if stopped is None:
                self._inotify.close()
            elif not stopped.is_set() and self._directory.fd >= 0:
                os.utime(self._directory.fd)  # an event on our own file, to wake it
        return stopped

    def forget(self) -> None:
        """Close the descriptor in a forked child: an event that is read there would be missing in the parent."""
        self._inotify.close()
