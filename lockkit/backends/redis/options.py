"""From URLs, options and clients of an application to a topology."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.connection
import redis.sentinel

from lockkit import validation
from lockkit.backend import Host, Option
from lockkit.backends.redis.address import (
    DEFAULT_PORT,
    Target,
    argument_names,
    credentials,
    verifies_certificate,
)
from lockkit.backends.redis.groups import (
    DEFAULT_SENTINEL_PORT,
    SENTINEL_TIMEOUT,
    ClusterTopology,
    SentinelTopology,
)
from lockkit.backends.redis.handshake import Handshake
from lockkit.backends.redis.keys import IDLE_SECONDS, IDLE_SECONDS_MIN
from lockkit.backends.redis.node import RedisNode, Topology
from lockkit.errors import ConfigurationError
from lockkit.runtime import Kind
from lockkit.url import Url

log = logging.getLogger("lockkit")

REPLICAS_MAX = 100


def parse_prefix(value: object) -> str:
    """Parse the option ``prefix``. An empty one makes the name of a lock its key, as in redis-py."""
    text = "" if value == "" else validation.parse_text(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it cannot be encoded as UTF-8 (it has a lone surrogate): remove that character") from None
    if "{" in text or "}" in text:
        raise ValueError("it must have no braces: they would decide the Cluster slot of all locks")
    return text


IDLE_TTL = Option(
    validation.parse_at_least(IDLE_SECONDS_MIN),
    "Seconds for which the record of a released name is kept, at least ten ttls. Until then, tokens increase whatever "
    "the server's clock says.",
    IDLE_SECONDS,
)

OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "prefix": Option(
            parse_prefix, "First part of all keys; empty: none. Clients that share locks use the same.", "lockkit"
        ),
        "replicas": Option(
            validation.parse_int(0, REPLICAS_MAX),
            "How many replicas must acknowledge a grant or a renewal before it counts.",
            0,
        ),
        "idle_ttl": IDLE_TTL,
        "db": Option(validation.parse_int(0, 2**31 - 1), "Number of the database; most URLs give it in the path."),
        "service_name": Option(validation.parse_text, "The Sentinels' name for the master; URLs give it in the path."),
        "sentinel_username": Option(validation.parse_text, "User name at the Sentinels themselves."),
        "sentinel_password": Option(validation.parse_text, "Password at the Sentinels themselves."),
    }
)


def _parse_limit(value: object) -> float:
    seconds = validation.parse_seconds(value)
    if not seconds:
        message = "it must be above 0 seconds: without a limit, a server that hangs would block its callers for ever"
        raise ValueError(message)
    return seconds


def _parse_requirement(value: object) -> object:
    """Take ``CERT_NONE`` for ``none``: so platforms and Celery write it."""
    return value.removeprefix("CERT_").lower() if isinstance(value, str) else value


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "protocol": validation.parse_int(2, 3),
    "ssl_cert_reqs": _parse_requirement,
    "ssl_check_hostname": validation.parse_bool,
    "socket_timeout": _parse_limit,
    "socket_connect_timeout": _parse_limit,
}


@cache
def driver_options() -> Mapping[str, Option]:
    """Return the keyword arguments of redis-py's connections, for the installed version."""
    help_text = "As of redis-py's connections."
    return {name: Option(_PARSERS.get(name) or _driver_parser(name), help_text) for name in argument_names()}


def _driver_parser(name: str) -> Callable[[Any], Any]:
    parse: Any = redis.connection.URL_QUERY_ARGUMENT_PARSERS.get(name)
    # An argument of connect(...) may be any object that the driver accepts.
    return lambda value: parse(value) if parse is not None and isinstance(value, str) else value


