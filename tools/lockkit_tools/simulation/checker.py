"""
Judges a history: what must be true of every one, whatever was done to network, clocks, clients and server.

Three verdicts. *Valid*: nothing is wrong. *Invalid*: something is, each with the check that found it.
*Unknown*: the history cannot be judged, because it is incomplete or a check itself failed; unknown is never valid.

================ ==================================================================================================
check            what it says
================ ==================================================================================================
exclusion        no two leases of a lock are believed in at one instant, each by its own deadline
cover            a lease is believed in only while the server keeps it
tokens           no token twice; a later grant has the higher token
deadlines        no lease is handed out past its deadline, and none comes back after it
loss             the holder learns of a loss at the first look, and at the deadline if it does not look; told once
timeouts         acquire returns in time
progress         no lock stays free while somebody waits for it; nothing gets stuck or breaks
ownership        a request frees only what belongs to its own owner
leftovers        nothing stays at the server: not for ttl after a close, and not at all after the ttl
storage          a storage that compares tokens never accepts an older holder after a newer one
================ ==================================================================================================

Every check is a function without state from what happened (and the limits) to the problems found.

After two events `exclusion` and `cover` are not asked for, because no lock service could promise them: the server lost
its data while the older lease lived, and somebody broke the lock by force.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple

from lockkit.units import Instant
from lockkit_tools.simulation.evidence import Seen, SeenCall, SeenGrant, SeenLease, Span, read
from lockkit_tools.simulation.history import History, Quiet, Stuck

ROUNDING = 1e-6
"""Seconds by which times of different clocks may differ after conversion to true time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How late is too late in the schedule that was run. All in true seconds."""

    acquire_late: float  # ``acquire`` returns at most so long after its timeout (its client not being paused)
    clock_rates: float  # clients' clocks differ from true time by at most this share
    told_late: float  # a loss is noticed at most so long after the deadline (its client not being paused)
    kept_longer: float  # a lease that ends by its deadline stays at the server for at most so long after it
    # A lock that was given back is free for at most so long while a running client waits for it and nothing is wrong
    # with network and server.
    free_after_release: float
    free_after_expiry: float  # as before, for a lock whose lease ran out


class Problem(NamedTuple):
    """What a check found. `at` is the true time of the event that shows it."""

    check: str
    at: float
    text: str

    def __str__(self) -> str:
        """Write it in one line."""
        return f"{self.check} at {self.at:.6f}: {self.text}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``valid``, ``invalid`` with the problems, or ``unknown`` with the reason. True only if valid."""

    word: Literal["valid", "invalid", "unknown"]
    problems: tuple[Problem, ...] = ()
    reason: str = ""

    def __bool__(self) -> bool:
        """Unknown is not valid."""
        return self.word == "valid"

    def __str__(self) -> str:
        """Write all problems, one in a line."""
        return "\n".join([self.word + (f": {self.reason}" if self.reason else ""), *map(str, self.problems)])


def check(history: History, limits: Limits) -> Verdict:
    """Judge a history."""
    try:
        seen = read(history)
        problems = [problem for look in CHECKS.values() for problem in look(seen, limits)]
    except Exception as error:  # noqa: BLE001 - whatever it was, nothing is known about this history
        return Verdict("unknown", reason=f"{type(error).__name__}: {error}")
    if problems:
        return Verdict("invalid", tuple(sorted(problems, key=lambda problem: problem.at)))
    return Verdict("valid")


# -- the checks ----------------------------------------------------------------------------------------------------


def exclusion(seen: Seen, limits: Limits) -> Iterator[Problem]:
    """No two leases of a lock are believed in at one instant."""
    del limits
    by_name: dict[str, list[tuple[Span, SeenLease]]] = {}
    for lease in seen.leases.values():
        for span in believed(seen, lease):
            by_name.setdefault(lease.acquired.name, []).append((span, lease))
    for spans in by_name.values():
        spans.sort(key=lambda item: item[0][0])
        for index, ((_, end), earlier) in enumerate(spans):
            for (start, _), later in spans[index + 1 :]:
                if start >= end - ROUNDING:
                    break
                if later is not earlier and not _excused(seen, earlier, later):
                    text = f"{_who(later)} is believed in while {_who(earlier)} is, until {end:.6f}"
                    yield Problem("exclusion", start, text)


