"""One Redis or Valkey server as the doctor examines it: by lockkit's connections, so as lockkit will reach it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import cast

from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import open_connection
from lockkit.backends.redis.errors import DRIVER_ERRORS, translate
from lockkit.backends.redis.handshake import info_fields
from lockkit.backends.redis.keys import lock_key, side_key
from lockkit.backends.redis.node import RedisNode
from lockkit.backends.redis.resp import Reply, ServerSaid, pack
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity

_SECTIONS = ("server", "clients", "memory", "persistence", "replication", "cluster")


class RedisServer:
    """
    One server.

    Attributes:
        examination: What examines it.
        target: Where it is. **Holds the password.**
        label: The same for messages.
        facts: What INFO says, after `look`; empty where that is denied.
    """

    def __init__(self, examination: Examination, target: Target) -> None:
        self.examination = examination
        runtime = examination.runtime
        self.target = target
        self.label = target.label
        self.facts: Mapping[str, str] = {}
        self._runtime = runtime
        self._node = RedisNode(runtime, target)

    def find(self, check: Check, seen: str, fix: str) -> None:
        """Note a finding about this server."""
        self.examination.find(check, self.label, seen, fix)

    async def look(self) -> None:
        """Read INFO."""
        reply = await self.ping()
        # PING is refused too while writes are; what INFO says then is the finding.
        if isinstance(reply, ServerSaid) and reply.code not in {"MISCONF", "NOPERM"}:
            raise translate(reply, self.label) from reply
        facts: dict[str, str] = {}
        for section in _SECTIONS:
            reply = await self.ask("INFO", section)
            if isinstance(reply, bytes):
                facts.update(info_fields(reply))
        self.facts = facts

    async def ping(self) -> Reply:
        """Ask for any answer; an error reply is one."""
        return await self.ask("PING")

    async def ask(self, *words: str | int) -> Reply:
        """Run a command that changes nothing. An error reply is a value (`ServerSaid`)."""
        (reply,) = await self._node.call_many([pack(*words)])
        return reply

    async def setting(self, name: str) -> str | None:
        """Give a setting of the server's; None if this user may not see it, or there is none of that name."""
        reply = await self.ask("CONFIG", "GET", name)
        if not isinstance(reply, list) or len(reply) != 2:  # noqa: PLR2004 - a name and its value
            return None
        return cast("bytes", reply[1]).decode("utf-8", "replace")

    async def clock(self) -> float:
        """Give the server's time of day, seconds since 1970."""
        seconds, micros = cast("list[bytes]", await self._node.call(pack("TIME"), resend=True))
        return int(seconds) + int(micros) / 1e6

    async def lets_anybody_in(self) -> bool:
        """Tell whether a connection without user and password is served."""
        arguments = {
            name: value
            for name, value in self.target.arguments.items()
            if name not in {"username", "password", "credential_provider"}
        }
        # Not RESP3: the server would already refuse its HELLO, with a different exception.
        anonymous = Target({**arguments, "protocol": 2, "db": 0}, self.target.form, self.label)
        try:
            connection = await open_connection(self._runtime, anonymous)
        except DRIVER_ERRORS:
            return False
        try:
            reply = await connection.call(pack("PING"))
        except DRIVER_ERRORS:
            return False
        finally:
            connection.close()
        return not isinstance(reply, ServerSaid)

    async def close(self) -> None:
        """Close the connections."""
        await self._node.close()


def pairs(reply: Reply) -> dict[str, str]:
    """Read a flat list of names and values, as SENTINEL gives it."""
    words = [cast("bytes", word).decode("utf-8", "replace") for word in cast("list[Reply]", reply)]
    return dict(zip(words[::2], words[1::2], strict=True))


# -- rights -----------------------------------------------------------------------------------------------------------

_error = partial(Check, severity=Severity.ERROR, page="backends/redis.md#url-and-options")
_warning = partial(Check, severity=Severity.WARNING, page="backends/redis.md#url-and-options")

RIGHTS = _error(
    "redis-rights",
    risk="Locks cannot be taken, renewed or released, or waiters are not woken: the server refuses what lockkit sends.",
)

SHARE_RIGHTS = _warning(
    "redis-share-rights",
    risk="Read locks and semaphores cannot be used: the server refuses what lockkit sends for them. Locks work.",
)


