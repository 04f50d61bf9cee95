"""What the clients of every simulated service do alike: call its node through the simulated network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Self, TypeVar

from lockkit.backend import Grant, Holder, Host, LockBackend, Request, seconds_left
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.units import Instant, Seconds
from lockkit.url import Url
from lockkit_tools.simulation.network import Network, NoAnswer
from lockkit_tools.simulation.world import Process

T = TypeVar("T")


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
