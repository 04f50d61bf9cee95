"""Judges a scene: which promise held, which broke, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Final, Literal

from lockkit_tools.lab.record import Grant, Record
from lockkit_tools.lab.scenario import TTL, Scene

Word = Literal["kept", "contained", "broken"]
"""
``kept``: every promise held. ``contained``: the lock alone did not protect, but the storage refused what was too late.
``broken``: something went wrong for the application.
"""

HEADLINES: Final[dict[Word, str]] = {
    "kept": "KEPT: every promise held.",
    "contained": "CONTAINED: the lock did not hold, but storage refused the late write.",
    "broken": "BROKEN: the lock did not protect.",
}


WAIT_SECONDS = 0.03 * TTL
"""A wait says something about the promise if it is longer than this. Shorter ones are the network."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise of a lock, and whether it held."""

    name: str
    text: str
    state: Literal["held", "broken", "none"]  # ``none``: the scene does not ask for it
    why: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """All promises, one word, and what to change."""

    word: Word
    promises: tuple[Promise, ...]
    advice: tuple[str, ...]

    @property
    def headline(self) -> str:
        """Say the word in a sentence."""
        broken = [promise.name for promise in self.promises if promise.state == "broken"]
        if self.word == "contained" and "late" not in broken:
            return "CONTAINED: two clients held the lock, but storage refused the older one."
        if self.word == "contained":
            return HEADLINES["contained"]
        if self.word == "broken" and "data" in broken:
            return "BROKEN: a newer write was lost."
        if self.word == "broken" and broken == ["free"]:
            return "BROKEN: the lock is never free again."
        if self.word == "broken" and "one" in broken:
            return "BROKEN: two clients held the lock at the same time."
        return HEADLINES[self.word]


def judge(scene: Scene, record: Record) -> Verdict:
    """Judge what happened in a scene."""
    promises = (_one(record), _late(record), _data(record), _tokens(record), _free(record))
    broken = {promise.name for promise in promises if promise.state == "broken"}
    refused = any(not write.accepted for write in record.writes)
    if not broken:
        word: Word = "kept"
    elif refused and broken <= {"one", "late"}:
        word = "contained"
    else:
        word = "broken"
    return Verdict(word, promises, tuple(_advice(scene, record, broken, word)))


def _one(record: Record) -> Promise:
    text = "One client at a time holds a valid lease"
    leases = sorted(record.grants, key=lambda grant: grant.start)
    if record.overlaps:
        first = record.overlaps[0]
        why = f"{first.older} and {first.newer} both held it, from {first.start:.1f} s to {first.end:.1f} s"
        return Promise("one", text, "broken", why)
    return Promise("one", text, "held", _hand_overs(leases))


def _hand_overs(leases: list[Grant]) -> str:
    for older, newer in pairwise(leases):
        if older.client != newer.client and older.end < inf:
            gap = _span(newer.start - older.end)
            ended = {"died": "had died", "released": "had released it"}.get(older.how, "had lost it")
            return f"{newer.client} got it {gap} after {older.client} {ended}"
    return "nobody else got it"


def _span(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _late(record: Record) -> Promise:
    text = "Nobody writes after its lease has ended"
    if not record.writes:
        return Promise("late", text, "none", "nobody writes in this scene")
    for write in record.writes:
        if write.late:
            ended = record.grants[write.number].end
            why = f"{write.client}'s write reached storage {_span(write.at - ended)} after its lease had ended"
            return Promise("late", text, "broken", why + ("" if write.accepted else ", and was refused"))
    return Promise("late", text, "held", "every write came in time")


def _data(record: Record) -> Promise:
    text = "No older holder's write replaces a newer one's"
    if not record.writes:
        return Promise("data", text, "none", "nobody writes in this scene")
    for write in record.writes:
        if write.overwrote:
            newer = next(one.client for one in reversed(record.writes) if one.number > write.number and one.accepted)
            return Promise("data", text, "broken", f"{write.client}'s write replaced {newer}'s")
    refused = [write for write in record.writes if not write.accepted]
    if refused:
        return Promise("data", text, "held", f"storage refused {refused[0].client}'s write by its token")
    return Promise("data", text, "held", "no write came out of order")


def _tokens(record: Record) -> Promise:
    text = "Each grant has a higher token than the one before"
    tokens = [grant.token for grant in sorted(record.grants, key=lambda grant: grant.start)]
    known = [token for token in tokens if token is not None]
    if tokens and not known:
        return Promise("tokens", text, "none", "this lock has no tokens, so storage has nothing to compare")
    if len(known) < 2:
        return Promise("tokens", text, "none", "fewer than two grants")
    if any(after <= before for before, after in pairwise(known)):
        return Promise("tokens", text, "broken", "a later grant has a lower token, or the same")
    return Promise("tokens", text, "held", f"{len(known)} grants, in order")


def _free(record: Record) -> Promise:
    text = "The lock comes free when its holder is gone"
    for wait in record.waits:
        # In every scene the holder releases the lock or dies, and the scene lasts long enough after that.
        if wait.end is None and wait.client not in record.dead:
            lasted = _span(record.end - wait.start)
            why = f"{wait.client} still waits at the end, after {lasted}, and no client holds it"
            return Promise("free", text, "broken", why)
    waited = [wait.end - wait.start for wait in record.waits if wait.end is not None and wait.granted]
    longest = max(waited, default=0.0)
    if len(record.grants) > 1 and longest >= WAIT_SECONDS:
        return Promise("free", text, "held", f"the longest wait was {_span(longest)}, with a ttl of {TTL:g} s")
    return Promise("free", text, "none", "nobody had to wait")


def _advice(scene: Scene, record: Record, broken: set[str], word: Word) -> list[str]:
    """Say what to change, by what broke and what had been done to it."""
    if scene.backends[0].kind == "by-hand":
        text = "Use a lock with an owner, a ttl and a checked release: every backend of lockkit has them."
        return [text] if broken else []
    if word == "kept":
        guard = "Nothing here. Guard the storage all the same: a pause at the wrong moment has no other remedy."
        return [guard] if record.writes and not scene.fenced else []
    found = []
    if word == "broken" and not scene.fenced and broken & {"one", "late", "data"}:
        found.append("Have storage compare fencing tokens: see Guard your storage. --fenced shows it refuse the write.")
    if "one" in broken:
        found += _against_two_holders(scene)
    if word == "contained" and "one" not in broken:
        found.append("Nothing: no lock stops a late write. The guard did.")
    elif word == "contained":
        found.append("The guard makes this harmless for guarded data. What has no token is not protected.")
    return found


def _against_two_holders(scene: Scene) -> Iterator[str]:
    backend = scene.backends[0]
    faults = {step.action for step in scene.steps if step.who in backend.nodes}
    if "stop" in faults and backend.kind == "redlock":
        yield "Leave durable off, so that restarted nodes wait until everything that they forgot has ended."
    elif "stop" in faults:
        yield "Keep the data over a restart (appendonly yes, appendfsync always), or use Redlock, etcd or ZooKeeper."
    if "failover" in faults and not backend.option("replicas", 0):
        yield "Set replicas= to the number of all replicas: a grant that none of them has is then undone."
    if "clock" in faults:
        yield "Have the servers' time service slew the clock, and never step it."
