"""
The names of the locks on some Redis nodes, from ``SCAN``.

Source: "SCAN" in the Redis documentation: a key that is there from the first call to the last is returned at least
once; one may be returned several times while the server resizes its table; keys that have expired are left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

from lockkit.backend import NamesPage, apart, split_space
from lockkit.backends.redis.errors import translate
from lockkit.backends.redis.keys import escape_glob, lock_key, side_key
from lockkit.backends.redis.node import RedisNode
from lockkit.backends.redis.resp import ServerSaid, pack
from lockkit.errors import ConfigurationError
from lockkit.validation import lock_name, unescape

ENDLESS, GONE = -1, -2
"""Answers of ``PTTL``: for a key without expiry, and for none."""

SCAN_COUNT = 1000
"""Keys of the database that one call looks at. More blocks the server for longer (a thousand: 0.6 ms); fewer takes
more round trips, of which a database with a million keys needs a thousand already."""


class Scan:
    """
    One listing: its nodes, the one that is being read, the cursor there, and the names so far.

    The names are kept because ``SCAN`` may repeat a key, and because nodes of a Cluster may exchange slots.
    """

    def __init__(self, prefix: str, name_prefix: str, nodes: Sequence[RedisNode]) -> None:
        space, begin = split_space(name_prefix)
        self._named = partial(apart, space) if space else str
        prefix, name_prefix = f"{prefix}+{space}" if space else prefix, begin
        self._key_begin = lock_key(prefix, "")
        self._prefix = prefix
        self._name_prefix = name_prefix
        # With an empty prefix, not all keys of names that begin with "+" begin with such a name.
        begin = lock_key(prefix, name_prefix) if prefix or name_prefix[:1] != "+" else ""
        self._pattern = f"{escape_glob(begin)}*"
        self._nodes = list(nodes)
        self._index = 0
        self._cursor: bytes | str = b"0"
        self._seen: set[str] = set()

    async def page(self, masters: Callable[[], Awaitable[Sequence[RedisNode]]] | None = None) -> NamesPage:
        """Read some keys of the node."""
        node = self._nodes[self._index]
        command = pack("SCAN", self._cursor, "MATCH", self._pattern, "COUNT", SCAN_COUNT, "TYPE", "string")
        cursor, keys = cast("Any", await node.call(command, resend=True))
        index = self._index + (cursor == b"0")
        if index == len(self._nodes) and masters is not None:
            self._nodes += [node for node in await masters() if node not in self._nodes]
        names = {self._named(name) for key in keys if (name := self._name(key)) is not None} - self._seen
        if names and not self._prefix:
            names = await self._proven(node, list(names))
        self._cursor, self._index = cursor, index
        self._seen |= names
        return NamesPage(list(names), self if index < len(self._nodes) else None)

    def replace_node(self, other: RedisNode) -> None:
        """Leave out the node that is being read, and read another one at the end."""
        self._nodes = [*self._nodes[: self._index], *self._nodes[self._index + 1 :], other]
        self._cursor = b"0"

    async def _proven(self, node: RedisNode, names: Sequence[str]) -> set[str]:
        """Leave out what may be data of an application: keys without an expiry and without a record beside them."""
        keys = [lock_key("", name) for name in names]
        asked = [pack("PTTL", key) for key in keys] + [pack("EXISTS", side_key(key, "fence")) for key in keys]
        replies = await node.call_many(asked)
        for reply in replies:
            if isinstance(reply, ServerSaid):
                raise translate(reply, node.label) from reply
        lefts, records = replies[: len(names)], replies[len(names) :]
        return {
            name
            for name, left_ms, record in zip(names, lefts, records, strict=True)
            if left_ms != GONE and (left_ms != ENDLESS or record == 1)
        }

    def _name(self, key: bytes) -> str | None:
        """Return the name of the lock at a key; None for a key that no lock of lockkit can have."""
        try:
            text = key.decode()
            name = lock_name(unescape(text.removeprefix(self._key_begin)))
        except (UnicodeDecodeError, ConfigurationError):
            return None
        return name if name.startswith(self._name_prefix) and lock_key(self._prefix, name) == text else None