def cover(seen: Seen, limits: Limits) -> Iterator[Problem]:
    """A lease is believed in only while the server keeps it."""
    del limits
    for owner, lease in seen.leases.items():
        if owner not in seen.grants_of:
            text = f"{_who(lease)} was handed out, but the server granted nothing to it"
            yield Problem("cover", lease.acquired.at, text)
            continue
        grant = seen.grants_of[owner][0]
        freed = grant.freed
        if freed is not None and freed.how in {"broken", "lost"}:
            continue
        kept_until = grant.ends[-1][1] if freed is None else freed.at
        for start, end in believed(seen, lease):
            if start < grant.granted.at - ROUNDING or end > kept_until + ROUNDING:
                text = f"{_who(lease)} is believed in until {end:.6f}, the server kept it until {kept_until:.6f}"
                yield Problem("cover", kept_until, text)
        yield from _promises(lease, grant)


def _promises(lease: SeenLease, grant: SeenGrant) -> Iterator[Problem]:
    """Whenever one of the two changes, the client's deadline is not after the server's end: luck does not count."""
    for at in sorted({since for since, _ in [*lease.deadlines, *grant.ends]}):
        if lease.acquired.at <= at < lease.ended:
            deadline, end = _last(lease.deadlines, at), _last(grant.ends, at)
            if at < deadline and deadline > end + ROUNDING:
                text = f"the deadline of {_who(lease)} is {deadline:.6f}, but the server keeps it until {end:.6f}"
                yield Problem("cover", at, text)


def tokens(seen: Seen, limits: Limits) -> Iterator[Problem]:
    """No token twice; a later grant has the higher token."""
    del limits
    for name, grants in seen.grants.items():
        for before, after in pairwise(grants):
            if after.token <= before.token:
                text = f"lock {name!r}: token {after.token} was granted after {before.token}"
                yield Problem("tokens", after.at, text)
    for owner, grants_of_owner in seen.grants_of.items():
        first = grants_of_owner[0].granted
        for again in grants_of_owner[1:]:
            yield Problem("tokens", again.granted.at, f"{owner[:8]} was granted lock {first.name!r} a second time")
        lease = seen.leases.get(owner)
        if lease is not None and lease.acquired.token != first.token:
            yield Problem("tokens", lease.acquired.at, f"{_who(lease)} was granted with token {first.token}")
    yield from _token_order(seen)


def _token_order(seen: Seen) -> Iterator[Problem]:
    """As clients can see it, on one server or many: who calls after another has acquired gets a higher token."""
    newest: dict[str, SeenLease] = {}
    for lease in sorted(seen.leases.values(), key=lambda lease: lease.acquired.at):
        before = newest.get(lease.acquired.name)
        if before is not None and lease.acquired.token <= before.acquired.token:
            called = seen.calls[lease.acquired.call].called
            if called.at >= before.acquired.at or lease.acquired.token == before.acquired.token:
                text = f"{_who(lease)} was acquired after {_who(before)}"
                yield Problem("tokens", lease.acquired.at, text)
                continue
        newest[lease.acquired.name] = lease


def deadlines(seen: Seen, limits: Limits) -> Iterator[Problem]:
    """No lease is handed out past its deadline, and none comes back after it."""
    del limits
    for lease in seen.leases.values():
        if lease.acquired.until <= lease.acquired.at:
            yield Problem("deadlines", lease.acquired.at, f"{_who(lease)} was past its deadline when it was handed out")
        for (_, deadline), (at, _) in pairwise(lease.deadlines):
            if at > deadline + ROUNDING:
                yield Problem("deadlines", at, f"{_who(lease)} came back after its deadline {deadline:.6f}")


def loss(seen: Seen, limits: Limits) -> Iterator[Problem]:
    """The holder learns of a loss at the first look, and at the deadline if it does not look; told once."""
    for lease in seen.leases.values():
        yield from _looks(lease)
        yield from _noticed(seen, limits, lease)
        yield from _told(seen, limits, lease)


