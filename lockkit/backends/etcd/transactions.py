"""The transactions that locks on etcd consist of. Pure functions: they build messages, and send nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd import values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lockkit.backend import Mode

__all__ = [
    "all_keys",
    "batches",
    "check_keys",
    "check_queue",
    "create_key",
    "create_reader_key",
    "delete_below",
    "delete_key",
    "delete_keys",
    "end",
    "first_key",
    "keys_from",
    "newest_in",
    "none_in",
    "oldest_in",
    "replace_value",
]

KEYS_PAGE = 1000
"""Keys in one answer of `keys_from`. More makes larger answers (100 bytes a key), fewer takes more round trips."""

BATCH = 100
"""Operations in one transaction. etcd's default for --max-txn-ops is 128; an operation that is a transaction itself may
have as many as are left. Fewer takes more round trips."""


class Contender(Protocol):
    """What a transaction says of one key of this client: see `lockkit.backends.etcd.session.Contender`."""

    prefix: bytes
    value: bytes
    mode: Mode
    key: bytes
    slot_keys: tuple[bytes, ...]
    is_rewritten: bool
    create_revision: int

    @property
    def compare_revision(self) -> rpc.Compare:
        """True while the key is the one that was created."""
        ...

    @property
    def compare_modification(self) -> rpc.Compare:
        """True until the key is moved."""
        ...

    @property
    def compare_value(self) -> rpc.Compare:
        """True while the key is this contender's, whenever it was created."""
        ...


C = TypeVar("C", bound=Contender)


def create_key(contender: Contender, lease_id: int, *, queue: bool) -> rpc.TxnRequest:
    """
    Acquire the lock, or take a place in its queue.

    ::

        if no key below the prefix:  put ours                                    -> held
        else:                        read the oldest
                                     if ours is not there: read the newest, put  -> in the queue, behind the newest
                                     else:                 read ours                (both only with `queue`)
    """
    put = rpc.PutRequest(key=contender.key, value=contender.value, lease=lease_id)
    request = rpc.TxnRequest()
    request.compare.add(
        target=rpc.Compare.CREATE, key=contender.prefix, range_end=end(contender.prefix), create_revision=0
    )
    request.success.add(request_put=put)
    request.failure.add(request_range=first_key(contender.prefix))
    if queue:
        behind = request.failure.add().request_txn
        behind.compare.add(target=rpc.Compare.CREATE, key=contender.key, create_revision=0)
        behind.success.add(request_range=_newest_key(contender.prefix))
        behind.success.add(request_put=put)
        behind.failure.add(request_range=rpc.RangeRequest(key=contender.key))
    return request


def create_reader_key(contender: Contender, lease_id: int, *, queue: bool) -> rpc.TxnRequest:
    """
    Acquire the lock for reading, or take a place in its queue.

    ::

        if no writer's key, and not ours:  put ours                                 -> held
        else:                              read the oldest, and the newest writer's
                                           if ours is not there:  put               -> held if that writer reads only
                                           else:                  read ours

    A writer that reads only has no other in front of it: else it could not have held the lock for writing. So if the
    newest one does, it is the only one. Without `queue` ours is put only then.
    """
    put = rpc.PutRequest(key=contender.key, value=contender.value, lease=lease_id)
    is_new = rpc.Compare(target=rpc.Compare.CREATE, key=contender.key, create_revision=0)
    writers, behind_writers = contender.prefix, contender.prefix + values.READER
    request = rpc.TxnRequest(compare=[none_in((writers, behind_writers)), is_new])
    request.success.add(request_put=put)
    request.failure.add(request_range=first_key(contender.prefix))
    request.failure.add(request_range=_newest_writer(contender.prefix))
    behind = request.failure.add().request_txn
    behind.compare.append(is_new)
    if not queue:
        value = rpc.Compare.VALUE
        greater, less = rpc.Compare.GREATER, rpc.Compare.LESS
        behind.compare.add(target=value, result=greater, key=writers, range_end=behind_writers, value=values.SHARED)
        behind.compare.add(target=value, result=less, key=writers, range_end=behind_writers, value=values.BEHIND_SHARED)
    behind.success.add(request_put=put)
    behind.failure.add(request_range=rpc.RangeRequest(key=contender.key))
    return request


def check_queue(contender: Contender) -> rpc.TxnRequest:
    """Read the key that a contender waits for, and the oldest; fail if the contender's is gone."""
    is_reader = contender.mode == "shared"
    in_front = _newest_writer(contender.prefix) if is_reader else _newest_key(contender.prefix)
    in_front.max_create_revision = contender.create_revision - 1
    request = rpc.TxnRequest(compare=[contender.compare_revision])
    request.success.add(request_range=in_front)
    request.success.add(request_range=first_key(contender.prefix))
    return request


