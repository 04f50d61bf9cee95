"""
Locks on several independent Redis or Valkey nodes, held by a majority of them: Redlock.

Algorithm: the lock is the same string key ``PREFIX:NAME`` on every node, set with ``NX PX`` by one round to all nodes;
whoever has it on a majority holds it, for its ttl less the time that this took. A second round is for the token::

    round 1   every node: take the key, answer max(last token, server time in µs)
    round 2   who said yes: write max + 1 as the last token, where the key is still ours     majority needed: granted

Why the tokens increase: A was granted with token t, so a majority wrote t while the lock was A's there. B, later, has
a majority too, and the two share a node. There B took the key after A's write (the key was A's at the write), so B
read at least t in round 1; and B asks only those in round 2 whose answer it counted in round 1, so it has seen that t.

The value of the key is the owner, and with every further attempt of a waiter ``OWNER.2``, ``OWNER.3``, …::

    A's attempt 1: node 3 is slow; no majority; A's release for node 3 is on its way
    A's attempt 2: granted by nodes 1, 2 and 3
    the release of attempt 1 arrives at node 3, and would free A's lock there: nodes 3, 4 and 5 grant it to B

With a value for each attempt a late message finds nothing that is its own.

Beside the lock's key lie those of `lockkit.backends.redis.backend` (``fence``, ``meta``, ``queue``, ``broken``), on
each node its own, and one mark per node that says whether it may vote (`lockkit.backends.redlock.delayed_restart`).

Waiters leave their place in the queues of all nodes. A release tells the first one of each node, which is mostly the
same; nothing is reserved for it, so the order of arrival is not kept (``fair=False``).

What the nodes must offer: Redis 6.0.6 or Valkey, no replicas of each other. What it cannot promise: that more than a
minority loses its data, or that clocks run apart, without a second holder. That is what tokens are for.

Source: "Distributed Locks with Redis", Redis documentation; for its limits Martin Kleppmann, "How to do distributed
locking" (2016).
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from lockkit import validation
from lockkit.backend import (
    CALL_SECONDS,
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    LockBackend,
    Option,
    Renewal,
    Renewed,
    Request,
    Unknown,
    decode_metadata,
    seconds_left,
)
from lockkit.backends.redis import options as redis_options
from lockkit.backends.redlock import addresses
from lockkit.backends.redlock.connections import open_panel
from lockkit.backends.redlock.delayed_restart import Admission
from lockkit.backends.redlock.nodes import (
    ABANDON,
    ACQUIRE,
    BREAK,
    FENCE,
    HOLDERS,
    LOOK,
    RELEASE,
    RENEW,
    UNDO,
    Absent,
    LockKeys,
)
from lockkit.errors import ConfigurationError, LockError, NoQuorum

if TYPE_CHECKING:
    from lockkit.backends.redlock.nodes import Answer, Panel
    from lockkit.url import Url

__all__ = ["RedlockBackend"]

log = logging.getLogger("lockkit")

FENCE_MS_MIN = 86_400_000
"""How long the counters of an idle lock are kept, at least: a day. Shorter relies more on the nodes' clocks, which must
then not differ by more; longer keeps more small keys."""

NODE_TIMEOUT = 0.5
"""Seconds that a node has for an answer. Longer holds up callers once when a node hangs; shorter takes a busy node for
dead."""

SPLIT_PAUSE_MIN = 0.002
"""Seconds between two attempts when the votes were split, at first; random, and longer each time. Shorter than a round
trip and the contenders meet again."""

SPLIT_PAUSE_MAX = 0.25
"""Longest such pause. Longer delays a hand-over when somebody died in the middle of an attempt, shorter asks more."""

DEAF_PAUSE = 0.25
"""Pause between two looks when no node lets us subscribe (rights to channels), seconds."""

KNOWN_NAMES_MAX = 1024
"""Names whose packed keys are kept. More takes memory (half a kilobyte each), fewer packs again."""

_OWN_VALUE = re.compile(r"([0-9a-f]{32})\.\d+")
_STRANGER, _WAITING = -1, -2  # what acquire.lua says of a node that may not vote
_OURS, _NOBODYS, _TAKEN, _BROKEN = 1, 0, -1, -2  # what renew.lua says of a lock

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "prefix": Option(
            redis_options.parse_prefix, "First part of all keys. Clients that share locks have the same.", "lockkit"
        ),
        "db": Option(
            validation.parse_int(0, 2**31 - 1), "Number of the database on all nodes; in URLs the path says it."
        ),
        "fencing": Option(
            validation.parse_bool,
            "Two rounds, for tokens that increase. Off: one round, and a token may come twice or go back.",
            True,  # noqa: FBT003 - a default
        ),
        "durable": Option(
            validation.parse_bool,
            "Nodes that restart vote at once. Only for nodes that lose nothing: appendonly yes, appendfsync always.",
            False,  # noqa: FBT003
        ),
        "node_timeout": Option(validation.parse_ttl, "Seconds that each node has for an answer.", NODE_TIMEOUT),
    }
)

_CAPABILITIES = Capabilities(
    crash_release="ttl",
    min_ttl=0.01,
    ttl_granularity=0.001,
    fair=False,
    wakeup="push",
    token_source="max over a majority of (last + 1, server time in µs), written back to a majority",  # noqa: S106
    survives_node_loss=True,
    survives_data_loss=True,
    shared_mode=False,
    clock_assumption="the nodes' and clients' clocks run at the same rate within 1 %; for tokens after nodes have lost "
    "data, the nodes' times of day differ by less than the longest ttl",
    waiters_visible=True,
    scope="network",
    caveat="All nodes losing their data together, or clocks that run apart, can lead to a second holder: guard storage "
    "by token.",
)


class RedlockBackend(LockBackend):
    """Processes that reach the same set of independent Redis or Valkey nodes."""

    capabilities = _CAPABILITIES
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def __init__(self, url: str, panel: Panel, options: Mapping[str, Any], host: Host) -> None:
        """
        Use nodes; nothing is sent.

        Args:
            url: For messages.
            panel: The nodes.
            options: All of `OPTIONS`.
            host: The engine's side.
        """
        self._url = url
        self._panel = panel
        self._runtime = host.runtime
        self._prefix: str = options["prefix"]
        self._fencing: bool = options["fencing"]
        self._nodes_count = len(panel.labels)
        self._quorum = self._nodes_count // 2 + 1
        self._listening = False
        self._nowhere = [""] * self._nodes_count
        self._names: dict[str, LockKeys] = {}
        self._mark_keys = LockKeys(self._prefix, "")
        self._admission = Admission(panel, self._mark_keys, host.runtime, durable=options["durable"])
        self._advise()

    def _advise(self) -> None:
        count = self._nodes_count
        if count < 3:  # noqa: PLR2004 - the least of which one may fail
            log.warning("%s has %d nodes, so it stands still when one of them fails: use 3 or 5", self._url, count)
        elif count % 2 == 0:
            log.warning(
                "%s has %d nodes and survives no more failures than %d would; and an even number can tie: use %d or %d",
                self._url, count, count - 1, count - 1, count + 1,
            )  # fmt: skip

    @classmethod
    def driver_options(cls) -> Mapping[str, Option]:
        """See `LockBackend.driver_options`: the keyword arguments of redis-py's connections."""
        known = redis_options.driver_options()
        # `node_timeout` says both.
        return {name: known[name] for name in known if name not in {"socket_timeout", "socket_connect_timeout"}}

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> RedlockBackend:
        """See `LockBackend.open`."""
        driver = {name: value for name, value in options.items() if name not in OPTIONS}
        sources = addresses.url_sources(url, options, driver, host.runtime)
        panel = open_panel(host, sources, options)
        return cls(url.safe_text, panel, options, host)

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> RedlockBackend | None:
        """See `LockBackend.adopt`: a list of redis-py's clients, in the form of this face."""
        if not isinstance(client, (list, tuple)):
            return None
        sources = addresses.adopt_sources(client, options["node_timeout"], host.runtime)
        if sources is None:
            return None
        panel = open_panel(host, sources, options)
        return cls(addresses.url_of(sources), panel, options, host)

    @property
    def url(self) -> str:
        """See `LockBackend.url`."""
        return self._url

    # -- acquire ---------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        """See `LockBackend.try_acquire`."""
        bid: _Bid | None = request.state
        if bid is None:
            bid = request.state = _Bid(self._keys(request.name), _milliseconds(request.ttl))
            self._admission.ttl_ms = max(self._admission.ttl_ms, bid.ttl_ms)
        by = min(request.answer_by, self._runtime.now() + CALL_SECONDS)
        outcome = await self._attempt(request, bid, by)
        if isinstance(outcome, _Votes) and outcome.strangers:
            # Nobody has looked into that yet: the very first use of the nodes, or a restart.
            looked = self._admission.run_soon()
            await looked.wait(self._share(by) - self._runtime.now())
            outcome = await self._attempt(request, bid, by)
        if isinstance(outcome, _Votes):
            raise self._no_quorum(outcome)
        return outcome

    def _share(self, by: float) -> float:
        """Until when one of several rounds may take: nodes that hang leave a third of the time to the next."""
        now = self._runtime.now()
        until = now + seconds_left(by, now) * 2 / 3
        assert now <= until <= max(now, by)
        return until

    async def _attempt(self, request: Request, bid: _Bid, by: float) -> Grant | Busy | _Votes:
        """Ask for the votes once. The votes if fewer than a majority may vote."""
        keys, value = bid.keys, bid.next_value(request.owner)
        bid.places = self._panel.places(request) if request.queue and self._listening else self._nowhere
        arguments = value, bid.ttl_ms, request.metadata
        count = _Votes(await self._panel.ask(ACQUIRE, keys, arguments, tails=bid.places, until=self._share(by)))
        if len(count.yes) >= self._quorum:
            if count.strangers:
                self._admission.run_soon()
            token = max(count.yes.values()) + 1
            assert token > 1
            written = await self._write_token(bid, value, token, count, by)
            if written is None:
                self._panel.forget(request)
                # Also who did not answer may have voted, and may be found to be ours by a renewal.
                state = _Held(keys, value, frozenset([*count.yes, *count.silent]))
                return Grant(request.name, request.owner, token, bid.ttl_ms / 1000, None, state)
            await self._take_back(bid, value, count, by)
            if written.answered_count < self._quorum:
                raise self._no_quorum(written)
            return bid.split(self._runtime.random.random(), None)
        await self._take_back(bid, value, count, by)
        if count.answered_count < self._quorum:
            return count
        return self._busy(bid, count)

    async def _write_token(self, bid: _Bid, value: str, token: int, count: _Votes, by: float) -> _Count | None:
        """Round two. None if a majority has written it; otherwise what the nodes said."""
        if not self._fencing:
            return None
        arguments = value, token, _fence_ms(bid.ttl_ms)
        answers = await self._panel.ask(FENCE, bid.keys, arguments, only=count.yes, until=self._share(by))
        written = _Count(answers)
        return None if len(written.yes) >= self._quorum else written

    async def _take_back(self, bid: _Bid, value: str, count: _Votes, by: float) -> None:
        """Give back the votes of an attempt that did not win, also those that were not heard of."""
        assert value in bid.values, "taken back twice"
        voted = [*count.yes, *count.silent]
        if voted:
            await self._panel.ask(UNDO, bid.keys, (value,), only=voted, owed=bid.ttl_ms / 1000, until=by)
            bid.taken_back(value)
        else:
            bid.unused(value)

    def _busy(self, bid: _Bid, count: _Votes) -> Busy:
        """Say when to look again: when enough of those who said no will be free, at the latest."""
        lefts = sorted(refusal.left for refusal in count.busy)
        missing = self._quorum - len(count.yes)
        assert missing > 0
        assert lefts, "a majority answered, it did not say yes, and nobody said no"
        free_after = lefts[missing - 1] if len(lefts) >= missing else math.inf
        retry_after = None if free_after == math.inf else _look_after(free_after, bid.ttl_ms / 1000)
        (refusal, supporters), *_ = Counter(refusal.by for refusal in count.busy).most_common(1)
        value, foreign = refusal
        if supporters < self._quorum:
            return bid.split(self._runtime.random.random(), retry_after)
        bid.splits = 0
        return Busy(retry_after, poll=foreign, owner=_owner_of(value))

    def _no_quorum(self, count: _Count, found: str | None = None) -> LockError:
        """Say which nodes did not answer, and why not; `found` says what is known without them."""
        if found is None:
            assert count.answered_count < self._quorum
            found = f"{count.answered_count} of {self._nodes_count} nodes answered"
        reasons = (count.why(index, label) for index, label in enumerate(self._panel.labels))
        message = f"{found}, where a majority of {self._quorum} is needed: {'; '.join(filter(None, reasons))}"
        errors = [_reason(answer) for answer in count.answers if isinstance(answer, LockError)]
        wrong = [error for error in errors if isinstance(error, ConfigurationError)]
        if self._nodes_count - len(wrong) < self._quorum:
            error: LockError = ConfigurationError(message)
            error.__cause__ = wrong[0]
            return error
        error = NoQuorum(message)
        error.__cause__ = errors[0] if errors else None
        return error

    # -- waiting ---------------------------------------------------------------------------------------------------

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        """See `LockBackend.wait`."""
        bid: _Bid = request.state
        if bid.splits or any(bid.places):
            await super().wait(request, busy, until)
            return
        # Subscribe, and return at once: the next look takes places in the queues.
        self._listening = await self._panel.listen(min(until, request.answer_by))
        if not self._listening:
            await super().wait(request, busy, min(until, self._runtime.now() + DEAF_PAUSE))

    async def abandon(self, request: Request) -> None:
        """See `LockBackend.abandon`."""
        bid: _Bid | None = request.state
        if bid is None:
            return
        by = min(request.answer_by, self._runtime.now() + CALL_SECONDS)
        owed = bid.ttl_ms / 1000
        for value in tuple(bid.values):
            # Perhaps granted: then waiters are to be told, as by a release.
            await self._panel.ask(RELEASE, bid.keys, (value,), owed=owed, until=self._share(by))
            bid.taken_back(value)
        where = [index for index, place in enumerate(bid.places) if place]
        if where:
            await self._panel.ask(ABANDON, bid.keys, (), tails=bid.places, only=where, owed=owed, until=by)
            bid.places = self._nowhere
        assert not bid.values, "votes that nobody takes back"
        self._panel.forget(request)
        request.state = None

    # -- held ------------------------------------------------------------------------------------------------------

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`. A majority must still have it as ours; who lost the key is not given it again."""
        calls = []
        for grant in grants:
            held: _Held = grant.state
            ttl_ms = _milliseconds(grant.ttl)
            self._admission.ttl_ms = max(self._admission.ttl_ms, ttl_ms)
            calls.append((held.keys, (held.value, ttl_ms, _fence_ms(ttl_ms))))
        by_node = await self._panel.ask_many(RENEW, calls)
        return [
            self._verdict(grant.state, list(answers))
            for grant, answers in zip(grants, zip(*by_node, strict=True), strict=True)
        ]

    def _verdict(self, held: _Held, answers: list[Answer]) -> Renewal:
        """Say what the votes of the nodes mean, each in the words of ``renew.lua``. Silence is no vote."""
        count = _Count(answers)
        unheard_count = held.unheard_count(count)
        assert len(count.yes) + unheard_count <= self._nodes_count, "a node counted twice"
        if len(count.yes) >= self._quorum:
            return Renewed()
        if len(count.yes) + unheard_count >= self._quorum:
            found = f"{len(count.yes)} of {self._nodes_count} nodes say that it holds the lock"
            return Unknown(self._no_quorum(count, found))
        if answers.count(_BROKEN):
            return Gone("broken")
        return Gone("taken" if answers.count(_TAKEN) >= self._quorum else "gone")

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """See `LockBackend.release`. Who does not answer is told again when it is reached."""
        held: _Held = grant.state
        answers = await self._panel.ask(RELEASE, held.keys, (held.value,), owed=grant.ttl, until=answer_by)
        count = _Count(answers)
        if count.answered_count < self._quorum:
            raise self._no_quorum(count)
        return len(count.yes) + held.unheard_count(count) >= self._quorum

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """See `LockBackend.release_all`. All of them in one batch to each node."""
        calls = [(held.keys, (held.value,)) for held in (cast("_Held", grant.state) for grant in grants)]
        by_node = await self._panel.ask_many(RELEASE, calls, until=answer_by, last=True)
        counts = [_Count(list(answers)) for answers in zip(*by_node, strict=True)]
        failed = [count for count in counts if count.answered_count < self._quorum]
        if failed:
            raise self._no_quorum(failed[-1])

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `LockBackend.holders`."""
        found = await self._find_holder(self._keys(name))
        return [] if found is None else [found.holder(self._quorum)]

    async def _find_holder(self, keys: LockKeys) -> _Found | None:
        count = _Count(await self._panel.ask(HOLDERS, keys, ()))
        if count.answered_count < self._quorum:
            raise self._no_quorum(count)
        replies = [cast("list[Any]", answer) for answer in count.answers if isinstance(answer, list)]
        if sum(not reply for reply in replies) >= self._quorum:
            return None  # whoever asks now gets it
        held = [reply for reply in replies if reply]
        (value, supporters), *_ = Counter(reply[0] for reply in held).most_common(1)
        assert supporters <= len(held) <= self._nodes_count
        # Its other votes may lie with those who did not answer.
        if supporters + len(count.silent) + len(count.absent) < self._quorum:
            return None
        return _Found(value, [reply for reply in held if reply[0] == value])

    async def confirm(self, grant: Grant) -> Gone | None:
        """See `LockBackend.confirm`. Votes of nodes that do not answer are no votes here, unlike in `holders`."""
        held: _Held = grant.state
        value = held.value.encode()
        answers = await self._panel.ask(HOLDERS, held.keys, ())
        outcome = self._verdict(held, [_vote(answer, value) for answer in answers])
        if isinstance(outcome, Unknown):
            raise outcome.error
        return outcome if isinstance(outcome, Gone) else None

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`. Of the holder that was found, not of one that came after it."""
        keys = self._keys(name)
        found = await self._find_holder(keys)
        if found is None:
            return False
        value = found.value.decode("utf-8", "surrogateescape")
        count = _Count(await self._panel.ask(BREAK, keys, (value, FENCE_MS_MIN)))
        if count.answered_count < self._quorum:
            raise self._no_quorum(count)
        return bool(count.yes)

    async def ping(self) -> None:
        """See `LockBackend.ping`: a majority answers."""
        count = _Count(await self._panel.ask(LOOK, self._mark_keys, ()))
        if count.answered_count < self._quorum:
            raise self._no_quorum(count)

    async def close(self) -> None:
        """See `LockBackend.close`."""
        await self._panel.close()

    def _keys(self, name: str) -> LockKeys:
        keys = self._names.get(name)
        if keys is None:
            if len(self._names) >= KNOWN_NAMES_MAX:
                self._names.clear()
            keys = self._names[name] = LockKeys(self._prefix, name)
        return keys


class _Refusal(NamedTuple):
    """A node's "busy": seconds that the key lives on, and ``(value, foreign)`` of who has it."""

    left: float
    by: tuple[str, bool]


