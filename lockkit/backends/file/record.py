"""
What stands in a record file: text, one `Ledger`, version 1. Pure: no I/O.

::

    lockkit-record 1 CRC32 SIZE           of what follows: checksum (hexadecimal), and size of the whole in bytes
    BOOT NAME TOKEN UNTIL_US BROKEN       boot id; escaped name; last token; end of lease or offer; broken owner
    OWNER CLIENT TTL_US                   the holder
    METADATA                              the holder's JSON
    OWNER CLIENT TTL_US                   the waiters, first come first, one a line

or, under the flock of who is about to remove the file: ``lockkit-removed``.

``-`` stands for nothing. Behind SIZE bytes there may be the rest of an earlier, longer record.
Times are µs of the machine's clock that goes on while it is suspended, and mean nothing under another boot id.

Written by a single ``write``, and read whole: a reader sees the old record or the new one, and recognises by the
checksum what is neither (a page that never reached the disk before the power failed).
"""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple

from lockkit.backends.lock_state import Ledger

__all__ = [
    "HEAD_SIZE",
    "REMOVED",
    "SIZE_MAX",
    "DamagedError",
    "FileClaim",
    "RemovedError",
    "VersionError",
    "decode",
    "encode",
    "size_of",
]

HEAD_SIZE = len("lockkit-record 1 01234567 000000\n")
SIZE_MAX = 999_999
"""Largest record, bytes: some ten thousand waiting clients."""

REMOVED = b"lockkit-removed\n"
"""What is written before the file is removed: for those who have it open."""

_HEAD = re.compile(rb"lockkit-record 1 ([0-9a-f]{8}) ([0-9]{6})\n")
_OTHER_VERSION = re.compile(rb"lockkit-record ([0-9]{1,9}) ")
_WORD = re.compile(r"[!-~]+")
# The client id becomes part of a path.
_CLIENT = re.compile(r"[0-9a-f]+|-")


class FileClaim(NamedTuple):
    """
    One acquisition of one client.

    Attributes:
        owner: Its random id.
        ttl: Lease time asked for, seconds; 0 in a holder that was read back.
        client: Name of the client's file; empty if the claim is nobody's.
        metadata: JSON text. Kept for the holder only.
    """

    owner: str
    ttl: float
    client: str
    metadata: str = ""


class DamagedError(ValueError):
    """The text is no record: empty, cut off, or changed by something else than lockkit."""


class VersionError(ValueError):
    """The record has a format that this lockkit does not know. The message is the version."""


class RemovedError(ValueError):
    """The file is not the record any more: open it again."""


def encode(ledger: Ledger[FileClaim], name: str, boot: str) -> bytes:
    """
    Write a ledger as text.

    Args:
        ledger: What to write.
        name: The lock's escaped name.
        boot: Boot id of the machine.
    """
    holder = ledger.holder
    # To the nearest, so that a record that is read and written back stays as it is. A lease may lose half a µs by it,
    # far less than the 2 ms by which its holder gives it up earlier.
    until_us = int(ledger.until * 1e6 + 0.5)
    if holder is None:
        lines = f"{boot} {name} {ledger.token} {until_us} {ledger.broken or '-'}\n-\n-\n"
    else:
        lines = (
            f"{boot} {name} {ledger.token} {until_us} {ledger.broken or '-'}\n"
            f"{holder.owner} {holder.client or '-'} 0\n{holder.metadata or '-'}\n"
        )
    if ledger.queue:
        lines += "".join(f"{waiter.owner} {waiter.client} {int(waiter.ttl * 1e6 + 0.5)}\n" for waiter in ledger.queue)
    body = lines.encode("ascii")
    return b"lockkit-record 1 %08x %06d\n%b" % (zlib.crc32(body), HEAD_SIZE + len(body), body)


def size_of(text: bytes) -> int:
    """
    Tell how many bytes the record has whose beginning this is.

    Raises:
        RemovedError: The file has been given up.
        VersionError: Another version of the format.
        DamagedError: It is no record.
    """
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


def decode(text: bytes, name: str | None) -> tuple[Ledger[FileClaim], str]:
    """
    Read a ledger back.

    Args:
        text: The whole record; more may follow behind its end.
        name: The lock's escaped name, which must stand in it; None takes any.

    Returns:
        The ledger, and the boot id under which it was written.

    Raises:
        RemovedError: The file has been given up.
        VersionError: Another version of the format.
        DamagedError: It is no record, or no record of this lock.
    """
    size = size_of(text)
    body = text[HEAD_SIZE:size]
    if len(text) < size or zlib.crc32(body) != int(text[17:25], 16):
        message = "cut off" if len(text) < size else "its checksum is wrong"
        raise DamagedError(message)
    try:
        state, holder, metadata, *waiters = body.decode("ascii").removesuffix("\n").split("\n")
        boot, stored, token, until_us, broken = state.split(" ")
        ledger: Ledger[FileClaim] = Ledger(int(token))
        ledger.until = int(until_us) / 1e6
        ledger.broken = "" if broken == "-" else broken
        if holder != "-":
            ledger.holder = _claim(holder, "" if metadata == "-" else metadata)
        ledger.queue = [_claim(line) for line in waiters]
    except ValueError as error:
        message = f"nonsense under a right checksum: {error}"
        raise DamagedError(message) from error
    if stored != name and name is not None:
        message = f"it is the record of the lock {stored}"
        raise DamagedError(message)
    return ledger, boot


def _claim(line: str, metadata: str = "") -> FileClaim:
    owner, client, ttl_us = line.split(" ")
    if not _WORD.fullmatch(owner) or not _CLIENT.fullmatch(client):
        message = "a claim with odd characters"
        raise ValueError(message)
    return FileClaim(owner, int(ttl_us) / 1e6, "" if client == "-" else client, metadata)
