"""
What is in the keys of contenders, and in their values. Pure functions.

====================================  ======================================================
``PREFIX/NAME/<lease>``               a writer: an ordinary lock, as ``etcdctl lock`` has it
``PREFIX/NAME/r<lease>-<owner>``      a reader
``PREFIX+sem/NAME/q<lease>-<owner>``  waits for a permit
``PREFIX+sem/NAME/s<slot>``           a permit
====================================  ======================================================

``<lease>`` is the id of the etcd lease in hexadecimal, so no writer's key begins as a reader's does.

The value is ``OWNER METADATA``, with a mark in front once a writer reads only (`encode`). A new key would be behind the
writers that wait, so a downgraded lease keeps its key.
"""

from __future__ import annotations

import re

from lockkit.backend import Mode
from lockkit.backends.etcd import rpc_pb2 as rpc

READER = b"r"
_WAITER = b"q"
_SLOT = b"s"
_SLOT_DIGITS_MAX = 9

SHARED = b"\0shared "
"""What the value of a downgraded lease begins with. No command line can give ``etcdctl elect`` such a value."""

BEHIND_SHARED = b"\0shared!"
"""Greater than each value that begins with `SHARED`, less than each value of an owner."""

_OWNER_CHARS = 32
_ALONE = re.compile(rb"(?:[0-9a-f]{8,16}|s[0-9]{4})\Z")
_BESIDE = re.compile(rb"[rq][0-9a-f]{1,16}-([0-9a-f]{32})\Z")
_VALUE = re.compile(rb"(?:\0shared )?([0-9a-f]{32}) ")


def key_of(prefix: bytes, lease_id: int, owner: str, mode: Mode) -> bytes:
    """Return the key of a contender; of a permit, that with which it waits."""
    if mode == "exclusive":
        return b"%b%x" % (prefix, lease_id)
    return b"%b%b%x-%b" % (prefix, READER if mode == "shared" else _WAITER, lease_id, owner.encode())


def slot_key(prefix: bytes, slot: int) -> bytes:
    """Return the key of a permit."""
    return b"%b%b%04d" % (prefix, _SLOT, slot)


def slot_of(key: bytes) -> int | None:
    """Return the number of the permit with a key; None if no permit of lockkit's can have it."""
    digits = key.rpartition(b"/")[2].removeprefix(_SLOT)
    return int(digits) if digits.isdigit() and len(digits) <= _SLOT_DIGITS_MAX else None


def slots_of(prefix: bytes) -> tuple[bytes, bytes]:
    """Return the range of the keys of permits: the first one, and the first one behind them."""
    return prefix + _SLOT, prefix + b"t"


def waiters_of(prefix: bytes) -> tuple[bytes, bytes]:
    """Return the range of the keys of those who wait for a permit, as `slots_of`."""
    return prefix + _WAITER, prefix + READER


def is_contender(kv: rpc.KeyValue, prefix: bytes) -> bool:
    """
    Tell whether a key below the prefix of a lock is proven to be of a contender, lockkit's or ``etcdctl lock``'s.

    Its name has the owner that the value begins with; or an etcd lease ends it, and its name is the id of that lease,
    or lockkit's value is in it. An application that has data there, with a ``prefix=`` of its own, has other keys.
    """
    name, value = kv.key.removeprefix(prefix), _VALUE.match(kv.value)
    beside = _BESIDE.match(name)
    if beside is not None:
        return value is not None and value[1] == beside[1]
    if not kv.lease:
        return False
    return name == b"%x" % kv.lease or (value is not None and _ALONE.match(name) is not None)


def encode(owner: str, metadata: str, *, downgraded: bool = False) -> bytes:
    """Return the value of a key."""
    value = f"{owner} {metadata}".encode()
    return SHARED + value if downgraded else value


def is_downgraded(value: bytes) -> bool:
    """Tell whether the value of a writer's key says that it reads only."""
    return value.startswith(SHARED)


def mode_of(kv: rpc.KeyValue, prefix: bytes) -> Mode:
    """Tell beside whom the contender of a lock with this key holds it, or is to hold it."""
    return "shared" if kv.key.startswith(prefix + READER) or is_downgraded(kv.value) else "exclusive"


def owner_and_metadata(kv: rpc.KeyValue) -> tuple[str, str]:
    """Read owner and metadata of a key. A foreign client's owner is the id of its lease, its metadata the value."""
    text = kv.value.removeprefix(SHARED).decode("utf-8", "replace")
    owner, _, metadata = text.partition(" ")
    if len(owner) == _OWNER_CHARS and metadata:
        return owner, metadata
    return kv.key.rpartition(b"/")[2].decode("utf-8", "replace"), text
