"""One Redis or Valkey server as the doctor asks it: by lockkit's own connections, so as lockkit will reach it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from lockkit.backends.redis.node import DRIVER_ERRORS, ServerSaid, Target, open_node, open_wire, pack, translate

if TYPE_CHECKING:
    from lockkit.backends.redis.node import Reply
    from lockkit.runtime import Runtime

__all__ = ["RedisServer", "fields", "pairs"]

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
        """
        Read what the server says about itself.

        Raises:
            BackendUnavailable: No answer.
            ConfigurationError: It refuses the login.
        """
        reply = await self.ping()
        # PING is refused too while writes are; what INFO says then is the finding.
        if isinstance(reply, ServerSaid) and reply.code not in {"MISCONF", "NOPERM"}:
            raise translate(reply, self.label) from reply
        facts: dict[str, str] = {}
        for section in _SECTIONS:
            reply = await self.ask("INFO", section)
            if isinstance(reply, bytes):
                facts.update(fields(reply))
        self.facts = facts

    async def ping(self) -> Reply:
        """
        Ask for any answer, be it a refusal.

        Raises:
            BackendUnavailable: There is none.
        """
        return await self.ask("PING")

    async def ask(self, *words: str | int) -> Reply:
        """
        Run a command that changes nothing. What the server refuses is a value (`ServerSaid`).

        Raises:
            BackendUnavailable: No answer.
        """
        (reply,) = await self._node.call_many([pack(*words)])
        return reply

    async def setting(self, name: str) -> str | None:
        """Give a setting of the server's; None if this user may not see it, or there is none of that name."""
        reply = await self.ask("CONFIG", "GET", name)
        if not isinstance(reply, list) or len(reply) != 2:  # noqa: PLR2004 - a name and its value
            return None
        return cast("bytes", reply[1]).decode("utf-8", "replace")

    async def clock(self) -> float:
        """
        Give the server's time of day, seconds since 1970.

        Raises:
            BackendUnavailable: No answer.
            ConfigurationError: This user may not ask.
        """
        seconds, micros = cast("list[bytes]", await self._node.call(pack("TIME"), resend=True))
        return int(seconds) + int(micros) / 1e6

    async def lets_anybody_in(self) -> bool:
        """Tell whether a connection without user and password is served."""
        arguments = {
            name: value
            for name, value in self.target.arguments.items()
            if name not in {"username", "password", "credential_provider"}
        }
        # Not as RESP3: its HELLO would already be refused, and that by an exception of its own.
        anonymous = Target({**arguments, "protocol": 2, "db": 0}, self.target.form, self.label)
        try:
            wire = await open_wire(self._runtime, anonymous)
        except DRIVER_ERRORS:
            return False
        try:
            reply = await self._runtime.io(wire.call(pack("PING")))
        except DRIVER_ERRORS:
            return False
        finally:
            wire.close()
        return not isinstance(reply, ServerSaid)

    async def close(self) -> None:
        """Close the connections."""
        await self._node.close()


def fields(text: bytes) -> dict[str, str]:
    """Read the ``name:value`` lines of INFO and CLUSTER INFO."""
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def pairs(reply: Reply) -> dict[str, str]:
    """Read a flat list of names and values, as SENTINEL gives it."""
    words = [cast("bytes", word).decode("utf-8", "replace") for word in cast("list[Reply]", reply)]
    return dict(zip(words[::2], words[1::2], strict=True))
