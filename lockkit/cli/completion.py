"""The names that a shell offers for NAME: those of the locks that are held, if the backend tells them in time."""

from __future__ import annotations

import logging
import re
import threading
from itertools import islice

import lockkit
from lockkit.errors import LockError

COMPLETION_SECONDS = 1.0
"""How long a shell waits for names. With a longer one, the tab key blocks for longer while a server does not answer."""

NAMES_MAX = 200
"""Names that are offered. More than a screen of them helps nobody."""

# A shell runs what is on its line: a name with a meaning there, which any client may have chosen, is not offered. Nor
# is one that is an option (-x, --help) or that zsh expands to the path of a program (=ls).
_SAFE = re.compile(r"[\w.,:/@%+][\w.,:/@%+=-]*")


def complete_name(begin: str, url: str | None, profile: str | None) -> list[str]:
    """Name locks that are held."""
    found: list[str] = []

    def read() -> None:
        try:
            with lockkit.connect(url, profile=profile) as client:
                found.extend(islice(filter(_SAFE.fullmatch, client.names(begin)), NAMES_MAX))
        except LockError:
            found.clear()

    # Python prints a warning for which there is no handler: in the middle of what the user types.
    logger, nowhere = logging.getLogger("lockkit"), logging.NullHandler()
    logger.addHandler(nowhere)
    # A daemon: the process ends although a server hangs.
    thread = threading.Thread(target=read, name="lockkit-complete", daemon=True)
    thread.start()
    thread.join(COMPLETION_SECONDS)
    logger.removeHandler(nowhere)
    return sorted(found)
