"""
Where a lock is stored in ZooKeeper's tree, the queue of its contenders, and whose turn it is.

::

    /lockkit/seat%2F12A                                              the lock "seat/12A"
    /lockkit/seat%2F12A/9f…c1__lock__0000000041                      its holder
    /lockkit/seat%2F12A/03…7e__rlock__0000000042                     a reader that waits for it
    /lockkit+sem/pool/5a…90__permit__0000000007                      the holder of slot 0 of the semaphore "pool"
    /lockkit+sem/pool/c4…1d__permit__0000000008                      the holder of slot 1
    /lockkit+sem/pool/c4…1d__permit__0000000008__slot1               its mark

This is the layout of kazoo's ``Lock``, ``WriteLock`` and ``ReadLock``: 32 hexadecimal digits, a word, and the number
that ZooKeeper appends. lockkit puts the owner in the digits. kazoo has no permits.

A *mark* is a node beside a contender's, and says what that contender has become: the holder of a permit, or a reader
that was a writer (``…__lock__0000000041__read``). It is created in one transaction with a change of the contender's own
node, which wakes those that watch that. kazoo takes no notice of marks.

Whose turn it is follows from one listing of the queue. Numbers only grow, so those ahead of a contender can only leave.
Each rule stays true when one of them leaves: what one listing grants, no later one takes back.

=========  ================================  ==================================  =====================================
mode       granted when ahead of it are      meanwhile it watches                source
=========  ================================  ==================================  =====================================
exclusive  nobody                            the one before it                   ZooKeeper Recipes, "Locks"
shared     readers only                      the nearest writer before it        ZooKeeper Recipes, "Shared Locks"
permit     holders only, and fewer than its  the directory if only holders are   Curator's ``InterProcessSemaphoreV2``:
           limit                             ahead, else the one before it       one waiter watches what is held
=========  ================================  ==================================  =====================================

The queue of a semaphore is: holders, then waiters. A permit is held by the first contender of all, in slot 0, and by
each that has a mark, in the slot of the mark. Only the first waiter may create its mark, for the lowest slot that its
listing shows to be free. Meanwhile no other contender can take that slot, and the number of holders can only fall.

When all before the first waiter have left, it is the first contender, and holds slot 0. A mark that is still on its way
would give it another slot. So it creates the mark in one transaction with a check that the one before it exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from lockkit.backend import Mode, Request
from lockkit.errors import ConfigurationError
from lockkit.validation import lock_name, unescape

READ_MARK = "__read"
"""End of the name of the mark of a writer that has become a reader."""

_WORDS: dict[Mode, str] = {"exclusive": "lock", "shared": "rlock", "permit": "permit"}
_MODES: dict[str, Mode] = {word: mode for mode, word in _WORDS.items()}
# ZooKeeper writes the number with "%010d": a sign takes the place of a zero.
_NODE = re.compile(r"(.*)__(r?lock|permit)__(-?\d{9,10})", re.DOTALL)
_MARK = re.compile(r"(.*__(?:lock|permit)__-?\d{9,10})(__read|__slot(\d{1,9}))", re.DOTALL)
# What ZooKeeper refuses in a path (PathUtils.validatePath). It works in UTF-16, where all characters beyond the first
# plane are surrogates.
_REFUSED = re.compile("[%/\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff]")
_RELATIVE = {".": "%2E", "..": "%2E%2E"}


def escape_name(name: str) -> str:
    """Give the name of a lock's directory: ``/``, ``%`` and characters that ZooKeeper refuses become ``%XX``."""
    return _RELATIVE.get(name) or _REFUSED.sub(lambda one: "".join(f"%{byte:02X}" for byte in one[0].encode()), name)


def name_of(directory: str) -> str | None:
    """Give the lock whose directory has that name; None if there is no such lock."""
    try:
        name = lock_name(unescape(directory))
    except ConfigurationError:
        return None
    return name if escape_name(name) == directory else None


