"""
How the servers of lockkit's own backends can be ill-treated, for the fault suite.

Clients reach a server through a `FaultProxy`, where it tells no addresses of its own; so connections can be cut, and
answers lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import quote

from lockkit.backends.object_store.record import object_name
from lockkit.backends.sql_table.statements import SHARED
from lockkit.testing.faults import Faults, Step, Target
from lockkit_tools.servers import (
    EtcdCluster,
    EtcdServer,
    FaultProxy,
    MariaServer,
    PostgresServer,
    RedisCluster,
    RedisNodes,
    RedisSentinels,
    RedisServer,
    Server,
    ServerGroup,
    ZooKeeperEnsemble,
    ZooKeeperServer,
    http2_call_ended,
)
from lockkit_tools.servers.objects import BUCKET, CLOSED_BUCKET
from tests.conformance.targets import ObjectStore

PASSWORD = "hunter2"  # noqa: S105 - of throw-away servers
"""Wrong ones end with it, so that one search finds both."""


class ServerFaults(Faults):
    """
    A service of `lockkit_tools.servers`, to be entered.

    Args:
        service: Keeps its data when it is killed.
        options: For ``connect``.
        lacks: Abilities that the class has and this service has not.
    """

    proxied: ClassVar[bool] = True
    loses_everywhere: ClassVar[bool] = False
    """Whether an answer is lost at every server, because each has a vote; else at the one that is asked."""

    secret = PASSWORD

    def __init__(
        self, service: Server | ServerGroup, options: Mapping[str, Any] | None = None, *, lacks: Sequence[str] = ()
    ) -> None:
        self.service = service
        self.options = options or {}
        self._lacks = lacks
        self._exit = ExitStack()
        self._frozen = self._erased = False
        self.proxies: list[FaultProxy] = []

    @property
    def servers(self) -> Sequence[Server]:
        """Each server."""
        return self.service.servers if isinstance(self.service, ServerGroup) else [self.service]

    def __enter__(self) -> Self:
        self._exit.enter_context(self.service)
        self.prepare()
        url = self.url()
        super().__init__(Target(url, self.options))
        if self.proxied:
            for server in self.servers:
                proxy = self._exit.enter_context(FaultProxy(server.host, server.port))
                self.proxies.append(proxy)
                url = url.replace(server.address, proxy.address)
            self.target = Target(url, self.options)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()

    def url(self) -> str:
        """Give the URL without proxies."""
        return self.service.url

    def prepare(self) -> None:
        """Set up an empty server: users, and logins."""

    def can(self, ability: str) -> bool:
        if ability in self._lacks or (ability in {"drop_answer", "delay", "partition"} and not self.proxied):
            return False
        if ability == "stop_one":
            return len(self.servers) > 1
        return super().can(ability)

    def heal(self) -> None:
        if self._frozen:
            self.thaw()
        self.start()
        for proxy in self.proxies:
            proxy.heal()

    def stop(self) -> None:
        self.service.kill()
        for proxy in self.proxies:
            proxy.refuse()

    def start(self) -> None:
        self.service.start()
        if self._erased:
            self._erased = False
            self.prepare()
        for proxy in self.proxies:
            proxy.accept()

    def erase(self) -> None:
        self.service.erase()
        self._erased = True

    def stop_one(self) -> None:
        lost = self.victims()
        for server, proxy in zip(self.servers, self.proxies, strict=True):
            if server in lost:
                server.kill()
                proxy.refuse()

    def victims(self) -> Sequence[Server]:
        """Give the servers that `stop_one` kills."""
        return self.servers[: (len(self.servers) - 1) // 2]

    def freeze(self) -> None:
        self._frozen = True
        self.service.pause()

    def thaw(self) -> None:
        self.service.resume()
        self._frozen = False

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.cut()

    def partition(self) -> None:
        for proxy in self.proxies:
            proxy.blackhole()

    def delay(self, seconds: float) -> None:
        for proxy in self.proxies:
            proxy.delay(to_client=seconds)

    def drop_answer(self, step: Step, name: str) -> threading.Event:
        wanted, done, taken = self.sign(step, name), threading.Event(), threading.Lock()

        def takes(request: bytes) -> bool:
            return wanted in request and (self.loses_everywhere or taken.acquire(blocking=False))

        def until(answer: bytes) -> bool:
            if self.ended(answer):
                done.set()
            return done.is_set()

        for proxy in self.proxies:
            proxy.drop_next_reply(match=takes, until=until)
        return done

    def sign(self, step: Step, name: str) -> bytes:  # noqa: ARG002 - for those that override it
        """Give the bytes by which the request of a step is known."""
        return name.encode()

    ended: Callable[[bytes], bool] = staticmethod(bool)
    """Whether bytes hold the whole answer."""

    def wrong_password(self) -> Target:
        return replace(self.target, url=self.target.url.replace(PASSWORD, f"not{PASSWORD}"))


def durable_node() -> RedisServer:
    """Make a Redis that keeps what it has confirmed, with a user who may do nothing."""
    weak = f"on >{PASSWORD} ~* &* +ping +info +hello +client +select"
    return RedisServer(password=PASSWORD, users={"weak": weak}, appendonly=True, appendfsync="always")


def durable(group: RedisSentinels | RedisCluster) -> RedisSentinels | RedisCluster:
    """Have all nodes keep what they have confirmed."""
    for node in group.nodes:
        node.appendonly, node.appendfsync = True, "always"
    return group


class RedisFaults(ServerFaults):
    """Redis."""

    @property
    def nodes(self) -> Sequence[RedisServer]:
        """The servers that store keys."""
        return [server for server in self.servers if isinstance(server, RedisServer)]

    def without_rights(self) -> Target:
        return replace(self.target, url=self.target.url.replace(f":{PASSWORD}", f"weak:{PASSWORD}"))

    def fill(self) -> None:
        self._limit(1)

    def heal(self) -> None:
        super().heal()
        self._limit(0)

    def _limit(self, memory_bytes: int) -> None:
        for node in self.nodes:
            with node.connect() as connection:
                connection.call("CONFIG", "SET", "maxmemory", memory_bytes)


class RedlockFaults(RedisFaults):
    """Redlock: each node has a vote."""

    loses_everywhere = True


class RedisGroupFaults(RedisFaults):
    """Sentinels and Cluster: the nodes tell their own addresses, so no proxy can stand before them."""

    proxied = False

    def cut(self) -> None:
        for node in self.nodes:
            with node.connect() as connection:
                for kind in ("normal", "pubsub"):
                    connection.call("CLIENT", "KILL", "TYPE", kind)


class SqlFaults(ServerFaults):
    """PostgreSQL and MariaDB."""

    def sign(self, step: Step, name: str) -> bytes:
        """A downgrade reads the row, and then writes it."""
        return SHARED.encode() if step == "downgrade" else name.encode()

    def prepare(self) -> None:
        """Make a user without rights."""
        assert isinstance(self.service, PostgresServer | MariaServer)
        if isinstance(self.service, PostgresServer):
            self.service.execute(f"CREATE ROLE weak LOGIN PASSWORD '{PASSWORD}'")
        else:
            self.service.execute(f"CREATE USER weak IDENTIFIED BY '{PASSWORD}'")

    def without_rights(self) -> Target:
        scheme, _, rest = self.target.url.partition("://")
        return replace(self.target, url=f"{scheme}://weak:{rest.partition(':')[2]}")


class SqlSessionFaults(SqlFaults):
    """The modes in which a session is the lock: what renews and releases it has no name in it."""

    def sign(self, step: Step, name: str) -> bytes:
        return name.encode() if step == "acquire" else b""


QUICK_LOGIN = {"bcrypt-cost": "4"}


class EtcdFaults(ServerFaults):
    """etcd, with logins."""

    ended = staticmethod(http2_call_ended)

    def url(self) -> str:
        """Give the URL with the login."""
        return self.service.url.replace("://", f"://root:{PASSWORD}@")

    def prepare(self) -> None:
        """Ask everybody to log in."""
        member = self.servers[0]
        assert isinstance(member, EtcdServer)
        member.etcdctl("user", "add", f"weak:{PASSWORD}")
        member.enable_auth(PASSWORD)

    def without_rights(self) -> Target:
        return replace(self.target, url=self.target.url.replace("root:", "weak:"))

    def victims(self) -> Sequence[Server]:
        """Give the leader."""
        return [self.service.leader] if isinstance(self.service, EtcdCluster) else []


class ZooKeeperFaults(ServerFaults):
    """ZooKeeper, without logins."""

    def sign(self, step: Step, name: str) -> bytes:
        """A step reads too, and only what it writes names a node."""
        return b"__lock__" if step == "acquire" else name.encode()

    def victims(self) -> Sequence[Server]:
        """Give the leader."""
        return [self.service.leader] if isinstance(self.service, ZooKeeperEnsemble) else []


class ObjectFaults(ServerFaults):
    """An object store. Its login is in the environment: the same for all clients, and that of other tests."""

    def sign(self, step: Step, name: str) -> bytes:
        """Each step is a write; reads name the object too."""
        del step
        return f"PUT /{BUCKET}/{quote(object_name(name))}".encode()

    def without_rights(self) -> Target:
        return replace(self.target, url=self.target.url.replace(BUCKET, CLOSED_BUCKET))


def sql(make: type[PostgresServer | MariaServer], mode: str | None = None) -> ServerFaults:
    """Make a database, in one of its modes."""
    server = make(password=PASSWORD, durable=True)
    return SqlFaults(server) if mode is None else SqlSessionFaults(server, {"mode": mode})


FAULTS: Mapping[str, Callable[[], ServerFaults]] = {
    "redis": lambda: RedisFaults(durable_node()),
    "redis-resp3": lambda: RedisFaults(durable_node(), {"protocol": 3}),
    "redis-sentinel": lambda: RedisGroupFaults(
        durable(RedisSentinels(password=PASSWORD)), {"replicas": 1}, lacks=("without_rights", "stop_one", "erase")
    ),
    "redis-cluster": lambda: RedisGroupFaults(
        durable(RedisCluster(password=PASSWORD)), lacks=("without_rights", "stop_one", "erase")
    ),
    "redlock-3": lambda: RedlockFaults(RedisNodes(3, make=durable_node), {"durable": True}, lacks=("erase",)),
    "redlock-5": lambda: RedlockFaults(RedisNodes(5, make=durable_node), {"durable": True}, lacks=("erase",)),
    "postgresql": lambda: sql(PostgresServer),
    "postgresql-row": lambda: sql(PostgresServer, "row"),
    "postgresql-advisory": lambda: sql(PostgresServer, "advisory"),
    "mariadb": lambda: sql(MariaServer),
    "mariadb-row": lambda: sql(MariaServer, "row"),
    "mariadb-advisory": lambda: sql(MariaServer, "advisory"),
    "etcd": lambda: EtcdFaults(EtcdServer(settings=QUICK_LOGIN)),
    "etcd-cluster": lambda: EtcdFaults(EtcdCluster(settings=QUICK_LOGIN), lacks=("erase",)),
    "s3": lambda: ObjectFaults(ObjectStore(), lacks=("wrong_password",)),
    "zookeeper": lambda: ZooKeeperFaults(ZooKeeperServer(durable=True), lacks=("wrong_password",)),
    "zookeeper-ensemble": lambda: ZooKeeperFaults(ZooKeeperEnsemble(durable=True), lacks=("wrong_password", "erase")),
}
"""By target (`tests.conformance.targets`). The others have no server: memory, files."""
