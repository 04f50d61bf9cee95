"""From URLs, options and connections of an application to a route."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.connection
import redis.sentinel

from lockkit import validation
from lockkit.backend import Option
from lockkit.backends.redis.address import credentials
from lockkit.backends.redis.cluster import ClusterRoute
from lockkit.backends.redis.node import DEFAULT_PORT, Target
from lockkit.backends.redis.sentinel import DEFAULT_SENTINEL_PORT, SENTINEL_TIMEOUT, SentinelRoute
from lockkit.backends.redis.topology import Greeter, SingleRoute, Station
from lockkit.errors import ConfigurationError

if TYPE_CHECKING:
    from lockkit.backend import Host
    from lockkit.backends.redis.topology import Route
    from lockkit.url import Url

__all__ = ["OPTIONS", "adopt_route", "driver_options", "open_route"]

REPLICAS_MAX = 100


def parse_prefix(value: object) -> str:
    """
    Parse the option ``prefix``.

    Raises:
        ValueError: It is empty or has a brace: those mark what decides the Cluster slot.
    """
    text = validation.parse_text(value)
    if "{" in text or "}" in text:
        message = "it must have no braces: they decide the slot of a key in a Cluster, and each lock has its own"
        raise ValueError(message)
    return text


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "prefix": Option(parse_prefix, "First part of all keys. Clients that share locks have the same.", "lockkit"),
        "replicas": Option(
            validation.parse_int(0, REPLICAS_MAX),
            "How many replicas must have a grant or a renewal before it counts.",
            0,
        ),
        "db": Option(validation.parse_int(0, 2**31 - 1), "Number of the database; in most URLs the path says it."),
        "service_name": Option(validation.parse_text, "What the Sentinels call the master; in URLs the path says it."),
        "sentinel_username": Option(validation.parse_text, "User name at the Sentinels themselves."),
        "sentinel_password": Option(validation.parse_text, "Password at the Sentinels themselves."),
    }
)

# What is lockkit's own business, or would change the replies that we read.
_NOT_PASSED_ON = {
    "self", "args", "kwargs", "host", "port", "path", "db", "parser", "parser_class", "decode_responses", "encoding",
    "encoding_errors", "encoder_class", "command_packer", "legacy_responses", "retry", "retry_on_timeout",
    "retry_on_error", "health_check_interval", "redis_connect_func", "event_dispatcher", "himport_registry",
}  # fmt: skip
_NOT_PASSED_ON_PREFIXES = ("maint", "orig_", "oss_")


@cache
def driver_options() -> Mapping[str, Option]:
    """Give the keyword arguments of redis-py's connections, whichever version is installed."""
    names: set[str] = set()
    for kind in (redis.connection.SSLConnection, redis.connection.UnixDomainSocketConnection):
        for cls in kind.__mro__:
            if "__init__" in vars(cls) and cls is not object:
                names |= set(inspect.signature(vars(cls)["__init__"]).parameters)
    wanted = {name for name in names - _NOT_PASSED_ON if not name.startswith(_NOT_PASSED_ON_PREFIXES)}
    help_text = "Passed on to redis-py's connection."
    return {name: Option(_PARSERS.get(name) or _driver_parser(name), help_text) for name in wanted}


def _driver_parser(name: str) -> Callable[[Any], Any]:
    parse = cast("Callable[[str], object] | None", redis.connection.URL_QUERY_ARGUMENT_PARSERS.get(name))

    def parse_text(value: object) -> object:
        # In connect(...) it may be any object that the driver takes.
        return parse(value) if parse is not None and isinstance(value, str) else value

    return parse_text


def _parse_protocol(value: object) -> int:
    return validation.parse_int(2, 3)(value)


def _parse_limit(value: object) -> float:
    seconds = validation.parse_seconds(value)
    if not seconds:
        message = "it must be above 0 seconds: without a limit a server that hangs would hold up its callers for ever"
        raise ValueError(message)
    return seconds


_PARSERS: Mapping[str, Callable[[object], Any]] = {
    "protocol": _parse_protocol,
    "socket_timeout": _parse_limit,
    "socket_connect_timeout": _parse_limit,
}


def open_route(url: Url, options: Mapping[str, Any], host: Host) -> Route:
    """
    Make the route of a URL. No I/O.

    Raises:
        ConfigurationError: The URL lacks something or has too much.
    """
    if url.driver == "sentinel":
        return _sentinel(url, options, host)
    if url.driver == "cluster":
        return _cluster(url, options, host)
    return _single(url, options, host)


