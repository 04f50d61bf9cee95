"""What the page on other libraries says of each, beyond figures: what it offers, what it leaves to its users."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PEERS", "Peer"]


@dataclass(frozen=True, slots=True)
class Peer:
    """
    A library.

    Attributes:
        label: What the benchmark calls it.
        offers: What speaks for it. Sentences.
        leaves: What it leaves to its users: a sentence, the test that shows it, and the one that shows how lockkit
            does, where it stands beside it.
        ttl: Its locks end by themselves.
        waits: It can be told to wait; otherwise the benchmark asks again.
    """

    label: str
    offers: str
    leaves: tuple[tuple[str, ...], ...] = ()
    ttl: bool = True
    waits: bool = True


PEERS = (
    Peer(
        "redis-py Lock",
        "Part of the driver that you have anyway, on both faces. "
        "Small enough to be read in one sitting, and its key is the one that lockkit uses: both exclude each other.",
        (
            (
                "Nothing renews the lock and nothing tells of its loss: the holder hears of it when it releases.",
                "test_redis_py_holder_hears_of_its_loss_when_it_releases",
                "test_lockkit_holder_is_told_of_its_loss",
            ),
            (
                "There is no token by which a storage could refuse a holder that was paused.",
                "test_paused_holder_overwrites_what_the_next_one_wrote",
                "test_lockkit_token_keeps_the_paused_holder_from_writing",
            ),
        ),
    ),
    Peer(
        "python-redis-lock",
        "Wakes its waiters, with one blocking command each, and renews a lock if it is asked to. "
        "It has a reset for locks that were left behind, and a backend for Django's cache.",
        (
            (
                "The thread that renews ends with its first error, and nobody is told.",
                "test_python_redis_lock_renews_no_more_after_one_error",
            ),
        ),
    ),
    Peer(
        "pottery Redlock",
        "Redlock beside Redis containers that behave like dict, list and set, with an asyncio form.",
        (
            (
                "Whether a lock is held cannot be asked by anybody but its holder.",
                "test_pottery_says_free_of_a_lock_that_another_object_holds",
            ),
        ),
    ),
    Peer(
        "redlock-py",
        "The description of Redlock in 130 lines, by which many have understood it.",
        (
            (
                "After its tries it gives up, and a caller who wants the lock asks again.",
                "test_redlock_py_gives_up_after_its_tries",
            ),
        ),
    ),
    Peer(
        "kazoo Lock",
        "The recipe of ZooKeeper in the driver that everybody uses: fair, woken one at a time, with read and write "
        "locks, semaphores, barriers and elections beside it, which lockkit has not. "
        "lockkit lays its nodes out in the same way, and both stand in one line.",
    ),
    Peer(
        "pyetcd",
        "A complete client of etcd: keys, watches, leases, members, and a lock among them. It wakes its waiters.",
        (
            (
                "Each attempt that fails leaves an etcd lease behind until its ttl is over.",
                "test_pyetcd_leaves_a_lease_for_each_attempt_that_fails",
            ),
        ),
    ),
    Peer(
        "etcd3gw",
        "Speaks to etcd's HTTP gateway: no gRPC to install, and it goes through proxies that know HTTP only.",
        (
            (
                "`with` enters its block also if it did not get the lock: look at `acquire` yourself.",
                "test_etcd3gw_enters_the_block_without_the_lock",
            ),
        ),
        waits=False,
    ),
    Peer(
        "sqlalchemy-dlock",
        "The advisory locks of PostgreSQL, MySQL and MariaDB, and of SQL Server and Oracle, which lockkit has not. "
        "It works on the connection that you give it, with both faces.",
        (
            (
                "Nothing looks after that connection: when its session ends, others get the lock that it believes in.",
                "test_sqlalchemy_dlock_believes_in_a_lock_whose_session_was_ended",
            ),
        ),
        ttl=False,
    ),
    Peer(
        "tooz",
        "The nearest relative: one API over many servers, with groups, members and elections, and years in OpenStack.",
        (
            (
                "`acquired` is what it remembers, not what the server says.",
                "test_tooz_believes_in_a_lock_whose_key_is_gone",
            ),
        ),
    ),
    Peer(
        "filelock",
        "The lock of virtualenv, tox and many others: no dependency, every platform, both faces, and locks that work "
        "where the file system has none. lockkit's file backend is for Linux and macOS only.",
        (
            (
                "An `AsyncFileLock` counts for its object: two tasks that share one are in together.",
                "test_filelock_object_shared_by_two_tasks_lets_both_in",
                "test_lockkit_object_shared_by_two_tasks_lets_one_in",
            ),
        ),
        ttl=False,
    ),
    Peer(
        "portalocker",
        "Locks the very file that you work on, on every platform, with shared locks and semaphores.",
        ttl=False,
    ),
)
