"""Every way to reach a Redis server: URLs, options, and connections that the application has."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

import lockkit
import lockkit.aio
from lockkit.backends.redis.backend import RedisBackend
from lockkit_tools.servers import RedisCluster, RedisSentinels, RedisServer, require, wait_until
from tests.backends.redis.support import Face, backend_at
from tests.backends.support import StubHost

PATIENCE = 60.0


@pytest.fixture(autouse=True, scope="module")
def _redis() -> None:
    require("redis", local=True)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """One node with a password, a user, a Unix socket."""
    require("redis", local=True)
    users = {"app": "on >p%40@:/ ~* &* +@all"}
    with RedisServer(password="pass word", users=users, unix_socket=True) as node:  # noqa: S106 - of a throw-away server
        yield node


def use(first: lockkit.Client, second: lockkit.Client) -> None:
    """Hold, wait, be woken, look, and let go."""
    first.ping()
    lease = first.lock("x").acquire(timeout=PATIENCE)
    tokens: list[int] = []

    def wait() -> None:
        with second.lock("x", timeout=PATIENCE) as later:
            tokens.append(later.token)

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: None if [one.waiters for one in first.holders("x")] == [1] else "nobody waits")
    lease.extend()
    lease.release()
    thread.join(PATIENCE)
    assert tokens > [lease.token]


async def use_asyncio(first: lockkit.aio.Client, second: lockkit.aio.Client) -> None:
    """As `use`, with tasks."""
    await first.ping()
    lease = await first.lock("x").acquire(timeout=PATIENCE)

    async def wait() -> int:
        async with second.lock("x", timeout=PATIENCE) as later:
            return later.token

    waiting = asyncio.create_task(wait())
    while [one.waiters for one in await first.holders("x")] != [1]:  # noqa: ASYNC110 - it is the server that changes
        await asyncio.sleep(0.01)
    await lease.extend()
    await lease.release()
    assert await waiting > lease.token


def use_both(url: str) -> None:
    """Use a URL on both faces."""
    with lockkit.connect(url) as first, lockkit.connect(url) as second:
        use(first, second)

    async def scenario() -> None:
        async with lockkit.aio.connect(url) as first, lockkit.aio.connect(url) as second:
            await use_asyncio(first, second)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "form",
    [
        "redis://:pass%20word@{address}",
        "redis://pass%20word@{address}/0",
        "redis://default:pass%20word@{address}/3",
        "redis://app:p%2540%40%3A%2F@{address}/0?protocol=3",
        "valkey://app@{address}?username=app&password=p%2540%40%3A%2F",
        "unix://:pass%20word@{socket}?db=2",
        "unix://app:p%2540%40%3A%2F@{socket}?protocol=3",
        "redis://:pass%20word@{address}?db=1&socket_keepalive=yes&client_name=me",
    ],
)
def test_url_reaches_the_server(server: RedisServer, form: str) -> None:
    """User, password, database, protocol and socket, on both faces."""
    use_both(form.format(address=server.address, socket=server.socket_path))


@pytest.mark.parametrize("protocol", [2, 3])
def test_tls_is_spoken_and_checked(protocol: int) -> None:
    """With the authority's certificate it works; without it the certificate is refused, and the message says so."""
    with RedisServer(tls=True) as node:
        use_both(f"{node.url}&protocol={protocol}")
        with (
            lockkit.connect(f"rediss://{node.address}") as client,
            pytest.raises(lockkit.ConfigurationError, match="ssl_ca_certs"),
        ):
            client.ping()


@pytest.mark.parametrize("protocol", [2, 3])
def test_tls_at_one_end_only_is_an_error_of_configuration(protocol: int) -> None:
    """Neither side says so: the one waits for the rest of a line, the other closes the connection."""

    def expect(url: str, advice: str) -> None:
        with lockkit.connect(url, protocol=protocol) as client, pytest.raises(lockkit.ConfigurationError, match=advice):
            client.lock("x").acquire(timeout=PATIENCE)

        async def scenario() -> None:
            async with lockkit.aio.connect(url, protocol=protocol) as other:
                with pytest.raises(lockkit.ConfigurationError, match=advice):
                    await other.lock("x").acquire(timeout=PATIENCE)

        asyncio.run(scenario())

    with RedisServer() as plain, RedisServer(tls=True) as secret:
        expect(f"rediss://{plain.address}", "such as redis://")
        expect(f"redis://{secret.address}", "such as rediss://")


