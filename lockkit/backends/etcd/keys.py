"""
The keys of this client's contenders, what is in them, and the transactions that locks consist of. Sends nothing.

====================================  ======================================================
``PREFIX/NAME/<lease>``               a writer: an ordinary lock, as ``etcdctl lock`` has it
``PREFIX/NAME/r<lease>-<owner>``      a reader
``PREFIX+sem/NAME/q<lease>-<owner>``  waits for a permit
``PREFIX+sem/NAME/s<slot>``           a permit
====================================  ======================================================

``<lease>`` is the id of the etcd lease in hexadecimal, so no writer's key begins as a reader's does.

The value is ``OWNER METADATA``, with a mark in front (`SHARED`) once a writer reads only. A new key would be behind the
writers that wait, so a downgraded lease keeps its key.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from lockkit.backend import Mode, Request
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.runtime import Event

T = TypeVar("T")

READER, WAITER, SLOT = b"r", b"q", b"s"  # what the last part of a key begins with

SHARED = b"\0shared "
"""What the value of a downgraded lease begins with. No command line can give ``etcdctl elect`` such a value."""

BEHIND_SHARED = b"\0shared!"
"""Greater than each value that begins with `SHARED`, less than each value of an owner."""

STALE_SHARE = 0.1
"""Share of a session's ttl: this long after a heartbeat it gets another one before it grants a lock, and this long
before its end it takes no new key. Larger gives a new lease less time; smaller costs more round trips (without a
write), and a lock that is moved to the session may find it gone, and count as lost."""

BATCH = 100
"""Operations in one transaction. etcd's default for --max-txn-ops is 128; an operation that is a transaction itself may
have as many as are left. Fewer takes more round trips."""

_VALUE = re.compile(rb"(?:\0shared )?[0-9a-f]{32} \{")


@dataclass(slots=True, eq=False)
class Session:
    """One etcd lease. Times are the client's monotonic clock."""

    id: int  # of the lease
    requested_ttl: int  # seconds
    ttl: float  # seconds; the cluster may have raised it
    anchor: float  # just before the last request that started its ttl anew, of those that were answered
    keep_alive_at: float = 0.0  # when a waiter should send a heartbeat
    retired: bool = False  # it takes no new key: one may be created late in it
    ended: bool = False  # it is gone, and all its keys with it
    # Those whose key has its id, is attached to it, or may be, or may still be created; by their first keys.
    contenders: dict[bytes, Contender] = field(default_factory=dict)

    def was_kept_alive(self, anchor: float) -> None:
        """Count its ttl from `anchor` on."""
        self.anchor = max(self.anchor, anchor)
        self.keep_alive_at = self.anchor + self.ttl / 3

    @property
    def ends_at(self) -> float:
        """When the cluster may end it, unless it gets a heartbeat before."""
        return self.anchor + self.ttl

    def has_ttl(self, ttl: int) -> bool:
        return ttl in {self.requested_ttl, int(self.ttl)}

    def takes_keys(self, ttl: int, now: float) -> bool:
        """Tell whether keys of this ttl may be attached to it."""
        lasts = now < self.ends_at - self.ttl * STALE_SHARE
        return self.has_ttl(ttl) and lasts and not self.retired and not self.ended

    def is_stale(self, now: float) -> bool:
        """Tell whether it needs a heartbeat before it grants a lock."""
        return now >= self.anchor + self.ttl * STALE_SHARE


