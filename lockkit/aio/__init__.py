"""
The async API: the same names as `lockkit`; what does I/O is awaited, what is local stays plain.

Thin: every decision is made by the engine. A client belongs to the event loop in which it is used;
when that has ended, to the next one, with new connections.
"""

from __future__ import annotations

from lockkit.aio.client import Client, connect, from_client
from lockkit.aio.election import Election, Term
from lockkit.aio.lease import Lease, current_lease
from lockkit.aio.lock import Lock
from lockkit.aio.lock_set import LeaseSet, LockSet, locks
from lockkit.aio.sharing import RWLock, Semaphore

__all__ = [
    "Client",
    "Election",
    "Lease",
    "LeaseSet",
    "Lock",
    "LockSet",
    "RWLock",
    "Semaphore",
    "Term",
    "connect",
    "current_lease",
    "from_client",
    "locks",
]
