"""
Which nodes of a Redlock may vote: delayed restart.

A node that comes back without its data would vote for a second holder. So each node has a *mark*, which it loses with
its data, and which contains the run id of the server that wrote it. ``acquire.lua`` compares it in the same atomic step
as the vote, so a node that was just emptied (FLUSHALL) or restarted does not vote, whatever any client believed of it.
Without ``durable=1``, a server that does not tell its run id does not vote at all (`lockkit.backends.redis.handshake`).
This module decides when such a node votes again.

====================================================  ==================================================================
answers of the nodes                                  decision
====================================================  ==================================================================
all n answer, none has a mark                         the first start of a new set: all are marked and vote at once
all n answer, some have a mark, all of them younger   another client is doing the first start: ask again
than 5 s by their own clocks, and voting
otherwise                                             a node without a mark of its present run may have lost data: it
                                                      is marked, and votes when the longest ttl has passed
``durable=1``                                         a node without a mark of its present run is marked and votes at
                                                      once
====================================================  ==================================================================

Why *all* must answer for a first start. Five nodes; A holds 3, 4 and 5 (1 and 2 were slow)::

    1 and 2 go down; 3, 4 and 5 restart empty
    B asks: 3, 4 and 5 answer, none has a mark. "A first start" would be wrong: A still believes.

The longest ttl is that of the longest lease that the node may have forgotten. Each node keeps the longest ttl that it
has voted for in its mark, written before the vote. A lease that needs the vote of the lost node m has the votes of
quorum - 1 others, and any n - quorum + 1 of the others include one of them: the maximum of their marks is enough.
If fewer answer, none of them may know the lease, and the node waits for at least `FORGOTTEN_MS`.

The mark is written only where there is none of this run, and only in the run that was looked at (``admit.lua``). So if
two clients decide at the same time, the first decision stands: a late "first start" does not shorten a wait, and admits
no node that has restarted since.

Known limits: if all nodes lose their data at once, that looks like a first start, and no majority could tell. And so it
looks to a client that found a new set, and was stopped while another started it, if a node is then emptied by FLUSHALL.

Source: the section "Performance, crash recovery and fsync" of the Redlock description in the Redis documentation.
Deviations: a restarted node that still has data waits too (without ``appendfsync always`` it may lack its last writes),
and no administrator has to delay the start of a server.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple, cast

from lockkit.backends.redlock.network import Nodes
from lockkit.backends.redlock.nodes import ADMIT, LOOK, LockKeys
from lockkit.background import SingleRun
from lockkit.errors import LockError
from lockkit.runtime import Event, Runtime

log = logging.getLogger("lockkit")

FIRST_START_MS = 5000
"""How long a first start may take. Longer waits longer for a client that died during it; shorter: a slow one leaves
nodes that wait for the longest ttl without need."""

FORGOTTEN_MS = 60_000
"""Least wait when too few other nodes can tell the longest ttl. Leases longer than this are at risk when several nodes
are lost together; longer delays the start of a new set in which a node is missing."""

AHEAD_MS_MAX = 10
"""How far a token may be ahead of the time of the node that accepts it; see ``acquire.lua``."""

LOOKS_MAX = 10
"""How often to ask again during the first start of another client. More delays the caller, fewer reports "no quorum"
early."""

_BLANK, _MARKED = 0, 1


def wait_milliseconds(ttl_ms: int) -> int:
    """Return how long a node must not vote that may have forgotten leases with this ttl."""
    # The clock-drift margin between two nodes is the same as the engine's between client and node. And the last token
    # may have been ahead of the time.
    return math.ceil(ttl_ms * 1.01) + 2 + AHEAD_MS_MAX


class _Look(NamedTuple):
    """A node's answer about its mark; see ``look.lua``."""

    state: int
    wait_ms: int
    ttl_ms: int
    age_ms: int
    run: bytes

    @property
    def votes(self) -> bool:
        return self.state == _MARKED and self.wait_ms == 0


class DelayedRestart:
    """Decides for one client when a node may vote; `ttl_ms` is the longest ttl that this client has asked for."""

    def __init__(self, nodes: Nodes, keys: LockKeys, runtime: Runtime, *, durable: bool) -> None:
        self.ttl_ms = 0
        self._nodes = nodes
        self._keys = keys
        self._runtime = runtime
        self._durable = durable
        self._nodes_count = len(nodes.labels)
        self._quorum = self._nodes_count // 2 + 1
        self._looking = SingleRun(runtime, "lockkit-redlock-admit", self.run)

    def note_ttl(self, ttl_ms: int) -> None:
        """Note a ttl that this client asks for."""
        assert ttl_ms > 0, "a node would vote before this lease has ended"
        self.ttl_ms = max(self.ttl_ms, ttl_ms)

    def run_soon(self) -> Event:
        """
        Do what `run` does in the background; the event is set at its end.

        Not within a caller's time limit: with little time left, a slow node would count as one that does not answer,
        and the others would wait without need.
        """
        return self._looking.start()

    async def run(self) -> None:
        """Ask all nodes for their marks, and mark those that have none of their present run."""
        for _ in range(LOOKS_MAX):
            answers = await self._nodes.ask(LOOK, self._keys, ())
            looks = {
                index: _Look(*cast("list[Any]", answer)) for index, answer in enumerate(answers) if type(answer) is list
            }
            unmarked = [index for index, look in looks.items() if look.state != _MARKED]
            if not unmarked:
                return
            marked = [look for look in looks.values() if look.state != _BLANK]
            starting = not self._durable and len(looks) == self._nodes_count
            if not starting or not marked or not all(look.votes and look.age_ms < FIRST_START_MS for look in marked):
                await self._mark(unmarked, looks, at_once=self._durable or (starting and not marked))
                return
            # The first start of another client is under way.
            await self._runtime.sleep(self._runtime.random.uniform(0.01, 0.05))

    async def _mark(self, unmarked: list[int], looks: dict[int, _Look], *, at_once: bool) -> None:
        assert all(looks[index].state != _MARKED for index in unmarked)
        ttl_ms = max(self.ttl_ms, *(look.ttl_ms for look in looks.values()))
        wait_ms = 0
        if not at_once:
            few = sum(look.votes for look in looks.values()) < self._nodes_count - self._quorum + 1
            wait_ms = wait_milliseconds(max(ttl_ms, FORGOTTEN_MS) if few else ttl_ms)
            assert wait_ms > ttl_ms, "a node that votes before what it forgot has ended"
        # Not where a node restarts meanwhile: another client may have started the set, and hold what this node forgot.
        runs = [looks[index].run if index in looks and not self._durable else b"" for index in range(self._nodes_count)]
        answers = await self._nodes.ask(ADMIT, self._keys, (wait_ms, ttl_ms), last_arguments=runs, only=unmarked)
        for index in unmarked:
            if answers[index] == 1 and wait_ms:
                log.warning(
                    "Redlock node %s was restarted or has lost its data: it votes again in %.1f s, "
                    "when every lease that it may have forgotten has ended",
                    self._nodes.labels[index], wait_ms / 1000,
                )  # fmt: skip
            elif isinstance(answers[index], LockError):
                log.debug("marking %s: %s", self._nodes.labels[index], answers[index])
