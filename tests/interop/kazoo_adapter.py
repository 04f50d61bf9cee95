"""
kazoo's ``Lock`` over lockkit, as thin as it can be, for kazoo's own tests of it.

Same signature, same methods, same exceptions. What differs in spite of that is a difference between the two libraries:
`tests.interop.kazoo_differences` names each, with its reason.

kazoo's lock is a path, lockkit's a name below a prefix, which is never empty. So lockkit gets a URL, in which kazoo's
chroot is part of the prefix.
"""

from __future__ import annotations

import json
import threading
from typing import Any

from kazoo.exceptions import CancelledError, LockTimeout, NoNodeError

import lockkit
from lockkit.backends.zookeeper.path import contenders

TTL = 15.0
"""The timeout of the sessions that kazoo's tests use: kazoo's lock has no ttl of its own."""


class Lock:
    """`kazoo.recipe.lock.Lock`."""

    def __init__(
        self,
        client: Any,  # noqa: ANN401 - kazoo has no types
        path: str,
        identifier: object = None,
        extra_lock_patterns: tuple[str, ...] = (),
    ) -> None:
        """Take what kazoo's takes; of other implementations' nodes lockkit knows none."""
        del extra_lock_patterns
        self.client = client
        self.path = path
        self.data = str(identifier or "").encode()
        self._mutex = threading.Lock()
        self._cancelled = False
        self._lease: lockkit.Lease | None = None
        self._connect()

    def _connect(self) -> None:
        # A client of ours for each object: several of one client would wait in this process, and not in line there.
        hosts = ",".join(f"{host}:{port}" for host, port in self.client.hosts)
        parent, _, name = f"{self.client.chroot}{self.path}".rpartition("/")
        self._ours = lockkit.connect(f"zookeeper://{hosts}", prefix=parent)
        self._lock = self._ours.lock(name, ttl=TTL, metadata=self.data.decode())

    @property
    def is_acquired(self) -> bool:
        """Held by this object, as far as it knows."""
        return self._lease is not None

    @property
    def node(self) -> str | None:
        """The name of the node that holds."""
        return None if self._lease is None else self._lease._record.grant.state.path.rpartition("/")[2]

    def acquire(self, blocking: bool = True, timeout: float | None = None, ephemeral: bool = True) -> bool:  # noqa: FBT001, FBT002 - kazoo's
        """Acquire; False if this object has it, or for a single try if anybody has."""
        if not ephemeral:
            raise NotImplementedError("lockkit has no lock that stays when its holder is gone")
        try:
            lease = self._lock.try_acquire(timeout if blocking else 0)
        except lockkit.LockError:
            if not self._cancelled:
                raise
            self._cancelled = False
            self._connect()
            raise CancelledError from None
        if lease is not None:
            self._lease = lease
            return True
        if blocking and not self.is_acquired:
            raise LockTimeout(f"Failed to acquire lock on {self.path} after {timeout} seconds")
        return False

    def cancel(self) -> None:
        """End a wait: in lockkit that is closing its client."""
        self._cancelled = True
        self._ours.close()

    def release(self) -> bool:
        """Release. As in kazoo, nobody is told if the lock had been lost."""
        lease, self._lease = self._lease, None
        if lease is None:
            return False
        try:
            lease.release()
        except lockkit.LockLost:
            return True
        return True

    def contenders(self) -> list[str]:
        """The identifiers of those in line, as an operator reads them; lockkit itself tells the holder only."""
        self.client.ensure_path(self.path)
        found = []
        for one in contenders(self.client.get_children(self.path)):
            try:
                data, _ = self.client.get(f"{self.path}/{one.node}")
            except NoNodeError:
                continue
            found.append(json.loads(data)["text"])
        return found

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