def test_client_name_and_database_are_set(server: RedisServer) -> None:
    """An administrator sees who is connected; the keys are where the URL says."""
    url = f"redis://:pass%20word@{server.address}/5"
    with lockkit.connect(url, client_name="worker-7") as client, client.lock("x"), server.connect() as connection:
        assert "name=worker-7" in str(connection.call("CLIENT", "LIST"))
        connection.call("SELECT", 5)
        assert connection.call("EXISTS", "lockkit:x") == 1


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("redis://", "name one server"),
        ("redis://a,b", "redlock://"),
        ("redis://h/one", "number of a database"),
        ("redis://h/-1", "number of a database"),
        ("redis://h/1?db=2", "different databases"),
        ("redis://h?prefix=a{b", "no braces"),
        ("redis://h?prefix=a}b", "no braces"),
        ("redis://h?protocol=4", "from 2 to 3"),
        ("redis://h?replicas=-1", "from 0 to 100"),
        ("redis://h?socket_timeout=0", "above 0 seconds"),
        ("redis://h?decode_responses=1", "unknown option"),
        ("redis://h?sockettimeout=1", "did you mean 'socket_timeout'"),
        ("redis://h?ssl_ca_certs=x", "redis-py does not accept its options"),
        ("redis://h?service_name=x", r"redis\+sentinel:// only"),
        ("unix://", "unix:///path"),
        ("unix://host/path", "unix:///path"),
        ("redis+sentinel://h", "NAME_OF_THE_MASTER"),
        ("redis+sentinel:///name", "sentinel1"),
        ("redis+sentinel://h:26379//0", "NAME_OF_THE_MASTER"),
        ("redis+sentinel://h/name?service_name=other", "NAME_OF_THE_MASTER"),
        ("redis+sentinel://h/name/x", "number of a database"),
        ("redis+cluster://", "node1"),
        ("redis+sentinel://u:p@h,v:p@i/name", "the same user and password"),
        ("redis+cluster://h,u:p@i", "the same user and password"),
        ("redis+cluster://h/1", "only the database 0"),
    ],
)
def test_wrong_url_is_refused_at_once(url: str, part: str) -> None:
    """Nothing is sent; the message says what is accepted."""
    with pytest.raises(lockkit.ConfigurationError, match=part):
        lockkit.connect(url)


@pytest.mark.parametrize("url", ["redis://h", "redlock://h,i,j"])
def test_prefix_that_cannot_be_encoded_is_refused_at_once(url: str) -> None:
    """Like a name of that kind: it could never be sent."""
    with pytest.raises(lockkit.ConfigurationError, match=r"prefix.*lone surrogate"):
        lockkit.connect(url, prefix="a\ud800")


def test_connect_does_no_io() -> None:
    """A client of a server that does not exist can be made and closed."""
    for url in ("redis://192.0.2.1", "unix:///nowhere", "redis+sentinel://192.0.2.1/m", "redis+cluster://192.0.2.1"):
        lockkit.connect(url).close()


def test_no_message_shows_a_password(server: RedisServer) -> None:
    """Not the URL of a client, nor what stands in its parts."""
    client = lockkit.connect(f"redis://app:hidden@{server.address}?client_name=me", password="hidden too")  # noqa: S106
    topology: Any = client._engine.client.backend._topology  # type: ignore[union-attr]
    shown = f"{client!r} {client.url} {topology._node.target!r}"

    assert "hidden" not in shown
    client.close()


DRIVERS: dict[str, Callable[[RedisServer], redis.Redis]] = {
    "plain": lambda node: redis.Redis(host=node.host, port=node.port, password=node.password),
    "decoding": lambda node: redis.Redis(
        host=node.host, port=node.port, password=node.password, decode_responses=True, protocol=3
    ),
    "unix": lambda node: redis.Redis(unix_socket_path=str(node.socket_path), password=node.password),
    "one connection": lambda node: redis.Redis(
        connection_pool=redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
            host=node.host, port=node.port, password=node.password, max_connections=1, timeout=20
        )
    ),
    "single": lambda node: redis.Redis(
        host=node.host, port=node.port, password=node.password, single_connection_client=True
    ),
}


@pytest.mark.parametrize("kind", DRIVERS)
def test_client_of_the_application_is_used_and_left_open(server: RedisServer, kind: str) -> None:
    """Whatever its pool and its decoding."""
    driver = DRIVERS[kind](server)
    with lockkit.from_client(driver) as first, lockkit.from_client(driver) as second:
        use(first, second)

    assert driver.ping()
    driver.close()


