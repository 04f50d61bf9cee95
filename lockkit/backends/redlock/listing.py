"""
Which locks the nodes of a Redlock may have: names from the keys of some nodes, on which all nodes then vote.

A lock that a majority of q of n nodes has is at one of any n - q + 1 nodes. So it is enough to list the keys of so many
nodes, and q - 1 may be down.
"""

from __future__ import annotations

from collections.abc import Sequence

from lockkit.backends.redis.listing import Scan
from lockkit.backends.redlock.addresses import counted
from lockkit.backends.redlock.nodes import Nodes
from lockkit.errors import BackendUnavailable, NoQuorum


class Listing:
    """
    One listing: which node is being listed, and the names that were voted on.

    Attributes:
        ended: Enough nodes were listed.
    """

    def __init__(self, nodes: Nodes, quorum: int, prefix: str, name_prefix: str) -> None:
        self._nodes = nodes
        self._prefixes = prefix, name_prefix
        self._wanted = len(nodes.labels) - quorum + 1
        self._scan: Scan | None = None
        self._next_index = 0
        self._listed_count = 0
        self._failures: list[BackendUnavailable] = []
        self._seen: set[str] = set()
        self._candidates: list[str] | None = None
        self._scan_ended = False

    @property
    def ended(self) -> bool:
        """See the class."""
        return self._listed_count == self._wanted

    async def candidates(self) -> Sequence[str]:
        """Read some keys of a node: names to vote on, perhaps none. The same ones until they are accepted."""
        assert not self.ended, "enough nodes were listed"
        if self._candidates is not None:
            return self._candidates
        if self._scan is None:
            self._scan = self._nodes.scan(self._next_index, *self._prefixes)
            self._next_index += 1
        try:
            page = await self._scan.page()
        except BackendUnavailable as error:
            self._scan, self._scan_ended = None, False
            self._failures.append(error)
            if len(self._nodes.labels) - len(self._failures) < self._wanted:
                reasons = "; ".join(map(str, self._failures))
                message = f"the keys of {self._wanted} of {counted(len(self._nodes.labels))} are needed: {reasons}"
                raise NoQuorum(message) from error.__cause__ or error
            return []
        self._scan_ended = page.next is None
        self._candidates = [name for name in page.names if name not in self._seen]
        return self._candidates

    def accept(self) -> None:
        """Note that the candidates were voted on."""
        self._seen.update(self._candidates or ())
        self._candidates = None
        if self._scan is not None and self._scan_ended:
            self._scan = None
            self._listed_count += 1