class _Count:
    """
    The answers of all nodes to one question, counted.

    Attributes:
        answers: For each node.
        yes: Index to number, of positive answers.
        silent: Indexes of who was asked and gave no usable answer: it may have done it.
        absent: Indexes of who was down, so that nothing was sent.
        answered_count: How many answered.
    """

    __slots__ = ("absent", "answered_count", "answers", "silent", "yes")

    def __init__(self, answers: list[Answer]) -> None:
        """Count."""
        self.answers = answers
        self.yes: dict[int, int] = {}
        self.silent: list[int] = []
        self.absent: list[int] = []
        self.answered_count = 0
        for index, answer in enumerate(answers):
            if type(answer) is int:
                self.answered_count += 1
                if answer > 0:
                    self.yes[index] = answer
            elif isinstance(answer, list):
                self._take(answer)
            elif isinstance(answer, Absent):
                self.absent.append(index)
            elif answer is not None:
                self.silent.append(index)
        assert len(self.yes) <= self.answered_count
        assert self.answered_count + len(self.silent) + len(self.absent) <= len(answers), "a node counted twice"

    def _take(self, answer: list[Any]) -> None:
        del answer
        self.answered_count += 1

    def why(self, index: int, label: str) -> str:
        """Say why a node did not answer; empty if it did."""
        del label
        answer = self.answers[index]
        return str(answer) if isinstance(answer, LockError) else ""


