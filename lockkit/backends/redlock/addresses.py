"""Where the nodes of a Redlock are, and how to open a connection to each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import redis
import redis.asyncio

from lockkit.backends.redis.connection import take_over
from lockkit.backends.redis.node import DEFAULT_PORT, DRIVER_ERRORS, Target, open_wire
from lockkit.backends.redis.probe import other_form
from lockkit.errors import ConfigurationError

if TYPE_CHECKING:
    from lockkit.backends.redis.node import Wire
    from lockkit.runtime import Runtime
    from lockkit.url import Url

__all__ = ["NODES_MAX", "AdoptedSource", "Source", "UrlSource", "adopt_sources", "url_sources"]

NODES_MAX = 9
"""More cost a message each, and no cluster that loses four nodes at once is helped by a fifth."""


class Source(ABC):
    """
    Opens connections to one node.

    Attributes:
        label: ``host:port``, for messages, and to tell nodes apart.
    """

    label: str

    @abstractmethod
    async def connect(self) -> Wire:
        """
        Open a connection that is logged in.

        Raises:
            Exception: One of `DRIVER_ERRORS`.
        """


class UrlSource(Source):
    """
    A node of a URL.

    Attributes:
        target: Where it is. **Holds the password.**
    """

    def __init__(self, runtime: Runtime, target: Target) -> None:
        """Connect to nothing yet."""
        self._runtime = runtime
        self.target = target
        self.label = target.label
        self._proven = False

    async def connect(self) -> Wire:
        """
        See `Source.connect`.

        Raises:
            ConfigurationError: It has never answered, and speaks TLS where the URL does not, or the other way round.
        """
        try:
            wire = await open_wire(self._runtime, self.target)
        except DRIVER_ERRORS as error:
            until = self._runtime.now() + self.target.timeout
            if self._proven or (found := await other_form(self._runtime, self.target, error, until)) is None:
                raise
            scheme = "redlock" if self.target.form == "tls" else "redlocks"
            message = f"{self.label} cannot be talked to: {found}. Use {scheme}://"
            raise ConfigurationError(message) from error
        self._proven = True
        return wire


class AdoptedSource(Source):
    """
    The node of a client that the application has.

    Connections like those of its pool, but our own: the pool's have time limits that suit a single server, and are lent
    to whoever comes, while we must know whether a node is up before we ask it.
    """

    def __init__(self, runtime: Runtime, client: redis.Redis | redis.asyncio.Redis, timeout: float) -> None:
        """Connect to nothing yet."""
        self._runtime = runtime
        self._timeout = timeout
        pool: Any = client.connection_pool
        self._make = pool.connection_class
        arguments: dict[str, Any] = dict(pool.connection_kwargs)
        # A node that fails is left out at once; retrying it would hold up the others.
        for name in ("retry", "retry_on_error", "retry_on_timeout"):
            arguments.pop(name, None)
        self._arguments = {**arguments, "socket_timeout": timeout, "socket_connect_timeout": timeout}
        if "path" in arguments:
            del self._arguments["socket_connect_timeout"]
            self.label = str(arguments["path"])
        else:
            self.label = f"{arguments.get('host', 'localhost')}:{arguments.get('port', DEFAULT_PORT)}"

    async def connect(self) -> Wire:
        """See `Source.connect`."""
        return await take_over(self._runtime, self._make(**self._arguments), self._timeout)


def url_sources(url: Url, options: Mapping[str, Any], driver: Mapping[str, Any], runtime: Runtime) -> list[Source]:
    """
    Make the nodes of a URL.

    Args:
        url: With its hosts; its path is the number of the database on all of them.
        options: lockkit's own.
        driver: For redis-py's connections.
        runtime: Of the face.

    Raises:
        ConfigurationError: The URL lacks something or has too much, or redis-py does not take its options.
    """
    timeout = options["node_timeout"]
    limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    arguments = {"db": _database(url, options), **driver, **limits}
    tls = url.base == "redlocks"
    targets = [Target.of(host, arguments, tls=tls) for host in url.hosts]
    for target in targets[:1]:
        try:
            target.connection(runtime.kind)
        except (TypeError, ValueError, redis.RedisError) as error:
            raise _wrong(url.safe_text, f"redis-py does not take its options: {error}") from error
    return checked([UrlSource(runtime, target) for target in targets], url.safe_text)


def adopt_sources(clients: Sequence[Any], timeout: float, runtime: Runtime) -> list[Source] | None:
    """
    Make nodes of a list of redis-py's clients; None if they are something else.

    Raises:
        ConfigurationError: They are of the other face, too many, or one twice.
    """
    asyncio = runtime.kind == "asyncio"
    ours, other = (redis.asyncio.Redis, redis.Redis) if asyncio else (redis.Redis, redis.asyncio.Redis)
    if any(isinstance(client, other) for client in clients):
        face, module = ("lockkit.aio", "redis.asyncio") if asyncio else ("lockkit", "redis")
        message = f"{face}.from_client needs clients of {module}, and these are of the other face"
        raise ConfigurationError(message)
    if not clients or not all(isinstance(client, ours) for client in clients):
        return None
    sources = [AdoptedSource(runtime, client, timeout) for client in clients]
    return checked(sources, url_of(sources))


def url_of(sources: Sequence[Source]) -> str:
    """Write the URL to show for nodes that were adopted."""
    return f"redlock://{','.join(source.label for source in sources)}"


def checked(sources: Sequence[Source], url: str) -> list[Source]:
    """
    Check the number of the nodes and that they differ.

    Raises:
        ConfigurationError: They are none, too many, or one stands there twice.
    """
    labels = [source.label for source in sources]
    if not 1 <= len(labels) <= NODES_MAX:
        raise _wrong(url, f"it has {len(labels)} nodes, and must have 1 to {NODES_MAX}, best 3 or 5")
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise _wrong(url, f"{twice} stands there twice, and must not vote twice: name independent servers")
    return list(sources)


def _database(url: Url, options: Mapping[str, Any]) -> int:
    text = url.path.strip("/")
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):  # noqa: PLR2004 - more are no number of a database
        raise _wrong(url.safe_text, "its path must be the number of a database, for example /0")
    if text and options["db"] is not None and int(text) != options["db"]:
        raise _wrong(url.safe_text, "its path and its option db name different databases: leave one out")
    return int(text) if text else options["db"] or 0


def _wrong(url: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{url} is not understood: {problem}", backend=url)