def check_keys(contenders: Sequence[Contender], move_to: int | None) -> rpc.TxnRequest:
    """
    Read keys, without their values; before that, move them to another etcd lease if its id is given.

    A move attaches the key to that lease. The ``create_revision`` stays, and so does the token. It
    happens only if nothing has changed the key since its last known revision: a move that was not answered cannot be
    executed after a later one.
    """
    request = rpc.TxnRequest()
    for contender in contenders:
        if move_to is not None:
            put = rpc.PutRequest(key=contender.key, ignore_value=True, lease=move_to)
            compare = [contender.compare_revision, contender.compare_modification]
            request.success.add(request_txn=rpc.TxnRequest(compare=compare, success=[rpc.RequestOp(request_put=put)]))
        request.success.add(request_range=rpc.RangeRequest(key=contender.key, keys_only=True))
    return request


def delete_keys(contenders: Sequence[C]) -> Iterator[tuple[rpc.TxnRequest, Sequence[C]]]:
    """
    Delete keys that were created with these contenders' values, whenever that was.

    Those are also the keys of slots for which a permit's request was sent.

    Returns:
        Transactions, each with the contenders that it deletes.
    """
    request, batch = rpc.TxnRequest(), list[C]()
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


def replace_value(contender: Contender, value: bytes) -> rpc.TxnRequest:
    """
    Replace the value of a key, which stays attached to its etcd lease; else read the key.

    It happens only if nothing has changed the key since its last known revision, as a move (`check_keys`).
    """
    put = rpc.PutRequest(key=contender.key, value=value, ignore_lease=True)
    request = rpc.TxnRequest(compare=[contender.compare_revision, contender.compare_modification])
    request.success.add(request_put=put)
    request.failure.add(request_range=rpc.RangeRequest(key=contender.key))
    return request


def delete_key(key: bytes, condition: rpc.Compare) -> rpc.TxnRequest:
    """Delete one key if the condition is true."""
    deletion = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    return rpc.TxnRequest(compare=[condition], success=[deletion])


def delete_below(prefix: bytes) -> rpc.TxnRequest:
    """Delete all keys below a prefix, which ends with a slash."""
    deletion = rpc.DeleteRangeRequest(key=prefix, range_end=end(prefix))
    return rpc.TxnRequest(success=[rpc.RequestOp(request_delete_range=deletion)])


def first_key(prefix: bytes, *, keys_only: bool = False) -> rpc.RangeRequest:
    """Read the oldest key below a prefix: the holder's."""
    return oldest_in((prefix, end(prefix)), keys_only=keys_only)


def all_keys(prefix: bytes) -> rpc.RangeRequest:
    """Read all keys below a prefix, the oldest first."""
    return _in_order((prefix, end(prefix)), rpc.RangeRequest.ASCEND, limit=0, keys_only=False)


def none_in(keys: tuple[bytes, bytes]) -> rpc.Compare:
    """Return a comparison that is true if there is no key in a range."""
    return rpc.Compare(target=rpc.Compare.CREATE, key=keys[0], range_end=keys[1], create_revision=0)


def _newest_key(prefix: bytes) -> rpc.RangeRequest:
    return newest_in((prefix, end(prefix)), keys_only=True)


def _newest_writer(prefix: bytes) -> rpc.RangeRequest:
    return newest_in((prefix, prefix + values.READER), keys_only=False)


def newest_in(keys: tuple[bytes, bytes], *, keys_only: bool) -> rpc.RangeRequest:
    """Read the newest key of a range."""
    return _in_order(keys, rpc.RangeRequest.DESCEND, limit=1, keys_only=keys_only)


def oldest_in(keys: tuple[bytes, bytes], *, keys_only: bool = False) -> rpc.RangeRequest:
    """Read the oldest key of a range."""
    return _in_order(keys, rpc.RangeRequest.ASCEND, limit=1, keys_only=keys_only)


def _in_order(
    keys: tuple[bytes, bytes], order: rpc.RangeRequest.SortOrder, *, limit: int, keys_only: bool
) -> rpc.RangeRequest:
    return rpc.RangeRequest(
        key=keys[0],
        range_end=keys[1],
        limit=limit,
        sort_order=order,
        sort_target=rpc.RangeRequest.CREATE,
        keys_only=keys_only,
    )


def keys_from(start: bytes, begin: bytes) -> rpc.RangeRequest:
    """
    Read keys without their values, in the order of their bytes, at most `KEYS_PAGE`.

    Args:
        start: The first key to read.
        begin: What all of them begin with: some of UTF-8, not empty.
    """
    # No byte of UTF-8 is 0xff, so the last one can grow.
    behind = begin[:-1] + bytes([begin[-1] + 1])
    return rpc.RangeRequest(key=start, range_end=behind, limit=KEYS_PAGE, keys_only=True)


def end(prefix: bytes) -> bytes:
    """Return the first key behind all that begin with `prefix`, which ends with a slash."""
    assert prefix.endswith(b"/")
    return prefix[:-1] + b"0"


def batches(contenders: Sequence[C], operations: int = 1) -> Iterator[Sequence[C]]:
    """Split contenders into as many as fit into a transaction with so many operations for each."""
    size = BATCH // operations
    return (contenders[start : start + size] for start in range(0, len(contenders), size))