def open_topology(url: Url, options: Mapping[str, Any], host: Host) -> Topology:
    """Make the topology of a URL. No I/O."""
    arguments = {name: value for name, value in options.items() if name not in OPTIONS}
    if url.driver == "sentinel":
        return _sentinel(url, options, arguments, host)
    for name in ("service_name", "sentinel_username", "sentinel_password"):
        if options[name] is not None:
            raise wrong_url(url.safe_text, f"the option {name} is for redis+sentinel:// only")
    tls = url.base == "rediss"
    arguments = {**credentials(url.username, url.password), **arguments}
    if url.driver == "cluster":
        if not url.hosts:
            raise wrong_url(url.safe_text, f"write {url.scheme}://node1:{DEFAULT_PORT},node2")
        url.require_one_login()
        if database(url, url.path, options) != 0:
            raise wrong_url(url.safe_text, "a Cluster has only the database 0")
        target = Target.anywhere(arguments, tls=tls)
        check_arguments(url, target, host.runtime.kind)
        seeds = [(one.host, one.port or DEFAULT_PORT) for one in url.hosts]
        return ClusterTopology(seeds, target, host, options["prefix"])
    if url.base == "unix":
        if url.hosts or len(url.path) <= 1:
            raise wrong_url(url.safe_text, "write unix:///path/of/the.sock?db=0")
        target = Target.unix(url.path, {"db": options["db"] or 0, **arguments})
    else:
        if len(url.hosts) != 1:
            problem = f"it must name one server: {url.scheme}://host:{DEFAULT_PORT}/0"
            raise wrong_url(
                url.safe_text, f"{problem}. For several see redis+sentinel://, redis+cluster:// and redlock://"
            )
        target = Target.of(url.hosts[0], {"db": database(url, url.path, options), **arguments}, tls=tls)
    check_arguments(url, target, host.runtime.kind)
    return RedisNode(host.runtime, target, options["prefix"], Handshake(host))


def _sentinel(url: Url, options: Mapping[str, Any], arguments: Mapping[str, Any], host: Host) -> Topology:
    # Not strip: of "//0" the name is empty, not "0".
    path_name, _, path_db = url.path.removeprefix("/").partition("/")
    service_name = path_name or options["service_name"]
    if not url.hosts or not service_name or (options["service_name"] or service_name) != service_name:
        raise wrong_url(
            url.safe_text, f"write {url.scheme}://sentinel1:{DEFAULT_SENTINEL_PORT},sentinel2/NAME_OF_THE_MASTER/0"
        )
    url.require_one_login()
    tls = url.base == "rediss"
    login = credentials(url.username, url.password)
    master = Target.anywhere({**login, **arguments, "db": database(url, path_db, options)}, tls=tls)
    check_arguments(url, master, host.runtime.kind)
    # The Sentinels have the master's TLS and protocol, a login of their own, and shorter time limits.
    own = {name: value for name, value in arguments.items() if name not in {"username", "password"}}
    own |= {"socket_timeout": SENTINEL_TIMEOUT, "socket_connect_timeout": SENTINEL_TIMEOUT}
    own |= {name: options[f"sentinel_{name}"] for name in ("username", "password") if options[f"sentinel_{name}"]}
    anyone = Target.anywhere(own, tls=tls)
    sentinels = [anyone.moved(one.host, one.port or DEFAULT_SENTINEL_PORT) for one in url.hosts]
    return SentinelTopology(sentinels, service_name, master, host, options["prefix"])


def database(url: Url, path: str, options: Mapping[str, Any]) -> int:
    """Read the number of the database from a path or from the option ``db``."""
    text = path.removeprefix("/").removesuffix("/")
    if text and not (text.isascii() and text.isdigit() and len(text) < 10):  # noqa: PLR2004 - digits of a 32-bit number
        raise wrong_url(url.safe_text, "its path must be the number of a database, for example /0")
    if text and options["db"] is not None and int(text) != options["db"]:
        raise wrong_url(url.safe_text, "its path and its option db name different databases: leave one out")
    return int(text) if text else options["db"] or 0


def check_arguments(url: Url, target: Target, kind: Kind) -> None:
    """Have redis-py check the arguments now, and not at their first use."""
    if target.arguments.get("ssl_check_hostname") and not verifies_certificate(target.arguments):
        raise wrong_url(url.safe_text, "ssl_cert_reqs=none trusts any certificate: leave out ssl_check_hostname=true")
    try:
        target.settings(kind)
    except (TypeError, ValueError, redis.RedisError) as error:
        raise wrong_url(url.safe_text, f"redis-py does not accept its options: {error}") from error