def _single(url: Url, options: Mapping[str, Any], host: Host) -> Route:
    arguments = _driver_arguments(url, options)
    if url.base == "unix":
        if url.hosts or len(url.path) <= 1:
            raise _wrong(url, "write unix:///path/of/the.sock?db=0")
        target = Target.at(
            {"path": url.path, "db": options["db"] or 0, **credentials(url.username, url.password), **arguments},
            tls=False,
        )
    else:
        if len(url.hosts) != 1:
            problem = f"it must name one server: {url.scheme}://host:{DEFAULT_PORT}/0"
            raise _wrong(url, f"{problem}. For several see redis+sentinel://, redis+cluster:// and redlock://")
        target = Target.of(url.hosts[0], {"db": _database(url, url.path, options), **arguments}, tls=_is_tls(url))
    _check_arguments(url, target, host)
    return SingleRoute(Station.at(target, host, options["prefix"], Greeter(host)))


def _sentinel(url: Url, options: Mapping[str, Any], host: Host) -> Route:
    # Not strip: of "//0" the name is empty, not "0".
    path_name, _, path_db = url.path.removeprefix("/").partition("/")
    service_name = path_name or options["service_name"]
    if not url.hosts or not service_name or (options["service_name"] or service_name) != service_name:
        raise _wrong(url, f"write {url.scheme}://sentinel1:{DEFAULT_SENTINEL_PORT},sentinel2/NAME_OF_THE_MASTER/0")
    arguments = _driver_arguments(url, options)
    common = {name: value for name, value in arguments.items() if name not in {"username", "password"}}
    own = _sentinel_arguments(common, options["sentinel_username"], options["sentinel_password"])
    sentinels = [
        Target.at({**own, "host": one.host, "port": one.port or DEFAULT_SENTINEL_PORT}, tls=_is_tls(url))
        for one in url.hosts
    ]
    master = {
        **credentials(url.username, url.password), **arguments, "db": _database(url, path_db, options)
    }  # fmt: skip
    _check_arguments(url, Target.at({**master, "host": "", "port": 0}, tls=_is_tls(url)), host)
    return SentinelRoute(sentinels, service_name, master, host, options["prefix"], tls=_is_tls(url))


def _sentinel_arguments(common: Mapping[str, Any], username: str | None, password: str | None) -> dict[str, Any]:
    """Arguments for the Sentinels: the master's TLS and protocol, their own login, and less patience."""
    limit = {"socket_timeout": SENTINEL_TIMEOUT, "socket_connect_timeout": SENTINEL_TIMEOUT}
    login = {"username": username, "password": password}
    return {**common, **limit, **{name: value for name, value in login.items() if value is not None}, "db": 0}


def _cluster(url: Url, options: Mapping[str, Any], host: Host) -> Route:
    if not url.hosts:
        raise _wrong(url, f"write {url.scheme}://node1:{DEFAULT_PORT},node2")
    if _database(url, url.path, options) != 0:
        raise _wrong(url, "a Cluster has only the database 0")
    arguments = {**credentials(url.username, url.password), **_driver_arguments(url, options)}
    seeds = [(one.host, one.port or DEFAULT_PORT) for one in url.hosts]
    _check_arguments(url, Target.at({**arguments, "host": "", "port": 0}, tls=_is_tls(url)), host)
    return ClusterRoute(seeds, arguments, host, options["prefix"], tls=_is_tls(url))


def _database(url: Url, path: str, options: Mapping[str, Any]) -> int:
    text = path.removeprefix("/").removesuffix("/")
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):  # noqa: PLR2004 - more are no number of a database
        raise _wrong(url, "its path must be the number of a database, for example /0")
    if text and options["db"] is not None and int(text) != options["db"]:
        raise _wrong(url, "its path and its option db name different databases: leave one out")
    return int(text) if text else options["db"] or 0


def _is_tls(url: Url) -> bool:
    return url.base == "rediss"


def _driver_arguments(url: Url, options: Mapping[str, Any]) -> dict[str, Any]:
    if url.driver != "sentinel":
        for name in ("service_name", "sentinel_username", "sentinel_password"):
            if options[name] is not None:
                raise _wrong(url, f"the option {name} is for redis+sentinel:// only")
    return {name: value for name, value in options.items() if name not in OPTIONS}


