"""
The nodes of a Redlock as its algorithm sees them: questions, answers, and which keys a question is about.

`lockkit.backends.redlock.backend` decides by counting answers, and knows nothing of sockets. So the same code runs on
real nodes (`lockkit.backends.redlock.connections`) and on simulated ones (the tests').
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal, TypeAlias

from lockkit.backends.redis.node import Script, bulk, lock_key, side_key
from lockkit.errors import BackendUnavailable, LockError

if TYPE_CHECKING:
    from lockkit.backend import Request
    from lockkit.backends.redis.node import Reply

__all__ = [
    "ABANDON", "ACQUIRE", "ADMIT", "BREAK", "FENCE", "HOLDERS", "LOOK", "RELEASE", "RENEW", "UNDO", "Absent",
    "Answer", "Argument", "LockKeys", "Op", "Panel",
]  # fmt: skip

Argument: TypeAlias = "str | int"
KeyName = Literal["lock", "fence", "meta", "queue", "broken", "mark"]
Answer: TypeAlias = "Reply | LockError"
"""Of one node: what its script returned, or why there is no answer. None: the node was not asked."""


class Absent(BackendUnavailable):
    """
    The answer of a node that was down, so that nothing was sent to it.

    Attributes:
        reason: Why it is down.
    """

    def __init__(self, reason: LockError) -> None:
        """Say the same as `reason`."""
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Op:
    """
    Something that a node does in one atomic step.

    Attributes:
        name: Which.
        script: The Lua file that does it, whose first lines say what is returned.
        keys: Which keys it takes, in order.
        greeted: Its last argument is the run id of the server, as seen when the connection was opened.
    """

    name: str
    script: Script
    keys: tuple[KeyName, ...]
    greeted: bool = False


def _op(name: str, keys: Sequence[KeyName], arguments: int, *, greeted: bool = False, tells: bool = False) -> Op:
    shared = "tell" if tells else None
    script = Script(name, keys=len(keys), arguments=arguments, shared=shared, package=__package__)
    return Op(name, script, tuple(keys), greeted)


ACQUIRE = _op("acquire", ["lock", "fence", "meta", "queue", "mark"], 5, greeted=True)
FENCE = _op("fence", ["lock", "fence"], 3)
RENEW = _op("renew", ["lock", "fence", "meta", "broken", "mark"], 3)
RELEASE = _op("release", ["lock", "meta", "queue"], 1, tells=True)
UNDO = _op("undo", ["lock", "meta"], 1)
ABANDON = _op("abandon", ["lock", "queue"], 1, tells=True)
BREAK = _op("break", ["lock", "fence", "meta", "broken", "queue"], 2, tells=True)
LOOK = _op("look", ["mark"], 1, greeted=True)
ADMIT = _op("admit", ["mark"], 3, greeted=True)
# The same as of one node alone.
HOLDERS = Op("holders", Script("holders", keys=4, arguments=0), ("lock", "fence", "meta", "queue"))


class LockKeys:
    """
    The keys of one lock, the same on every node.

    Attributes:
        lock: Name of the key that is the lock.
    """

    __slots__ = ("_packed", "_prefix", "lock")

    def __init__(self, prefix: str, name: str) -> None:
        """Name them."""
        self.lock = lock_key(prefix, name)
        self._prefix = prefix
        self._packed: dict[str, bytes] = {}

    def packed(self, op: Op) -> bytes:
        """Give the keys of a question as the server takes them, packed once."""
        packed = self._packed.get(op.name)
        if packed is None:
            packed = self._packed[op.name] = b"".join(bulk(self._name(key)) for key in op.keys)
        return packed

    def _name(self, key: KeyName) -> str:
        if key == "lock":
            return self.lock
        # A key of no lock (those begin with PREFIX:) and beside none (their braces hold PREFIX:NAME).
        return f"{{{self._prefix}}}:redlock" if key == "mark" else side_key(self.lock, key)


class Panel(ABC):
    """
    The nodes.

    Attributes:
        labels: Of each node, for messages.
    """

    labels: Sequence[str]

    @abstractmethod
    async def ask(
        self,
        op: Op,
        keys: LockKeys,
        arguments: Sequence[Argument],
        *,
        tails: Sequence[Argument] | None = None,
        only: Collection[int] | None = None,
        owed: float = 0.0,
        until: float = inf,
    ) -> list[Answer]:
        """
        Ask nodes at the same time, and wait for all answers until one deadline for all of them.

        A node that is not connected is not waited for.

        Args:
            op: What.
            keys: Of which lock.
            arguments: The same for all nodes.
            tails: One more argument, for each node its own.
            only: Indexes of the nodes to ask; None: all.
            owed: A node that gives no answer is asked again when it is reached next, within so many seconds, if it can
                be. Only for what does no harm however late it comes.
            until: Client monotonic time by which there is an answer, or the want of one. What can be sent is sent,
                however late it is.

        Returns:
            For each node its answer.
        """

    @abstractmethod
    async def retry(self) -> None:
        """
        Have nodes that are down tried now, and wait for what comes of it, at most as long as for an answer.

        Before a decision that depends on which nodes cannot be asked: that a node is down is what the last try showed,
        and it may be back since.
        """

    @abstractmethod
    async def ask_many(
        self,
        op: Op,
        calls: Sequence[tuple[LockKeys, Sequence[Argument]]],
        *,
        until: float = inf,
        last: bool = False,
    ) -> list[list[Answer]]:
        """
        Ask all nodes about many locks, pipelined, as far as the time goes.

        Args:
            op: What.
            calls: Which locks, and the arguments for each.
            until: As for `ask`; the locks that were not asked about by then have errors for answers.
            last: The client is being closed, and its event loop may end: do not connect to nodes that are lost.

        Returns:
            For each node its answers, in the order of `calls`.
        """

    @abstractmethod
    def places(self, request: Request) -> list[str]:
        """
        Give the places in the queues of the nodes, "" where none can be taken; the request is woken from now on.

        All are "" before `listen`.
        """

    @abstractmethod
    async def listen(self, until: float) -> bool:
        """Subscribe at all nodes that are up, so that `places` can be taken. False if there is no subscription then."""

    @abstractmethod
    def forget(self, request: Request) -> None:
        """Wake it no more."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections that are ours."""
