"""What the nodes of a Redlock are asked: operations, their keys, and answers."""

from __future__ import annotations

from functools import partial
from typing import TypeAlias

from lockkit.backends.redis import keys as redis_keys
from lockkit.backends.redis.keys import Script
from lockkit.backends.redis.resp import Reply
from lockkit.errors import BackendUnavailable, LockError

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
ADMIT: Op = _script("admit", keys=["mark"], arguments=4)
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
