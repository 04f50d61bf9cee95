"""
Which cases a run without ``--nightly`` leaves out, on which targets.

With ``--nightly`` (``nox -s conformance``) every case runs on every target. Users who run `lockkit.testing.conformance`
on a backend of their own always get every case. What is left out is listed here by name, so a new case runs on every
target until somebody adds it to a list.
"""

from __future__ import annotations

from lockkit.testing.conformance import cases
from lockkit.testing.faults import FaultSuite
from tests.conformance.inputs import Inputs
from tests.conformance.leases import Blocks, Losses
from tests.conformance.reentrancy import Reentrancy
from tests.conformance.several import Several
from tests.conformance.usage import Decorating, ThreadingLocks

ENGINE_TARGETS = frozenset({"memory", "file", "redis", "postgresql", "etcd"})
"""Where the cases of `ENGINE_OWNED` run: within the process, in files, and at servers of three kinds."""


class EngineCases(Inputs, Blocks, Losses, Reentrancy, Several, Decorating, ThreadingLocks):
    """Cases of lockkit's own, which are not in the public suite: they ask nothing of a backend."""


ENGINE_OWNED = frozenset(cases(EngineCases)) | {
    # The engine's queue of each lock, behind which a backend sees one waiter; which errors `once` keeps.
    "test_waiters_of_one_client_come_in_the_order_of_their_arrival",
    "test_errors_count_as_done_only_if_listed",
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

TOPOLOGY_FREE = frozenset(
    {
        # Checked, rounded or counted by the code that both share, from the capabilities that both have.
        "test_accepted_ttls",
        "test_accepted_long_ttls",
        "test_client_has_a_default_ttl",
        "test_unknown_option_is_refused",
        "test_text_as_metadata",
        "test_remaining_counts_down_and_never_exceeds_the_ttl",
        "test_holder_never_believes_longer_than_the_ttl",
        "test_wall_clock_decides_nothing_at_the_client",
        "test_extend_sets_the_time_left_and_never_adds",
        # The same requests as in cases that stay; only the client makes something else of the answers.
        "test_max_hold_ends_renewal",
        "test_wait_beyond_the_ttl_is_told_once",
        "test_dropped_lease_warns_and_is_free_after_its_ttl",
        "test_lock_object_shared_by_two_keeps_their_leases_apart",
        "test_lease_can_be_released_by_another_actor",
        "test_timeout_is_over_neither_early_nor_only_with_the_ttl",
        "test_waiters_of_one_client_cost_the_backend_one",
        "test_actors_of_one_client_exclude_each_other",
        "test_errors_can_be_pickled",
        "test_close_can_be_called_twice",
        "test_asyncio_client_belongs_to_one_event_loop",
        "test_key_is_done_only_when_the_block_says_so",
    }
)
"""Further cases that a target of `VARIANTS` leaves to the one whose code it has."""

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
    return not (target in VARIANTS and case in TOPOLOGY_FREE)