class _Votes(_Count):
    """
    The answers to round one (see ``acquire.lua``). Only who may vote counts as having answered.

    Attributes:
        busy: From those who say that somebody else has the key there.
        strangers: Somebody may not vote, and nobody has looked into that.
    """

    __slots__ = ("busy", "strangers")

    def __init__(self, answers: list[Answer]) -> None:
        """Count."""
        self.busy: list[_Refusal] = []
        self.strangers = False
        super().__init__(answers)

    def _take(self, answer: list[Any]) -> None:
        if answer[0] == _STRANGER:
            self.strangers = True
        elif answer[0] != _WAITING:
            self.answered_count += 1
            _, left_ms, value, foreign = answer
            left = math.inf if left_ms < 0 else left_ms / 1000
            self.busy.append(_Refusal(left, (value.decode("utf-8", "replace"), foreign == 1)))

    def why(self, index: int, label: str) -> str:
        """Say why a node did not answer or may not vote; empty if it did."""
        answer = self.answers[index]
        if isinstance(answer, list) and answer[0] == _STRANGER:
            return f"{label} was restarted or has lost its data, and may not vote yet"
        if isinstance(answer, list) and answer[0] == _WAITING:
            left = cast("int", answer[1]) / 1000
            return f"{label} was restarted or has lost its data, and votes again in {left:.1f} s"
        return super().why(index, label)


