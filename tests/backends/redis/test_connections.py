"""Every way to reach a Redis server: URLs, options, and connections that the application has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

import lockkit
import lockkit.aio
from lockkit.backends.redis.backend import RedisBackend
from lockkit.testing.face_driver import FACES, FaceDriver, adapt
from lockkit.testing.target import Face
from lockkit_tools.servers import RedisCluster, RedisSentinels, RedisServer, require
from tests.backends.redis.faces import both as both_apis
from tests.backends.redis.support import Face as ApiFace
from tests.backends.redis.support import backend_at
from tests.backends.support import StubHost, play

PATIENCE = 60.0

both = pytest.mark.parametrize("face", FACES)
protocols = pytest.mark.parametrize(("protocol", "face"), [(2, "blocking"), (3, "asyncio")])


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


async def use(driver: FaceDriver, first: lockkit.aio.Client, second: lockkit.aio.Client) -> None:
    """Hold, wait, be woken, look, and let go."""
    await first.ping()
    lease = await first.lock("x").acquire(timeout=PATIENCE)
    waiting = driver.spawn(second.lock("x").acquire(timeout=PATIENCE))
    await driver.until_waiting(second, "x")
    await lease.extend()
    await lease.release()
    later = await waiting.result()
    assert later.token > lease.token
    await later.release()


def use_url(face: Face, url: str) -> None:
    """Use a URL."""

    async def body(driver: FaceDriver) -> None:
        await use(driver, await driver.connect(), await driver.connect())

    play(face, url, body)


def adopt(driver: FaceDriver, client: object, **options: Any) -> lockkit.aio.Client:
    """Make a client from one of the application."""
    if driver.face == "asyncio":
        return lockkit.aio.from_client(client, **options)
    made: lockkit.aio.Client = adapt(lockkit.from_client(client, **options))
    return made


@pytest.mark.parametrize(
    ("face", "form"),
    [
        ("blocking", "redis://:pass%20word@{address}"),
        ("asyncio", "redis://pass%20word@{address}/0"),
        ("blocking", "redis://default:pass%20word@{address}/3"),
        ("asyncio", "redis://app:p%2540%40%3A%2F@{address}/0?protocol=3"),
        ("blocking", "valkey://app@{address}?username=app&password=p%2540%40%3A%2F"),
        ("asyncio", "unix://:pass%20word@{socket}?db=2"),
        ("blocking", "unix://app:p%2540%40%3A%2F@{socket}?protocol=3"),
        ("asyncio", "redis://:pass%20word@{address}?db=1&socket_keepalive=yes&client_name=me"),
    ],
)
def test_url_reaches_the_server(server: RedisServer, form: str, face: Face) -> None:
    """User, password, database, protocol and socket."""
    use_url(face, form.format(address=server.address, socket=server.socket_path))


@protocols
def test_tls_is_spoken(protocol: int, face: Face) -> None:
    """For commands and subscriptions; which certificates are refused: ``test_tls.py``."""
    with RedisServer(tls=True) as node:
        use_url(face, f"{node.url}&protocol={protocol}")


@protocols
@pytest.mark.parametrize(("tls", "advice"), [(False, "such as redis://"), (True, "such as rediss://")])
def test_tls_at_one_end_only_is_an_error_of_configuration(
    protocol: int,
    face: Face,
    tls: bool,  # noqa: FBT001 - a parameter of the test
    advice: str,
) -> None:
    """Neither side says so: the one waits for the rest of a line, the other closes the connection."""

    async def body(driver: FaceDriver) -> None:
        client = await driver.connect(protocol=protocol, socket_timeout=1.0)
        with pytest.raises(lockkit.ConfigurationError, match=advice):
            await client.lock("x").acquire(timeout=PATIENCE)

    with RedisServer(tls=tls) as node:
        play(face, f"{'redis' if tls else 'rediss'}://{node.address}", body)


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
    shown = f"{client!r} {client.url} {topology.target!r}"

    assert "hidden" not in shown
    client.close()


@pytest.mark.parametrize("renamed", ["HELLO", "AUTH"])
@pytest.mark.parametrize("form", ["redis://:hunter2@{}", "redis+sentinel://{}/m?sentinel_password=hunter2"])
def test_password_that_the_server_repeats_is_not_shown(form: str, renamed: str) -> None:
    """Nor in the cause: a server that does not know a command says what its arguments were."""
    with (
        RedisServer(settings={"rename-command": f'{renamed} ""'}) as node,
        lockkit.connect(form.format(node.address), protocol=3 if renamed == "HELLO" else 2) as client,
        pytest.raises(lockkit.ConfigurationError, match=f"lacks a command.*unknown command .{renamed}") as raised,
    ):
        client.ping()

    assert "hunter2" not in f"{raised.value} {raised.value.__cause__!r}"


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decoding": {"decode_responses": True, "protocol": 3},
    "single": {"single_connection_client": True},
}


@both
@pytest.mark.parametrize("kind", KINDS)
def test_client_of_the_application_is_used_and_left_open(server: RedisServer, kind: str, face: Face) -> None:
    """Whatever its pool and its decoding."""

    async def body(driver: FaceDriver) -> None:
        module = redis if face == "blocking" else redis.asyncio
        theirs: Any = module.Redis(host=server.host, port=server.port, password=server.password, **KINDS[kind])
        async with adopt(driver, theirs) as first, adopt(driver, theirs) as second:
            await use(driver, first, second)
        if face == "blocking":
            assert theirs.ping()
            theirs.close()
        else:
            assert await theirs.ping()
            await theirs.aclose()

    play(face, server.url, body)


def test_pool_that_is_used_up_delays_no_lock(server: RedisServer) -> None:
    """The application's own commands may take all its connections while it holds a lock."""
    pool = redis.ConnectionPool(max_connections=1, host=server.host, port=server.port, password=server.password)
    with lockkit.from_client(redis.Redis(connection_pool=pool)) as client, lockkit.connect(server.url) as other:
        with client.lock("used up", ttl=600):
            taken = pool.get_connection()
        other.lock("used up", ttl=600).acquire(timeout=PATIENCE).release()
    taken.disconnect()  # type: ignore[no-untyped-call]


