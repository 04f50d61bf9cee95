"""One Redis or Valkey server as the doctor examines it: by lockkit's connections, so as lockkit will reach it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from lockkit.backends.redis.address import Target
from lockkit.backends.redis.connection import open_connection
from lockkit.backends.redis.errors import DRIVER_ERRORS, translate
from lockkit.backends.redis.handshake import info_fields
from lockkit.backends.redis.node import open_node
from lockkit.backends.redis.resp import Reply, ServerSaid, pack
from lockkit.runtime import Runtime

_SECTIONS = ("server", "clients", "memory", "persistence", "replication", "cluster")


class RedisServer:
    """
    One server.

    Attributes:
        target: Where it is. **Holds the password.**
        label: The same for messages.
        facts: What INFO says, after `look`; empty where that is denied.
    """

    def __init__(self, runtime: Runtime, target: Target) -> None:
        """Connect to nothing yet."""
        self.target = target
        self.label = target.label
        self.facts: Mapping[str, str] = {}
        self._runtime = runtime
        self._node = open_node(runtime, target)

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
            reply = await self._runtime.io(connection.call(pack("PING")))
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
