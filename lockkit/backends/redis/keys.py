"""Lua files made into commands, the names of their keys, and the times in Redis's unit."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TypeAlias, TypeVar

from lockkit.backend import SPACES, split_space
from lockkit.backends.redis.resp import bulk
from lockkit.validation import escape

IDLE_SECONDS = 86_400.0
"""How long the counter of a lock that is not used is kept, if the option ``idle_ttl`` does not say."""

IDLE_SECONDS_MIN = 60.0
"""The shortest such time. After it, tokens increase only by the server's clock: shorter, and a step of that clock by a
minute, as after a boot, could be longer."""

IDLE_TTLS = 10
"""It is at least so many ttls: a counter must outlive its lease."""

KNOWN_NAMES_MAX = 1024
"""Names whose packed keys are cached. More takes memory (half a kilobyte each), fewer packs them more often."""

Pack: TypeAlias = "Callable[[bytes], bytes]"

SHARED = "lockkit:shared"
"""Value of a lock that readers or permits hold."""

_FUNCTIONS = re.compile(r"^-- With the functions of .*:$", re.MULTILINE)

# Scripts call commands on keys other than the lock's by `side`. In a Cluster, a key vanishes with its last entry. While
# its slot moves, the server then takes it for one at the other node, and refuses the commands that follow: they find
# nothing.
_STRICT = f"""\
local SHARED, alone = '{SHARED}', false
local function side(...)
  local result = redis.pcall(...)
  if type(result) == 'table' and result.err and not string.find(result.err, 'non local key', 1, true) then
    return redis.call(...)  -- which raises the error
  end
  return result
end
"""
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
end
"""


class Command:
    """A Lua script as a command."""

    __slots__ = ("alone", "command", "loading_command")

    def __init__(self, text: str, *, keys: int, words: int, alone: Command | None = None) -> None:
        self.alone = alone  # a variant for a slot that moves between nodes of a Cluster
        sha = hashlib.sha1(text.encode()).hexdigest()  # noqa: S324 - by which Redis identifies it
        count = b"*%d\r\n" % (3 + words)
        # They pack a call, the second one that loads the script, too: from keys and arguments, each packed by `bulk`.
        # Methods of bytes, because each lock calls them twice.
        self.command: Pack = (count + bulk("EVALSHA") + bulk(sha) + bulk(keys)).__add__
        self.loading_command: Pack = (count + bulk("EVAL") + bulk(text) + bulk(keys)).__add__


class Script(Command):
    """A Lua file in the folder ``scripts`` of a backend. Its `keys` are named as for `side_key`, or "lock"."""

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
        one = Command(_LENIENT % (SHARED, len(keys) - 1) + text, keys=1, words=words) if alone else None
        super().__init__(_STRICT + text, keys=len(keys), words=words, alone=one)


# "session" was such a space once; a lock of that name keeps its key.
_APART = tuple(f"+{space}:" for space in (*SPACES, "session"))


def lock_key(prefix: str, name: str) -> str:
    """
    Name the key of a lock, as redis-py's ``Lock`` and others know it: ``PREFIX:NAME``, braces percent-encoded.

    With an empty prefix it is the name alone; the lock ``+sem:x`` then has the key ``%2Bsem:x``, because ``+sem:x`` is
    that of the semaphore ``x``.
    """
    key = escape(name, "{}")
    if prefix:
        return f"{prefix}:{key}"
    return f"%2B{key[1:]}" if key.startswith(_APART) else key


def side_key(key: str, what: str) -> str:
    """Name a key beside a lock's, in the same Cluster slot: ``{PREFIX:NAME}:fence``."""
    return f"{{{key}}}:{what}"


def escape_glob(text: str) -> str:
    """Take their meaning from the characters that have one in a pattern of ``SCAN``."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


def ttl_milliseconds(ttl: float) -> int:
    """Round a ttl (seconds) up to whole milliseconds."""
    # 0.1 * 3 is a little above 0.3: without the margin that would be a millisecond more.
    ttl_ms = math.ceil(ttl * 1000 - 1e-6)
    assert ttl_ms > 0, "a key that never expires"
    return ttl_ms


def fence_milliseconds(ttl_ms: int, idle_ms: int) -> int:
    """Return how long the counter is kept after the last grant or renewal with that ttl."""
    fence_ms = max(idle_ms, IDLE_TTLS * ttl_ms)
    assert fence_ms > ttl_ms, "a counter that does not outlive its lease"
    return fence_ms


class LockKeys:
    """The keys of one lock; `lock` is its own."""

    __slots__ = ("_packed", "_prefix", "lock")

    def __init__(self, prefix: str, name: str) -> None:
        space, name = split_space(name)
        self.lock = lock_key(f"{prefix}+{space}" if space else prefix, name)
        self._prefix = prefix
        self._packed: dict[Script, bytes] = {}

    def packed(self, script: Script) -> bytes:
        """Return the keys of a script as the server expects them, packed once."""
        packed = self._packed.get(script)
        if packed is None:
            packed = self._packed[script] = b"".join(bulk(self._name(what)) for what in script.keys)
        return packed

    def body(self, script: Script, *arguments: bytes | str | int) -> bytes:
        """Return the keys and arguments of a script, packed."""
        return self.packed(script) + b"".join(map(bulk, arguments))

    def _name(self, what: str) -> str:
        return self.lock if what == "lock" else side_key(self.lock, what)


KeysT = TypeVar("KeysT", bound=LockKeys)


class KeysByName(dict[str, KeysT]):
    """The keys of locks, made when they are first asked for; a dictionary because each acquisition looks there."""

    def __init__(self, make: Callable[[str], KeysT]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> KeysT:
        if len(self) >= KNOWN_NAMES_MAX:
            self.clear()
        keys = self[name] = self._make(name)
        return keys