def _check_arguments(url: Url, target: Target, host: Host) -> None:
    """Have redis-py look at the arguments now, and not at the first use."""
    try:
        target.connection(host.runtime.kind)
    except (TypeError, ValueError, redis.RedisError) as error:
        raise _wrong(url, f"redis-py does not take its options: {error}") from error


def _wrong(url: Url, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{url.safe_text} is not understood: {problem}", backend=url.safe_text)


def adopt_route(client: object, options: Mapping[str, Any], host: Host) -> tuple[str, Route] | None:
    """
    Make a route on a client of redis-py's, in the form of the host's face.

    The connections are our own, beside the client's: one that is kept costs less than one that is borrowed each time, a
    pool that is used up holds up no renewal, and a failover has to be noticed on them. Those beside a plain client are
    of the class that its pool makes. Of Sentinel and Cluster clients addresses, credentials and TLS are used.

    Returns:
        The URL to show for it, and the route; None if it is something else.

    Raises:
        ConfigurationError: It is of the other face, or an option is missing.
    """
    asyncio = host.runtime.kind == "asyncio"
    ours, other = (redis.asyncio, redis) if asyncio else (redis, redis.asyncio)
    if isinstance(client, (other.Redis, other.sentinel.Sentinel, other.RedisCluster)):
        face, module = ("lockkit.aio", "redis.asyncio") if asyncio else ("lockkit", "redis")
        message = f"{face}.from_client needs a client of {module}: {type(client).__name__} is that of the other face"
        raise ConfigurationError(message)
    if isinstance(client, ours.sentinel.Sentinel):
        service_name = options["service_name"]
        if service_name is None:
            message = "a Sentinel may watch several masters: say which by from_client(sentinel, service_name=…)"
            raise ConfigurationError(message)
        return _adopt_sentinel(client.master_for(service_name).connection_pool, options, host)
    if isinstance(client, ours.RedisCluster):
        return _adopt_cluster(client, options, host)
    if not isinstance(client, ours.Redis):
        return None
    pool: Any = client.connection_pool
    if isinstance(pool, ours.sentinel.SentinelConnectionPool):
        return _adopt_sentinel(pool, options, host)
    target = Target.lent(pool)
    url = f"redis://{target.label}/{pool.connection_kwargs.get('db', 0)}"
    return url, SingleRoute(Station.at(target, host, options["prefix"], Greeter(host)))


def _adopt_sentinel(pool: Any, options: Mapping[str, Any], host: Host) -> tuple[str, Route]:  # noqa: ANN401 - redis-py's
    tls = _speaks_tls(pool.connection_class)
    sentinels = []
    for one in pool.sentinel_manager.sentinels:
        own = one.connection_pool
        arguments = {**_known_arguments(own.connection_kwargs), **_sentinel_arguments({}, None, None)}
        address = {name: own.connection_kwargs[name] for name in ("host", "port")}
        sentinels.append(Target.at({**arguments, **address}, tls=_speaks_tls(own.connection_class)))
    arguments = _known_arguments(pool.connection_kwargs)
    labels = ",".join(target.label for target in sentinels)
    url = f"redis+sentinel://{labels}/{pool.service_name}/{arguments.get('db', 0)}"
    return url, SentinelRoute(sentinels, pool.service_name, arguments, host, options["prefix"], tls=tls)


def _adopt_cluster(client: Any, options: Mapping[str, Any], host: Host) -> tuple[str, Route]:  # noqa: ANN401 - redis-py's
    nodes = list(client.nodes_manager.startup_nodes.values())
    # asyncio's nodes have their connection arguments themselves, the others in a pool.
    source = nodes[0] if host.runtime.kind == "asyncio" else client.get_default_node().redis_connection.connection_pool
    arguments = _known_arguments(source.connection_kwargs)
    seeds = [(node.host, int(node.port)) for node in nodes]
    url = f"redis+cluster://{','.join(f'{name}:{port}' for name, port in seeds)}"
    tls = _speaks_tls(source.connection_class)
    return url, ClusterRoute(seeds, arguments, host, options["prefix"], tls=tls)


def _speaks_tls(connection_class: type) -> bool:
    return issubclass(connection_class, (redis.connection.SSLConnection, redis.asyncio.connection.SSLConnection))


def _known_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what would change replies, retries or time limits that lockkit sets itself, and what is not given."""
    wanted = {*driver_options(), "db"}
    return {name: value for name, value in arguments.items() if name in wanted and value is not None}