@dataclass(slots=True, eq=False)
class Contender:
    """
    One key of this client: a place in the queue of a lock, or the lock itself.

    Times are the client's monotonic clock, unless something else is said.
    """

    name: str  # of the lock
    owner: str
    prefix: bytes  # of the keys of all contenders for the lock
    value: bytes  # with which the key is created: owner and metadata
    wake: Event | None  # of the request that waits with it, if it does
    mode: Mode = "exclusive"
    first_key: bytes = b""  # known once it has a session
    key: bytes = b""  # the same, but that of its slot for a permit that was granted
    slot_keys: tuple[bytes, ...] = ()  # of a permit not granted yet: of these, a request that was sent may create one
    slot: int | None = None  # of a permit that is granted
    value_now: bytes = b""  # of the key, as far as known: `value` until it is updated or downgraded
    home: Session | None = None  # whose id is in the key; None before it has one
    session: Session = field(init=False)  # that the key is attached to, or, while `unsettled`, is to be
    unsettled: bool = False  # the request that moves the key to `session` was not answered yet
    create_revision: int = 0  # the token; 0 until it is known
    mod_revision: int = 0  # changes with each move and each change of the value
    wanted_until: float = inf  # when the key is not wanted any more; ``-inf`` once it was given up
    may_come_late: bool = False  # the request that creates the key was not answered, and may be executed late
    created: Event | None = None  # set when that request has been answered or has failed; None before it is sent
    key_in_front: bytes = b""  # the key that it waits for; the first of them if there are several
    behind_front: bytes = b""  # with several, the first key behind them
    seen_at: int = 0  # the revision at which they were there
    watch_id: int = 0  # of the watch that wakes it, on `key_watched`
    key_watched: bytes = b""
    since: float = 0.0  # when it was granted, Unix time, as the value says; until it has waited, when the request came

    def __post_init__(self) -> None:
        self.value_now = self.value

    def set_may_come_late(self) -> None:
        """Note that the request that creates the key may be executed late."""
        self.may_come_late = True
        if self.home is not None:
            self.home.retired = True

    def waits_for(self, seen_at: int, key: bytes, behind: bytes = b"") -> None:
        """Note the key that it waits for, or the range of keys, and a revision at which they were there."""
        self.key_in_front, self.behind_front, self.seen_at = key, behind, seen_at

    def set_revision(self, revision: int) -> None:
        """Note the revision at which the key was created."""
        assert revision > 0
        self.create_revision = self.mod_revision = revision

    def was_found(self, kvs: Sequence[rpc.KeyValue]) -> bool:
        """Tell from what was read at its key whether that is still the one that was created."""
        return [kv.create_revision for kv in kvs] == [self.create_revision]

    @property
    def compare_revision(self) -> rpc.Compare:
        """True while the key is the one that was created."""
        return rpc.Compare(target=rpc.Compare.CREATE, key=self.key, create_revision=self.create_revision)

    def put(self, key: bytes, lease_id: int) -> rpc.RequestOp:
        return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=self.value, lease=lease_id))


# -- keys and values ---------------------------------------------------------------------------------------------------


def key_of(prefix: bytes, lease_id: int, owner: str, mode: Mode) -> bytes:
    """Return the key of a contender; of a permit, that with which it waits."""
    begin = {"exclusive": b"", "shared": READER, "permit": WAITER}[mode]
    return b"%b%b%x" % (prefix, begin, lease_id) + (b"-" + owner.encode() if begin else b"")


def slot_key(prefix: bytes, slot: int) -> bytes:
    """Return the key of a permit."""
    return b"%b%b%04d" % (prefix, SLOT, slot)


def slot_of(key: bytes) -> int | None:
    """Return the number of the permit with a key; None if no permit of lockkit's can have it."""
    found = re.search(rb"/s([0-9]{1,9})\Z", key)
    return int(found[1]) if found else None


def beginning_with(begin: bytes) -> tuple[bytes, bytes]:
    """Return the range of the keys with a beginning: the first one, and the first one behind them."""
    # No byte of UTF-8 is 0xff, so the last one can grow.
    return begin, begin[:-1] + bytes([begin[-1] + 1])


def is_contender(kv: rpc.KeyValue, prefix: bytes) -> bool:
    """
    Tell whether a key below the prefix of a lock is proven to be of a contender, lockkit's or ``etcdctl lock``'s.

    lockkit's value is in it, or its name is the id of the etcd lease that ends it. An application that has data there,
    with a ``prefix=`` of its own, has other keys.
    """
    return _VALUE.match(kv.value) is not None or (kv.lease > 0 and kv.key == b"%b%x" % (prefix, kv.lease))


def mode_of(kv: rpc.KeyValue, prefix: bytes) -> Mode:
    """Tell beside whom the contender of a lock with this key holds it, or is to hold it."""
    return "shared" if kv.key.startswith(prefix + READER) or kv.value.startswith(SHARED) else "exclusive"


def owner_and_metadata(kv: rpc.KeyValue) -> tuple[str, str]:
    """Read owner and metadata of a key. A foreign client's owner is the id of its lease, its metadata the value."""
    text = kv.value.removeprefix(SHARED).decode("utf-8", "replace")
    owner, _, metadata = text.partition(" ")
    if len(owner) == 32 and metadata:  # noqa: PLR2004 - hexadecimal digits
        return owner, metadata
    return kv.key.rpartition(b"/")[2].decode("utf-8", "replace"), text


# -- transactions ------------------------------------------------------------------------------------------------------


