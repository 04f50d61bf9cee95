"""The transactions that locks on etcd consist of. Pure functions: they build messages, and send nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from lockkit.backend import Request
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd import values
from lockkit.backends.etcd.contender import Contender

T = TypeVar("T")

KEYS_PAGE = 1000
"""Keys in one answer of `keys_from`. More makes larger answers (100 bytes a key), fewer takes more round trips."""

BATCH = 100
"""Operations in one transaction. etcd's default for --max-txn-ops is 128; an operation that is a transaction itself may
have as many as are left. Fewer takes more round trips."""


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
    put = rpc.PutRequest(key=contender.key, value=contender.value, lease=lease_id)
    first, behind_last = _excluding(contender)
    request = rpc.TxnRequest()
    request.compare.add(target=rpc.Compare.CREATE, key=first, range_end=behind_last, create_revision=0)
    if is_reader:
        request.compare.add(target=rpc.Compare.CREATE, key=contender.key, create_revision=0)
    request.success.add(request_put=put)
    request.failure.add(request_range=first_key(contender.prefix))
    if not (asked.queue or is_reader):
        return request
    request.failure.add(request_range=_newest_excluding(contender))
    behind = request.failure.add().request_txn
    behind.compare.add(target=rpc.Compare.CREATE, key=contender.key, create_revision=0)
    if not asked.queue:
        value = rpc.Compare.VALUE
        greater, less = rpc.Compare.GREATER, rpc.Compare.LESS
        behind.compare.add(target=value, result=greater, key=first, range_end=behind_last, value=values.SHARED)
        behind.compare.add(target=value, result=less, key=first, range_end=behind_last, value=values.BEHIND_SHARED)
    behind.success.add(request_put=put)
    behind.failure.add(request_range=rpc.RangeRequest(key=contender.key))
    return request


def _excluding(contender: Contender) -> tuple[bytes, bytes]:
    """Return the range of the keys that exclude a contender for a lock while they are in front of its own."""
    behind = contender.prefix + values.READER if contender.mode == "shared" else end(contender.prefix)
    return contender.prefix, behind


def _newest_excluding(contender: Contender) -> rpc.RangeRequest:
    # A reader needs the value, too: has that writer been downgraded?
    return in_order(_excluding(contender), newest=True, keys_only=contender.mode != "shared")


def check_queue(contender: Contender) -> rpc.TxnRequest:
    """Read the oldest key, and the one that a contender waits for; fail if the contender's is gone."""
    in_front = _newest_excluding(contender)
    in_front.max_create_revision = contender.create_revision - 1
    request = rpc.TxnRequest(compare=[contender.compare_revision])
    request.success.add(request_range=first_key(contender.prefix))
    request.success.add(request_range=in_front)
    return request


def read_keys(keys: Sequence[bytes]) -> rpc.TxnRequest:
    """Read keys, without their values."""
    reads = (rpc.RangeRequest(key=key, keys_only=True) for key in keys)
    return rpc.TxnRequest(success=[rpc.RequestOp(request_range=read) for read in reads])


def change_key(contender: Contender, put: rpc.PutRequest) -> rpc.TxnRequest:
    """
    Change the value of a key or its etcd lease; else read it. The ``create_revision`` stays, and so does the token.

    It happens only if nothing has changed the key since its last known revision: a change that was not answered cannot
    be executed after a later one.
    """
    request = rpc.TxnRequest(compare=[contender.compare_modification])
    request.success.add(request_put=put)
    request.failure.add(request_range=rpc.RangeRequest(key=contender.key))
    return request


def delete_keys(contenders: Sequence[Contender]) -> Iterator[tuple[rpc.TxnRequest, Sequence[Contender]]]:
    """
    Delete keys that were created with these contenders' values, whenever that was.

    Those are also the keys of slots for which a permit's request was sent.
    """
    request = rpc.TxnRequest()
    batch: list[Contender] = []
    for contender in contenders:
        deletions = _deletions(contender)
        if len(request.success) + len(deletions) > BATCH:
            yield request, batch
            request, batch = rpc.TxnRequest(), []
        request.success.extend(rpc.RequestOp(request_txn=one) for one in deletions)
        batch.append(contender)
    if batch:
        yield request, batch


