"""What the page on other libraries says of each, beyond figures: what it offers, what it leaves to its users."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peer:
    """
    A library.

    Attributes:
        label: What the benchmark calls it.
        verdict: When to choose it, in one sentence.
        offers: What speaks for it. Sentences.
        leaves: What it leaves to its users: a sentence, the test that shows it, and, if there is one, the test that
            shows what lockkit does.
        ttl: Whether its locks expire.
        waits: Whether it can wait; otherwise the benchmark polls.
    """

    label: str
    verdict: str
    offers: str
    leaves: tuple[tuple[str, ...], ...] = ()
    ttl: bool = True
    waits: bool = True


PEERS = (
    Peer(
        "redis-py Lock",
        "Enough where work done twice is only a waste and ends well before its timeout.",
        "Part of the driver that you already have, with a sync and an async API. "
        "Small enough to read in one sitting. "
        "With the name `lockkit:NAME` it uses the key of lockkit's lock NAME, so the two exclude each other.",
        (
            (
                "The holder learns of its loss only when it releases.",
                "test_redis_py_holder_hears_of_its_loss_when_it_releases",
                "test_broken_lock_is_told_by_the_next_renewal",
            ),
            (
                "There is no token by which storage could reject a paused holder.",
                "test_paused_holder_overwrites_what_the_next_one_wrote",
                "test_paused_holder_is_refused_after_the_next_one_has_written",
            ),
        ),
    ),
    Peer(
        "python-redis-lock",
        "A good choice for waiters on one Redis where a loss of the lock does no harm.",
        "Wakes its waiters, with one blocking command each, and renews a lock on request. "
        "It can reset abandoned locks, and has a backend for Django's cache.",
        (
            (
                "The renewal thread ends at its first error, without telling anyone.",
                "test_python_redis_lock_renews_no_more_after_one_error",
            ),
        ),
    ),
    Peer(
        "fencekit",
        "Choose it for jobs on one Redis that also need its idempotency guard or its fenced Django update.",
        "Fencing tokens, a fenced `SET`, an idempotency guard and a fenced Django update, all on one Redis.",
    ),
    Peer(
        "mithril-locks",
        "Choose it for fencing tokens from a small library; ask for renewal with `auto_renewal=True`.",
        "Fencing tokens, read/write locks and renewal on request, with a sync and an async API: "
        "on Redis, Redis Cluster, Redlock, PostgreSQL, SQLite and files. "
        "Its metadata ask for redis-py before 8; in the run it had redis-py 8.",
    ),
    Peer(
        "pottery Redlock",
        "Choose it for its containers, and its lock with them.",
        "Redlock beside Redis containers that behave like dict, list and set, with an asyncio form.",
        (
            (
                "Only the holder can ask whether a lock is held.",
                "test_pottery_says_free_of_a_lock_that_another_object_holds",
            ),
        ),
    ),
    Peer(
        "redlock-py",
        "Read it to learn the algorithm: it polls, renews nothing and has no tokens.",
        "The Redlock algorithm in 130 lines, from which many people have learned it.",
        (
            (
                "It gives up after a fixed number of attempts; the caller must try again.",
                "test_redlock_py_gives_up_after_its_tries",
            ),
        ),
    ),
    Peer(
        "kazoo Lock",
        "A good choice if ZooKeeper is all you will ever use and you listen for lost sessions yourself.",
        "The recipe of ZooKeeper in the usual driver: fair, wakes one waiter at a time, and offers read and write "
        "locks, semaphores and elections, as lockkit does, and barriers, which lockkit lacks. "
        "lockkit uses the same node layout, so on the same path both share one queue.",
    ),
    Peer(
        "pyetcd",
        "A good choice as a client of etcd; its lock suits work that is shorter than the ttl.",
        "A complete etcd client: keys, watches, leases, members, and a lock. It wakes its waiters.",
        (
            (
                "Each failed attempt leaves an etcd lease behind until its ttl ends.",
                "test_pyetcd_leaves_a_lease_for_each_attempt_that_fails",
            ),
        ),
    ),
    Peer(
        "etcd3gw",
        "Choose it where only HTTP reaches etcd, and check what `acquire` returns.",
        "Talks to etcd's HTTP gateway: it needs no gRPC, and works through HTTP-only proxies.",
        (
            (
                "`with` enters its block even without the lock: check the result of `acquire` yourself.",
                "test_etcd3gw_enters_the_block_without_the_lock",
            ),
        ),
        waits=False,
    ),
    Peer(
        "sqlalchemy-dlock",
        "A good choice inside one database session: it adds nothing to run, and ends with the session.",
        "The advisory locks of PostgreSQL, MySQL and MariaDB, and of SQL Server and Oracle, which lockkit lacks. "
        "It works on the connection that you pass, and has a sync and an async API.",
        (
            (
                "Nothing watches that connection: when its session ends, another client gets the lock unnoticed.",
                "test_sqlalchemy_dlock_believes_in_a_lock_whose_session_was_ended",
            ),
            (
                "With a time limit, as in this run, it polls once a second on PostgreSQL; without one it does not.",
                "test_sqlalchemy_dlock_waits_at_the_server",
            ),
        ),
        ttl=False,
    ),
    Peer(
        "tooz",
        "Choose it if you also need its groups and partitions, as OpenStack does.",
        "The closest relative: one API over many servers, with groups, members and elections. "
        "OpenStack has used it for years.",
        (
            (
                "`acquired` is what the object remembers, not what the server says.",
                "test_tooz_believes_in_a_lock_whose_key_is_gone",
            ),
        ),
    ),
    Peer(
        "filelock",
        "A good choice for files on one machine, also on Windows, if a stopped process may keep the lock.",
        "The lock of virtualenv, tox and many others: no dependency, every platform, sync and async, and a soft lock "
        "where the file system has no locks. lockkit's file backend is for Linux and macOS only.",
        (
            (
                "An `AsyncFileLock` belongs to its object: two tasks that share one both get in.",
                "test_filelock_object_shared_by_two_tasks_lets_both_in",
                "test_lock_object_shared_by_two_keeps_their_leases_apart",
            ),
        ),
        ttl=False,
    ),
    Peer(
        "portalocker",
        "A good choice to lock the very file that you write.",
        "Locks the file that you work on, on every platform, with shared locks and semaphores.",
        ttl=False,
    ),
)
