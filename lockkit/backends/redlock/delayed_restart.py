"""
Which nodes of a Redlock may vote: delayed restart.

A node that comes back without what it knew would vote for a second holder. So each node has a *mark*, which it loses
with its data, and which names the run of the server that it was written in. `acquire.lua` compares it in the
same atomic step as the vote, so a node that was emptied (FLUSHALL) or restarted a moment ago does not vote, whatever
any client believed of it; a server that does not tell its run is not asked for its vote at all, but with ``durable=1``
(`lockkit.backends.redlock.connections`). Someone then has to say from when on it votes again; that is decided here.

====================================================  ==================================================================
what the nodes say                                    what is done
====================================================  ==================================================================
all n answer, none has a mark                         the first start of a new set: all are marked and vote at once
all n answer, some have a mark, all of them younger   the first start is under way, by another client: look again
than 5 s by their own clocks, and voting
otherwise                                             who has no mark of its present run has (or may have) lost data:
                                                      marked, and votes when the longest ttl has passed
``durable=1``                                         who has no mark of its present run is marked and votes at once
====================================================  ==================================================================

Why *all* must answer for a first start. Five nodes; A holds 3, 4 and 5 (1 and 2 were slow)::

    1 and 2 go down; 3, 4 and 5 restart empty
    B asks: 3, 4 and 5 answer, none has a mark. "A first start" would be wrong: A still believes.

The longest ttl is that of the longest lease that the node may have forgotten. Each node keeps the longest ttl that it
has voted for in its mark, written before the vote. A lease that counted on the lost node m was voted for by quorum - 1
others, and these are met by any n - quorum + 1 of the others that answer: the maximum of their marks is enough.
Do fewer answer, the lease may be unknown to all of them, and `FORGOTTEN_MS` is waited at least.

The mark is written only where none of this run is (`admit.lua`), so of two clients that decide at the same time
the first one's decision stands: a late "first start" does not shorten a wait.

What this does not catch: all nodes lose their data at once. That looks like a first start, and no majority could tell.

Source: the section "Performance, crash recovery and fsync" of the Redlock description in the Redis documentation.
Deviations: a restarted node that still has data waits too (without ``appendfsync always`` it may lack its last writes),
and nobody has to delay the start of a server by hand.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NamedTuple, cast

from lockkit.backends.redlock.nodes import ADMIT, LOOK
from lockkit.background import SingleRun
from lockkit.errors import LockError

if TYPE_CHECKING:
    from lockkit.backends.redlock.nodes import LockKeys, Panel
    from lockkit.runtime import Event, Runtime

__all__ = ["FIRST_START_MS", "FORGOTTEN_MS", "Admission"]

log = logging.getLogger("lockkit")

FIRST_START_MS = 5000
"""How long a first start may take. Longer waits longer for a client that died in it; shorter, and a slow one leaves
nodes that wait for the longest ttl without need."""

FORGOTTEN_MS = 60_000
"""Least wait when too few other nodes can be asked for the longest ttl. Leases longer than this are at risk when
several nodes are lost together; longer keeps a new set with a missing node waiting for longer."""

LOOKS_MAX = 10
"""Looks at the first start of another client in a row. More delays the caller, fewer tells it "no quorum" early."""

_BLANK, _MARKED = 0, 1


class _Look(NamedTuple):
    """What a node says of its mark; see ``look.lua``."""

    state: int
    wait_ms: int
    ttl_ms: int
    age_ms: int

    @property
    def votes(self) -> bool:
        return self.state == _MARKED and self.wait_ms == 0


class Admission:
    """
    Decides for one client from when on a node votes.

    Attributes:
        ttl_ms: Longest ttl that this client has asked for.
    """

    def __init__(self, panel: Panel, keys: LockKeys, runtime: Runtime, *, durable: bool) -> None:
        """Know of no ttl yet."""
        self.ttl_ms = 0
        self._panel = panel
        self._keys = keys
        self._runtime = runtime
        self._durable = durable
        self._nodes_count = len(panel.labels)
        self._quorum = self._nodes_count // 2 + 1
        self._looking = SingleRun(runtime, "lockkit-redlock-admit", self.run)

    async def run(self) -> None:
        """Look at all nodes, and mark those that have no mark of their present run."""
        looks: dict[int, _Look] = {}
        for _ in range(LOOKS_MAX):
            looks = await self._look()
            strange = [index for index, look in looks.items() if look.state != _MARKED]
            if not strange:
                return
            if not self._is_first_start_elsewhere(looks):
                await self._mark(strange, looks)
                return
            await self._runtime.sleep(self._runtime.random.uniform(0.01, 0.05))

    def run_soon(self) -> Event:
        """
        Do the same in the background; the event is set at its end.

        Not in the time of a caller: one that has little of it would take nodes that were not asked for long enough for
        such that cannot be asked, and let the others wait.
        """
        return self._looking.start()

    async def _look(self) -> dict[int, _Look]:
        # A node cannot be asked if it does not answer now, not if it did not answer a while ago.
        await self._panel.retry()
        answers = await self._panel.ask(LOOK, self._keys, ())
        looks = {
            index: _Look(*cast("list[int]", answer)) for index, answer in enumerate(answers) if isinstance(answer, list)
        }
        assert all(look.wait_ms >= 0 and look.ttl_ms >= 0 for look in looks.values())
        return looks

    def _is_first_start(self, looks: dict[int, _Look]) -> bool:
        return len(looks) == self._nodes_count and all(look.state == _BLANK for look in looks.values())

    def _is_first_start_elsewhere(self, looks: dict[int, _Look]) -> bool:
        if self._durable or len(looks) < self._nodes_count:
            return False
        marked = [look for look in looks.values() if look.state != _BLANK]
        return bool(marked) and all(look.votes and look.age_ms < FIRST_START_MS for look in marked)

    async def _mark(self, strange: list[int], looks: dict[int, _Look]) -> None:
        assert strange, "nobody to be marked"
        ttl_ms = max(self.ttl_ms, *(look.ttl_ms for look in looks.values()))
        wait_ms = 0
        if not self._durable and not self._is_first_start(looks):
            wait_ms = ttl_ms
            if sum(look.votes for look in looks.values()) < self._nodes_count - self._quorum + 1:
                wait_ms = max(wait_ms, FORGOTTEN_MS)
            # The clocks of two nodes differ by as much as the engine allows between client and node.
            wait_ms = math.ceil(wait_ms * 1.01) + 2
            assert wait_ms > ttl_ms, "a node that votes before what it forgot has ended"
        answers = await self._panel.ask(ADMIT, self._keys, (wait_ms, ttl_ms), only=strange)
        for index in strange:
            if answers[index] == 1 and wait_ms:
                log.warning(
                    "Redlock node %s was restarted or has lost its data: it votes again in %.1f s, "
                    "when every lease that it may have forgotten has ended",
                    self._panel.labels[index], wait_ms / 1000,
                )  # fmt: skip
            elif isinstance(answers[index], LockError):
                log.debug("marking %s: %s", self._panel.labels[index], answers[index])
