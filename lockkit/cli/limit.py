"""``lockkit limit``: an operator's cap on a semaphore."""

from __future__ import annotations

import lockkit
from lockkit.cli.output import print_json, refuse_private
from lockkit.validation import plain

NONE = "none"
"""What stands for "no cap" on the command line."""


def limit(name: str, cap: str | None, url: str | None, profile: str | None, *, as_json: bool) -> None:
    """Show or change the cap of a semaphore."""
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
