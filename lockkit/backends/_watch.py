"""
Wake-ups between the clients of a lock directory, by one inotify instance per client.

==================================  ========================================================================
event                               meaning
==================================  ========================================================================
ATTRIB on our own client file       somebody *poked* us (`_clients.poke`): a lock that we wait for may be ours now
CLOSE_WRITE on another client file  that client has ended; it held a lock that we wait for, or waited before us
==================================  ========================================================================

A waiter watches only the client before it in the queue, as ZooKeeper's lock recipe does: no herd.

The kernel reports the end of a client a moment before it drops the flock by which others see it
(``__fput`` in fs/file_table.c: ``fsnotify_close``, then ``locks_remove_file``), so the followers are woken when the
flock is gone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lockkit.backends._clients import is_dead
from lockkit.backends._inotify import ATTRIB, CLOSE_WRITE, IGNORED, Inotify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lockkit.backend import Request
    from lockkit.backends._clients import Client
    from lockkit.backends._directory import Directory
    from lockkit.runtime import Event, Runtime

__all__ = ["Watcher"]

LINGER_SECONDS = 2.0
"""How long the listener stays when nobody waits any more. Shorter starts more threads; longer keeps one for nothing."""

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
            requests: What it waits for, by owner. The caller's, who adds and removes.
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

    def listen(self) -> None:
        """See to it that somebody reads the events while requests wait."""
        with self._mutex:
            if self._stopped is not None or self._closed:
                return
            self._stopped = self._runtime.event()
        self._runtime.spawn("lockkit-file-wakeups", self._listen)

    async def _listen(self) -> None:
        try:
            while await self._runtime.readable(self._inotify.fd, LINGER_SECONDS) or self._requests:
                if self._closed:
                    break
                for client_id, owners in self._read():
                    await self._ended(client_id, owners)
        finally:
            self._end()
        # Who began to wait in the instant of our end has found us still here.
        if self._requests:
            self.listen()

    def _end(self) -> None:
        with self._mutex:
            if self._closed:
                self._inotify.close()
            stopped, self._stopped = self._stopped, None
        if stopped is not None:
            stopped.set()

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
        """End the listener and close the inotify instance; return the event that tells when, if it is not done yet."""
        with self._mutex:
            self._closed = True
            stopped = self._stopped
            if stopped is None:
                self._inotify.close()
        if stopped is not None:
            os.utime(self._client.fd)  # our own poke
        return stopped

    def forget(self) -> None:
        """Close the descriptor in a forked child: the events that are read there would be missing in the parent."""
        self._inotify.close()
