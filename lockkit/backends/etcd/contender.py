"""
What a client remembers of its sessions, keys and watches.

See `lockkit.backends.etcd.session` and `lockkit.backends.etcd.wakeup`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from lockkit.backend import Mode
from lockkit.backends.etcd import rpc_pb2 as rpc
from lockkit.backends.etcd import values
from lockkit.runtime import Event
from lockkit.units import Instant

STALE_SHARE = 0.1
"""Share of a session's ttl since its last heartbeat from which on it gets another one before it grants a lock. A new
lease has at least the rest; larger gives it less time, smaller costs more round trips (without a write)."""


@dataclass(slots=True, eq=False)
class Session:
    """One etcd lease. Times are the client's monotonic clock."""

    id: int  # of the lease
    requested_ttl: int  # seconds
    ttl: float  # seconds; the cluster may have raised it
    anchor: float  # just before the last request that started its ttl anew, of those that were answered
    keep_alive_at: float = field(init=False)  # when a waiter should send a heartbeat
    retired: bool = False  # it takes no new key: one may be created late in it
    closing: bool = False  # nothing in it is wanted; it is being revoked
    ended: bool = False  # it is gone, and all its keys with it
    by_name: dict[str, Contender] = field(default_factory=dict)  # the writer whose key has its id, by lock name
    # Those whose key is attached to it, or may be, or may still be created.
    contenders: set[Contender] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.keep_alive_at = self.anchor + self.ttl / 3

    def was_kept_alive(self, anchor: Instant) -> None:
        """Count its ttl from `anchor` on."""
        self.anchor = max(self.anchor, anchor)
        self.keep_alive_at = self.anchor + self.ttl / 3

    def delay_heartbeat(self, now: float) -> None:
        """Have no other waiter send a heartbeat meanwhile, nor at once if this one fails."""
        self.keep_alive_at = now + self.ttl / 10

    @property
    def ends_at(self) -> float:
        """When the cluster may end it, unless it gets a heartbeat before."""
        return self.anchor + self.ttl

    @property
    def is_over(self) -> bool:
        """Whether nothing may rely on it any more."""
        return self.closing or self.ended

    def takes_keys(self, ttl: int, now: float) -> bool:
        """Tell whether keys of this ttl may be attached to it."""
        return self.has_ttl(ttl) and not self.retired and not self.is_over and now < self.ends_at

    def has_ttl(self, ttl: int) -> bool:
        """Tell whether it is one for this ttl."""
        return ttl in {self.requested_ttl, int(self.ttl)}

    def is_stale(self, now: float) -> bool:
        """Tell whether it needs a heartbeat before it grants a lock."""
        return now >= self.anchor + self.ttl * STALE_SHARE

    def is_wanted(self, now: float) -> bool:
        """Tell whether anything in it is held or waited for."""
        return any(one.wanted_until > now for one in self.contenders)


@dataclass(slots=True, eq=False)
class Watch:
    """One watch."""

    id: int  # its number in the stream
    key: bytes
    contender: Contender | None  # which waits; None if none does
    reusable: bool  # it reports the deletion of one key, as most do
    since: int = 0  # the revision after which it reports everything; 0 before it is confirmed


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
    key: bytes = b""  # known once it has a session; a permit's is another one than that with which it has waited
    slot_keys: tuple[bytes, ...] = ()  # of a permit not granted yet: of these, a request that was sent may create one
    slot: int | None = None  # of a permit that is granted
    value_now: bytes = field(init=False)  # of the key, as far as known: `value` until it is updated or downgraded
    is_rewritten: bool = False  # a request was sent that changes the value
    home: Session | None = None  # whose id is in the key
    session: Session | None = None  # that the key is attached to
    # Not None after a move that was not answered: the key is attached to the one session or to the other.
    moving_to: Session | None = None
    create_revision: int = 0  # the token; 0 until it is known
    mod_revision: int = 0  # changes with each move and each change of the value
    wanted_until: float = inf  # when the key is not wanted any more; ``-inf`` once it was given up
    may_come_late: bool = False  # the request that creates the key was not answered, and may be executed late
    created: Event | None = None  # set when that request has been answered or has failed; None before it is sent
    key_in_front: bytes = b""  # the key that it waits for; the first of them if there are several
    behind_front: bytes = b""  # with several, the first key behind them
    seen_at: int = 0  # the revision at which they were there
    watch: Watch | None = None  # that wakes it
    joined_at: float = inf  # when the request came
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

    def takes_slot(self, slot: int, revision: int) -> None:
        """Note that a permit was granted, with the revision at which its key was created."""
        self.key, self.slot_keys, self.slot = values.slot_key(self.prefix, slot), (), slot
        self.set_revision(revision)

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

    @property
    def compare_modification(self) -> rpc.Compare:
        """True until the key is moved or its value is changed."""
        return rpc.Compare(target=rpc.Compare.MOD, key=self.key, mod_revision=self.mod_revision)

    @property
    def compare_value(self) -> rpc.Compare:
        """True while the key is this contender's, whenever it was created."""
        return rpc.Compare(target=rpc.Compare.VALUE, key=self.key, value=self.value)