def _deletions(contender: Contender) -> list[rpc.TxnRequest]:
    deletions = [delete_key(contender.key, contender.compare_value)]
    if contender.is_rewritten:
        deletions.append(delete_key(contender.key, contender.compare_revision))
    for key in contender.slot_keys:
        is_ours = rpc.Compare(target=rpc.Compare.VALUE, key=key, value=contender.value)
        deletions.append(delete_key(key, is_ours))
    return deletions


def delete_key(key: bytes, condition: rpc.Compare) -> rpc.TxnRequest:
    """Delete one key if the condition is true."""
    deletion = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    return rpc.TxnRequest(compare=[condition], success=[deletion])


def break_keys(kvs: Sequence[rpc.KeyValue], marks: bytes, lease_id: int | None) -> rpc.TxnRequest:
    """Delete keys that are as they were read, each with a mark for its holder; without marks if there is no lease."""
    request = rpc.TxnRequest()
    for kv in kvs:
        unchanged = rpc.Compare(target=rpc.Compare.CREATE, key=kv.key, create_revision=kv.create_revision)
        deletion = delete_key(kv.key, unchanged)
        if lease_id is not None:
            deletion.success.add(request_put=rpc.PutRequest(key=mark_of(marks, kv.create_revision), lease=lease_id))
        request.success.add(request_txn=deletion)
    return request


def mark_of(marks: bytes, create_revision: int) -> bytes:
    """Return the key of the mark of a holder that was ended by force."""
    return b"%b/%d" % (marks, create_revision)


def delete_below(prefix: bytes) -> rpc.TxnRequest:
    """Delete all keys below a prefix, which ends with a slash."""
    deletion = rpc.DeleteRangeRequest(key=prefix, range_end=end(prefix))
    return rpc.TxnRequest(success=[rpc.RequestOp(request_delete_range=deletion)])


def first_key(prefix: bytes, *, keys_only: bool = False) -> rpc.RangeRequest:
    """Read the oldest key below a prefix: the holder's."""
    return in_order((prefix, end(prefix)), keys_only=keys_only)


def in_order(
    keys: tuple[bytes, bytes], *, newest: bool = False, limit: int = 1, keys_only: bool = False
) -> rpc.RangeRequest:
    """Read the oldest or the newest keys of a range, in the order of their creation; with ``limit=0`` all."""
    order, target = rpc.RangeRequest.DESCEND if newest else rpc.RangeRequest.ASCEND, rpc.RangeRequest.CREATE
    return rpc.RangeRequest(
        key=keys[0], range_end=keys[1], limit=limit, sort_order=order, sort_target=target, keys_only=keys_only
    )


def none_in(keys: tuple[bytes, bytes]) -> rpc.Compare:
    """Return a comparison that is true if there is no key in a range."""
    return rpc.Compare(target=rpc.Compare.CREATE, key=keys[0], range_end=keys[1], create_revision=0)


def keys_from(start: bytes, begin: bytes) -> rpc.RangeRequest:
    """Read keys without their values, in the order of their bytes, at most `KEYS_PAGE`."""
    # No byte of UTF-8 is 0xff, so the last one can grow.
    behind = begin[:-1] + bytes([begin[-1] + 1])
    return rpc.RangeRequest(key=start, range_end=behind, limit=KEYS_PAGE, keys_only=True)


def end(prefix: bytes) -> bytes:
    """Return the first key behind all that begin with `prefix`, which ends with a slash."""
    assert prefix.endswith(b"/")
    return prefix[:-1] + b"0"


def batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Split as many as fit into a transaction with one operation for each."""
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))