@dataclass(slots=True)
class _Held:
    """
    What a grant stands on.

    Attributes:
        keys: Of the lock.
        value: Of the key, where it is ours.
        voters: Indexes of the nodes where it may be ours.
    """

    keys: LockKeys
    value: str
    voters: Collection[int]

    def unheard_count(self, count: _Count) -> int:
        """How many nodes may still have it as ours, and did not answer."""
        unheard_count = sum(index in self.voters for index in (*count.silent, *count.absent))
        assert unheard_count <= len(self.voters)
        return unheard_count


class _Bid:
    """
    What a request has at the nodes.

    Attributes:
        keys: Of the lock.
        ttl_ms: What it asks for.
        values: Of attempts that are not known to be taken back.
        places: In the queues of the nodes, as they were last given; "" where there is none.
        splits: How often in a row nobody had a majority.
    """

    __slots__ = ("_attempts", "keys", "places", "splits", "ttl_ms", "values")

    def __init__(self, keys: LockKeys, ttl_ms: int) -> None:
        self.keys = keys
        self.ttl_ms = ttl_ms
        self.values: list[str] = []
        self.places: Sequence[str] = ()
        self.splits = 0
        self._attempts = 0

    def next_value(self, owner: str) -> str:
        """Give the value for a new attempt: never that of another one."""
        self._attempts += 1
        value = owner if self._attempts == 1 else f"{owner}.{self._attempts}"
        assert value not in self.values, "a late message of another attempt would find it"
        self.values.append(value)
        return value

    def taken_back(self, value: str) -> None:
        """Note that nothing is left of an attempt, or will be when the nodes are reached."""
        if value in self.values:
            self.values.remove(value)

    def unused(self, value: str) -> None:
        """Note that an attempt set its value nowhere, and nothing of it is under way: it may be used for the next."""
        self.taken_back(value)
        self._attempts -= 1
        assert self._attempts >= 0

    def split(self, chance: float, free_after: float | None) -> Busy:
        """Give the answer when nobody has a majority: try again after a random time, or the contenders meet again."""
        longest = min(SPLIT_PAUSE_MAX, SPLIT_PAUSE_MIN * 2.0**self.splits)
        self.splits = min(self.splits + 1, 20)
        pause = longest * (0.2 + 0.8 * chance)
        assert 0 < pause <= SPLIT_PAUSE_MAX
        return Busy(pause if free_after is None else min(pause, free_after))


