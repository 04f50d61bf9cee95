"""
The format of a record, version 1: text, one `LockState`.

::

    lockkit-record 1 CRC32 SIZE           of what follows: checksum (hexadecimal), and size of the whole in bytes
    BOOT NAME TOKEN UNTIL_US BROKEN       boot id; escaped name; last token; end of lease or offer; broken owner
    OWNER CLIENT TTL_US                   the holder
    METADATA                              the holder's JSON
    + OWNER CLIENT UNTIL_US TOKEN SLOT METADATA
                                          those that hold the lock beside one another, one a line; SLOT of permits only
    OWNER CLIENT TTL_US [MODE]            the waiters, first come first, one a line; of a reader ``s``, of a permit its
                                          limit, of others nothing
    note END_US TEXT                      the note, if there is one: JSON text, and the end of its life

or, written under the flock by the process that is about to remove the file: ``lockkit-removed``.

``-`` means none. After SIZE bytes there may be the rest of an earlier, longer record.
Times are µs of the machine's clock that goes on while it is suspended, and mean nothing under another boot id. END_US
is of the wall clock: notes survive a reboot.

A record is written by a single ``write``, and read whole: a reader sees the old record or the new one. The checksum
reveals anything else (a page that never reached the disk before the power failed).
"""

from __future__ import annotations

import json
import re
import zlib
from math import inf
from typing import NamedTuple

from lockkit.backend import Mode
from lockkit.backends.lock_state import Lease, LockState
from lockkit.validation import decode_json

SIZE_MAX = 999_999
"""Largest record, bytes: some ten thousand waiting clients."""

REMOVED = b"lockkit-removed\n"
"""Written before a record is removed, for the clients that have it open."""

_BLOCKED = -1  # of UNTIL_US: the head of the queue does not fit beside those that hold the lock

_HEAD = re.compile(rb"lockkit-record 1 ([0-9a-f]{8}) ([0-9]{6})\n")
_HEAD_SIZE = len("lockkit-record 1 01234567 000000\n")
_OTHER_VERSION = re.compile(rb"lockkit-record ([0-9]{1,9}) ")
_WORD = re.compile(r"[!-~]+")
# The client id becomes part of a path.
_CLIENT = re.compile(r"[0-9a-f]+|-")


class FileClaim(NamedTuple):
    """One acquisition of one client."""

    owner: str
    ttl: float  # that it asked for, seconds; 0 in a holder that was read from a record
    client: str  # name of the client's file; empty in the placeholder of a damaged record
    metadata: str = ""  # JSON text; written for the holders only
    mode: Mode = "exclusive"  # this and `limit`: written for waiters only
    limit: int = 1


class DamagedError(ValueError):
    """The text is no record: empty, cut off, or changed by another program."""


class VersionError(ValueError):
    """The record has a format that this lockkit does not know. The message is the version."""


class RemovedError(ValueError):
    """The file is not the record any more: open it again."""


def encode(state: LockState[FileClaim], name: str, boot: str) -> bytes:
    """Turn the state of a lock into a record."""
    alone = state.alone
    # Rounded to the nearest, so that a record that is read and written back stays as it is. A lease may lose half a µs,
    # far less than the 2 ms by which its holder gives it up earlier.
    until, first = state.until, "-\n-"
    if alone is not None:
        holder, until = alone.claim, alone.until
        first = f"{holder.owner} {holder.client or '-'} 0\n{holder.metadata or '-'}"
    until_us = int(until * 1e6 + 0.5) if until != inf else _BLOCKED
    lines = f"{boot} {name} {state.token} {until_us} {','.join(state.broken) or '-'}\n{first}\n"
    if alone is None and state.leases:
        lines += "".join(map(_share_line, state.leases.values()))
    if state.queue:
        lines += "".join(map(_waiter_line, state.queue))
    if state.note is not None:
        lines += f"note {state.note[1]} {json.dumps(state.note[0])}\n"
    body = lines.encode("ascii")
    return b"lockkit-record 1 %08x %06d\n%b" % (zlib.crc32(body), _HEAD_SIZE + len(body), body)


