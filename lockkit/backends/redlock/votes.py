"""Counting the votes of a Redlock's nodes: pure data, no I/O. The Lua files say what each answer means."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, cast

from lockkit.backend import Busy, Holder, decode_metadata, granted_at
from lockkit.backends.redlock.nodes import Answer, LockKeys, NodeConnecting, NodeDown
from lockkit.errors import LockError
from lockkit.runtime import Runtime

SPLIT_SECONDS_MIN = 0.002
"""First pause after split votes; random, and longer each time. Shorter than a round trip: the contenders collide
again."""

SPLIT_SECONDS_MAX = 0.25
"""Longest such pause. Longer delays a hand-over when a contender died during an attempt, shorter sends more."""

UNSURE_SECONDS = 0.25
"""Longest pause of a waiter if the holder's client may be of another kind, which wakes nobody, or is just being granted
the lock. Longer delays a hand-over from such a client, shorter sends more."""

OURS, FOREIGN, UNSURE = 0, 1, 2  # acquire.lua, of a holder
NOT_ADMITTED, WAITING = -1, -2  # acquire.lua, of a node that may not vote
OWNED, FREE, TAKEN, BROKEN = 1, 0, -1, -2  # renew.lua, of a lock

_OWN_VALUE = re.compile(r"([0-9a-f]{32})\.\d+")


class Refusal(NamedTuple):
    """A node's "busy": how long the key lives on, the value of its holder, and the kind of its client."""

    left_seconds: float
    value: str
    kind: int


class Count:
    """The answers of all nodes to one operation, counted. Only nodes that may vote count as having answered."""

    __slots__ = ("answered_count", "answers", "down", "silent", "yes")

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers  # for each node
        self.yes: dict[int, int] = {}  # index to number, of positive answers
        self.silent: list[int] = []  # indexes of nodes without a usable answer: they may have done it
        self.down: list[int] = []  # indexes of nodes that were down, so that nothing was sent
        self.answered_count = 0
        for index, answer in enumerate(answers):
            if type(answer) is int:
                self.answered_count += 1
                if answer > 0:
                    self.yes[index] = answer
            elif isinstance(answer, list):
                self.answered_count += not _may_not_vote(answer)
            elif isinstance(answer, NodeDown):
                self.down.append(index)
            elif answer is not None:
                self.silent.append(index)

    @property
    def connecting(self) -> bool:
        """Whether some node was left out only because there was no time to connect."""
        return any(isinstance(answer, NodeConnecting) for answer in self.answers)

    @property
    def not_admitted(self) -> bool:
        """Whether some node may not vote, and no client has decided when it may."""
        return [NOT_ADMITTED] in self.answers

    @property
    def not_voting(self) -> list[int]:
        """Indexes of the nodes that may not vote."""
        return [
            index for index, answer in enumerate(self.answers) if isinstance(answer, list) and _may_not_vote(answer)
        ]

    @property
    def refusals(self) -> list[Refusal]:
        """The answers to ``acquire.lua`` from nodes where another value has the key."""
        lists = [cast("list[Any]", answer) for answer in self.answers if isinstance(answer, list)]
        return [
            Refusal(_seconds(answer[1]), answer[2].decode("utf-8", "replace"), answer[3])
            for answer in lists
            if not _may_not_vote(answer)
        ]

    def why(self, index: int, label: str) -> str:
        """Return why a node did not answer or may not vote; empty if it voted."""
        answer = self.answers[index]
        if isinstance(answer, LockError):
            return str(answer)
        if not isinstance(answer, list) or not _may_not_vote(answer):
            return ""
        left_seconds = cast("int", answer[-1]) / 1000
        when = "may not vote yet" if answer[0] == NOT_ADMITTED else f"votes again in {left_seconds:.1f} s"
        return f"{label} was restarted or has lost its data, and {when}"


def _may_not_vote(answer: list[Any]) -> bool:
    return bool(answer) and answer[0] in {NOT_ADMITTED, WAITING}


@dataclass(slots=True)
class Held:
    """What a grant is based on."""

    keys: LockKeys
    value: str  # of the lock's key on the nodes that voted for it
    voters: Collection[int]  # indexes of the nodes that voted for it, or may have
    metadata: str  # of the request
    ended: bool = False  # it is being released, or has been: no node gets its key again

    def unknown_count(self, count: Count) -> int:
        """Return how many nodes may still have its value and did not answer."""
        return sum(index in self.voters for index in (*count.silent, *count.down))


