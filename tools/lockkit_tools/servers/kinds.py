"""
The kinds of servers: what each needs on the machine, and how each is made.

One line per kind; finding, installing and the command line read this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from lockkit_tools.servers.base import Service
from lockkit_tools.servers.binaries import look_for, look_for_jar
from lockkit_tools.servers.docker import ContainerServer, Image, docker_has
from lockkit_tools.servers.errors import ServerMissing
from lockkit_tools.servers.readiness import ask_etcd, ask_mysql, ask_postgresql, ask_redis, ask_zookeeper


@dataclass(frozen=True, slots=True)
class Need:
    """Something that must be on the machine, under any of several names."""

    names: tuple[str, ...]
    java: bool = False
    """Whether it is a Java library rather than a program."""

    def present(self) -> str | None:
        """Where it is; None if it is not here."""
        found = look_for_jar(self.names[0]) if self.java else look_for(*self.names)
        return None if found is None else str(found)


@dataclass(frozen=True, slots=True)
class Kind:
    """What must be known about one kind of server."""

    name: str
    title: str
    factory: str | None
    """``module:class`` of the local form; None: there is no local form."""
    needs: tuple[Need, ...]
    packages: tuple[str, ...]
    """Debian packages that bring what it needs."""
    image: Image | None = None
    """How it is run in a container; None: there is no such form."""

    @property
    def variable(self) -> str:
        """Environment variable with the URL of a server to use instead of our own."""
        return f"LOCKKIT_TEST_{self.name.upper().replace('-', '_')}_URL"

    def missing(self) -> list[str]:
        """The needed programs that are not on this machine."""
        return [" or ".join(need.names) for need in self.needs if need.present() is None]

    def locations(self) -> list[str]:
        """Where the needed programs are, for those that are here."""
        return [place for need in self.needs if (place := need.present()) is not None]

    def make(self, **options: object) -> Service:
        """A server of this kind made of local programs, not started yet."""
        if self.factory is None:
            raise ServerMissing(f"{self.title} has no local form here; set {self.variable}")
        module, _, name = self.factory.partition(":")
        make: Callable[..., Service] = getattr(import_module(f"lockkit_tools.servers.{module}"), name)
        return make(**options)

    def missing_image(self) -> str | None:
        """Why there is no container of this kind here, and what to do; None if there are."""
        if self.image is None:
            return f"{self.title} has no form in one container; set {self.variable}"
        if not docker_has(self.image.name):
            return (
                f"no container of {self.image.name}: needs a Docker daemon that has the image or can fetch it, "
                f"and pip install testcontainers"
            )
        return None

    def make_contained(self) -> Service:
        """A server of this kind in a container, not started yet."""
        if self.image is None:
            raise ServerMissing(f"{self.title} has no form in one container; set {self.variable}")
        return ContainerServer(self.name, self.image)


# fmt: off
_REDIS = (Need(("redis-server", "valkey-server")),)
_POSTGRESQL = (Need(("postgres",)), Need(("initdb",)))
_MARIADB = (Need(("mariadbd", "mysqld")), Need(("mariadb-install-db", "mysql_install_db")))
_ZOOKEEPER = (Need(("java",)), Need(("zookeeper.jar",), java=True))
# Not "zookeeper": that one makes an account and a service, and draws in a desktop JRE.
_ZOOKEEPER_PACKAGES = ("libzookeeper-java", "libslf4j-java", "default-jre-headless")
_ETCD, _ETCD_PACKAGES = (Need(("etcd",)), Need(("etcdctl",))), ("etcd-server", "etcd-client")

_REDIS_IMAGE = Image("redis:7.4", 6379, "redis://{address}/0", ask_redis)
_POSTGRESQL_IMAGE = Image(
    "postgres:16.4", 5432, "postgresql://postgres@{address}/postgres", ask_postgresql,
    env=(("POSTGRES_HOST_AUTH_METHOD", "trust"),),
)
_MYSQL_ENVIRONMENT = (("MYSQL_USER", "lockkit"), ("MYSQL_PASSWORD", "lockkit"), ("MYSQL_DATABASE", "lockkit"))
_MARIADB_IMAGE = Image(
    "mariadb:11.4", 3306, "mariadb://lockkit:lockkit@{address}/lockkit", ask_mysql,
    env=(*_MYSQL_ENVIRONMENT, ("MARIADB_RANDOM_ROOT_PASSWORD", "1")),
)
_MYSQL_IMAGE = Image(
    "mysql:8", 3306, "mysql://lockkit:lockkit@{address}/lockkit", ask_mysql,
    env=(*_MYSQL_ENVIRONMENT, ("MYSQL_RANDOM_ROOT_PASSWORD", "1")),
)
_ZOOKEEPER_IMAGE = Image(
    "zookeeper:3.9", 2181, "zookeeper://{address}", ask_zookeeper,
    env=(
        # By default it lets 60 connections in from one address, and all of ours come from that of Docker's bridge.
        ("ZOO_MAX_CLIENT_CNXNS", "0"),
        ("ZOO_ADMINSERVER_ENABLED", "false"),
        # As for local servers, see there.
        ("ZOO_TICK_TIME", "200"), ("ZOO_INIT_LIMIT", "50"), ("ZOO_SYNC_LIMIT", "15"),
        ("ZOO_4LW_COMMANDS_WHITELIST", "*"),
        ("ZOO_CFG_EXTRA", "maxSessionTimeout=120000"),
    ),
)
_ETCD_IMAGE = Image(
    "quay.io/coreos/etcd:v3.5.17", 2379, "etcd://{address}", ask_etcd,
    command=("etcd", "--listen-client-urls=http://0.0.0.0:2379", "--advertise-client-urls=http://127.0.0.1:2379"),
)

_KINDS = (
    Kind("redis", "Redis, one node", "redis:RedisServer", _REDIS, ("redis-server",), _REDIS_IMAGE),
    Kind(
        "redis-sentinel", "Redis, a master and a replica under three Sentinels", "redis_groups:RedisSentinels",
        _REDIS, ("redis-server",),
    ),
    Kind(
        "redis-cluster", "Redis Cluster of three masters", "redis_groups:RedisCluster",
        _REDIS, ("redis-server",),
    ),
    Kind(
        "redlock", "Redis, independent nodes", "redis_groups:RedisNodes",
        _REDIS, ("redis-server",),
    ),
    Kind(
        "postgresql", "PostgreSQL", "postgresql:PostgresServer", _POSTGRESQL, ("postgresql",), _POSTGRESQL_IMAGE,
    ),
    Kind(
        "pgbouncer", "PostgreSQL behind pgbouncer in transaction mode", "pgbouncer:PooledPostgres",
        (*_POSTGRESQL, Need(("pgbouncer",))), ("postgresql", "pgbouncer"),
    ),
    Kind("mariadb", "MariaDB", "mariadb:MariaServer", _MARIADB, ("mariadb-server",), _MARIADB_IMAGE),
    Kind("mysql", "MySQL", None, (), (), _MYSQL_IMAGE),  # no distribution packages it beside MariaDB
    Kind(
        "zookeeper", "ZooKeeper, stand-alone", "zookeeper:ZooKeeperServer",
        _ZOOKEEPER, _ZOOKEEPER_PACKAGES, _ZOOKEEPER_IMAGE,
    ),
    Kind(
        "zookeeper-ensemble", "ZooKeeper, three members", "zookeeper:ZooKeeperEnsemble",
        _ZOOKEEPER, _ZOOKEEPER_PACKAGES,
    ),
    Kind("etcd", "etcd, one member", "etcd:EtcdServer", _ETCD, _ETCD_PACKAGES, _ETCD_IMAGE),
    Kind(
        "etcd-cluster", "etcd, three members", "etcd:EtcdCluster",
        _ETCD, _ETCD_PACKAGES,
    ),
    Kind(
        "s3", "An object store that speaks S3 (SeaweedFS)", "objects:ObjectStoreServer", (Need(("weed",)),), (),
    ),
    Kind("nats", "NATS with JetStream", "nats:NatsServer", (Need(("nats-server",)),), ("nats-server",)),
    # No servers, but found and installed as one: what shows a client another time of day, and what checks models/.
    Kind("faketime", "libfaketime", None, (Need(("faketime",)),), ("faketime",)),
    Kind(
        "spin", "Spin, the model checker", None, (Need(("spin",)), Need(("gcc",))), ("spin", "gcc", "libc6-dev"),
    ),
)
# fmt: on

KINDS: dict[str, Kind] = {kind.name: kind for kind in _KINDS}


def find_kind(name: str) -> Kind:
    """The kind of that name."""
    if name not in KINDS:
        raise ValueError(f"no kind of server {name!r}; there are: {', '.join(KINDS)}")
    return KINDS[name]