def _share_line(share: Lease[FileClaim]) -> str:
    claim, slot = share.claim, "-" if share.slot is None else share.slot
    until_us = int(share.until * 1e6 + 0.5)
    return f"+ {claim.owner} {claim.client} {until_us} {share.token} {slot} {claim.metadata or '-'}\n"


def _waiter_line(waiter: FileClaim) -> str:
    mode = "" if waiter.mode == "exclusive" else " s" if waiter.mode == "shared" else f" {waiter.limit}"
    return f"{waiter.owner} {waiter.client} {int(waiter.ttl * 1e6 + 0.5)}{mode}\n"


def size_of(text: bytes) -> int:
    """Read the size of a record from its beginning, bytes."""
    head = _HEAD.match(text)
    if head is None:
        if text.startswith(REMOVED):
            raise RemovedError
        other = _OTHER_VERSION.match(text)
        if other is not None and other[1] != b"1":
            raise VersionError(other[1].decode())
        message = "empty" if not text else "no record"
        raise DamagedError(message)
    return int(head[2])


def decode(text: bytes, name: str | None) -> tuple[LockState[FileClaim], str]:
    """Turn a record into the state of a lock."""
    size = size_of(text)
    body = text[_HEAD_SIZE:size]
    if len(text) < size or zlib.crc32(body) != int(text[17:25], 16):
        message = "cut off" if len(text) < size else "its checksum is wrong"
        raise DamagedError(message)
    try:
        first, holder, metadata, *others = body.decode("ascii").removesuffix("\n").split("\n")
        boot, stored, token, until_us, broken = first.split(" ")
        state: LockState[FileClaim] = LockState(int(token))
        state.until = inf if int(until_us) == _BLOCKED else int(until_us) / 1e6
        state.broken = () if broken == "-" else tuple(broken.split(","))
        if holder != "-":
            claim = _claim(holder, "" if metadata == "-" else metadata)
            state.leases[claim.owner] = Lease(claim, state.until, state.token)
            state.until = inf
        if others and others[-1].startswith("note "):
            _, end_us, note = others.pop().split(" ", 2)
            state.note = str(decode_json(note, SIZE_MAX)), int(end_us)
        for line in others:
            if line.startswith("+ "):
                share = _share(line)
                state.leases[share.claim.owner] = share
            else:
                state.queue.append(_claim(line))
    except ValueError as error:
        raise DamagedError(f"nonsense under a right checksum: {error}") from error
    if stored != name and name is not None:
        raise DamagedError(f"it is the record of the lock {stored}")
    return state, boot


def recorded_name(text: bytes) -> str:
    """Return the escaped name in a record that `decode` has accepted."""
    return text[_HEAD_SIZE:].split(b" ", 2)[1].decode("ascii")


def _claim(line: str, metadata: str = "") -> FileClaim:
    owner, client, ttl_us, *word = line.split(" ")
    if not _WORD.fullmatch(owner) or not _CLIENT.fullmatch(client) or len(word) > 1:
        raise ValueError("a claim with odd characters")
    claim = FileClaim(owner, int(ttl_us) / 1e6, "" if client == "-" else client, metadata)
    if not word:
        return claim
    return claim._replace(mode="shared") if word[0] == "s" else claim._replace(mode="permit", limit=int(word[0]))


def _share(line: str) -> Lease[FileClaim]:
    _, owner, client, until_us, token, slot, metadata = line.split(" ", 6)
    claim = _claim(f"{owner} {client} 0", "" if metadata == "-" else metadata)
    mode: Mode = "shared" if slot == "-" else "permit"
    return Lease(claim, int(until_us) / 1e6, int(token), mode, None if slot == "-" else int(slot))
