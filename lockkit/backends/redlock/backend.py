"""
Locks on several independent Redis or Valkey nodes, held by a majority of them: Redlock.

Algorithm: the lock is the same string key ``PREFIX:NAME`` on every node, set with ``NX PX`` by one round to all nodes.
A client that has it on a majority holds it, for its ttl less the time that this took. With the key goes a token, for
which a second round is needed now and then::

    round 1   every node: take the key; lowest = max(last token + 1, server time in µs)
              if lowest <= token that the client proposes <= time + 10 ms: write that as the last token, answer it
              otherwise answer lowest
              a majority wrote it: granted
    round 2   nodes that said yes: write the highest answer as the last token, if the key still has the value
              a majority wrote it: granted

Why the tokens increase: A was granted with token t, so a majority wrote t while the lock was A's there. B, later, has
a majority too, and the two share a node. There B took the key after A's write (the key was A's at the write), so its
answer to B was above t; and B's token is no lower than any answer that it counts in round 1. B asks only those in round
2 whose answer it counted, and is granted its own proposal only if no answer is higher.

What a client proposes is the highest of the nodes' times, by its monotonic clock, as they were when it last needed
round 2. A proposal that is wrong, for whatever reason, costs a second round.

The value of the key is the owner, and with every further attempt of a waiter ``OWNER.2``, ``OWNER.3``, …::

    A's attempt 1: node 3 is slow; no majority; A's release for node 3 is on its way
    A's attempt 2: granted by nodes 1, 2 and 3
    the release of attempt 1 arrives at node 3, and would free A's lock there: nodes 3, 4 and 5 grant it to B

With a value for each attempt, a late message matches no other attempt.

Each node has, beside the lock's key, those of `lockkit.backends.redis.backend` (``fence``, ``queue``, ``broken``), and
one mark that says whether it may vote (`lockkit.backends.redlock.delayed_restart`).

Waiting requests have entries in the queues of all nodes. A release notifies the first one of each node, mostly the
same; nothing is reserved for it, so the order of arrival is not kept (``fair=False``).

Requirements: Redis 6.2 or Valkey, no replicas of each other. Known limits: a second holder is possible if more than a
minority loses its data, or if clocks run apart. Tokens protect storage then.

Source: "Distributed Locks with Redis", Redis documentation; for its limits Martin Kleppmann, "How to do distributed
locking" (2016).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar

import redis
import redis.asyncio

from lockkit import validation
from lockkit.backend import (
    CALL_SECONDS,
    SPACES,
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    LockBackend,
    NamesPage,
    Option,
    Renewal,
    Renewed,
    Request,
    Unknown,
    seconds_left,
    unproven,
)
from lockkit.backends.redis import options as redis_options
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.keys import KeysByName, fence_milliseconds, ttl_milliseconds
from lockkit.backends.redis.listing import Scan
from lockkit.backends.redlock.delayed_restart import DelayedRestart
from lockkit.backends.redlock.network import Nodes
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
    Answer,
    LockKeys,
    NodeDown,
)
from lockkit.backends.redlock.votes import (
    BROKEN,
    FREE,
    TAKEN,
    Attempts,
    Count,
    Found,
    Held,
    as_renewal,
    find_holder,
)
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError, NoQuorum
from lockkit.runtime import Kind
from lockkit.units import Instant, Seconds
from lockkit.url import Url

log = logging.getLogger("lockkit")

NODES_MAX = 9
"""Each costs a message per call, and nine already survive the failure of four."""

NODE_TIMEOUT = 0.5
"""Seconds that a node has for an answer. Longer delays callers once when a node hangs; shorter gives up on a busy
node."""

CONNECT_SECONDS_MIN = 0.05
"""Least time in which to wait once more for nodes that are being connected. Longer reports nodes that are up as
missing; shorter has no time left for the call."""

MARGIN_US = 1000
"""How far a proposed token is above what the nodes' times should be. More: nodes whose clocks are a little behind the
others refuse it. Less: nodes that are reached a little later than last time refuse it."""

RESTORE_SHARE = 0.25
"""Share of the ttl, from the begin of a renewal on, in which nodes get back lost keys. More may cost the lease
if such a node hangs; less gives fewer leases theirs."""

UNSUBSCRIBED_POLL_SECONDS = 0.25
"""Pause between two attempts when no node allows a subscription (rights to channels)."""

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "prefix": Option(
            redis_options.parse_prefix, "First part of all keys. Clients that share locks use the same.", "lockkit"
        ),
        "db": Option(
            validation.parse_int(0, 2**31 - 1), "Number of the database on all nodes; URLs give it in the path."
        ),
        "fencing": Option(
            validation.parse_bool,
            "Tokens increase, for which some acquisitions take a second round. Off: tokens may repeat or decrease.",
            True,  # noqa: FBT003 - a default
        ),
        "durable": Option(
            validation.parse_bool,
            "Nodes that restart vote at once. Only for nodes that lose no data: appendonly yes, appendfsync always.",
            False,  # noqa: FBT003
        ),
        "idle_ttl": redis_options.IDLE_TTL,
        "node_timeout": Option(validation.parse_ttl, "Seconds that each node has for an answer.", NODE_TIMEOUT),
    }
)


class RedlockBackend(LockBackend):
    """Processes that reach the same set of independent Redis or Valkey nodes."""

    capabilities = Capabilities(
        crash_release="ttl",
        min_ttl=0.01,
        ttl_granularity=0.001,
        fair=False,
        wakeup="push",
        token_source="max over a majority of (last + 1, server time in µs), written back to a majority",  # noqa: S106
        survives_node_loss=True,
        survives_data_loss=True,
        shared_mode=False,
        clock_assumption="the nodes' and clients' clocks run at the same rate within 1 %; for tokens after nodes have "
        "lost data, the nodes' times of day differ by less than the longest ttl",
        waiters_visible=True,
        scope="network",
        caveat="All nodes losing their data together, or clocks that run apart, can lead to a second holder: guard "
        "storage by token.",
        listing=True,
        permits="slots",
    )
    options: ClassVar[Mapping[str, Option]] = OPTIONS

    def __init__(self, url: str, nodes: Nodes, options: Mapping[str, Any], host: Host) -> None:
        self._url = url
        self._nodes = nodes
        self._runtime = host.runtime
        self._prefix: str = options["prefix"]
        self._fencing: bool = options["fencing"]
        self._idle_ms = ttl_milliseconds(options["idle_ttl"])
        self._nodes_count = len(nodes.labels)
        self._quorum = self._nodes_count // 2 + 1
        assert self._nodes_count < 2 * self._quorum, "two majorities that share no node"
        self._listening = False
        self._no_entries = [""] * self._nodes_count
        self._keys = KeysByName(partial(LockKeys, self._prefix))
        self._mark_keys = LockKeys(self._prefix, "")
        self._ahead_us: int | None = None
        self._delayed_restart = DelayedRestart(nodes, self._mark_keys, host.runtime, durable=options["durable"])
        self._advise()

    def _advise(self) -> None:
        count = self._nodes_count
        if count < 3:  # noqa: PLR2004 - the fewest of which one may fail
            log.warning(
                "%s names fewer than 3 nodes (%d): no lock can be taken if one fails; use 3 or 5", self._url, count
            )
        elif count % 2 == 0:
            log.warning(
                "%s has %d nodes and survives no more failures than %d would, and votes can tie: use %d or %d",
                self._url, count, count - 1, count - 1, count + 1,
            )  # fmt: skip

    @classmethod
    def driver_options(cls) -> Mapping[str, Option]:
        """See `LockBackend.driver_options`: the keyword arguments of redis-py's connections."""
        known = redis_options.driver_options()
        # `node_timeout` sets both.
        return {name: known[name] for name in known if name not in {"socket_timeout", "socket_connect_timeout"}}

    @classmethod
    def examiner(cls, url: Url) -> str:
        del url
        return "lockkit.backends.redlock.examine"

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> RedlockBackend:
        return cls(url.safe_text, Nodes(host, url_targets(url, options, host.runtime.kind), options), options, host)

    @classmethod
    def adopt(cls, client: object, options: Mapping[str, Any], host: Host) -> RedlockBackend | None:
        """See `LockBackend.adopt`: a list of redis-py's clients, sync or async as the runtime."""
        kind = host.runtime.kind
        client_class = redis.asyncio.Redis if kind == "asyncio" else redis.Redis
        if not isinstance(client, (list, tuple)):
            return None
        redis_options.check_async(client, kind)
        if not client or not all(isinstance(one, client_class) for one in client):
            return None
        # lockkit opens its own connections beside the clients' pools: those have time limits that suit a single server,
        # and lockkit must know whether a node is up before it sends anything.
        targets = [Target.lent(one.connection_pool, options["node_timeout"]) for one in client]
        scheme = "redlocks" if all(target.form == "tls" for target in targets) else "redlock"
        url = f"{scheme}://{','.join(target.label for target in targets)}"
        _check_nodes(targets, url)
        redis_options.warn_of_unverified(targets, kind, url)
        return cls(url, Nodes(host, targets, options), options, host)

    @property
    def url(self) -> str:
        return self._url

    # -- acquire ---------------------------------------------------------------------------------------------------

    async def try_acquire(self, request: Request) -> Grant | Busy:
        attempts: Attempts | None = request.state
        if attempts is None:
            attempts = request.state = Attempts(self._keys[request.name], ttl_milliseconds(request.ttl))
            self._delayed_restart.note_ttl(attempts.ttl_ms)
        by = min(request.answer_by, self._runtime.now() + CALL_SECONDS)
        outcome = await self._attempt(request, attempts, by)
        while isinstance(outcome, Count) and outcome.connecting and self._runtime.now() < by - CONNECT_SECONDS_MIN:
            outcome = await self._attempt(request, attempts, by)
        if isinstance(outcome, Count) and outcome.not_admitted:
            # The very first use of the nodes, or a restart that no client has dealt with.
            admitted = self._delayed_restart.run_soon()
            await admitted.wait(self._round_until(by) - self._runtime.now())
            outcome = await self._attempt(request, attempts, by)
        if isinstance(outcome, Count):
            raise self._no_quorum(outcome)
        return outcome

    def _round_until(self, by: Instant) -> float:
        """Return the time limit of one of several rounds: nodes that hang leave a third of the time to the next."""
        now = self._runtime.now()
        return now + seconds_left(by, now) * 2 / 3

    async def _attempt(self, request: Request, attempts: Attempts, by: Instant) -> Grant | Busy | Count:
        """Ask for the votes once. Return the votes if fewer than a majority may vote."""
        keys, value = attempts.keys, attempts.next_value(request.owner)
        queued = request.queue and self._listening
        attempts.entries = self._nodes.queue_entries(request) if queued else self._no_entries
        now_us = int(self._runtime.now() * 1e6)
        proposed = 0 if self._ahead_us is None else now_us + self._ahead_us + MARGIN_US
        arguments = (
            value, attempts.ttl_ms, fence_milliseconds(attempts.ttl_ms, self._idle_ms), request.metadata,
            proposed if self._fencing else "",
        )  # fmt: skip
        answers = await self._nodes.ask(
            ACQUIRE, keys, arguments, last_arguments=attempts.entries, until=self._round_until(by)
        )
        votes = Count(answers)
        if votes.not_admitted and votes.answered_count >= self._quorum:
            # The others are enough, whatever they say; the caller need not wait for that.
            self._delayed_restart.run_soon()
        if len(votes.yes) < self._quorum:
            await self._take_back(attempts, value, votes, by)
            return votes if votes.answered_count < self._quorum else attempts.busy(votes, self._quorum, self._runtime)
        tokens = list(votes.yes.values())
        token, refused = max(tokens), None
        # The first always: while a set is started, a node may forget that it has voted (models/redlock_restart.pml).
        checked = self._fencing or self._ahead_us is None
        if checked and not (token == proposed and tokens.count(token) >= self._quorum):
            # With the way there, which the next proposal has before it too.
            self._ahead_us = token - now_us
            refused = await self._write_token(request, value, token, votes, by)
        if refused is None:
            self._nodes.forget(request)
            # A node that did not answer may have voted too, which a renewal may find out.
            state = Held(keys, value, frozenset([*votes.yes, *votes.silent]), request.metadata)
            return Grant(request.name, request.owner, token, attempts.ttl_ms / 1000, None, state)
        await self._take_back(attempts, value, votes, by)
        if refused.answered_count < self._quorum:
            raise self._no_quorum(refused)
        return attempts.split(self._runtime)

    async def _write_token(self, request: Request, value: str, token: int, votes: Count, by: Instant) -> Count | None:
        """Run round two. Return None if a majority has written the token, otherwise the nodes' answers."""
        attempts: Attempts = request.state
        arguments = value, token, fence_milliseconds(attempts.ttl_ms, self._idle_ms), request.metadata
        until = self._round_until(by)
        written = Count(await self._nodes.ask(FENCE, attempts.keys, arguments, only=votes.yes, until=until))
        assert written.yes.keys() <= votes.yes.keys(), "a token written where round one has read none"
        return None if len(written.yes) >= self._quorum else written

    async def _take_back(self, attempts: Attempts, value: str, votes: Count, by: Instant) -> None:
        """Take back the votes of an attempt that did not win, also those of nodes that did not answer."""
        voted = [*votes.yes, *votes.silent]
        if voted:
            seconds = attempts.ttl_ms / 1000
            # Others may have seen a majority, which they take for a holder who notifies them.
            op = RELEASE if len(voted) >= self._quorum else UNDO
            await self._nodes.ask(op, attempts.keys, (value,), only=voted, send_later_seconds=seconds, until=by)
        attempts.taken_back(value, unused=not voted)

    def _majority(self, answers: list[Answer]) -> Count:
        """Count the answers to an operation."""
        count = Count(answers)
        if count.answered_count < self._quorum:
            raise self._no_quorum(count)
        return count

    def _no_quorum(self, count: Count, found: str | None = None) -> LockError:
        """Say which nodes did not answer, and why; `found` is what is known without them."""
        if found is None:
            found = f"{count.answered_count} of {counted(self._nodes_count)} answered"
        reasons = (count.why(index, label) for index, label in enumerate(self._nodes.labels))
        message = f"{found}, and a majority of {self._quorum} is needed: {'; '.join(filter(None, reasons))}"
        errors = [_reason(answer) for answer in count.answers if isinstance(answer, LockError)]
        wrong = [error for error in errors if isinstance(error, ConfigurationError)]
        if self._nodes_count - len(wrong) < self._quorum:
            error: LockError = ConfigurationError(message)
            error.__cause__ = wrong[0]
            return error
        error = NoQuorum(message)
        error.sent = any(not isinstance(answer, NodeDown) for answer in count.answers)
        error.__cause__ = (errors[0].__cause__ or errors[0]) if errors else None
        return error

    # -- waiting ---------------------------------------------------------------------------------------------------

    async def wait(self, request: Request, busy: Busy, until: Instant) -> None:
        assert request.queue, "a single try does not wait"
        attempts: Attempts = request.state
        if attempts.splits or any(attempts.entries):
            await super().wait(request, busy, until)
            return
        # Subscribe, and return at once: the next attempt enters the queues.
        self._listening = await self._nodes.listen(min(until, request.answer_by))
        if not self._listening:
            await super().wait(request, busy, min(until, self._runtime.now() + UNSUBSCRIBED_POLL_SECONDS))

    async def abandon(self, request: Request) -> None:
        attempts: Attempts | None = request.state
        if attempts is None:
            return
        by = min(request.answer_by, self._runtime.now() + CALL_SECONDS)
        seconds = attempts.ttl_ms / 1000
        for value in tuple(attempts.values):
            # It may have been granted: then waiters are to be notified, as by a release.
            until = self._round_until(by)
            await self._nodes.ask(RELEASE, attempts.keys, (value,), send_later_seconds=seconds, until=until)
            attempts.taken_back(value)
        entries = attempts.entries
        queued = [index for index, entry in enumerate(entries) if entry]
        if queued:
            await self._nodes.ask(
                ABANDON, attempts.keys, (), last_arguments=entries, only=queued, send_later_seconds=seconds, until=by
            )
            attempts.entries = self._no_entries
        assert not attempts.values, "votes that are not taken back"
        assert not any(attempts.entries), "queue entries that are not removed"
        self._nodes.forget(request)
        request.state = None

    # -- held ------------------------------------------------------------------------------------------------------

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        """See `LockBackend.renew`. Needs a majority with the value; then a node that lost the key gets it back."""
        calls, began = [], self._runtime.now()
        for grant in grants:
            held: Held = grant.state
            ttl_ms = ttl_milliseconds(grant.ttl)
            self._delayed_restart.note_ttl(ttl_ms)
            calls.append((held.keys, (held.value, ttl_ms, fence_milliseconds(ttl_ms, self._idle_ms))))
        by_node = await self._nodes.ask_many(RENEW, calls)
        assert len(by_node) == self._nodes_count, "a majority of fewer nodes is none"
        incomplete: list[tuple[Grant, list[int]]] = []
        outcomes: list[Renewal] = []
        for grant, *answers in zip(grants, *by_node, strict=True):
            outcomes.append(self._verdict(grant.state, answers))
            if FREE in answers and type(outcomes[-1]) is Renewed:
                incomplete.append((grant, [index for index, answer in enumerate(answers) if answer == FREE]))
        if incomplete:
            await self._restore(incomplete, began)
        return outcomes

    async def _restore(self, incomplete: Sequence[tuple[Grant, list[int]]], began: Instant) -> None:
        """
        Give leases that a majority has just renewed their keys on other nodes, where those are free.

        A node that lost the key (its data, or it was down) votes as in an acquisition: only if it may, and has no other
        holder. So this vote excludes others like any other, from the next renewal on, which finds and counts it.

        But this message creates a key, which a lock that was released, broken or deleted must not get back. So a
        majority must have said that it has the key: if the message is late, and the lease over, that majority is free.
        And a release that overtakes the message is sent again.
        """
        not_voting: set[int] = set()
        for grant, indexes in incomplete:
            held: Held = grant.state
            until = began + grant.ttl * RESTORE_SHARE
            only = [] if held.ended else [index for index in indexes if index not in not_voting]
            if not only or self._runtime.now() >= until:
                continue
            assert len(only) <= self._nodes_count - self._quorum, "a majority has the key"
            ttl_ms = ttl_milliseconds(grant.ttl)
            fence_ms = fence_milliseconds(ttl_ms, self._idle_ms)
            # The token is too old for a node to write it now, unless in round two.
            arguments = held.value, ttl_ms, fence_ms, held.metadata, grant.token
            votes = Count(
                await self._nodes.ask(
                    ACQUIRE, held.keys, arguments, last_arguments=self._no_entries, only=only, until=until
                )
            )
            held.voters = frozenset([*held.voters, *votes.yes, *votes.silent])
            if votes.yes:
                written = held.value, grant.token, fence_ms, held.metadata
                await self._nodes.ask(FENCE, held.keys, written, only=votes.yes, until=until)
            if held.ended:
                await self._nodes.ask(
                    RELEASE, held.keys, (held.value,), only=only, send_later_seconds=grant.ttl, until=until
                )
            not_voting.update(votes.not_voting)
            if votes.not_admitted:
                self._delayed_restart.run_soon()

    def _verdict(self, held: Held, answers: list[Answer]) -> Renewal:
        """Decide by the answers of the nodes, each as of ``renew.lua``. A node that does not answer does not vote."""
        count = Count(answers)
        unknown_count = held.unknown_count(count)
        if len(count.yes) >= self._quorum:
            return Renewed()
        if len(count.yes) + unknown_count >= self._quorum:
            found = f"{len(count.yes)} of {counted(self._nodes_count)} say that this lease holds the lock"
            return Unknown(self._no_quorum(count, found))
        assert len(held.voters) >= self._quorum, "a lease that never had a majority"
        if answers.count(BROKEN):
            return Gone("broken")
        return Gone("taken" if answers.count(TAKEN) >= self._quorum else "gone")

    async def release(self, grant: Grant, answer_by: float = inf) -> bool:
        """See `LockBackend.release`. Nodes that do not answer get it again when they are reached."""
        held: Held = grant.state
        assert held.value.startswith(grant.owner), "the votes of another owner"
        held.ended = True  # before anything is sent: see `_restore`
        answers = await self._nodes.ask(
            RELEASE, held.keys, (held.value,), send_later_seconds=grant.ttl, until=answer_by
        )
        count = self._majority(answers)
        return len(count.yes) + held.unknown_count(count) >= self._quorum

    async def release_all(self, grants: Sequence[Grant], answer_by: float) -> None:
        """See `LockBackend.release_all`. One pipeline per node."""
        calls = []
        for grant in grants:
            held: Held = grant.state
            held.ended = True
            calls.append((held.keys, (held.value,)))
        by_node = await self._nodes.ask_many(RELEASE, calls, until=answer_by, last=True)
        counts = [Count(list(answers)) for answers in zip(*by_node, strict=True)]
        failed = [count for count in counts if count.answered_count < self._quorum]
        if failed:
            raise self._no_quorum(failed[-1])

    async def holders(self, name: str) -> Sequence[Holder]:
        found = await self._find_holder(self._keys[name])
        return [] if found is None else [found.holder(self._quorum)]

    async def _find_holder(self, keys: LockKeys) -> Found | None:
        count = self._majority(await self._nodes.ask(HOLDERS, keys, ()))
        return find_holder(count, self._quorum)

    async def confirm(self, grant: Grant) -> Gone | None:
        """See `LockBackend.confirm`. Unlike in `holders`, nodes that do not answer do not count."""
        held: Held = grant.state
        value = held.value.encode()
        answers = await self._nodes.ask(HOLDERS, held.keys, ())
        outcome = self._verdict(held, [as_renewal(answer, value) for answer in answers])
        if isinstance(outcome, Unknown):
            raise outcome.error
        return outcome if isinstance(outcome, Gone) else None

    async def break_lock(self, name: str) -> bool:
        """
        See `LockBackend.break_lock`. Breaks the lease that was found, not a later one.

        With an empty prefix, applications may have keys that look like those of locks.
        """
        return await self._break(name, proven=not self._prefix)

    async def break_unproven(self, name: str) -> bool:
        return await self._break(name, proven=False)

    async def _break(self, name: str, *, proven: bool) -> bool:
        keys = self._keys[name]
        found = await self._find_holder(keys)
        if found is None:
            return False
        if proven and not found.proven:
            raise unproven(self._url, name, f"its keys {keys.lock!r} have neither an expiry nor a record")
        return bool(self._majority(await self._nodes.ask(BREAK, keys, (found.value, self._idle_ms))).yes)

    async def names(self, prefix: str, after: NamesPage | None = None) -> NamesPage:
        """See `LockBackend.names`. Names from the keys of some nodes, each kept if a majority may have a holder."""
        wanted = self._nodes_count - self._quorum + 1
        listing: _Listing = _Listing(self._nodes, wanted, self._prefix, prefix) if after is None else after.next
        candidates = await listing.read()
        calls = [(LockKeys(self._prefix, name), ()) for name in candidates]
        answers = await self._nodes.ask_many(HOLDERS, calls) if calls else []
        names = [
            name
            for name, *votes in zip(candidates, *answers, strict=True)
            if find_holder(self._majority(votes), self._quorum) is not None
        ]
        listing.candidates = None
        return NamesPage(names, None if listing.ended else listing)

    async def erase(self) -> None:
        for space in ("", *(f"+{space}" for space in SPACES)):
            await self._nodes.erase(f"{self._prefix}{space}")

    async def ping(self) -> None:
        """See `LockBackend.ping`: a majority answers."""
        self._majority(await self._nodes.ask(LOOK, self._mark_keys, ()))

    async def close(self) -> None:
        await self._nodes.close()


