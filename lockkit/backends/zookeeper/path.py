"""
Where a lock is stored in ZooKeeper's tree, and the queue of its contenders.

::

    /lockkit/seat%2F12A                                              the lock "seat/12A"
    /lockkit/seat%2F12A/9f…c1__lock__0000000041                      its holder
    /lockkit/seat%2F12A/03…7e__lock__0000000042                      a client that waits for it

This is the layout of kazoo's ``Lock``: 32 hexadecimal digits, a word, and the number that ZooKeeper appends. lockkit
puts the owner in the digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from lockkit.errors import ConfigurationError
from lockkit.validation import lock_name, unescape

__all__ = ["NODE_WORD", "Contender", "contenders", "escape_name", "name_of", "node_prefix"]

NODE_WORD = "__lock__"

# A kazoo ReadLock excludes lockkit too, as it excludes a kazoo WriteLock.
_NODE = re.compile(r"(.*)__r?lock__(-?\d{10})", re.DOTALL)
# What ZooKeeper refuses in a path (PathUtils.validatePath). It works in UTF-16, where all characters beyond the first
# plane are surrogates.
_REFUSED = re.compile("[%/\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff]")
_RELATIVE = {".": "%2E", "..": "%2E%2E"}


def escape_name(name: str) -> str:
    """Give the name of a lock's directory: ``/``, ``%`` and characters that ZooKeeper refuses become ``%XX``."""
    return _RELATIVE.get(name) or _REFUSED.sub(_percent, name)


def name_of(directory: str) -> str | None:
    """Give the lock whose directory has that name; None if there is no such lock."""
    try:
        name = lock_name(unescape(directory))
    except ConfigurationError:
        return None
    return name if escape_name(name) == directory else None


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match[0].encode())


class Contender(NamedTuple):
    """A node in the queue of a lock."""

    node: str
    owner: str
    sequence: int


def node_prefix(owner: str) -> str:
    """Give the start of the name of an owner's node; ZooKeeper appends the number."""
    return owner + NODE_WORD


def contenders(children: Iterable[str]) -> list[Contender]:
    """
    Give the queue of a lock, the holder first, without anything else in its directory.

    ZooKeeper's number has 32 bits and a sign: after 2147483647 comes -2147483648. So numbers are compared by their
    distance, which is right as long as the queue is shorter than two thousand million.
    """
    found = [Contender(node, match[1], int(match[2])) for node in children if (match := _NODE.fullmatch(node))]
    if len(found) > 1:
        base = found[0].sequence
        found.sort(key=lambda contender: (contender.sequence - base + 2**31) % 2**32)
    return found