def wrong_url(url: str, problem: str) -> ConfigurationError:
    """Make the error for a URL (without its password)."""
    return ConfigurationError(f"{url} is not understood: {problem}", backend=url)


def check_async(clients: Sequence[object], kind: Kind) -> None:
    """Check that clients of redis-py are sync ones for the sync API, or async ones for the async API."""
    asyncio = kind == "asyncio"
    other = redis if asyncio else redis.asyncio
    here, there = ("lockkit.aio", "lockkit") if asyncio else ("lockkit", "lockkit.aio")
    wanted, given = ("redis.asyncio", "a sync") if asyncio else ("redis", "an async")
    for client in clients:
        if isinstance(client, (other.Redis, other.sentinel.Sentinel, other.RedisCluster)):
            message = f"{here}.from_client needs a client of {wanted}: you passed {given} {type(client).__name__}"
            raise ConfigurationError(f"{message}. Use {there}.from_client")


def warn_of_unverified(targets: Sequence[Target], kind: Kind, url: str) -> None:
    """Warn if an application's client does not verify its servers: the doctor sees only URLs."""
    if any(target.unverified(kind) is not None for target in targets):
        log.warning(
            "%s: this client of redis-py does not verify certificate and host name of its server (ssl_cert_reqs, "
            "ssl_check_hostname), so lockkit does not either: a man in the middle can read the password",
            url,
        )


def adopt_topology(client: object, options: Mapping[str, Any], host: Host) -> tuple[str, Topology] | None:
    """
    Make a topology from a client of redis-py, sync or async as the host's runtime.

    lockkit opens its own connections beside the client's, by its addresses, credentials and TLS settings: keeping one
    costs less than borrowing one for each call, an exhausted pool delays no renewal, and lockkit must notice a failover
    on them.
    """
    kind, prefix = host.runtime.kind, options["prefix"]
    check_async([client], kind)
    ours = redis.asyncio if kind == "asyncio" else redis
    if isinstance(client, ours.sentinel.Sentinel):
        if options["service_name"] is None:
            message = "a Sentinel may watch several masters: name one by from_client(sentinel, service_name=…)"
            raise ConfigurationError(message)
        client = client.master_for(options["service_name"])
    topology: Topology
    if isinstance(client, ours.RedisCluster):
        nodes: list[Any] = list(client.nodes_manager.startup_nodes.values())
        # Nodes of an async client have the connection arguments themselves, those of a sync client in a pool.
        pool: Any = nodes[0] if kind == "asyncio" else client.get_default_node().redis_connection.connection_pool
        targets = [target := Target.lent(pool, in_cluster=True)]
        seeds = [(one.host, int(one.port)) for one in nodes]
        where = f"+cluster://{','.join(target.moved(*seed).label for seed in seeds)}"
        remap = getattr(client.nodes_manager, "address_remap", None)  # of later versions
        topology = ClusterTopology(seeds, target, host, prefix, remap=remap)
    elif isinstance(client, ours.Redis):
        pool = client.connection_pool
        targets = [target := Target.lent(pool)]
        where = f"://{target.label}/{target.arguments.get('db', 0)}"
        topology = RedisNode(host.runtime, target, prefix, Handshake(host))
        if isinstance(pool, ours.sentinel.SentinelConnectionPool):
            managers: Any = pool.sentinel_manager.sentinels
            sentinels = [Target.lent(one.connection_pool, SENTINEL_TIMEOUT) for one in managers]
            labels = ",".join(sentinel.label for sentinel in sentinels)
            where = f"+sentinel://{labels}/{pool.service_name}/{target.arguments.get('db', 0)}"
            topology = SentinelTopology(sentinels, pool.service_name, target, host, prefix)
            targets += sentinels
    else:
        return None
    url = f"{'rediss' if target.form == 'tls' else 'redis'}{where}"
    if target.form == "unix":
        url = f"unix://{target.label}?db={target.arguments.get('db', 0)}"
    warn_of_unverified(targets, kind, url)
    return url, topology