def test_pool_that_is_used_up_delays_no_lock(server: RedisServer) -> None:
    """The application's own commands may take all its connections while it holds a lock."""
    where: dict[str, Any] = {"host": server.host, "port": server.port, "password": server.password}
    pool = redis.ConnectionPool(max_connections=1, **where)
    with lockkit.from_client(redis.Redis(connection_pool=pool)) as client, lockkit.connect(server.url) as other:
        with client.lock("used up", ttl=600):
            taken = pool.get_connection()
        other.lock("used up", ttl=600).acquire(timeout=PATIENCE).release()
    taken.disconnect()  # type: ignore[no-untyped-call]

    async def scenario() -> None:
        pool = redis.asyncio.ConnectionPool(max_connections=1, **where)
        driver = redis.asyncio.Redis(connection_pool=pool)
        async with lockkit.aio.from_client(driver) as client, lockkit.aio.connect(server.url) as other:
            async with client.lock("used up", ttl=600):
                taken = await pool.get_connection()  # type: ignore[no-untyped-call]
            await (await other.lock("used up", ttl=600).acquire(timeout=PATIENCE)).release()
        await taken.disconnect()

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [False, True])
def test_asyncio_client_of_the_application_is_used_and_left_open(
    server: RedisServer,
    decode: bool,  # noqa: FBT001 - a parameter of the test
    protocol: int,
) -> None:
    """The same for ``redis.asyncio.Redis``; a cancelled call returns no half-read connection to the pool."""

    async def scenario() -> None:
        driver = redis.asyncio.Redis(
            host=server.host, port=server.port, password=server.password, decode_responses=decode, protocol=protocol
        )
        async with lockkit.aio.from_client(driver) as first, lockkit.aio.from_client(driver) as second:
            await use_asyncio(first, second)
            for number in range(100):
                task = asyncio.create_task(first.holders("x"))
                for _ in range(number % 6):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                assert await driver.echo(f"{number}") in {f"{number}", f"{number}".encode()}
        assert await driver.ping()
        await driver.aclose()

    asyncio.run(scenario())


def test_sentinel_and_cluster_clients_are_used() -> None:
    """Their addresses and credentials, on both faces."""
    with RedisSentinels(password="one") as group:  # noqa: S106 - of a throw-away server
        hosts = [(sentinel.host, sentinel.port) for sentinel in group.sentinels]
        sentinel: Any = redis.sentinel.Sentinel(hosts, password="one")  # type: ignore[no-untyped-call]  # noqa: S106
        with pytest.raises(lockkit.ConfigurationError, match="service_name="):
            lockkit.from_client(sentinel)
        with (
            lockkit.from_client(sentinel, service_name="mymaster") as first,
            lockkit.from_client(sentinel.master_for("mymaster")) as second,
        ):
            use(first, second)

        async def scenario() -> None:
            driver: Any = redis.asyncio.sentinel.Sentinel(hosts, password="one")  # type: ignore[no-untyped-call]  # noqa: S106
            async with (
                lockkit.aio.from_client(driver, service_name="mymaster") as first,
                lockkit.aio.connect(group.url) as second,
            ):
                await use_asyncio(first, second)

        asyncio.run(scenario())


def test_cluster_client_is_used() -> None:
    """As the one of Sentinel."""
    with RedisCluster() as group:
        node = group.nodes[0]
        driver = redis.RedisCluster(host=node.host, port=node.port)
        with lockkit.from_client(driver) as first, lockkit.connect(group.url) as second:
            use(first, second)
        assert driver.ping()
        driver.close()

        async def scenario() -> None:
            client = redis.asyncio.RedisCluster(host=node.host, port=node.port)
            async with lockkit.aio.from_client(client) as first, lockkit.aio.connect(group.url) as second:
                await use_asyncio(first, second)
            await client.aclose()

        asyncio.run(scenario())