class Attempts:
    """The attempts of one request, and what they left at the nodes."""

    __slots__ = ("_count", "entries", "keys", "splits", "ttl_ms", "values")

    def __init__(self, keys: LockKeys, ttl_ms: int) -> None:
        self.keys = keys
        self.ttl_ms = ttl_ms  # asked for
        self.values: list[str] = []  # of attempts that may still be at some node
        self.entries: Sequence[str] = ()  # the last ones for the queues of the nodes; "" where there is none
        self.splits = 0  # how often in a row no contender had a majority
        self._count = 0

    def next_value(self, owner: str) -> str:
        """Return the value for a new attempt: no other attempt has it."""
        self._count += 1
        value = owner if self._count == 1 else f"{owner}.{self._count}"
        assert value not in self.values, "a late message of another attempt would match it"
        self.values.append(value)
        return value

    def taken_back(self, value: str, *, unused: bool = False) -> None:
        """Note that nothing is left of an attempt, or will be when the nodes are reached; `unused`: nor ever was."""
        if value in self.values:
            self.values.remove(value)
        self._count -= unused  # the next attempt may use it
        assert value not in self.values, "two attempts with the same value"

    def split(self, runtime: Runtime, free_after: float = inf) -> Busy:
        """Return the answer when no contender has a majority: retry after a random time, or they collide again."""
        longest = min(SPLIT_SECONDS_MAX, SPLIT_SECONDS_MIN * 2.0**self.splits)
        self.splits = min(self.splits + 1, 20)
        return Busy(min(longest * runtime.random.uniform(0.2, 1.0), free_after))

    def busy(self, votes: Count, quorum: int, runtime: Runtime) -> Busy:
        """Return when to retry: when enough of the nodes that refused will be free, at the latest."""
        refusals = votes.refusals
        lefts = sorted(refusal.left_seconds for refusal in refusals)
        missing = quorum - len(votes.yes)
        assert lefts, "a majority answered, did not say yes, and did not refuse"
        seconds = _retry_after(lefts[missing - 1] if len(lefts) >= missing else inf, self.ttl_ms / 1000)
        (value, supporters), *_ = Counter(refusal.value for refusal in refusals).most_common(1)
        if supporters < quorum:
            return self.split(runtime, seconds)
        self.splits = 0
        kind = min(refusal.kind for refusal in refusals if refusal.value == value)
        if kind == UNSURE:
            seconds = min(seconds, UNSURE_SECONDS * runtime.random.uniform(0.5, 1.0))
        return Busy(None if seconds == inf else seconds, poll=kind == FOREIGN, owner=_owner_of(value))


class Found(NamedTuple):
    """The holder of a lock: the value, and the replies of the nodes where it is (see ``holders.lua``)."""

    value: bytes
    replies: list[list[Any]]

    @property
    def proven(self) -> bool:
        """A node has an expiry for it, or a record of its lease: it is no data of an application."""
        return any(reply[1] >= 0 or reply[2] for reply in self.replies)

    def holder(self, quorum: int) -> Holder:
        """Combine the replies."""
        # Held as long as a majority has it; nodes that do not answer do not count.
        lefts = sorted((_seconds(reply[1]) for reply in self.replies), reverse=True)
        left_seconds = lefts[min(quorum, len(lefts)) - 1]
        token = max((int(reply[2]) for reply in self.replies if reply[2].isdigit()), default=None)
        return Holder(
            _owner_of(self.value.decode("utf-8", "replace")),
            token,
            None if left_seconds == inf else left_seconds,
            decode_metadata(next((reply[3] for reply in self.replies if reply[3]), b"")),
            max(reply[4] for reply in self.replies),
            since=granted_at(token),
        )


def find_holder(count: Count, quorum: int) -> Found | None:
    """Return the holder by a majority's answers to ``holders.lua``; None if no value may have a majority."""
    assert count.answered_count >= quorum, "a minority cannot tell"
    replies = [answer for answer in count.answers if isinstance(answer, list)]
    if sum(not reply for reply in replies) >= quorum:
        return None
    held = [cast("list[Any]", reply) for reply in replies if reply]
    (value, supporters), *_ = Counter(reply[0] for reply in held).most_common(1)
    # Its other votes may be at nodes that did not answer.
    if supporters + len(count.silent) + len(count.down) < quorum:
        return None
    return Found(value, [reply for reply in held if reply[0] == value])


def as_renewal(answer: Answer, value: bytes) -> Answer:
    """Translate an answer of ``holders.lua`` to that of ``renew.lua`` for a lease with this value."""
    if not isinstance(answer, list):
        return answer
    if not answer:
        return FREE
    return OWNED if answer[0] == value else TAKEN


def _retry_after(left_seconds: float, ttl: float) -> float:
    """
    Return after how many seconds a waiter retries that is not woken, when the holder has so many left.

    Half of it: the first in the queue may be stopped, a subscription dropped by the network, the queue gone with a
    node's data. A live holder renews at a third, so that is half a ttl at most. But at least a third of the waiter's
    ttl: during the last seconds of a holder that died, it does not retry ever more often.
    """
    return min(left_seconds, max(left_seconds / 2, ttl / 3))


def _seconds(left_ms: int) -> float:
    return inf if left_ms < 0 else left_ms / 1000


def _owner_of(value: str) -> str:
    """Return the owner of a value, of whichever attempt; that of a foreign client is the value itself."""
    own = _OWN_VALUE.fullmatch(value)
    return value if own is None else own[1]