def create_key(contender: Contender, lease_id: int, asked: Request) -> rpc.TxnRequest:
    """
    Acquire the lock, or take a place in its queue.

    ::

        if no key that excludes ours, nor ours:  put ours                       -> held
        else:                                    read the oldest, and the newest that excludes ours
                                                 if ours is not there:  put     -> in the queue, behind that newest
                                                 else:                  read ours

    A writer is excluded by every key, a reader by those of writers. A writer that reads only has no other in front of
    it: else it could not have held the lock for writing. So if the newest one does, it is the only one, and the reader
    behind it holds the lock, too. If it may not wait, a reader's key is put only then, and a writer's not at all.
    """
    is_reader = contender.mode == "shared"
    put, is_absent = contender.put(contender.key, lease_id), none_in((contender.key, b""))
    newest = _newest_excluding(contender)
    first, behind_last = newest.key, newest.range_end
    request = rpc.TxnRequest(compare=[none_in((first, behind_last))], success=[put])
    if is_reader:
        request.compare.append(is_absent)
    request.failure.add(request_range=oldest_of(contender.prefix))
    if not (asked.queue or is_reader):
        return request
    request.failure.add(request_range=newest)
    behind = request.failure.add().request_txn
    behind.compare.append(is_absent)
    if not asked.queue:
        for result, value in ((rpc.Compare.GREATER, SHARED), (rpc.Compare.LESS, BEHIND_SHARED)):
            behind.compare.add(target=rpc.Compare.VALUE, result=result, key=first, range_end=behind_last, value=value)
    behind.success.append(put)
    behind.failure.add(request_range=rpc.RangeRequest(key=contender.key))
    return request


def _newest_excluding(contender: Contender) -> rpc.RangeRequest:
    """Read the newest key that excludes a contender while it is in front of its own."""
    if contender.mode == "exclusive":
        return in_order(beginning_with(contender.prefix), newest=True, keys_only=True)
    # The value, too: has that writer been downgraded?
    return in_order((contender.prefix, contender.prefix + READER), newest=True)


def check_queue(contender: Contender) -> rpc.TxnRequest:
    """Read the oldest key, and the one that a contender waits for; fail if the contender's is gone."""
    in_front = _newest_excluding(contender)
    in_front.max_create_revision = contender.create_revision - 1
    request = rpc.TxnRequest(compare=[contender.compare_revision])
    request.success.add(request_range=oldest_of(contender.prefix))
    request.success.add(request_range=in_front)
    return request


def read_keys(keys: Sequence[bytes]) -> rpc.TxnRequest:
    """Read keys, without their values."""
    request = rpc.TxnRequest()
    for key in keys:
        request.success.add(request_range=rpc.RangeRequest(key=key, keys_only=True))
    return request


def change_key(key: bytes, revision: int, value: bytes, lease_id: int) -> rpc.TxnRequest:
    """
    Change the value of a key or its etcd lease; else read it. The ``create_revision`` stays, and so does the token.

    It happens only if nothing has changed the key since its last known revision: a change that was not answered cannot
    be executed after a later one, nor twice.
    """
    request = rpc.TxnRequest(compare=[rpc.Compare(target=rpc.Compare.MOD, key=key, mod_revision=revision)])
    request.success.add(request_put=rpc.PutRequest(key=key, value=value, lease=lease_id))
    request.failure.add(request_range=rpc.RangeRequest(key=key))
    return request


def deletions(contender: Contender) -> list[rpc.TxnRequest]:
    """Delete the key of a contender, also if it was created late, and those of slots that its request may have put."""
    is_known = contender.create_revision and not contender.may_come_late
    ours = contender.slot_keys if is_known else (contender.key, *contender.slot_keys)
    value = contender.value
    found = [delete_key(rpc.Compare(target=rpc.Compare.VALUE, key=key, value=value)) for key in ours]
    if contender.create_revision:
        found.append(delete_key(contender.compare_revision))
    return found


def delete_key(condition: rpc.Compare) -> rpc.TxnRequest:
    """Delete the key of a comparison if that is true."""
    deletion = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=condition.key))
    return rpc.TxnRequest(compare=[condition], success=[deletion])


def oldest_of(prefix: bytes, *, keys_only: bool = False) -> rpc.RangeRequest:
    """Read the oldest key below a prefix: the holder's."""
    return in_order(beginning_with(prefix), keys_only=keys_only)


def in_order(keys: tuple[bytes, bytes], *, newest: bool = False, keys_only: bool = False) -> rpc.RangeRequest:
    """Read the oldest or the newest key of a range, in the order of their creation."""
    request = rpc.RangeRequest(key=keys[0], range_end=keys[1], limit=1, keys_only=keys_only)
    request.sort_order = rpc.RangeRequest.DESCEND if newest else rpc.RangeRequest.ASCEND
    request.sort_target = rpc.RangeRequest.CREATE
    return request


def none_in(keys: tuple[bytes, bytes]) -> rpc.Compare:
    """Return a comparison that is true if there is no key in a range; with an empty end, not this one key."""
    return rpc.Compare(target=rpc.Compare.CREATE, key=keys[0], range_end=keys[1], create_revision=0)


def batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split as many as fit into a transaction with one operation for each."""
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))
