"""Lua files made into commands."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TypeAlias

from lockkit.backends.redis.resp import bulk

Pack: TypeAlias = "Callable[[bytes], bytes]"

SHARED = "lockkit:shared"
"""Value of a lock that readers or permits hold."""

_FUNCTIONS = re.compile(r"^-- With the functions of .*:$", re.MULTILINE)

# Scripts call commands on keys other than the lock's by `side`.
_STRICT = f"local SHARED, alone, side = '{SHARED}', false, redis.call"
# A key vanishes with its last entry. While its slot moves, the server then takes it for one at the other node, and
# refuses the commands that follow: they find nothing.
_IN_CLUSTER = f"""\
local SHARED, alone = '{SHARED}', false
local function side(...)
  local result = redis.pcall(...)
  if type(result) == 'table' and result.err and not string.find(result.err, 'non local key', 1, true) then
    return redis.call(...)  -- which raises the error
  end
  return result
end"""
_LENIENT = """\
local SHARED, alone, side = '%s', true, redis.pcall
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
    A Lua script as a command.

    Attributes:
        text: Its source.
        sha: Its SHA-1, by which the server identifies it.
        alone: A variant for a slot that moves between nodes of a Cluster; None if there is none.
        in_cluster: What nodes of a Cluster run otherwise.
        command: Packs a call; takes its keys and arguments, each packed by `bulk`.
        loading_command: The same for a call that also loads the script.
    """

    __slots__ = ("alone", "command", "in_cluster", "loading_command", "sha", "text")

    def __init__(self, text: str, *, keys: int, words: int, alone: Command | None = None) -> None:
        """Pack it. The first `keys` of the `words` that follow are keys."""
        self.text = text
        self.sha = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - what Redis uses
        self.alone = alone
        self.in_cluster = self
        count = b"*%d\r\n" % (3 + words)
        # Methods of bytes, because each lock calls them twice.
        self.command: Pack = (count + bulk("EVALSHA") + bulk(self.sha) + bulk(keys)).__add__
        self.loading_command: Pack = (count + bulk("EVAL") + bulk(text) + bulk(keys)).__add__


class Script(Command):
    """
    A Lua file in the folder ``scripts`` of a backend.

    Attributes:
        name: Of the file, without ``.lua``.
        keys: What each of its keys is for: the lock's own key is "lock", see `lockkit.backends.redis.keys.side_key`.
    """

    __slots__ = ("keys", "name")

    def __init__(
        self, name: str, *, keys: Sequence[str], arguments: int, alone: bool = False, package: str = __package__
    ) -> None:
        self.name = name
        self.keys = tuple(keys)
        folder = files(package).joinpath("scripts")
        text, words = folder.joinpath(f"{name}.lua").read_text("utf-8"), len(keys) + arguments
        if (line := _FUNCTIONS.search(text)) is not None:
            used = [folder.joinpath(file).read_text("utf-8") for file in re.findall(r"\w+\.lua", line[0])]
            text = "\n".join([text[: line.start()], *used, text[line.end() :]])
        # While a slot moves, the server refuses a script (TRYAGAIN) if it has some of the declared keys and not all.
        # So this variant declares the first key only, and takes the others from the arguments. What follows the command
        # stays the same.
        one = Command(f"{_LENIENT % (SHARED, len(keys) - 1)}\n{text}", keys=1, words=words) if alone else None
        super().__init__(f"{_STRICT}\n{text}", keys=len(keys), words=words, alone=one)
        self.in_cluster = Command(f"{_IN_CLUSTER}\n{text}", keys=len(keys), words=words, alone=one)