async def examine_rights(server: RedisServer, *, marks: bool = False) -> None:
    """Find commands, keys and channels that the server would refuse, without running any command."""
    prefix = server.examination.options["prefix"]
    needed = _commands(prefix, replicas=bool(server.examination.options.get("replicas")), marks=marks)
    commands = needed if marks else [*needed, *_share_commands(prefix)]
    words: list[str | int] = []
    for command in commands:
        words += (len(command), *command)
    script = files("lockkit.backends.redis.examine").joinpath("rights.lua").read_text("utf-8")
    reply = await server.ask("EVAL", script, 0, *words)
    if isinstance(reply, ServerSaid):
        if reply.code == "NOPERM":
            await _find(RIGHTS, server, "The user may not run scripts (EVAL).", ["eval", "evalsha"])
        return
    if reply == -1:
        return  # before Redis 7 a user cannot be asked about; a missing right then shows as an error that names it
    indexes = [cast("int", index) - 1 for index in cast("list[object]", reply)]
    for check, refused in (
        (RIGHTS, [commands[index] for index in indexes if index < len(needed)]),
        (SHARE_RIGHTS, [commands[index] for index in indexes if index >= len(needed)]),
    ):
        if refused:
            shown = ", ".join(" ".join(command[:2]) for command in refused)
            names = sorted({_rule(command) for command in refused})
            await _find(check, server, f"The user may not run: {shown}.", names)


async def _find(check: Check, server: RedisServer, seen: str, names: Sequence[str]) -> None:
    who = await server.ask("ACL", "WHOAMI")
    user = who.decode() if isinstance(who, bytes) else str(server.target.arguments.get("username") or "default")
    prefix = server.examination.options["prefix"]
    rules = [
        f"'~{prefix}:*'" if prefix else "'~*'",
        f"'~{{{prefix}*'",
        f"'&{prefix}:wake:*'",
        *(f"'+{name}'" for name in names),
    ]
    server.find(check, seen, f"redis-cli ACL SETUSER {user} {' '.join(rules)}")


def _rule(command: Sequence[str]) -> str:
    return "pubsub|numsub" if command[0] == "PUBSUB" else command[0].lower()


def _commands(prefix: str, *, replicas: bool, marks: bool) -> list[tuple[str, ...]]:
    """Give what `lockkit.backends.redis.backend` sends, by itself or in its scripts; see the page on it."""
    lock = lock_key(prefix, "x")
    fence, queue = (side_key(lock, what) for what in ("fence", "queue"))
    channel = f"{prefix}:wake:x"
    commands: list[tuple[str, ...]] = [
        ("EVALSHA", "0" * 40, "1", lock),
        ("SET", lock, "x", "NX", "PX", "1"),
        ("GET", lock),
        ("MGET", lock, fence),
        ("SET", fence, "x", "PX", "1", "GET"),
        ("EXISTS", lock),
        ("DEL", lock),
        ("PEXPIRE", lock, "1"),
        ("PTTL", lock),
        ("TIME",),
        ("RPUSH", queue, "x"),
        ("LPOP", queue),
        ("LPOS", queue, "x"),
        ("LRANGE", queue, "0", "1"),
        ("LREM", queue, "0", "x"),
        ("PUBLISH", channel, "x"),
        ("SUBSCRIBE", channel),
        ("PUBSUB", "NUMSUB", channel),
    ]
    if replicas:
        commands.append(("WAIT", "1", "1"))
    if marks:
        mark = f"{{{prefix}}}:redlock"
        commands += [("MGET", mark), ("SET", mark, "x")]
    return commands


def _share_commands(prefix: str) -> list[tuple[str, ...]]:
    """Give what the scripts send for readers and permits besides."""
    lock = lock_key(prefix, "x")
    shares, leases, queue = (side_key(lock, what) for what in ("shares", "leases", "queue"))
    return [
        ("ZADD", shares, "1", "x"),
        ("ZREM", shares, "x"),
        ("ZSCORE", shares, "x"),
        ("ZCOUNT", shares, "0", "1"),
        ("ZRANGE", shares, "0", "1"),
        ("ZRANGEBYSCORE", shares, "0", "1"),
        ("LPUSH", queue, "x"),
        ("HSET", leases, "x", "x"),
        ("HGET", leases, "x"),
        ("HDEL", leases, "x"),
        ("HEXISTS", leases, "x"),
        ("HKEYS", leases),
    ]
