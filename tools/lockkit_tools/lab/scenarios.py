"""The scenarios of the lab, in the order in which a newcomer would look at them."""

from __future__ import annotations

from lockkit_tools.lab.scenario import Backend, Scenario, Scene, Step, parse_backend


def _on(*words: str) -> tuple[Backend, ...]:
    return tuple(map(parse_backend, words))


_ALL = _on("redis", "redlock", "etcd", "zookeeper")
_REDLOCK = _on("redlock")
_FORGETFUL_REDLOCK = _on("redlock?durable=on")

_LATE_PAUSE = (
    Step(0, "A", "acquire"),
    Step(2, "A", "check"),
    Step(2.1, "A", "pause", lasts=13.9),
    Step(2.2, "A", "write"),
    Step(5, "B", "acquire"),
    Step(13, "B", "write"),
    Step(18, "B", "release"),
)
_NODE_JUMPS = (
    Step(0, "A", "cut", nodes=("node4", "node5")),
    Step(0.2, "A", "acquire"),
    Step(3.8, "node3", "clock", by=12),
    Step(4.3, "B", "acquire"),
    Step(5, "B", "write"),
    Step(6, "A", "write"),
    Step(11, "B", "release"),
)
_NODE_WAITS_TO_VOTE = (
    Step(0, "A", "cut", nodes=("node4", "node5")),
    Step(0.2, "A", "acquire"),
    Step(2, "node3", "stop", lasts=1),
    Step(4, "B", "acquire"),
    Step(8, "A", "write", check=True),
    Step(9, "A", "release"),
    Step(11.5, "B", "write"),
    Step(14, "B", "release"),
)
_NODE_VOTES_AT_ONCE = (
    Step(0, "A", "cut", nodes=("node4", "node5")),
    Step(0, "B", "cut", nodes=("node1", "node2")),
    Step(0.2, "A", "acquire"),
    Step(3.6, "node3", "stop", lasts=0.4),
    Step(4.3, "B", "acquire"),
    Step(7.2, "B", "write"),
    Step(8.5, "A", "write"),
    Step(12, "B", "release"),
)


def _alone(name: str, scene: Scene) -> Scenario:
    return Scenario(name, scene.title, scene.about, (scene,))


