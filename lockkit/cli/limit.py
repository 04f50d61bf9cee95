"""``lockkit limit``: an operator's cap on a semaphore."""

from __future__ import annotations

import lockkit
from lockkit.cli.output import plain, print_json, refuse_private

__all__ = ["limit"]

NONE = "none"
"""What stands for "no cap" on the command line."""


def limit(name: str, cap: str | None, url: str | None, profile: str | None, *, as_json: bool) -> None:
    """
    Show or change the cap of a semaphore.

    Args:
        name: The semaphore.
        cap: A number, or ``none``; None shows it.
        url: Of the backend.
        profile: Of the configuration.
        as_json: Print JSON.

    Raises:
        LockError: The backend cannot be asked, or cannot cap semaphores.
    """
    with lockkit.connect(url, profile=profile) as client:
        refuse_private(client)
        semaphore = client.semaphore(name, limit=1)
        if cap is not None:
            semaphore.set_cap(None if cap == NONE else int(cap))
        now = semaphore.cap()
        if as_json:
            print_json({"name": name, "backend": client.url, "cap": now})
        elif now is None:
            print(plain(f"semaphore {name!r} at {client.url} has no cap: each client counts to its own limit"))
        else:
            pauses = ": new permits are paused" if now == 0 else ""
            print(plain(f"semaphore {name!r} at {client.url} is capped at {now}{pauses}"))
