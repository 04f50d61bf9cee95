"""
The master that Redis Sentinel names.

Source: "Guidelines for Redis clients with support for Redis Sentinel" in the Redis documentation. As described there,
lockkit asks the Sentinels in turn, moves the one that answers to the front, and uses an address only after its node has
said that it is a master (`Handshake` with ``masters_only``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import cast

from lockkit.backend import Host, seconds_left, unsent
from lockkit.backends.redis.address import Target
from lockkit.backends.redis.errors import code_of, nothing_done, sent_before
from lockkit.backends.redis.handshake import Handshake
from lockkit.backends.redis.node import RedisNode, Topology, end_of_call
from lockkit.backends.redis.parallel import ask_first, raise_configuration
from lockkit.backends.redis.resp import Reply, pack
from lockkit.backends.redis.script import Command
from lockkit.backends.redis.wakeup import WakeupListener
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.units import Instant

log = logging.getLogger("lockkit")

DEFAULT_SENTINEL_PORT = 26379

SENTINEL_TIMEOUT = 0.5
"""Seconds for an answer of one Sentinel. Longer delays finding the master while some Sentinels are down."""


class _UnknownMasterError(BackendUnavailable):
    """A Sentinel answered that it watches no master of that name."""


class SentinelTopology(Topology):
    """
    All locks are at the master, whichever node that is.

    Attributes:
        sentinels: Those of the URL; the one that answered last comes first.
        service_name: Their name for the master.
    """

    def __init__(
        self,
        sentinels: Sequence[Target],
        service_name: str,
        master: Target,
        host: Host,
        prefix: str,
    ) -> None:
        self.sentinels: list[RedisNode] = [RedisNode(host.runtime, target) for target in sentinels]
        self.service_name = service_name
        self._anywhere = master
        self._host = host
        self._prefix = prefix
        # The same for every master, so that it notices a change.
        self._handshake = Handshake(host, masters_only=True)
        self._mutex = host.runtime.mutex()
        self._master: RedisNode | None = None
        self._suspected = False

    async def run(
        self, script: Command, key: str, body: bytes, /, *, resend: bool = False, answer_by: float = inf
    ) -> Reply:
        now = self._host.runtime.now
        answer_by = end_of_call(self._host.runtime, answer_by)
        master = await self.node_for(key, answer_by)
        try:
            return await master.run(script, key, body, resend=resend, answer_by=answer_by)
        except BackendUnavailable as error:
            self._suspect(master)
            if now() >= answer_by or not (resend or nothing_done(error)):
                raise
            sent = not nothing_done(error)
            with sent_before(sent):
                successor = await self.node_for(key, answer_by)
            if successor is master:
                raise
        with sent_before(sent):
            return await successor.run(script, key, body, resend=resend, answer_by=answer_by)

    async def run_many(
        self, script: Command, calls: Sequence[tuple[str, bytes]], *, replicas: int = 0, answer_by: float = inf
    ) -> list[Reply | LockError]:
        answer_by = end_of_call(self._host.runtime, answer_by)
        try:
            master = await self.node_for("", answer_by)
        except LockError as error:
            return [error] * len(calls)
        replies = await master.run_many(script, calls, replicas=replicas, answer_by=answer_by)
        if any(isinstance(reply, BackendUnavailable) for reply in replies):
            self._suspect(master)
        return replies

    def _suspect(self, master: RedisNode) -> None:
        """
        Ask the Sentinels again before the next call: another node may be the master.

        Also if it answered: one that is cut off from its replicas refuses writes (``NOREPLICAS``), and is replaced.
        """
        if self._master is master:
            self._suspected = True

    def listener_for(self, key: str) -> WakeupListener | None:
        del key
        return None if self._master is None else self._master.listener

    async def node_for(self, key: str, answer_by: float = inf) -> RedisNode:
        del key
        master = self._master
        if master is not None and not self._suspected:
            return master
        target = self._anywhere.moved(*await self._ask(answer_by))
        with self._mutex:
            if self._master is not None and self._master is not master:
                return self._master  # another thread has found it meanwhile
            self._suspected = False
            if master is not None and master.label == target.label:
                return master  # its connections and its subscription may still be good
            self._master = successor = RedisNode(self._host.runtime, target, self._prefix, self._handshake)
        log.info("the master of %r is at %s", self.service_name, target.label)
        if master is not None:
            await master.close()
        return successor

    async def _ask(self, answer_by: float) -> tuple[str, int]:
        """Ask the Sentinels for the master's address, in turn, without waiting for those that hang."""
        now = self._host.runtime.now()
        # Half of the time: the call to the master comes after that.
        until = now + seconds_left(answer_by, now) / 2
        asks = [(sentinel.label, partial(self._ask_one, sentinel, until)) for sentinel in self.sentinels]
        found = await ask_first(self._host.runtime, asks, until)
        if isinstance(found, tuple):
            sentinel, address = found
            # In one step: another thread may do the same.
            self.sentinels = [sentinel, *(other for other in self.sentinels if other is not sentinel)]
            return address
        raise_configuration(found)
        message = f"no Sentinel names the master {self.service_name!r}: {'; '.join(map(str, found))}"
        if all(isinstance(error, _UnknownMasterError) for error in found):
            raise ConfigurationError(f"{message}. Check the name in the path of the URL")
        raise unsent(message) from found[0].__cause__

    async def _ask_one(self, sentinel: RedisNode, until: Instant) -> tuple[RedisNode, tuple[str, int]]:
        question = pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service_name)
        try:
            reply = await sentinel.call(question, resend=True, answer_by=until)
        except ConfigurationError as error:
            raise _explained(error, sentinel.label) from error.__cause__
        if reply is None:
            message = f"{sentinel.label} knows no master {self.service_name!r}"
            raise _UnknownMasterError(message)
        host, port = cast("list[bytes]", reply)
        return sentinel, (host.decode(), int(port))

    async def ping(self) -> None:
        answer_by = end_of_call(self._host.runtime, inf)
        master = await self.node_for("", answer_by)
        try:
            await master.call(pack("PING"), resend=True, answer_by=answer_by)
        except BackendUnavailable:
            self._suspect(master)
            raise

    async def close(self) -> None:
        if self._master is not None:
            await self._master.close()
        for sentinel in self.sentinels:
            await sentinel.close()


def _explained(error: ConfigurationError, label: str) -> ConfigurationError:
    """Say what differs at a Sentinel: it has its own login, and no other server knows its commands."""
    cause = error.__cause__
    assert cause is not None, "the driver or the server has said why"
    if "unknown command" in str(cause):
        advice = "is no Sentinel: give the addresses of the Sentinels, not of the servers that they watch"
    elif code_of(cause) in {"NOAUTH", "WRONGPASS"}:
        advice = "refuses the login; a Sentinel has its own: see sentinel_username=, sentinel_password="
    else:
        return error
    return ConfigurationError(f"{label} {advice} ({cause})")