class _Listing:
    """
    One listing: some nodes whose keys are read, and the names that are to be voted on.

    A lock that a majority of q of n nodes has is at one of any n - q + 1 nodes. So it is enough to list the keys of so
    many nodes, and q - 1 may be down.
    """

    def __init__(self, nodes: Nodes, wanted: int, prefix: str, name_prefix: str) -> None:
        servers = [node.server for node in nodes.all]
        self._needed = f"{wanted} of {counted(len(servers))}"
        self._scan, self._others = Scan(prefix, name_prefix, servers[:wanted]), servers[wanted:]
        self._failures: list[str] = []
        self.candidates: Sequence[str] | None = None  # names of the last page that await a vote; None: there are none
        self.ended = False  # that page was the last one

    async def read(self) -> Sequence[str]:
        """Return the candidates, from some keys of a node if there are none; another node follows one that fails."""
        if self.candidates is None:
            try:
                page = await self._scan.page()
            except BackendUnavailable as error:
                failures = [*self._failures, str(error)]
                if not self._others:
                    message = f"the keys of {self._needed} are needed: {'; '.join(failures)}"
                    raise NoQuorum(message) from error.__cause__ or error
                self._failures = failures
                self._scan.replace_node(self._others.pop(0))
                return []
            self.candidates, self.ended = page.names, page.next is None
        return self.candidates


