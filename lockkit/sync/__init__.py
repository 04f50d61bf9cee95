"""The sync API: threads wait inside the call. Thin: every decision is made by the engine."""

from __future__ import annotations

from lockkit.engine.settings import LockOptions
from lockkit.primitives.election import Leader
from lockkit.primitives.note import Note
from lockkit.primitives.once import OnceDone, OnceRunning
from lockkit.sync.client import Client, connect, from_client
from lockkit.sync.election import Election, Term
from lockkit.sync.lease import Lease, current_lease
from lockkit.sync.lock import Lock, ThreadingLock
from lockkit.sync.lock_set import LeaseSet, LockSet, locks
from lockkit.sync.sharing import RWLock, Semaphore

__all__ = [
    "Client",
    "Election",
    "Leader",
    "Lease",
    "LeaseSet",
    "Lock",
    "LockOptions",
    "LockSet",
    "Note",
    "OnceDone",
    "OnceRunning",
    "RWLock",
    "Semaphore",
    "Term",
    "ThreadingLock",
    "connect",
    "current_lease",
    "from_client",
    "locks",
]