_SCENARIOS = (
    _alone(
        "gc-pause",
        Scene(
            "A pause that is longer than the lease",
            "A looks at its lease, finds it valid, and is paused before it writes: a garbage collector, swapping, a "
            "debugger, a virtual machine that moves. The lease ends, B gets the lock and writes. Then A wakes up and "
            "does what it was about to do.",
            _ALL,
            _LATE_PAUSE,
        ),
    ),
    _alone(
        "late-message",
        Scene(
            "A write that is held up in the network",
            "A writes in time, and the network holds the message up until after A's lease. A knows that it has lost "
            "the lock; its write does not.",
            _ALL,
            (
                Step(0, "A", "acquire"),
                Step(3, "A", "write", delay=13),
                Step(3.5, "A", "cut"),
                Step(4, "B", "acquire"),
                Step(14, "B", "write"),
                Step(18, "B", "release"),
            ),
        ),
    ),
    _alone(
        "client-death",
        Scene(
            "The holder dies",
            "A dies with the lock in its hand. Nobody releases it. The lock has a time limit, so B gets it when that "
            "has passed.",
            _ALL,
            (
                Step(0, "A", "acquire"),
                Step(2, "A", "write"),
                Step(4, "B", "acquire"),
                Step(8, "A", "kill"),
                Step(16, "B", "write"),
                Step(18, "B", "release"),
            ),
        ),
    ),
    _alone(
        "partition",
        Scene(
            "The holder is cut off: its deadline comes first",
            "A loses the lock service, so it cannot renew. It counts its deadline from before the request, so it gives "
            "up before the server does, and B can only get the lock after that.",
            _ALL,
            (
                Step(0, "A", "acquire"),
                Step(2, "A", "write", check=True),
                Step(3, "A", "cut", lasts=13),
                Step(5, "B", "acquire"),
                Step(11.5, "A", "write", check=True),
                Step(14.5, "B", "write", check=True),
                Step(17.5, "B", "release"),
            ),
        ),
    ),
    Scenario(
        "restart-without-data",
        "A server restarts without its data",
        "The server that knew who holds the lock comes back and has forgotten it.",
        (
            Scene(
                "One Redis forgets the lock",
                "B asks the restarted server, which knows of no lock. A learns it with its next renewal, and has "
                "written by then.",
                _on("redis"),
                (
                    Step(0, "A", "acquire"),
                    Step(3.6, "server", "stop", lasts=0.6),
                    Step(4.3, "B", "acquire"),
                    Step(5, "B", "write"),
                    Step(5.8, "A", "write"),
                    Step(12, "B", "release"),
                ),
            ),
            Scene(
                "Redlock with delayed restart",
                "A has the votes of nodes 1, 2 and 3. Node 3 forgets its vote, and lockkit does not let it vote until "
                "every lease that it may have forgotten has ended. So B finds no majority before A is done.",
                _on("redlock", "redlock?durable=off"),
                _NODE_WAITS_TO_VOTE,
            ),
            Scene(
                "Redlock without delayed restart",
                "A reaches nodes 1 to 3, B reaches nodes 3 to 5. Node 3 forgets its vote for A and votes at once: a "
                "second majority.",
                _FORGETFUL_REDLOCK,
                _NODE_VOTES_AT_ONCE,
            ),
        ),
    ),
    Scenario(
        "clock-jump",
        "A server's clock jumps",
        "Redis ends keys by the time of day. If that is set forward, leases end early, and their holders do not know.",
        (
            Scene(
                "One server's clock jumps ahead",
                "The server believes that A's time is over. A learns it with its next renewal, and has written by "
                "then.",
                _on("redis", "etcd", "zookeeper"),
                (
                    Step(0, "A", "acquire"),
                    *(Step(3.6, node, "clock", by=12) for node in ("server", "etcd", "zookeeper")),
                    Step(4.2, "B", "acquire", timeout=2),
                    Step(5, "B", "write"),
                    Step(6, "A", "write"),
                    Step(11, "B", "release"),
                ),
            ),
            Scene(
                "One of five Redlock nodes jumps ahead",
                "A has the votes of nodes 1, 2 and 3. Node 3's clock jumps, its vote ends, and B gets nodes 3, 4 and "
                "5.",
                _REDLOCK,
                _NODE_JUMPS,
            ),
        ),
    ),
    Scenario(
        "failover",
        "A failover that forgets the newest lock",
        "Redis replicates asynchronously: it answers first, and sends the change to its replica afterwards.",
        (
            Scene(
                "The replica never got the lock",
                "The master grants A the lock and crashes before its replica has it. The promoted replica grants it to "
                "B.",
                _on("redis+sentinel"),
                (
                    Step(0, "replica", "lag", lasts=1.5),
                    Step(0.5, "A", "acquire"),
                    Step(1, "master", "failover", lasts=1),
                    Step(2.3, "B", "acquire"),
                    Step(2.8, "B", "write"),
                    Step(3.4, "A", "write"),
                    Step(8, "B", "release"),
                ),
            ),
            Scene(
                "replicas=1: no grant that only the master has",
                "The client waits until the replica has the grant. It never does, so A never believes that it holds "
                "the lock.",
                _on("redis+sentinel?replicas=1"),
                (
                    Step(0, "replica", "lag", lasts=9),
                    Step(0.5, "A", "acquire", timeout=1),
                    Step(2, "master", "failover", lasts=1.2),
                    Step(4, "B", "acquire"),
                    Step(6, "A", "write", check=True),
                    Step(11, "B", "write"),
                    Step(13, "B", "release"),
                ),
            ),
            Scene(
                "etcd or ZooKeeper: the members agree first",
                "A majority has the grant before A hears of it, so every next leader knows of the grant. B waits.",
                _on("etcd", "zookeeper"),
                (
                    Step(0.5, "A", "acquire"),
                    *(Step(2, node, "failover", lasts=1.2) for node in ("etcd", "zookeeper")),
                    Step(4, "B", "acquire"),
                    Step(6, "A", "write", check=True),
                    Step(8, "A", "release"),
                    Step(9, "B", "write"),
                    Step(12, "B", "release"),
                ),
            ),
        ),
    ),
    Scenario(
        "naive-setnx",
        "Locks by hand on Redis",
        "Three recipes that look right, each in the order of events in which it fails. --backend redis plays the "
        "same with lockkit.",
        (
            Scene(
                "SETNX without a ttl",
                "A dies with the lock. The key has no end, so B waits for ever.",
                _on("by-hand?recipe=setnx", "redis"),
                (Step(0, "A", "acquire"), Step(3, "B", "acquire"), Step(6, "A", "kill")),
                until=30,
            ),
            Scene(
                "SET NX with a ttl, and DEL without looking",
                "A comes back after its ttl and deletes the key: B's key. So C gets the lock while B still works.",
                _on("by-hand?recipe=delete", "redis"),
                (
                    Step(0, "A", "acquire"),
                    Step(3, "A", "pause", lasts=10),
                    Step(4, "A", "release"),
                    Step(5, "B", "acquire"),
                    Step(11, "C", "acquire"),
                    Step(15, "C", "write"),
                    Step(16, "B", "write"),
                    Step(18, "B", "release"),
                    Step(21, "C", "release"),
                ),
                clients=("A", "B", "C"),
            ),
            Scene(
                "SETNX with a deadline, and GETSET",
                "B's clock is ahead. It reads A's deadline by its own clock, finds it over, and takes the lock from A.",
                _on("by-hand?recipe=getset", "redis"),
                (
                    Step(0, "A", "acquire"),
                    Step(1, "B", "clock", by=15),
                    Step(3, "B", "acquire"),
                    Step(4, "B", "write"),
                    Step(5, "A", "write"),
                    Step(8, "A", "release"),
                    Step(11, "B", "release"),
                ),
            ),
        ),
    ),
    Scenario(
        "redlock-debate",
        "The debate on Redlock, scene by scene",
        "Martin Kleppmann (2016) and Salvatore Sanfilippo disagreed on whether Redlock is safe. Each scene is "
        "one of their arguments.",
        (
            Scene(
                "1. Kleppmann: a pause after the grant corrupts data",
                "He is right: no majority of nodes helps a client that stands still while its lease ends.",
                _REDLOCK,
                _LATE_PAUSE,
            ),
            Scene(
                "2. Kleppmann: so storage must compare tokens",
                "He is right: the same course of events, and A's late write is refused. lockkit's second round makes "
                "the tokens increase.",
                _REDLOCK,
                _LATE_PAUSE,
                fenced=True,
            ),
            Scene(
                "3. Sanfilippo: that is true of every lock that expires",
                "He is right: one Redis instead of five, and nothing is different.",
                _on("redis"),
                _LATE_PAUSE,
            ),
            Scene(
                "4. Sanfilippo: a pause before the grant is harmless",
                "He is right: A is paused while the answers are on their way, until its votes have expired. It reads "
                "its clock after the votes, counts from before the requests, and gets nothing.",
                _REDLOCK,
                (
                    Step(1, "A", "acquire", timeout=5),
                    Step(1.12, "A", "pause", lasts=12),
                    Step(3, "B", "acquire"),
                    Step(13, "B", "write"),
                    Step(14, "A", "write"),
                    Step(17, "B", "release"),
                ),
                latency=(0.08, 0.09),
            ),
            Scene(
                "5. Kleppmann: one clock that jumps makes two holders",
                "He is right, and Sanfilippo agrees: clocks must not be set. A has the votes of nodes 1, 2 and 3. Node "
                "3's clock jumps, its vote ends, and B gets nodes 3, 4 and 5.",
                _REDLOCK,
                _NODE_JUMPS,
            ),
            Scene(
                "6. Both: a node that forgets and votes makes two holders",
                "A reaches nodes 1 to 3, B reaches nodes 3 to 5. Node 3 forgets its vote for A and votes at once: a "
                "second majority.",
                _FORGETFUL_REDLOCK,
                _NODE_VOTES_AT_ONCE,
            ),
            Scene(
                "7. Sanfilippo: so it must not vote for a while",
                "He is right. A has the votes of nodes 1, 2 and 3. Node 3 forgets its vote, and lockkit does not let "
                "it vote until every lease that it may have forgotten has ended. So B finds no majority before A is "
                "done.",
                _REDLOCK,
                _NODE_WAITS_TO_VOTE,
            ),
        ),
    ),
    _alone(
        "hand-off",
        Scene(
            "A release hands the lock to the first waiter",
            "B and C wait in a queue at the server. When A releases, the server wakes B at once and keeps the lock for "
            "it; nobody polls.",
            _on("redis", "etcd", "zookeeper"),
            (
                Step(0, "A", "acquire"),
                Step(0.6, "B", "acquire"),
                Step(1.2, "C", "acquire"),
                Step(2.6, "A", "release"),
                Step(4.2, "B", "release"),
                Step(5.8, "C", "release"),
            ),
            clients=("A", "B", "C"),
            latency=(0.01, 0.02),
        ),
    ),
    _alone(
        "two-rounds",
        Scene(
            "Redlock's two rounds",
            "Round 1: A asks all nodes for the lock; each that grants it tells its last token and its time. Round 2: A "
            "writes the highest of them plus one to those nodes. When a majority has it, A holds the lock. The next "
            "holder shares a node with that majority, so its token is higher.",
            _REDLOCK,
            (Step(0.012, "A", "acquire"),),
            clients=("A",),
            latency=(0.014, 0.03),
            messages=True,
            until=0.13,
        ),
    ),
    _alone(
        "election",
        Scene(
            "An election: the old leader stops before the new one leads",
            "A leads, and is cut off from the lock service. It is told to stop when its grace begins, a third of the "
            "ttl before its deadline. So it has time to stop before B can be elected.",
            _ALL,
            (
                Step(0, "A", "lead"),
                Step(2, "B", "lead"),
                Step(4, "A", "cut"),
                Step(17, "B", "release"),
            ),
        ),
    ),
)

SCENARIOS = {scenario.name: scenario for scenario in _SCENARIOS}
