"""
An application's own redis-py client, as `lockkit.fencing` and `lockkit.optimistic` use it.

The application configures retries, timeouts and the connection pool. Driver exceptions become lockkit's.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import redis
import redis.asyncio
import redis.asyncio.client
import redis.asyncio.cluster
import redis.client
import redis.cluster
import redis.exceptions

from lockkit.backends.redis.errors import server_said, translate
from lockkit.errors import BackendUnavailable, ConfigurationError, LockError
from lockkit.runtime import Kind
from lockkit.validation import parse_ttl, shown

SyncClient: TypeAlias = "redis.Redis | redis.RedisCluster"
AsyncClient: TypeAlias = "redis.asyncio.Redis | redis.asyncio.RedisCluster"
Key: TypeAlias = str | bytes
Value: TypeAlias = str | bytes | int | float

# RedisClusterException is not a RedisError.
DRIVER_ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException, OSError)

_CLASSES: dict[str, tuple[type, ...]] = {
    "blocking": (redis.Redis, redis.RedisCluster),
    "asyncio": (redis.asyncio.Redis, redis.asyncio.RedisCluster),
}
# Errors about the server itself, also inside the message of a script's error, for which redis-py has no class.
_SERVER_CODES = re.compile(
    r"^BUSY\b|\b(ASK|CLUSTERDOWN|CROSSSLOT|MISCONF|MOVED|NOPERM|NOREPLICAS|OOM|READONLY|TRYAGAIN|UNKILLABLE)\b"
)
# They derive from the clients, but run commands later, or only some of them.
_PIPELINES = (
    redis.client.Pipeline,
    redis.cluster.ClusterPipeline,
    redis.asyncio.client.Pipeline,
    redis.asyncio.cluster.ClusterPipeline,
)


def check_client(client: object, kind: Kind, *, other: str) -> None:
    """Check that an object is a redis-py client of a kind; `other` is what takes clients of the other kind."""
    wanted, opposite = ("blocking", "asyncio") if kind == "blocking" else ("asyncio", "blocking")
    if isinstance(client, _PIPELINES):
        message = "client must be the client itself, not a pipeline of it: lockkit needs the answer at once"
    elif isinstance(client, _CLASSES[wanted]):
        return
    elif isinstance(client, _CLASSES[opposite]):
        message = f"{type(client).__module__}.{type(client).__name__} is {opposite}: use {other}"
    else:
        form = "redis.asyncio." if kind == "asyncio" else "redis."
        message = f"client must be a {form}Redis or {form}RedisCluster, not {type(client).__name__}"
    raise ConfigurationError(message)


def check_key(value: object, what: str) -> None:
    """Check a key."""
    if not isinstance(value, (str, bytes)) or not value:
        message = f"{what} must be a non-empty str or bytes, not {shown(value)}"
        raise ConfigurationError(message)


def milliseconds(seconds: object, what: str) -> int | None:
    """Convert a time span to whole milliseconds, as Redis wants it: at least 1; None for None."""
    if seconds is None:
        return None
    try:
        number = parse_ttl(None if isinstance(seconds, str) else seconds)
    except ValueError as error:
        raise ConfigurationError(f"{what} {error}, not {shown(seconds)}") from None
    return max(1, int(-(number * 1000) // -1))


def text_of(key: Key) -> str:
    """Decode a key for messages."""
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
    """Make lockkit's error from one of `DRIVER_ERRORS`, for a command on the application's data."""
    label, name = label_of(client), text_of(key)
    if isinstance(error, redis.exceptions.RedisClusterException):
        message = (
            f"{name!r} cannot be used at {label}: {error}. Give all keys of a call the same hash tag, {{like this}}"
        )
        return ConfigurationError(message, name=name)
    if isinstance(error, redis.ResponseError):
        text = str(error)
        if "WRONGTYPE" in text:
            return ConfigurationError(f"{label} holds a value at {name!r} that is not a string: {text}", name=name)
        if isinstance(error, redis.exceptions.AskError) or text.startswith(("MOVED", "CROSSSLOT")):
            message = f"{label} is a node of a Cluster: use a RedisCluster client, and keys of one slot ({text})"
            return ConfigurationError(message, name=name)
        error = server_said(error)
    made = translate(error, label)
    made.name = name
    return made


def is_from_script(error: BaseException) -> bool:
    """Return whether an error comes from the application's own script, and not from the server or missing rights."""
    return type(error) is redis.ResponseError and not _SERVER_CODES.search(str(error))


def unknown_outcome(error: BaseException, client: object, key: Key) -> BackendUnavailable:
    """Make the error for a change whose answer was lost."""
    name = text_of(key)
    message = (
        f"the answer to a change of {name!r} at {label_of(client)} was lost ({error}), so the change may have been "
        "made or not. Read the value before you try again"
    )
    return BackendUnavailable(message, name=name)
