"""Whether a user of Redis has the rights that lockkit needs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import cast

from lockkit.backends.redis.examine.server import RedisServer
from lockkit.backends.redis.keys import lock_key, side_key
from lockkit.backends.redis.resp import ServerSaid
from lockkit.doctor.examination import Examination
from lockkit.doctor.findings import Check, Severity

RIGHTS = Check(
    "redis-rights",
    Severity.ERROR,
    "Locks cannot be taken, renewed or released, or waiters are not woken: the server refuses what lockkit sends.",
    "backends/redis.md#url-and-options",
)

SHARE_RIGHTS = Check(
    "redis-share-rights",
    Severity.WARNING,
    "Read locks and semaphores cannot be used: the server refuses what lockkit sends for them. Locks work.",
    "backends/redis.md#url-and-options",
)


async def examine_rights(examination: Examination, server: RedisServer, *, marks: bool = False) -> None:
    """Find commands, keys and channels that the server would refuse, without running any command."""
    prefix = examination.options["prefix"]
    needed = _commands(prefix, replicas=bool(examination.options.get("replicas")), marks=marks)
    commands = needed if marks else [*needed, *_share_commands(prefix)]
    words: list[str | int] = []
    for command in commands:
        words += (len(command), *command)
    script = files("lockkit.backends.redis.examine").joinpath("rights.lua").read_text("utf-8")
    reply = await server.ask("EVAL", script, 0, *words)
    if isinstance(reply, ServerSaid):
        if reply.code == "NOPERM":
            await _find(RIGHTS, examination, server, "The user may not run scripts (EVAL).", ["eval", "evalsha"])
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
            await _find(check, examination, server, f"The user may not run: {shown}.", names)


async def _find(check: Check, examination: Examination, server: RedisServer, seen: str, names: Sequence[str]) -> None:
    who = await server.ask("ACL", "WHOAMI")
    user = who.decode() if isinstance(who, bytes) else str(server.target.arguments.get("username") or "default")
    prefix = examination.options["prefix"]
    rules = [
        f"'~{prefix}:*'" if prefix else "'~*'",
        f"'~{{{prefix}*'",
        f"'&{prefix}:wake:*'",
        *(f"'+{name}'" for name in names),
    ]
    examination.find(check, server.label, seen, f"redis-cli ACL SETUSER {user} {' '.join(rules)}")


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
