"""
The nodes of a Redlock as its algorithm sees them: operations, their keys, and answers.

`lockkit.backends.redlock.backend` decides by counting answers, and contains no I/O. So the same code runs on real nodes
(`lockkit.backends.redlock.network`) and on simulated ones (`lockkit_tools.simulation.redlock`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import partial
from math import inf
from typing import TypeAlias

from lockkit.backend import Request
from lockkit.backends.redis import keys as redis_keys
from lockkit.backends.redis.keys import Script
from lockkit.backends.redis.listing import Scan
from lockkit.backends.redis.resp import Reply
from lockkit.errors import BackendUnavailable, LockError
from lockkit.units import Instant

Argument: TypeAlias = "bytes | str | int"
Answer: TypeAlias = "Reply | LockError"
"""Of one node: what its script returned, or why there is no answer; None if the node was not asked."""

Op: TypeAlias = Script
"""What a node does in one atomic step: a Lua file, whose first lines describe the result."""

_script = partial(Script, package=__package__)
ACQUIRE: Op = _script("acquire", keys=["lock", "fence", "queue", "mark"], arguments=7)
FENCE: Op = _script("fence", keys=["lock", "fence", "queue"], arguments=4)
RENEW: Op = _script("renew", keys=["lock", "fence", "broken", "mark"], arguments=3)
RELEASE: Op = _script("release", keys=["lock", "fence", "queue"], arguments=1)
UNDO: Op = _script("undo", keys=["lock"], arguments=1)
ABANDON: Op = _script("abandon", keys=["lock", "queue"], arguments=1)
BREAK: Op = _script("break", keys=["lock", "fence", "broken", "queue"], arguments=2)
LOOK: Op = _script("look", keys=["mark"], arguments=1)
ADMIT: Op = _script("admit", keys=["mark"], arguments=3)
HOLDERS: Op = Script("holders", keys=["lock", "fence", "queue"], arguments=0)

TOLD_THE_RUN = frozenset({ACQUIRE, LOOK, ADMIT})
"""Their last argument is the run id of the server, as told on the connection."""


class NodeDown(BackendUnavailable):
    """Stands for the answer of a node that was down, to which nothing was sent; `reason` says why it is down."""

    def __init__(self, reason: LockError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class NodeConnecting(NodeDown):
    """Stands for the answer of a node that may be up: no connection to it was opened in time."""


class LockKeys(redis_keys.LockKeys):
    """The keys of one lock, the same on every node, and the mark of a node."""

    __slots__ = ()

    @property
    def mark(self) -> str:
        """The key of a node's mark."""
        return self._name("mark")

    def _name(self, what: str) -> str:
        # Neither the key of a lock (those begin with PREFIX:) nor beside one (their braces contain PREFIX:NAME).
        return f"{{{self._prefix}}}:redlock" if what == "mark" else super()._name(what)


class Nodes(ABC):
    """All nodes of a Redlock; `labels` name each in messages."""

    labels: Sequence[str]

    @abstractmethod
    async def ask(
        self,
        op: Op,
        keys: LockKeys,
        arguments: Sequence[Argument],
        *,
        last_arguments: Sequence[Argument] | None = None,
        only: Collection[int] | None = None,
        send_later_seconds: float = 0.0,
        until: Instant = inf,
    ) -> list[Answer]:
        """
        Run an operation on several nodes at the same time, with one deadline for all answers.

        It does not wait for nodes that are known to be down. With `send_later_seconds`, a node that does not answer
        gets it when it is reached again within that time.
        """

    @abstractmethod
    async def ask_many(
        self,
        op: Op,
        calls: Sequence[tuple[LockKeys, Sequence[Argument]]],
        *,
        until: Instant = inf,
        last: bool = False,
    ) -> list[list[Answer]]:
        """Run an operation for many locks on all nodes, pipelined, as long as there is time; `last` before the end."""

    @abstractmethod
    def queue_entries(self, request: Request) -> list[str]:
        """
        Return the entries for the queues of the nodes, and wake the request from now on.

        An entry is "" where there is no subscription; all are before `listen`.
        """

    @abstractmethod
    async def listen(self, until: Instant) -> bool:
        """Subscribe at all nodes that are up, for `queue_entries`. Return whether there is any subscription."""

    @abstractmethod
    def forget(self, request: Request) -> None:
        """Stop waking a request."""

    @abstractmethod
    def scan(self, index: int, prefix: str, name_prefix: str) -> Scan:
        """Begin to list the locks whose keys a node has."""

    @abstractmethod
    async def erase(self, prefix: str) -> None:
        """Delete the keys of all locks with a prefix at every node."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections."""
