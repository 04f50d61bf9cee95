"""The client's side of the simulated lock service, and clients that use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Self, TypeVar

from lockkit.aio import Client, Lease
from lockkit.backend import (
    Busy,
    Capabilities,
    Gone,
    Grant,
    Holder,
    Host,
    LockBackend,
    Note,
    Renewal,
    Renewed,
    Request,
    Unknown,
    seconds_left,
)
from lockkit.engine.engine import Engine
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.units import Instant, Seconds
from lockkit.url import Url
from lockkit_tools.simulation.network import Network, NoAnswer
from lockkit_tools.simulation.runtime import SimulatedRuntime
from lockkit_tools.simulation.schedule import Schedule
from lockkit_tools.simulation.server import LockServer
from lockkit_tools.simulation.world import Process

T = TypeVar("T")

CALL_TIMEOUT = 1.0
"""Seconds that a client waits for an answer."""

CAPABILITIES: dict[str, Any] = {
    "crash_release": "ttl",
    "min_ttl": 0.01,
    "ttl_granularity": 0.0,
    "token_source": "max(last + 1, the node's wall clock in µs)",
    "survives_node_loss": False,
    "survives_data_loss": True,
    "shared_mode": False,
    "clock_assumption": "client and node clocks differ in rate by less than 1 %",
    "waiters_visible": True,
    "scope": "network",
    "notes": True,
    "transfer": True,
    "caveat": "Exists in a simulation only; excludes nobody from the holder of a lock that was lost with the data.",
}


class NodeBackend(LockBackend):
    """One process's connection to a service at one node, of which this much is called in the same way."""

    _server: Any

    def __init__(
        self,
        process: Process,
        server: Any,  # noqa: ANN401 - narrowed by each service
        network: Network,
        call_timeout: Seconds,
    ) -> None:
        self._process = process
        self._server = server
        self._network = network
        self._call_timeout = call_timeout

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> Self:
        """Refuse: a simulated server is an object of this process."""
        del options, host
        message = f"{url.safe_text}: a simulated backend has no URL; use lockkit_tools.simulation.connect"
        raise ConfigurationError(message)

    @property
    def url(self) -> str:
        return f"simulated://{self._server.node.name}"

    async def _call(self, operation: Callable[[], T], answer_by: Instant = inf) -> T:
        seconds = min(self._call_timeout, seconds_left(answer_by, self._process.now()))
        try:
            return await self._network.call(self._process, self._server.node, operation, seconds)
        except NoAnswer as error:
            raise BackendUnavailable(str(error)) from error

    async def abandon(self, request: Request) -> None:
        await self._call(lambda: self._server.abandon(request.name, request.owner), request.answer_by)
        request.state = None

    async def release(self, grant: Grant, answer_by: Instant = inf) -> bool:
        return await self._call(lambda: self._server.release(grant.name, grant.owner), answer_by)

    async def holders(self, name: str) -> Sequence[Holder]:
        return await self._call(lambda: self._server.holders(name))

    async def break_lock(self, name: str) -> bool:
        return await self._call(lambda: self._server.break_lock(name))

    async def ping(self) -> None:
        await self._call(lambda: None)

    async def close(self) -> None:
        """See `LockBackend.close`. Nothing to close."""


class SimulatedBackend(NodeBackend):
    """One process's connection to a `LockServer`."""

    capabilities = Capabilities(**CAPABILITIES, fair=True, wakeup="push")
    _server: LockServer

    def __init__(self, process: Process, server: LockServer, network: Network, call_timeout: Seconds) -> None:
        super().__init__(process, server, network, call_timeout)
        self._age = 0.0
        self._ttl_max = inf
        self._singly = False
        wakeup = server.wakeup
        self.capabilities = Capabilities(
            **CAPABILITIES, fair=wakeup == "fair", wakeup="poll" if wakeup == "none" else "push"
        )

    def behave(self, schedule: Schedule, host: Host) -> None:
        """Be the kind of service that a schedule wants."""
        self._age, self._ttl_max, self._singly = schedule.session_age, schedule.ttl_max, schedule.singly
        self._server.clients[self._process.name] = self._process, host

    async def try_acquire(self, request: Request) -> Grant | Busy:
        wake = None
        if request.queue:
            # The place may have been taken even if the answer never comes.
            request.state = wake = request.wake.set
        server, process = self._server, self._process
        anchor, ttl = process.now() - self._age, min(request.ttl, self._ttl_max)
        outcome = await self._call(
            lambda: server.acquire(
                process, request.name, request.owner, ttl - self._age, metadata=request.metadata, wake=wake
            ),
            request.answer_by,
        )
        if isinstance(outcome, int):
            request.state = None
            return Grant(request.name, request.owner, outcome, ttl, anchor if self._age else None)
        return Busy(outcome.retry_after, owner=outcome.owner)

    async def renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        if not self._singly:
            return await self._renew(grants)
        outcomes: list[Renewal] = []
        for grant in grants:
            try:
                outcomes += await self._renew([grant])
            except BackendUnavailable as error:
                outcomes.append(Unknown(error))
        return outcomes

    async def _renew(self, grants: Sequence[Grant]) -> Sequence[Renewal]:
        # A renewal is a heartbeat: the ttl counts from now, also where that of a grant does not.
        anchor = self._process.now()
        # What is sent is what stands in the grants now, not when it arrives.
        wanted = [(grant.name, grant.owner, grant.ttl if self._ttl_max == inf else self._ttl_max) for grant in grants]
        reasons = await self._call(lambda: [self._server.renew(*lease) for lease in wanted])
        renewed = anchor if self._singly else None, None if self._ttl_max == inf else self._ttl_max
        return [Renewed(*renewed) if reason is None else Gone(reason) for reason in reasons]

    async def take_over(self, request: Request, owner: str) -> Grant | None:
        server, process = self._server, self._process
        token = await self._call(
            lambda: server.take_over(
                process, request.name, owner, request.owner, ttl=request.ttl, metadata=request.metadata
            ),
            request.answer_by,
        )
        return None if token is None else Grant(request.name, request.owner, token, request.ttl)

    async def read_note(self, name: str, answer_by: Instant = inf) -> Note | None:
        return await self._call(lambda: self._server.read_note(name), answer_by)

    async def write_note(self, grant: Grant, text: str, keep: Seconds, answer_by: Instant = inf) -> bool:
        return await self._call(lambda: self._server.write_note(grant.name, grant.owner, text, keep), answer_by)


def connect(
    process: Process,
    server: LockServer,
    network: Network,
    *,
    call_timeout: Seconds = CALL_TIMEOUT,
    backend: Callable[[Process, LockServer, Network, float], LockBackend] = SimulatedBackend,
    schedule: Schedule | None = None,
    **options: float,
) -> Client:
    """Make a client in a process: the asyncio face of lockkit, on simulated time."""

    def make(host: Host) -> LockBackend:
        made = backend(process, server, network, call_timeout)
        if schedule is not None and isinstance(made, SimulatedBackend):
            made.behave(schedule, host)
        return made

    return client_of(process, make, **options)


def client_of(process: Process, make: Callable[[Host], LockBackend], **options: float) -> Client:
    """Make a client in a process, of any simulated backend."""

    def open_backend(engine: Engine[Lease]) -> tuple[LockBackend, dict[str, Any]]:
        return make(engine), dict(options)

    engine = Engine(open_backend, SimulatedRuntime(process), Lease)
    # As after a fork: what the dead process held is not for us to release, and no lease of it warns of being dropped.
    process.at_crash.append(engine.forked)
    return Client(engine)
