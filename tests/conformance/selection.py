"""
Which cases a run without ``--nightly`` leaves out, on which targets.

With ``--nightly`` (``nox -s conformance``) every case runs on every target. Users who run `lockkit.testing.conformance`
on a backend of their own always get every case. What is left out is listed here by name, so a new case runs on every
target until somebody adds it to a list.
"""

from __future__ import annotations

ENGINE_TARGETS = frozenset({"memory", "file", "redis", "postgresql", "etcd"})
"""Where the cases of `ENGINE_OWNED` run: within the process, in files, and at servers of three kinds."""

ENGINE_OWNED = frozenset(
    {
        # lockkit.validation: refused or accepted before a backend sees it.
        "test_accepted_timeouts_are_accepted_everywhere",
        "test_refused_timeouts_are_refused_everywhere",
        "test_refused_ttls",
        "test_refused_max_hold",
        "test_what_is_no_name_is_refused",
        "test_what_cannot_begin_a_name_is_refused",
        "test_unknown_kind_is_refused",
        # Reentrancy: the engine finds the lease of this thread or task among its own.
        "test_same_actor_gets_the_same_lease_again",
        "test_other_actor_waits",
        "test_plain_lock_of_that_name_is_refused",
        "test_other_client_of_the_same_actor_is_refused",
        "test_lost_lease_is_not_entered_again",
        "test_released_as_often_as_acquired_and_no_oftener",
        # The engine's queue of each lock, behind which a backend sees one waiter.
        "test_waiters_of_one_client_come_in_the_order_of_their_arrival",
        "test_timeout_counts_while_standing_in_line",
        # `with`: what its end makes of an exception and of a loss.
        "test_body_never_runs_without_the_lock",
        "test_exception_of_the_body_goes_on_unchanged",
        "test_exception_of_the_body_is_not_hidden_by_a_loss",
        "test_leaving_after_a_loss_raises",
        "test_leaving_after_a_loss_is_only_logged_on_request",
        "test_lock_is_released_on_every_base_exception",
        "test_block_whose_lease_was_released_inside_ends_quietly",
        "test_lease_is_a_context_manager",
        "test_lease_is_true",
        "test_released_lease_is_not_held",
        "test_client_is_a_context_manager",
        # The record of a lease: its deadline, and who is notified.
        "test_passed_deadline_is_loss",
        "test_callbacks_are_called_once_each",
        "test_callback_is_not_called_without_a_loss",
        "test_exception_of_a_callback_is_contained",
        "test_callback_may_be_a_coroutine_function",
        "test_wait_lost_wakes_on_loss_release_and_timeout",
        "test_body_is_cancelled_on_request_when_the_lease_is_lost",
        "test_cancellation_from_outside_is_not_mistaken_for_a_loss",
        "test_loss_is_logged",
        "test_close_wakes_who_waits_for_a_loss",
        "test_lease_cannot_be_pickled",
        "test_collected_lock_objects_keep_nothing",
        # Decorators.
        "test_coroutine_function_holds_the_lock_until_it_ends",
        "test_wrapper_of_a_coroutine_function_holds_the_lock_until_it_ends",
        "test_coroutine_that_returns_unfinished_work_is_refused",
        "test_function_that_returns_unfinished_work_is_refused",
        "test_wrapper_that_runs_its_coroutine_stays_a_plain_function",
        "test_exception_of_the_function_goes_on_and_the_lock_is_free",
        "test_calls_exclude_each_other",
        "test_wrong_uses_are_refused_when_decorating",
        "test_name_made_of_arguments_is_checked",
        "test_plain_function_holds_the_lock",
        "test_plain_function_is_refused_by_the_asyncio_face",
        # The adapter for code that wants a threading.Lock.
        "test_threading_lock_has_the_signatures_of_threading",
        "test_threading_lock_refuses_what_threading_refuses",
        "test_threading_lock_can_be_referred_to_and_shown_as_one",
        "test_threading_lock_left_after_its_loss_does_not_free_the_next_holder",
        "test_threading_lock_released_after_its_loss_does_not_free_the_next_holder",
        # Several locks, which are leases like any other to a backend; which errors `once` keeps.
        "test_set_holds_all_locks_and_releases_all",
        "test_set_that_times_out_holds_nothing",
        "test_sets_in_opposite_orders_do_not_deadlock",
        "test_loss_of_one_lock_is_loss_of_the_set",
        "test_errors_count_as_done_only_if_listed",
    }
)
"""Cases that engine, API or a primitive above them decide alone: a backend only grants, renews and releases."""

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


def is_daily(case: str, target: str) -> bool:
    """Whether a case runs on a target in every run; the others are for the night."""
    if case in ENGINE_OWNED:
        return target in ENGINE_TARGETS
    return not (target in VARIANTS and case in TOPOLOGY_FREE)
