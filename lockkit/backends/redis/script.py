"""Names of keys, and Lua files made into commands."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from lockkit.backends.redis.resp import bulk
from lockkit.validation import escape

__all__ = ["Command", "Script", "lock_key", "side_key"]


def lock_key(prefix: str, name: str) -> str:
    """Name the key of a lock, as redis-py's ``Lock`` and others know it: ``PREFIX:NAME``, braces percent-encoded."""
    return f"{prefix}:{escape(name, '{}')}"


def side_key(key: str, what: str) -> str:
    """Name a key beside a lock's, in the same Cluster slot: ``{PREFIX:NAME}:fence``."""
    return f"{{{key}}}:{what}"


# `side` is how a script calls commands on the keys beside the lock's own.
_STRICT = "local side = redis.call"
_LENIENT = """\
local side = redis.pcall
local KEYS, ARGV = {KEYS[1]}, ARGV
do
  local count, rest = %d, {}
  for i, value in ipairs(ARGV) do
    if i <= count then
      KEYS[i + 1] = value
    else
      rest[i - count] = value
    end
  end
  ARGV = rest
end"""


class Command:
    """
    A Lua text as a command.

    Attributes:
        text: What is run.
        sha: Its SHA-1, by which the server knows it.
        alone: The same for a slot that is being moved from one node of a Cluster to another; None if it has none.
    """

    __slots__ = ("_by_sha", "_by_text", "alone", "sha", "text")

    def __init__(self, text: str, *, keys: int, words: int, alone: Command | None = None) -> None:
        """Pack it. Of the `words` that follow, so many are named as keys."""
        self.text = text
        self.sha = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - what Redis uses
        self.alone = alone
        count = b"*%d\r\n" % (3 + words)
        self._by_sha = count + bulk("EVALSHA") + bulk(self.sha) + bulk(keys)
        self._by_text = count + bulk("EVAL") + bulk(text) + bulk(keys)

    def command(self, body: bytes) -> bytes:
        """Pack a call; `body` is its keys and arguments, each packed by `bulk`."""
        return self._by_sha + body

    def loading_command(self, body: bytes) -> bytes:
        """Pack a call that also teaches the server the script."""
        return self._by_text + body


class Script(Command):
    """A Lua file in the folder ``scripts`` of a backend."""

    __slots__ = ()

    def __init__(
        self,
        name: str,
        *,
        keys: int,
        arguments: int,
        shared: str | None = None,
        alone: bool = False,
        package: str = __package__,
    ) -> None:
        """
        Read it.

        Args:
            name: File name without ``.lua``.
            keys: How many keys it takes.
            arguments: How many further arguments it takes.
            shared: A file of functions that it uses.
            alone: It does its work with its first key alone, and calls commands on the others by ``side``, where an
                error means that the key is not there.
            package: The backend's package, whose folder ``scripts`` has the file.
        """
        folder = files(package).joinpath("scripts")
        parts = [folder.joinpath(f"{part}.lua").read_text() for part in (shared, name) if part is not None]
        text, words = "\n".join(parts), keys + arguments
        # The server refuses a script (TRYAGAIN) while it has some of the keys named to it and not the rest, for as long
        # as the slot moves. So it is named the first one only, and finds the others among the arguments. What is packed
        # behind the command stays the same.
        one = Command(f"{_LENIENT % (keys - 1)}\n{text}", keys=1, words=words) if alone else None
        super().__init__(f"{_STRICT}\n{text}", keys=keys, words=words, alone=one)
