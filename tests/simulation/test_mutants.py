"""
The checker can fail: engine, server and clocks are broken in one place each, and the check that is for it must notice.

Each mutant is a mistake that a lock library has made, or could make. "Found" means: invalid, by the named check, in one
of the first schedules; unknown does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lockkit.backend import Busy, Grant, LossReason, Request
from lockkit.engine.acquisition import Acquisition
from lockkit.engine.cleanup import PendingCleanups
from lockkit.engine.engine import Engine
from lockkit.engine.lease_record import LeaseRecord
from lockkit.engine.leases import Leases
from lockkit.engine.renewal import Renewer
from lockkit.engine.settings import LockSettings, LostCallback, drift_margin
from lockkit.lease import BaseLease
from lockkit_tools.simulation import LockServer, Schedule, SimulatedBackend, Simulation, draw
from lockkit_tools.simulation.history import Wrote
from lockkit_tools.simulation.server import Record, Storage
from lockkit_tools.simulation.world import Process
from tests.simulation.support import apart, known_first

SEEDS = range(2000)

AnyEngine = Engine[Any]
Surveyed = tuple[list[LeaseRecord], list[LeaseRecord], float]
Survey = Callable[[Renewer, float], Surveyed]
Notify = Callable[[Leases, LeaseRecord, LostCallback, str], None]
Admit = Callable[[AnyEngine, LockSettings, "Grant", float], BaseLease | None]

pytestmark = pytest.mark.filterwarnings("ignore:lease of lock:ResourceWarning")


# -- broken servers ------------------------------------------------------------------------------------------------


class ReleasesAnybodys(LockServer):
    """Deletes without comparing the owner."""

    def release(self, name: str, owner: str) -> bool:
        """Free it."""
        record = self.records.get(name)
        if record is not None:
            self._free(name, record, owner, "released")
        return record is not None


class RenewalCreates(LockServer):
    """Renewal sets the key, whether it is there or not."""

    def renew(self, name: str, owner: str, ttl: float) -> LossReason | None:
        """Set it."""
        reason = super().renew(name, owner, ttl)
        if reason == "gone":
            self._put(name, Record("?", owner, self.tokens.get(name, 1), self.node.now() + ttl, ""))
            return None
        return reason


class TokenIsTheClock(LockServer):
    """No maximum with the last token."""

    def _next_token(self, name: str) -> int:
        del name
        return self.node.wall_us()


class TokenIsACounter(LockServer):
    """No maximum with the clock: the counter is lost with the data."""

    def _next_token(self, name: str) -> int:
        return self.tokens.get(name, 0) + 1


class EndsEarly(LockServer):
    """Gives the lock away before the lease is over."""

    def _live(self, name: str, now: float) -> Record | None:
        record = super()._live(name, now)
        return None if record is not None and now > record.until - 0.2 else record


class WakesNobody(LockServer):
    """Waiters are left to find out for themselves."""

    def _wake(self, name: str, since: float | None = None) -> None:
        """Do nothing."""


class KeepsPlaces(LockServer):
    """Who gives up waiting stays in the queue."""

    def abandon(self, name: str, owner: str) -> None:
        """Undo, but for the place in the queue."""
        queue = list(self._queues.get(name, []))
        super().abandon(name, owner)
        self._queues[name] = queue


class WaitsForAWakeUpOnly(SimulatedBackend):
    """A lost wake-up is waited for, for ever."""

    async def wait(self, request: Request, busy: Busy, until: float) -> None:
        """Wait."""
        del busy, until
        await request.wake.wait(None)
        request.wake.clear()


# -- a broken engine -----------------------------------------------------------------------------------------------


async def nothing(*_: object) -> None:
    """Take the place of a coroutine function."""


def believe_from_the_answer(
    self: LeaseRecord, anchor: float, ttl: float, real: Callable[..., None] = LeaseRecord.set_deadline
) -> None:
    """Count the ttl from when the answer came."""
    del anchor
    real(self, self.client.runtime.now(), ttl)


def watch_is_blind(self: Renewer, now: float, real: Survey = Renewer._survey) -> Surveyed:
    """Renewals go on; whoever looks sees a loss, nobody is notified."""
    _, due, look_again = real(self, now)
    return [], due, max(look_again, now + 0.01)


def notify_twice(
    self: Leases, record: LeaseRecord, callback: LostCallback, reason: str, real: Notify = Leases._notify
) -> None:
    """Call ``on_lost`` again."""
    real(self, record, callback, reason)
    real(self, record, callback, reason)


def admit_anything(
    self: AnyEngine, settings: LockSettings, grant: Grant, started: float, real: Admit = Engine.admit
) -> BaseLease | None:
    """Hand out a lease that its deadline has overtaken."""
    lease = real(self, settings, grant, self.runtime.now())
    if lease is not None:
        lease._record.valid_until = started + grant.ttl - drift_margin(grant.ttl)
    return lease


def admit_without_anchor(
    self: AnyEngine, settings: LockSettings, grant: Grant, started: float, real: Admit = Engine.admit
) -> BaseLease | None:
    """Count the ttl of a session's lease from the request, not from the session's last heartbeat."""
    grant.anchor = None
    return real(self, settings, grant, started)


def accept_all(self: Storage, name: str, token: int) -> None:
    """Write without comparing the token."""
    self._history.append(Wrote(self.node.world.now, name, token, accepted=True))


def drifting(schedule: Schedule) -> Schedule:
    """Clocks that differ by 6 %, where the margin is 1 %."""
    return replace(schedule, client_rates=tuple(0.97 for _ in schedule.client_rates), server_rate=1.03)


@dataclass(frozen=True)
class Mutant:
    """One mistake, the checks that must notice it, and a schedule of those in which they did, if it is a late one."""

    found_by: tuple[str, ...]
    seed: int = 0
    server: type[LockServer] = LockServer
    backend: type[SimulatedBackend] = SimulatedBackend
    patch: tuple[type, str, object] | None = None
    schedule: Callable[[Schedule], Schedule] = lambda schedule: schedule


MUTANTS = {
    "deadline counted from the answer": Mutant(
        ("cover", "exclusion"), patch=(LeaseRecord, "set_deadline", believe_from_the_answer)
    ),
    "anchor of a grant ignored": Mutant(("cover",), patch=(Engine, "admit", admit_without_anchor)),
    "released while bodies clean up": Mutant(("progress",), patch=(Process, "cancel_when_alone", lambda *_: False)),
    "grant handed out past its deadline": Mutant(("deadlines",), 346, patch=(Engine, "admit", admit_anything)),
    "undo omitted": Mutant(("leftovers", "progress"), patch=(Acquisition, "_undo", nothing)),
    "undo not repeated": Mutant(("leftovers",), 438, patch=(PendingCleanups, "add", lambda *_: None)),
    "timeout not looked at": Mutant(("timeouts",), patch=(Acquisition, "_out_of_time", False)),
    "watch disabled": Mutant(("loss",), patch=(Renewer, "_watch", nothing)),
    "watch blind to deadlines": Mutant(("loss",), patch=(Renewer, "_survey", watch_is_blind)),
    "notified twice": Mutant(("loss",), patch=(Leases, "_notify", notify_twice)),
    "not notified": Mutant(("loss",), patch=(Leases, "_notify", lambda *_: None)),
    "wake-up waited for without limit": Mutant(("progress", "timeouts"), backend=WaitsForAWakeUpOnly),
    "release without owner check": Mutant(("ownership", "exclusion"), server=ReleasesAnybodys),
    "renewal creates": Mutant(("tokens",), server=RenewalCreates),
    "token without the last one": Mutant(("tokens",), server=TokenIsTheClock),
    "token without the clock": Mutant(("tokens",), 95, server=TokenIsACounter),
    "lease ended early": Mutant(("exclusion",), server=EndsEarly),
    "nobody woken": Mutant(("progress",), server=WakesNobody),
    "queue not left": Mutant(("progress",), server=KeepsPlaces),
    "storage without guard": Mutant(("storage",), 563, patch=(Storage, "_accept", accept_all)),
    "drift beyond the margin": Mutant(("exclusion",), schedule=drifting),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutant_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each of the checks that are for it."""
    if mutant.patch is not None:
        where, name, what = mutant.patch
        monkeypatch.setattr(where, name, what)
    missing = set(mutant.found_by)

    for seed in apart(known_first(mutant.seed, SEEDS)):
        simulation = Simulation(mutant.schedule(draw(seed)), server=mutant.server, backend=mutant.backend)
        missing -= {problem.check for problem in simulation.run().verdict.problems}
        if not missing:
            return

    pytest.fail(f"not found within {len(SEEDS)} seeds by {', '.join(sorted(missing))}")


LATE_WRITES = (575, 594, 694)
"""Schedules in which drift makes a write late."""


def test_guard_stops_what_drift_lets_through(pytestconfig: pytest.Config) -> None:
    """
    Two believe in one lock because their clocks run wrong; the storage that compares tokens stays right.

    In all schedules where seeds are asked for (`nox -s simulate`), else in some.
    """
    checks = set()
    refused = 0
    enough = len(SEEDS) if pytestconfig.getoption("--seed", None) else 150
    for count, seed in enumerate(apart([*LATE_WRITES, *SEEDS])):
        outcome = Simulation(drifting(draw(seed))).run()
        checks |= {problem.check for problem in outcome.verdict.problems}
        refused += sum(isinstance(event, Wrote) and not event.accepted for event in outcome.history)
        if count >= enough and refused:
            break

    assert "exclusion" in checks
    assert refused > 0, "no late write came: the guard had nothing to do"
    assert checks.isdisjoint({"tokens", "storage", "ownership"})
