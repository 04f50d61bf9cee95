"""
Which cases a run without ``--nightly`` leaves out, on which targets.

With ``--nightly`` (``nox -s conformance``) every case runs on every target. Users who run `lockkit.testing.conformance`
on a backend of their own always get every case. What is left out is listed here, by the name of the case
or of its group.
"""

from __future__ import annotations

from lockkit.testing.conformance import cases
from lockkit.testing.conformance.crashes import Crashes
from lockkit.testing.conformance.election import Elections
from lockkit.testing.conformance.expiry import Expiry
from lockkit.testing.conformance.inspection import Arguments, Inspection
from lockkit.testing.conformance.lifetime import Closing, Leftovers
from lockkit.testing.conformance.names import Names
from lockkit.testing.conformance.notes import Notes
from lockkit.testing.conformance.once import Onces
from lockkit.testing.conformance.queueing import Queueing
from lockkit.testing.conformance.release import Releasing
from lockkit.testing.conformance.waiting import GivingUp
from lockkit.testing.faults import FaultSuite
from tests.conformance.inputs import Inputs
from tests.conformance.leases import Blocks, Losses
from tests.conformance.reentrancy import Reentrancy
from tests.conformance.usage import Decorating, ThreadingLocks

ENGINE_TARGETS = frozenset({"memory", "redis"})
"""Where the cases of `ENGINE_OWNED` run: within the process, and at a server."""


class EngineCases(Inputs, Blocks, Losses, Reentrancy, Decorating, ThreadingLocks):
    """Cases of lockkit's own, which are not in the public suite: they ask nothing of a backend."""


ENGINE_OWNED = frozenset(cases(EngineCases)) | {
    # The engine's queue of each lock, behind which a backend sees one waiter; which errors `once` keeps.
    "test_waiters_of_one_client_come_in_the_order_of_their_arrival",
    "test_errors_count_as_done_only_if_listed",
    # Renewal ends, and so does the lease that nobody renews.
    "test_max_hold_ends_renewal",
    "test_holder_without_progress_loses_the_lock",
    # What the client knows of a lease or of its own wait, and says.
    "test_release_after_expiry_raises",
    "test_extend_of_a_lost_lease_raises",
    "test_wait_beyond_the_ttl_is_told_once",
}
"""Cases that engine, API or a primitive above them decide alone: a backend only grants, renews and releases."""

FAULT_CASES = frozenset(cases(FaultSuite))

VARIANTS = {
    "redis-resp3": "redis",
    "redis-sentinel": "redis",
    "redis-cluster": "redis",
    "redlock-5": "redlock-3",
    "etcd-cluster": "etcd",
    "zookeeper-ensemble": "zookeeper",
}
"""Targets with the code of another one, that differ from it by the number of servers, how one is found, or protocol."""


class OriginalCases(
    Expiry, Releasing, GivingUp, Queueing, Names, Inspection, Arguments, Closing, Leftovers, Crashes, Elections, Onces,
    Notes,
):  # fmt: skip
    """Groups that ask the same of every topology: by the same scripts, requests and sessions."""


TOPOLOGY_FREE = frozenset(cases(OriginalCases)) - ENGINE_OWNED - {"test_only_the_present_holder_writes_a_note"}
"""Further cases that a target of `VARIANTS` leaves to the one whose code it has."""

LONG_TTL = frozenset({"s3"})
"""Targets whose shortest ttl is of seconds, so that each case in which a lease ends by itself takes as long."""


class EndingCases(Expiry, Crashes, Elections, Onces):
    """Groups in which leases end by themselves. How object stores do it, their own tests show on a clock of theirs."""


ENDING = (
    frozenset(cases(EndingCases))
    - ENGINE_OWNED
    - {
        # One of each kind stays: a holder that died, and a child that was forked.
        "test_killed_holder_is_replaced_after_its_ttl",
        "test_forked_child_owns_nothing",
    }
)
"""Further cases that a target of `LONG_TTL` leaves to the others."""

TOPOLOGY_FAULTS = frozenset(
    {
        "test_wrong_password",
        "test_dead_server",
        "test_frozen_server",
        "test_loss_of_one_server_of_several",
        "test_connections_cut_while_held_and_while_waiting",
    }
)
"""Cases of the fault suite that a target of `VARIANTS` runs by day: those in which it has to find its servers again."""


def is_daily(case: str, target: str) -> bool:
    """Whether a case runs on a target in every run; the others are for the night."""
    if case in FAULT_CASES:
        return target not in VARIANTS or case in TOPOLOGY_FAULTS
    if case in ENGINE_OWNED:
        return target in ENGINE_TARGETS
    return not ((target in VARIANTS and case in TOPOLOGY_FREE) or (target in LONG_TTL and case in ENDING))