class Contender(NamedTuple):
    """A node in the queue of a lock."""

    node: str  # its name
    owner: str  # of the request
    sequence: int  # the number that ZooKeeper appended
    mode: Mode = "exclusive"  # beside whom it wants the lock, or has it
    slot: int | None = None  # of a permit that is held; None while it waits, and for a lock
    mark: str | None = None  # end of the name of its mark


def node_prefix(owner: str, mode: Mode = "exclusive") -> str:
    """Give the start of the name of an owner's node; ZooKeeper appends the number."""
    return f"{owner}__{_WORDS[mode]}__"


def slot_mark(slot: int) -> str:
    """Give the end of the name of the mark of a permit."""
    return f"__slot{slot}"


def contenders(children: Iterable[str]) -> list[Contender]:
    """
    Give the queue of a lock, the holder first, without anything else in its directory.

    ZooKeeper's number has 32 bits and a sign: after 2147483647 comes -2147483648. So numbers are compared by their
    distance, which is right as long as the queue is shorter than two thousand million.
    """
    found: list[Contender] = []
    marks: dict[str, re.Match[str]] = {}
    for node in children:
        if match := _NODE.fullmatch(node):
            found.append(Contender(node, match[1], int(match[3]), _MODES[match[2]]))
        elif mark := _MARK.fullmatch(node):
            marks[mark[1]] = mark
    for index, one in enumerate(found if marks else ()):
        if mark := marks.get(one.node):
            change = {"mode": "shared"} if mark[2] == READ_MARK else {"slot": int(mark[3])}
            found[index] = one._replace(mark=mark[2], **change)
    if len(found) > 1:
        base = found[0].sequence
        found.sort(key=lambda contender: (contender.sequence - base + 2**31) % 2**32)
    if found and found[0].mode == "permit" and found[0].slot is None:
        found[0] = found[0]._replace(slot=0)  # needs no mark
    return found


# -- whose turn it is: functions of one listing -----------------------------------------------------------------------


def held(queue: Sequence[Contender]) -> Sequence[Contender]:
    """Give those of a queue that hold the lock: its head."""
    if queue and queue[0].mode == "exclusive":
        return queue[:1]
    return [*takewhile(lambda one: one.mode == "shared" or one.slot is not None, queue)]


def would_wait(queue: Sequence[Contender], request: Request) -> bool:
    """Tell whether a request that joined this queue now would have to wait; for a permit, whether it surely would."""
    if request.mode == "exclusive":
        return bool(queue)
    if request.mode == "shared":
        return any(one.mode != "shared" for one in queue)
    # Those without a permit may wait because of a lower limit, or be about to create their marks.
    return len(queue) >= request.limit


def blocker(queue: Sequence[Contender], position: int) -> Contender | None:
    """Give the contender for which the one at that position, no permit, waits; None if it holds the lock."""
    if queue[position].mode == "exclusive":
        return queue[position - 1] if position else None
    return next((one for one in reversed(queue[:position]) if one.mode != "shared"), None)


# -- who was ended by force -------------------------------------------------------------------------------------------

_BROKEN = b"broken "
"""How the data of a lock's directory begin, once holders were ended by force. Their owners follow, the latest first."""

BROKEN_MAX = 500
"""Owners in these data. More takes more room at the server; with fewer, more holders get the reason ``gone``."""


def with_broken(data: bytes, owners: Iterable[str]) -> bytes | None:
    """Give the data of a directory with these owners added; None if they are not lockkit's to change."""
    if data and not data.startswith(_BROKEN):
        return None
    found = [*(owner.encode() for owner in owners), *data.removeprefix(_BROKEN).split()]
    return _BROKEN + b" ".join(found[:BROKEN_MAX])


def says_broken(data: bytes, owner: str) -> bool:
    """Tell whether the data of a directory name an owner as one that was ended by force."""
    return data.startswith(_BROKEN) and owner.encode() in data.split()