def _looks(lease: SeenLease) -> Iterator[Problem]:
    for look in lease.looks:
        deadline = _last(lease.deadlines, look.at)
        over = look.at >= deadline + ROUNDING or lease.ended < look.at
        if look.held and over:
            yield Problem("loss", look.at, f"{_who(lease)} looks held past its deadline {deadline:.6f} or its loss")
        if not look.held and look.at < min(deadline - ROUNDING, lease.ended):
            yield Problem("loss", look.at, f"{_who(lease)} looks lost before its deadline {deadline:.6f}")


def _noticed(seen: Seen, limits: Limits, lease: SeenLease) -> Iterator[Problem]:
    client = lease.acquired.client
    deadline = lease.deadlines[-1][1]
    latest = seen.after_pauses(client, deadline, limits.told_late)
    if lease.ended > latest and min(seen.alive_until(client), seen.ended) > latest and not lease.dropped:
        yield Problem("loss", latest, f"nobody noticed that {_who(lease)} passed its deadline {deadline:.6f}")


def _told(seen: Seen, limits: Limits, lease: SeenLease) -> Iterator[Problem]:
    reasons = [told.reason for told in lease.told]
    lost = lease.lost
    if lost is None:
        if reasons:
            yield Problem("loss", lease.told[0].at, f"{_who(lease)} was not lost, but its holder was told {reasons}")
        return
    client = lease.acquired.client
    latest = seen.after_pauses(client, lost.at, limits.told_late)
    if len(reasons) > 1 or (reasons and (reasons[0] != lost.why or lease.told[0].at > latest)):
        text = f"the holder of {_who(lease)}, lost ({lost.why}), was told {reasons} at {lease.told[0].at:.6f}"
        yield Problem("loss", lease.told[-1].at, text)
    if lease.acquired.told_wanted and not reasons and min(seen.alive_until(client), seen.ended) > latest:
        yield Problem("loss", latest, f"the holder of {_who(lease)}, lost ({lost.why}), was not told")


def timeouts(seen: Seen, limits: Limits) -> Iterator[Problem]:
    """Acquire returns in time."""
    for call in seen.calls.values():
        called = call.called
        if called.timeout is None:
            continue
        due = called.at + called.timeout * (1 + limits.clock_rates)
        latest = seen.after_pauses(called.client, due, limits.acquire_late)
        returned = inf if call.end is None else call.end.at
        if returned > latest and min(seen.alive_until(called.client), seen.ended) > latest:
            text = f"{_caller(call)} with timeout {called.timeout:.6f} returned at {returned:.6f}, not by {latest:.6f}"
            yield Problem("timeouts", latest, text)


def progress(seen: Seen, limits: Limits) -> Iterator[Problem]:
    """No lock stays free while somebody waits for it; nothing gets stuck or breaks."""
    for bug in seen.bugs:
        what = "did not end" if isinstance(bug, Stuck) else f"failed: {bug.error}"
        yield Problem("progress", bug.at, f"{bug.task} {what}")
    for call in seen.calls.values():
        waited = _in_calm(seen, call)
        for span, how in seen.free[call.called.name]:
            limit = limits.free_after_expiry if how in {"expired", "lost"} else limits.free_after_release
            for start, end in (_overlap(part, span) for part in waited):
                if end - start > limit:
                    text = f"lock {call.called.name!r} was free ({how}) until {end:.6f}, but {_caller(call)} waited"
                    yield Problem("progress", start, text)


def _in_calm(seen: Seen, call: SeenCall) -> list[Span]:
    """When a call waited, without the times at which its client was stopped, or network or server were not well."""
    client = call.called.client
    returned = inf if call.end is None else call.end.at
    spans = [(call.called.at, min(returned, seen.alive_until(client), seen.ended))]
    for hindrance in [*seen.faults, *seen.pauses.get(client, ())]:
        spans = [part for span in spans for part in _without(span, hindrance)]
    return spans


def ownership(seen: Seen, limits: Limits) -> Iterator[Problem]:
    """A request frees only what belongs to its own owner."""
    del limits
    for freed in seen.freed:
        if freed.how in {"released", "undone"} and freed.by != freed.owner:
            yield Problem("ownership", freed.at, f"the lease of {freed.owner} was {freed.how} by {freed.by}")


