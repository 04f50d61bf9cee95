"""
Wake-ups between the clients of a lock directory, by one inotify instance per client.

==================================  ========================================================================
event                               meaning
==================================  ========================================================================
ATTRIB on our own client file       somebody *poked* us (`_clients.poke`): a lock that we wait for may be ours now
CLOSE_WRITE on another client file  that client has ended; it held a lock that we wait for, or waited before us
==================================  ========================================================================

A waiter watches only the client before it in the queue, as ZooKeeper's lock recipe does: no herd. The first two watch
the holder: the first may be stopped.

A watcher ends for good when nobody waits any more, so that an idle client has neither thread nor inotify instance, and
when its listener fails or is cancelled. Then all requests are woken, and look for themselves until they have another.

The kernel reports the end of a client a moment before it drops the flock by which others see it
(``__fput`` in fs/file_table.c: ``fsnotify_close``, then ``locks_remove_file``), so the followers are woken when the
flock is gone.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from lockkit.backends.file.clients import is_dead
from lockkit.backends.file.inotify import ATTRIB, CLOSE_WRITE, IGNORED, Inotify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lockkit.backend import Request
    from lockkit.backends.file.clients import Client
    from lockkit.backends.file.directory import Directory
    from lockkit.runtime import Event, Runtime

__all__ = ["Watcher"]

log = logging.getLogger("lockkit")

LINGER_SECONDS = 2.0
"""How long a watcher stays when nobody waits any more. Shorter starts more threads and takes more inotify instances;
longer keeps one of each for nothing."""

_FLOCK_SECONDS_MIN = 0.0001
_FLOCK_LOOKS_MAX = 10  # doubling from 0.1 ms: 0.1 s in all


class Watcher:
    """Wakes the requests of one client. May be used from several threads under the blocking runtime."""

    def __init__(
        self,
        runtime: Runtime,
        directory: Directory,
        client: Client,
        requests: Mapping[str, Request],
        concerns: Callable[[Request], bool],
    ) -> None:
        """
        Watch the client's own file; the listener starts with the first `listen`.

        Args:
            runtime: Of the face.
            directory: Whose clients.
            client: This one.
            requests: What it waits for, by owner. The caller's, who adds and removes, and asks `listen` after adding.
            concerns: Tells whether a poke may be about this request.

        Raises:
            OSError: inotify cannot be used.
        """
        self._runtime = runtime
        self._directory = directory
        self._client = client
        self._requests = requests
        self._concerns = concerns
        self._mutex = runtime.mutex()
        self._followers: dict[int, set[str]] = {}
        self._ids: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._following: dict[str, int] = {}
        self._stopped: Event | None = None
        self._closed = False
        self._inotify = Inotify()
        try:
            self._own = self._inotify.add(client.path, ATTRIB)
        except BaseException:
            self._inotify.close()
            raise

    def follow(self, owner: str, client_id: str) -> bool:
        """
        Wake a request when a client ends. It follows one client at a time.

        Returns:
            False if that client has ended already.
        """
        with self._mutex:
            number = self._numbers.get(client_id)
            if number is not None and self._following.get(owner) == number:
                return True
            self._unfollow(owner)
            if self._closed or client_id in {"", self._client.id}:
                return True
            if number is None:
                try:
                    number = self._inotify.add(f"{self._directory.clients}/{client_id}", CLOSE_WRITE)
                except FileNotFoundError:
                    return False
                self._numbers[client_id] = number
                self._ids[number] = client_id
                self._followers[number] = set()
            self._followers[number].add(owner)
            self._following[owner] = number
        # It may have ended before we watched it.
        return not is_dead(self._directory, client_id)

    def unfollow(self, owner: str) -> None:
        """End what `follow` began."""
        with self._mutex:
            self._unfollow(owner)

    def _unfollow(self, owner: str) -> None:
        number = self._following.pop(owner, None)
        if number is not None:
            self._followers[number].discard(owner)
            if not self._followers[number]:
                self._drop(number)

    def _drop(self, number: int) -> None:
        if not self._closed:
            self._inotify.remove(number)
        del self._followers[number]
        del self._numbers[self._ids.pop(number)]

    def listen(self) -> bool:
        """
        See to it that the events are read while requests wait.

        Returns:
            False if this watcher has ended: what was added to the requests now needs another.

        Raises:
            RuntimeError: No thread can be started. The watcher has ended.
        """
        with self._mutex:
            if self._closed or self._stopped is not None:
                return not self._closed
            stopped = self._stopped = self._runtime.event()
        try:
            self._runtime.spawn("lockkit-file-wakeups", self._listen)
        except BaseException:
            # Interrupted, the listener may run all the same: its descriptor is not closed under it.
            with self._mutex:
                self._closed = True
            self._wake_all()
            stopped.set()
            raise
        return True

    async def _listen(self) -> None:
        try:
            while await self._runtime.readable(self._inotify.fd, LINGER_SECONDS) or not self._idle():
                if self._closed:
                    break
                for client_id, owners in self._read():
                    await self._ended(client_id, owners)
        except Exception:
            log.exception("reading the events of %s failed", self._directory.clients)
        finally:
            self._end()

    def _idle(self) -> bool:
        """Tell whether nobody waits; from then on nobody may."""
        # Under the mutex: a request that comes in this instant is seen here, or hears of our end from `listen`.
        with self._mutex:
            if not self._requests:
                self._closed = True
            return self._closed

    def _end(self) -> None:
        with self._mutex:
            self._closed = True
            self._inotify.close()
            stopped = self._stopped
        self._wake_all()
        if stopped is not None:
            stopped.set()

    def _wake_all(self) -> None:
        for request in list(self._requests.values()):
            request.wake.set()

    def _read(self) -> list[tuple[str, set[str]]]:
        """Wake who was poked; return the clients that have ended, with the owners of the requests to tell."""
        ended = []
        poked = False
        with self._mutex:
            for number, mask in self._inotify.read():
                if number in self._followers and mask & (CLOSE_WRITE | IGNORED):
                    owners = self._followers[number]
                    for owner in owners:
                        del self._following[owner]
                    ended.append((self._ids[number], owners))
                    self._drop(number)
                elif number in {self._own, -1}:
                    poked = True
        if poked:
            requests = list(self._requests.values())
            for request in requests:
                # A poke does not say which lock it is about. A look at each record is cheaper than trying each.
                if len(requests) == 1 or self._concerns(request):
                    request.wake.set()
        return ended

    async def _ended(self, client_id: str, owners: set[str]) -> None:
        """Wake the followers of a client once the kernel has dropped its flock."""
        pause = _FLOCK_SECONDS_MIN
        for _ in range(_FLOCK_LOOKS_MAX):
            if self._is_dead(client_id):
                break
            await self._runtime.sleep(pause)
            pause *= 2
        for owner in owners:
            request = self._requests.get(owner)
            if request is not None:
                request.wake.set()

    def _is_dead(self, client_id: str) -> bool:
        try:
            return is_dead(self._directory, client_id)
        except OSError:
            return True  # the woken requests will meet the error themselves, and can raise it

    def retire(self) -> Event | None:
        """End the listener and close the inotify instance; return the event that tells when it is done, if it runs."""
        with self._mutex:
            self._closed = True
            stopped = self._stopped
            if stopped is None:
                self._inotify.close()
            elif not stopped.is_set() and self._client.fd >= 0:
                os.utime(self._client.fd)  # our own poke
        return stopped

    def forget(self) -> None:
        """Close the descriptor in a forked child: the events that are read there would be missing in the parent."""
        self._inotify.close()
