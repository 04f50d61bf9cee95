"""
An application's own redis-py client, for what works on its data: `lockkit.fencing` and `lockkit.optimistic`.

Retries, timeouts and the connection pool stay the application's. Driver exceptions become lockkit's.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

import redis
import redis.asyncio
import redis.asyncio.client
import redis.asyncio.cluster
import redis.client
import redis.cluster
import redis.exceptions

from lockkit.backends.redis.errors import server_said, translate
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.validation import parse_ttl, shown

if TYPE_CHECKING:
    from lockkit.runtime import Kind

__all__ = [
    "DRIVER_ERRORS",
    "AsyncClient",
    "Key",
    "Seconds",
    "SyncClient",
    "check_client",
    "check_key",
    "data_error",
    "is_from_script",
    "label_of",
    "milliseconds",
    "text_of",
    "unknown_outcome",
]

SyncClient: TypeAlias = "redis.Redis | redis.RedisCluster"
AsyncClient: TypeAlias = "redis.asyncio.Redis | redis.asyncio.RedisCluster"
Key: TypeAlias = str | bytes
Seconds: TypeAlias = float | timedelta

# RedisClusterException is no RedisError.
DRIVER_ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException, OSError)

_CLASSES: dict[str, tuple[type, ...]] = {
    "blocking": (redis.Redis, redis.RedisCluster),
    "asyncio": (redis.asyncio.Redis, redis.asyncio.RedisCluster),
}
# What a server says of itself, also within the text of a script's error, and redis-py has no class for.
_SERVER_CODES = re.compile(
    r"^BUSY\b|\b(ASK|CLUSTERDOWN|CROSSSLOT|MISCONF|MOVED|NOPERM|NOREPLICAS|OOM|READONLY|TRYAGAIN|UNKILLABLE)\b"
)
# They derive from the clients, but what is called on them happens later, or only in part.
_PIPELINES = (
    redis.client.Pipeline,
    redis.cluster.ClusterPipeline,
    redis.asyncio.client.Pipeline,
    redis.asyncio.cluster.ClusterPipeline,
)


def check_client(client: object, kind: Kind, *, other: str) -> None:
    """
    Check that this is a client for this face.

    Args:
        client: What the application gave.
        kind: The face.
        other: What to use instead with a client of the other face.

    Raises:
        ConfigurationError: It is something else.
    """
    wanted, opposite = ("blocking", "asyncio") if kind == "blocking" else ("asyncio", "blocking")
    if isinstance(client, _PIPELINES):
        message = "give the client itself, not a pipeline of it: the answer is needed at once"
    elif isinstance(client, _CLASSES[wanted]):
        return
    elif isinstance(client, _CLASSES[opposite]):
        message = f"{type(client).__module__}.{type(client).__name__} is {opposite}: use {other}"
    else:
        form = "redis.asyncio." if kind == "asyncio" else "redis."
        message = f"client must be a {form}Redis or {form}RedisCluster, not {type(client).__name__}"
    raise ConfigurationError(message)


def check_key(value: object, what: str) -> None:
    """
    Check a key.

    Raises:
        ConfigurationError: It is empty, or neither text nor bytes.
    """
    if not isinstance(value, (str, bytes)) or not value:
        message = f"{what} must be a str or bytes that is not empty, not {shown(value)}"
        raise ConfigurationError(message)


def milliseconds(seconds: object, what: str) -> int | None:
    """
    Give a time span (`Seconds`) as Redis wants it: whole milliseconds, at least 1; None for None.

    Raises:
        ConfigurationError: It is no time span.
    """
    if seconds is None:
        return None
    try:
        number = parse_ttl(None if isinstance(seconds, str) else seconds)
    except ValueError as error:
        message = f"{what}={shown(seconds)} is not understood: {error}"
        raise ConfigurationError(message) from None
    return max(1, int(-(number * 1000) // -1))


def text_of(key: Key) -> str:
    """Give a key as text, for people."""
    return key if isinstance(key, str) else key.decode("utf-8", "backslashreplace")


def label_of(client: Any) -> str:  # noqa: ANN401 - four classes of redis-py's
    """Name the server for messages, without a password."""
    if isinstance(client, (redis.RedisCluster, redis.asyncio.RedisCluster)):
        return "the Cluster"
    pool = client.connection_pool
    if hasattr(pool, "service_name"):
        return f"the master {pool.service_name!r}"
    arguments = pool.connection_kwargs
    if "path" in arguments:
        return str(arguments["path"])
    return f"{arguments.get('host', 'localhost')}:{arguments.get('port', 6379)}"


def data_error(error: BaseException, client: object, key: Key) -> LockError:
    """
    Make our error of a driver's, about the application's data.

    Args:
        error: One of `DRIVER_ERRORS`. To be the ``__cause__``.
        client: The application's.
        key: What it was about.
    """
    label, name = label_of(client), text_of(key)
    if isinstance(error, redis.exceptions.RedisClusterException):
        message = f"{name!r} cannot be used at {label}: {error}. Give all keys of a call one hash tag, {{like this}}"
        return ConfigurationError(message, name=name)
    if isinstance(error, redis.ResponseError):
        text = str(error)
        if "WRONGTYPE" in text:
            return ConfigurationError(f"{label} holds something else than a string at {name!r}: {text}", name=name)
        if isinstance(error, redis.exceptions.AskError) or text.startswith(("MOVED", "CROSSSLOT")):
            message = f"{label} is a node of a Cluster: give a RedisCluster client, and keys of one slot ({text})"
            return ConfigurationError(message, name=name)
        error = server_said(error)
    made = translate(error, label)
    made.name = name
    return made


def is_from_script(error: BaseException) -> bool:
    """Tell whether an error is what an application's own script said or did wrong: no word on server or rights."""
    return type(error) is redis.ResponseError and not _SERVER_CODES.search(str(error))


def unknown_outcome(error: BaseException, client: object, key: Key) -> BackendUnavailable:
    """Make the error for a change that was sent and never answered."""
    name = text_of(key)
    message = (
        f"the answer to a change of {name!r} at {label_of(client)} was lost ({error}): it may have been made or not. "
        "Read it before you do it again"
    )
    return BackendUnavailable(message, name=name)