def url_targets(url: Url, options: Mapping[str, Any], kind: Kind) -> list[Target]:
    """
    Return the nodes of a URL.

    ConfigurationError: The URL is incomplete or has parts that do not belong there, or redis-py does not accept its
    options.
    """
    timeout: Seconds = options["node_timeout"]
    arguments = {name: value for name, value in options.items() if name not in OPTIONS}
    arguments |= {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    arguments["db"] = redis_options.database(url, url.path.strip("/"), options)
    targets = [Target.of(host, arguments, tls=url.base == "redlocks") for host in url.hosts]
    _check_nodes(targets, url.safe_text)
    redis_options.check_arguments(url, targets[0], kind)
    return [replace(target, tls=targets[0].tls) for target in targets]


def _check_nodes(targets: Sequence[Target], url: str) -> None:
    labels = [target.label for target in targets]
    problem = ""
    if not 1 <= len(labels) <= NODES_MAX:
        problem = f"it has {len(labels)} nodes, and must have 1 to {NODES_MAX}, preferably 3 or 5"
    elif len(set(labels)) < len(labels):
        repeated = next(label for label in labels if labels.count(label) > 1)
        problem = f"{repeated} is repeated, and must not vote twice: name independent servers"
    if problem:
        raise redis_options.wrong_url(url, problem)


def counted(count: int) -> str:
    """Give a number of nodes for people."""
    return f"{count} node{'' if count == 1 else 's'}"


def _reason(answer: LockError) -> LockError:
    return answer.reason if isinstance(answer, NodeDown) else answer
