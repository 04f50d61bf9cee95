"""Names of keys, and Lua files made into commands."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from lockkit.backends._redis_resp import bulk
from lockkit.values import escape

__all__ = ["Script", "lock_key", "side_key"]


def lock_key(prefix: str, name: str) -> str:
    """Name the key of a lock, as redis-py's ``Lock`` and others know it: ``PREFIX:NAME``, braces percent-encoded."""
    return f"{prefix}:{escape(name, '{}')}"


def side_key(key: str, what: str) -> str:
    """Name a key beside a lock's, in the same Cluster slot: ``{PREFIX:NAME}:fence``."""
    return f"{{{key}}}:{what}"


class Script:
    """
    A Lua file of ``redis_scripts``.

    Attributes:
        text: What is run.
        sha: Its SHA-1, by which the server knows it.
    """

    __slots__ = ("_by_sha", "_by_text", "sha", "text")

    def __init__(self, name: str, *, keys: int, arguments: int, shared: str | None = None) -> None:
        """
        Read it.

        Args:
            name: File name without ``.lua``.
            keys: How many keys it takes.
            arguments: How many further arguments it takes.
            shared: A file of functions that it uses.
        """
        folder = files("lockkit.backends").joinpath("redis_scripts")
        parts = [folder.joinpath(f"{part}.lua").read_text() for part in (shared, name) if part is not None]
        self.text = "\n".join(parts)
        self.sha = hashlib.sha1(self.text.encode()).hexdigest()  # noqa: S324 - what Redis uses
        count = b"*%d\r\n" % (3 + keys + arguments)
        self._by_sha = count + bulk("EVALSHA") + bulk(self.sha) + bulk(keys)
        self._by_text = count + bulk("EVAL") + bulk(self.text) + bulk(keys)

    def command(self, body: bytes) -> bytes:
        """Pack a call; `body` is its keys and arguments, each packed by `bulk`."""
        return self._by_sha + body

    def loading_command(self, body: bytes) -> bytes:
        """Pack a call that also teaches the server the script."""
        return self._by_text + body