def test_sentinel_client_is_used() -> None:
    """Its addresses and credentials."""
    with RedisSentinels(password="one") as group:  # noqa: S106 - of a throw-away server
        hosts = [(sentinel.host, sentinel.port) for sentinel in group.sentinels]

        async def body(driver: FaceDriver) -> None:
            module = redis if driver.face == "blocking" else redis.asyncio
            theirs: Any = module.sentinel.Sentinel(hosts, password="one")  # noqa: S106
            with pytest.raises(lockkit.ConfigurationError, match="service_name="):
                adopt(driver, theirs)
            async with (
                adopt(driver, theirs, service_name="mymaster") as first,
                adopt(driver, theirs.master_for("mymaster")) as second,
            ):
                await use(driver, first, second)

        for face in FACES:
            play(face, group.url, body)


def test_cluster_client_is_used_and_its_remapping() -> None:
    """As where the nodes tell addresses of their own network."""

    def remap(address: tuple[str, int]) -> tuple[str, int]:
        return "localhost", address[1]

    with RedisCluster() as group:

        async def body(driver: FaceDriver) -> None:
            module = redis if driver.face == "blocking" else redis.asyncio
            theirs: Any = module.RedisCluster(host="localhost", port=group.nodes[0].port, address_remap=remap)
            async with adopt(driver, theirs) as first:
                await use(driver, first, await driver.connect())
                nodes = first._engine.client.backend._topology._nodes  # type: ignore[union-attr]
                assert {node.target.arguments["host"] for node in nodes.values()} == {"localhost"}
            closing = theirs.close() if driver.face == "blocking" else await theirs.aclose()
            assert closing is None

        for face in FACES:
            play(face, group.url, body)


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


@both_apis
async def test_credential_provider_is_asked_for_each_connection(
    server: RedisServer, face: ApiFace, host: StubHost
) -> None:
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

    async with backend_at(f"redis://{server.address}", host, credential_provider=Provider()) as backend:
        for _ in range(2):
            await backend.ping()
            drop_connections()
    assert asked == [face.name, face.name]


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