def test_addresses_that_a_cluster_client_remaps_are_remapped() -> None:
    """As where the nodes tell addresses of their own network."""

    def remap(address: tuple[str, int]) -> tuple[str, int]:
        return "localhost", address[1]

    def hosts(client: lockkit.Client | lockkit.aio.Client) -> set[str]:
        topology: Any = client._engine.client.backend._topology  # type: ignore[union-attr]
        return {node.target.arguments["host"] for node in topology._nodes.values()}

    with RedisCluster() as group:
        port = group.nodes[0].port
        driver = redis.RedisCluster(host="localhost", port=port, address_remap=remap)
        with lockkit.from_client(driver) as client:
            client.lock("x").acquire(timeout=PATIENCE).release()
            assert hosts(client) == {"localhost"}
        driver.close()

        async def scenario() -> None:
            driver = redis.asyncio.RedisCluster(host="localhost", port=port, address_remap=remap)
            async with lockkit.aio.from_client(driver) as client:
                await (await client.lock("x").acquire(timeout=PATIENCE)).release()
                assert hosts(client) == {"localhost"}
            await driver.aclose()

        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ({"host": "h", "db": 3, "password": "hidden"}, "redis://h:6379/3"),
        ({"host": "::1", "port": 7000}, "redis://[::1]:7000/0"),
        ({"host": "h", "ssl": True}, "rediss://h:6379/0"),
        ({"unix_socket_path": "/run/redis.sock", "db": 2}, "unix:///run/redis.sock?db=2"),
    ],
)
def test_url_of_a_client_of_the_application(arguments: dict[str, Any], url: str) -> None:
    """As one would write it for `lockkit.connect`, without the password."""
    with lockkit.from_client(redis.Redis(**arguments)) as client:
        assert client.url == url
    if "unix_socket_path" not in arguments:
        nodes = [redis.Redis(**{**arguments, "port": port}) for port in (1, 2, 3)]
        scheme, _, host = url.rpartition("/")[0].rpartition(":")[0].partition("://")
        with lockkit.from_client(nodes) as client:
            scheme = scheme.replace("redis", "redlock")
            assert client.url == f"{scheme}://{','.join(f'{host}:{port}' for port in (1, 2, 3))}"


class StandIn(redis.Connection):
    """A class of connections that is not redis-py's own, as that of fakeredis."""


class AsyncStandIn(redis.asyncio.Connection):
    """The same for asyncio."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"connection_class": StandIn}, r"StandIn have no socket.*use lockkit\.connect\('memory://'\)"),
        ({"redis_connect_func": print}, "give it a credential_provider instead"),
        (
            {"connection_class": redis.SSLConnection, "ssl_validate_ocsp": True},
            "lockkit does not ask whether a certificate was revoked",
        ),
    ],
)
def test_client_that_connects_in_a_way_of_its_own_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Lockkit connects by itself, and could not do the same."""
    with pytest.raises(lockkit.ConfigurationError, match=message):
        lockkit.from_client(redis.Redis(connection_pool=redis.ConnectionPool(**arguments)))


def test_asyncio_client_that_connects_in_a_way_of_its_own_is_refused() -> None:
    """As in the sync API."""
    pool = redis.asyncio.ConnectionPool(connection_class=AsyncStandIn)

    async def scenario() -> None:
        with pytest.raises(lockkit.ConfigurationError, match="AsyncStandIn have no socket"):
            lockkit.aio.from_client(redis.asyncio.Redis(connection_pool=pool))

    asyncio.run(scenario())


@pytest.mark.parametrize("face", ["sync", "asyncio"])
def test_credential_provider_is_asked_for_each_connection(server: RedisServer, face: str) -> None:
    """By the function for this API; its credentials may be valid for minutes only."""
    asked: list[str] = []

    class Provider(redis.CredentialProvider):
        def get_credentials(self) -> tuple[str, str]:
            asked.append("sync")
            return "app", "p%40@:/"

        async def get_credentials_async(self) -> tuple[str, str]:
            asked.append("asyncio")
            return "app", "p%40@:/"

    def drop_connections() -> None:
        with server.connect() as connection:
            connection.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def scenario(host: StubHost) -> None:
        async with backend_at(f"redis://{server.address}", host, credential_provider=Provider()) as backend:
            for _ in range(2):
                await backend.ping()
                drop_connections()

    Face(face).run(scenario)
    assert asked == [face, face]


def test_client_of_the_other_face_is_refused() -> None:
    """The message says which form is needed."""
    blocking, other = redis.Redis(), redis.asyncio.Redis()

    async def scenario() -> None:
        with pytest.raises(
            lockkit.ConfigurationError, match=r"lockkit\.aio\.from_client needs a client of redis\.asyncio"
        ):
            lockkit.aio.from_client(blocking)

    asyncio.run(scenario())
    with pytest.raises(lockkit.ConfigurationError, match=r"lockkit\.from_client needs a client of redis:"):
        lockkit.from_client(other)
    blocking.close()


def test_driver_arguments_are_those_of_the_installed_driver() -> None:
    """Nothing that lockkit decides itself can be set."""
    options = RedisBackend.driver_options()

    assert {"client_name", "credential_provider", "ssl_ca_certs", "username", "password", "protocol"} <= set(options)
    assert not {"host", "port", "retry", "decode_responses", "parser_class"} & set(options)
