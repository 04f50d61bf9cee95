"""What the clients of every simulated service do alike: call its node through the simulated network."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from lockkit.backend import LockBackend, seconds_left
from lockkit.errors import BackendUnavailable, ConfigurationError
from lockkit.simulation.network import NoAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from lockkit.backend import Grant, Holder, Host, Request
    from lockkit.simulation.network import Network, Node
    from lockkit.simulation.world import Process
    from lockkit.units import Instant, Seconds
    from lockkit.url import Url

__all__ = ["NodeBackend"]

T = TypeVar("T")


class NodeServer(Protocol):
    """A service at one node, of which this much is called in the same way."""

    @property
    def node(self) -> Node:
        """Where it runs."""
        ...

    def abandon(self, name: str, owner: str) -> object:
        """Remove every trace of a request."""
        ...

    def release(self, name: str, owner: str) -> bool:
        """Free a lock, if the owner holds it."""
        ...

    def holders(self, name: str) -> Sequence[Holder]:
        """Describe the holders."""
        ...

    def break_lock(self, name: str) -> bool:
        """Free a lock by force."""
        ...


S = TypeVar("S", bound=NodeServer)


class NodeBackend(LockBackend, Generic[S]):
    """One process's connection to a service at one node."""

    def __init__(self, process: Process, server: S, network: Network, call_timeout: Seconds) -> None:
        """
        Connect.

        Args:
            process: Whose tasks will call.
            server: What is called.
            network: What is between.
            call_timeout: Seconds after which a call without answer raises `BackendUnavailable`.
        """
        self._process = process
        self._server = server
        self._network = network
        self._call_timeout = call_timeout

    @classmethod
    def open(cls, url: Url, options: Mapping[str, Any], host: Host) -> Self:
        """
        Refuse: a simulated server is an object of this process.

        Raises:
            ConfigurationError: Always.
        """
        del options, host
        message = f"{url.safe_text}: a simulated backend has no URL; use lockkit.simulation.connect"
        raise ConfigurationError(message)

    @property
    def url(self) -> str:
        """See `LockBackend.url`."""
        return f"simulated://{self._server.node.name}"

    async def _call(self, operation: Callable[[], T], answer_by: Instant = inf) -> T:
        seconds = min(self._call_timeout, seconds_left(answer_by, self._process.now()))
        try:
            return await self._network.call(self._process, self._server.node, operation, seconds)
        except NoAnswer as error:
            raise BackendUnavailable(str(error)) from error

    async def abandon(self, request: Request) -> None:
        """See `LockBackend.abandon`."""
        await self._call(lambda: self._server.abandon(request.name, request.owner), request.answer_by)
        request.state = None

    async def release(self, grant: Grant, answer_by: Instant = inf) -> bool:
        """See `LockBackend.release`."""
        return await self._call(lambda: self._server.release(grant.name, grant.owner), answer_by)

    async def holders(self, name: str) -> Sequence[Holder]:
        """See `LockBackend.holders`."""
        return await self._call(lambda: self._server.holders(name))

    async def break_lock(self, name: str) -> bool:
        """See `LockBackend.break_lock`."""
        return await self._call(lambda: self._server.break_lock(name))

    async def ping(self) -> None:
        """See `LockBackend.ping`."""
        await self._call(lambda: None)

    async def close(self) -> None:
        """See `LockBackend.close`. Nothing to close."""
