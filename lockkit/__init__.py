"""
lockkit: locks between threads, processes and machines. One API; a URL chooses the backend.

    import lockkit

    client = lockkit.connect("redis://localhost:6379/0")
    with client.lock("seat:12A", ttl=30, timeout=5) as lease:
        book_seat(fence=lease.token)

A lease alone is not mutual exclusion, because a paused holder does not know that it lost the lock. So every grant
carries a fencing token, every lease knows its deadline, the holder is notified when it loses the lock, and storage can
reject stale holders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockkit.errors import (
    BackendUnavailable,
    ConfigurationError,
    KeyReused,
    LockError,
    LockLost,
    LockTimeout,
    NoQuorum,
    StaleToken,
    StoredError,
    Unsupported,
)

if TYPE_CHECKING:
    from lockkit import aio, fencing, optimistic, sql
    from lockkit.backend import Capabilities, Holder
    from lockkit.observers import LockEvent, Observer, add_observer, remove_observer
    from lockkit.sync import (
        Client,
        Election,
        Leader,
        Lease,
        LeaseSet,
        Lock,
        LockOptions,
        LockSet,
        Note,
        OnceDone,
        OnceRunning,
        RWLock,
        Semaphore,
        Term,
        connect,
        current_lease,
        from_client,
        locks,
    )

    __version__: str

__all__ = [
    "BackendUnavailable",
    "Capabilities",
    "Client",
    "ConfigurationError",
    "Election",
    "Holder",
    "KeyReused",
    "Leader",
    "Lease",
    "LeaseSet",
    "Lock",
    "LockError",
    "LockEvent",
    "LockLost",
    "LockOptions",
    "LockSet",
    "LockTimeout",
    "NoQuorum",
    "Note",
    "Observer",
    "OnceDone",
    "OnceRunning",
    "RWLock",
    "Semaphore",
    "StaleToken",
    "StoredError",
    "Term",
    "Unsupported",
    "__version__",
    "add_observer",
    "aio",
    "connect",
    "current_lease",
    "fencing",
    "from_client",
    "locks",
    "optimistic",
    "remove_observer",
    "sql",
]

# Loaded on first use: `import lockkit` alone costs next to nothing, and only programs that use asyncio import it.
_LAZY = {
    **dict.fromkeys(__all__, "lockkit.sync"),
    **dict.fromkeys(("Capabilities", "Holder"), "lockkit.backend"),
    **dict.fromkeys(("LockEvent", "Observer", "add_observer", "remove_observer"), "lockkit.observers"),
    **{name: f"lockkit.{name}" for name in ("aio", "fencing", "optimistic", "sql")},
}


def __getattr__(name: str) -> object:
    """Load a public name on its first use (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - it takes longer than all of lockkit

        return version("lockkit")
    if name not in _LAZY:
        raise AttributeError(f"module 'lockkit' has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - see above

    module = importlib.import_module(_LAZY[name])
    value = module if _LAZY[name] == f"lockkit.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, the lazy ones too."""
    return sorted(__all__)