def leftovers(seen: Seen, limits: Limits) -> Iterator[Problem]:
    """Nothing stays at the server: not for ttl after a close, and not at all after the ttl."""
    if not seen.quiet or not seen.quiet[-1].final:
        text = "nobody looked at the end what is left at the server"
        yield Problem("leftovers", seen.ended, text)
    for quiet in seen.quiet:
        for client, owner in [*quiet.holders, *quiet.waiters]:
            if quiet.final or not _may_stay(seen, limits, quiet, (client, owner)):
                yield Problem("leftovers", quiet.at, f"{owner[:8]} of {client} is left at the server")


def _may_stay(seen: Seen, limits: Limits, quiet: Quiet, left: tuple[str, str]) -> bool:
    """Tell whether only the ttl could remove it."""
    client, owner = left
    if client in seen.crashed or client not in seen.closed or not seen.closed[client].calm:
        return True
    if owner in seen.undone:
        # The request that made it had been under way for long, and arrived after the one that undid it.
        waits = all(owner != holder for _, holder in quiet.holders)
        return waits or seen.undone[owner] < seen.grants_of[owner][-1].granted.at
    lease = seen.leases.get(owner)
    if lease is None:
        return False
    unanswered = any(one.outcome == "BackendUnavailable" for one in lease.released)
    # The deadline is before the server's end by as much as the answer took.
    expired = (
        lease.lost is not None and seen.grants_of[owner][0].ends[-1][1] < lease.deadlines[-1][1] + limits.kept_longer
    )
    return lease.dropped or unanswered or expired


def storage(seen: Seen, limits: Limits) -> Iterator[Problem]:
    """A storage that compares tokens never accepts an older holder after a newer one."""
    del limits
    newest: dict[str, int] = {}
    for write in seen.writes:
        if write.accepted:
            if write.token < newest.get(write.name, 0):
                text = f"a write with token {write.token} came after one with {newest[write.name]}"
                yield Problem("storage", write.at, text)
            newest[write.name] = write.token


CHECKS: dict[str, Callable[[Seen, Limits], Iterator[Problem]]] = {
    look.__name__: look
    for look in (
        exclusion, cover, tokens, deadlines, loss, timeouts, progress, ownership, leftovers, storage,
    )
}  # fmt: skip


# -- spans of time -------------------------------------------------------------------------------------------------


def believed(seen: Seen, lease: SeenLease) -> list[Span]:
    """When the holder may believe in its lease: from a change of the deadline to that deadline or the next change."""
    end = min(lease.ended, seen.alive_until(lease.acquired.client), seen.ended)
    changes = [since for since, _ in lease.deadlines[1:]]
    spans: list[Span] = []
    for (since, deadline), changed in zip(lease.deadlines, [*changes, end], strict=True):
        until = min(deadline, changed)
        if spans and spans[-1][1] == since:
            spans[-1] = (spans[-1][0], until)
        elif until > since:
            spans.append((since, until))
    return spans


def _excused(seen: Seen, one: SeenLease, other: SeenLease) -> bool:
    """Tell whether the server forgot the older of the two before it granted the newer, or was told to by force."""
    owners = one.acquired.owner, other.acquired.owner
    if not all(owner in seen.grants_of for owner in owners):
        return False
    older, newer = sorted(
        (seen.grants_of[owner][0] for owner in owners), key=lambda grant: (grant.granted.at, grant.granted.token)
    )
    return older.freed is not None and older.freed.how in {"broken", "lost"} and older.freed.at <= newer.granted.at


def _last(changes: list[Span], at: Instant) -> float:
    """The value of the last change that was not after `at`."""
    return [value for since, value in changes if since <= at][-1]


def _overlap(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


def _without(span: Span, hole: Span) -> list[Span]:
    """What is left of a span outside another."""
    parts = [(span[0], min(span[1], hole[0])), (max(span[0], hole[1]), span[1])]
    return [part for part in parts if part[1] > part[0]]


def _who(lease: SeenLease) -> str:
    acquired = lease.acquired
    return f"the lease {acquired.owner[:8]} of {acquired.client} (lock {acquired.name!r}, token {acquired.token})"


def _caller(call: SeenCall) -> str:
    return f"call {call.called.call} of {call.called.client}"