class _Found(NamedTuple):
    """Who holds a lock, and what the nodes where it does say of it (see ``holders.lua``)."""

    value: bytes
    replies: list[list[Any]]

    def holder(self, quorum: int) -> Holder:
        """Make one answer of it."""
        assert self.replies
        lefts = sorted((math.inf if reply[1] < 0 else reply[1] / 1000 for reply in self.replies), reverse=True)
        # Held as long as a majority has it; of nodes that do not answer nothing is known.
        left = lefts[min(quorum, len(lefts)) - 1]
        tokens = [int(reply[2]) for reply in self.replies if reply[2].isdigit()]
        metadata = next((reply[3] for reply in self.replies if reply[3]), b"")
        return Holder(
            _owner_of(self.value.decode("utf-8", "replace")),
            max(tokens) if tokens else None,
            None if left == math.inf else left,
            decode_metadata(metadata),
            max(reply[4] for reply in self.replies),
        )


def _owner_of(value: str) -> str:
    """Give the owner of a value: of whatever attempt it is; a foreign client's is its own."""
    own = _OWN_VALUE.fullmatch(value)
    return value if own is None else own[1]


def _vote(answer: Answer, value: bytes) -> Answer:
    """Say by an answer of ``holders.lua`` what a renewal would have said."""
    if not isinstance(answer, list):
        return answer
    if not answer:
        return _NOBODYS
    return _OURS if answer[0] == value else _TAKEN


def _reason(answer: LockError) -> LockError:
    return answer.reason if isinstance(answer, Absent) else answer


def _look_after(left: float, ttl: float) -> float:
    """
    Say after how many seconds a waiter looks that is not woken, when the holder has so many left.

    Half of it: the first in the queue may be stopped, a subscription dropped on the way, the queue gone with a node's
    data. A live holder renews at a third, so that is half a ttl at most. But at least a third of one's own ttl: for the
    last seconds of a holder that died nobody asks ever more often.
    """
    seconds = min(left, max(left / 2, ttl / 3))
    assert left / 2 <= seconds <= left
    return seconds


def _milliseconds(ttl: float) -> int:
    """Round a ttl up to whole milliseconds, Redis's unit."""
    # 0.1 * 3 is a little above 0.3: without the allowance that would be a millisecond more.
    ttl_ms = math.ceil(ttl * 1000 - 1e-6)
    assert ttl_ms > 0, "a key that never expires"
    return ttl_ms


def _fence_ms(ttl_ms: int) -> int:
    """How long the counters are kept after the last grant or renewal."""
    fence_ms = max(FENCE_MS_MIN, 10 * ttl_ms)
    assert fence_ms > ttl_ms, "a counter that does not outlive its lease"
    return fence_ms
