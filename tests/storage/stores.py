"""One value in each store that `lockkit.optimistic` can change: how it and a rival change it."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import redis
import sqlalchemy as sa
from kazoo.exceptions import NoNodeError

import lockkit
from lockkit import aio, optimistic
from lockkit_tools.servers import EtcdServer, RedisServer, ZooKeeperServer, http2_call_ended, require
from tests.backends.zookeeper.support import kazoo_client
from tests.storage.redis.support import Face
from tests.storage.sql.support import Base

VALUES = sa.Table(
    "stored",
    sa.MetaData(),
    sa.Column("name", sa.String(20), primary_key=True),
    sa.Column("value", sa.String(200), nullable=False),
    sa.Column("version", sa.Integer, nullable=False),
)


class Store(ABC):
    """
    A value in a store, as text; None: there is none.

    Attributes:
        address: HOST:PORT of its server.
        name: What errors call it.
        lost: What to ask a `FaultProxy` for, so that it drops the answer to a change.
    """

    address: str
    name: ClassVar[str] = "x"
    lost: ClassVar[dict[str, Any]]

    def update(self, face: str, fn: Any, **given: Any) -> Any:  # noqa: ANN401 - also what is wrong
        """Change it by a function of text, which may be async."""
        if inspect.iscoroutinefunction(fn):

            async def later(now: Any) -> Any:  # noqa: ANN401 - of the store
                return self.packed(await fn(self.unpacked(now)))

            return self.unpacked(self.change(face, later, given))
        called = (lambda now: self.packed(fn(self.unpacked(now)))) if callable(fn) else fn
        return self.unpacked(self.change(face, called, given))

    @abstractmethod
    def change(self, face: str, fn: Any, given: Mapping[str, Any]) -> Any:  # noqa: ANN401 - see above
        """Call the function of `lockkit.optimistic` for this store: ``sync`` or ``asyncio``."""

    @abstractmethod
    def value(self) -> str | None:
        """Read it without lockkit."""

    @abstractmethod
    def put(self, value: str | None) -> None:
        """Write, create or delete it without lockkit."""

    @abstractmethod
    def at(self, address: str) -> Store:
        """The same behind a proxy."""

    def packed(self, value: Any) -> Any:  # noqa: ANN401 - of the store
        """Make of text what the store takes."""
        return value

    def unpacked(self, value: Any) -> Any:  # noqa: ANN401 - see above
        """Make text of what the store gives."""
        return value.decode() if isinstance(value, bytes) else value


class _Redis(Store):
    """A string in Redis."""

    def __init__(self, host: str, port: int) -> None:
        self.address = f"{host}:{port}"
        self._port = port

    def change(self, face: str, fn: Any, given: Mapping[str, Any]) -> Any:  # noqa: ANN401
        return Face(face, self._port).update("x", fn, **given)

    def value(self) -> str | None:
        with redis.Redis(port=self._port, decode_responses=True) as client:
            found: Any = client.get("x")
            return None if found is None else str(found)

    def put(self, value: str | None) -> None:
        with redis.Redis(port=self._port) as client:
            _ = client.delete("x") if value is None else client.set("x", value)

    def at(self, address: str) -> _Redis:
        host, _, port = address.rpartition(":")
        return _Redis(host, int(port))


class ZooKeeperStore(Store):
    """A node in ZooKeeper."""

    name = "/stored"
    lost: ClassVar = {"match": b"counted"}

    def __init__(self, address: str, stack: ExitStack) -> None:
        self.address = address
        self._stack = stack
        self.client = stack.enter_context(kazoo_client(address))

    def change(self, face: str, fn: Any, given: Mapping[str, Any]) -> Any:  # noqa: ANN401
        if face == "sync":
            return optimistic.update_node(self.client, self.name, fn, **given)
        return asyncio.run(optimistic.update_node_async(self.client, self.name, fn, **given))

    def value(self) -> str | None:
        try:
            return str(self.client.get(self.name)[0].decode())
        except NoNodeError:
            return None

    def put(self, value: str | None) -> None:
        if self.client.exists(self.name) and value is not None:
            self.client.set(self.name, value.encode())
        elif value is not None:
            self.client.create(self.name, value.encode())
        elif self.client.exists(self.name):
            self.client.delete(self.name)

    def at(self, address: str) -> ZooKeeperStore:
        return ZooKeeperStore(address, self._stack)


class _Etcd(Store):
    """A key in etcd. The rival is another client of lockkit, whose function looks at nothing."""

    lost: ClassVar = {"match": b"x", "until": http2_call_ended}

    def __init__(self, address: str, stack: ExitStack) -> None:
        self.address = address
        self._stack = stack
        self._client = stack.enter_context(lockkit.connect(f"etcd://{address}"))

    def change(self, face: str, fn: Any, given: Mapping[str, Any]) -> Any:  # noqa: ANN401
        if face == "sync":
            return optimistic.update_key(self._client, "x", fn, **given)

        async def main() -> Any:  # noqa: ANN401
            async with aio.connect(f"etcd://{self.address}") as client:
                return await optimistic.update_key_async(client, "x", fn, **given)

        return asyncio.run(main())

    def value(self) -> str | None:
        seen: list[Any] = []
        optimistic.update_key(self._client, "x", seen.append)
        return self.unpacked(seen[0])  # type: ignore[no-any-return] # text

    def put(self, value: str | None) -> None:
        optimistic.update_key(self._client, "x", lambda _: optimistic.DELETE if value is None else value)

    def at(self, address: str) -> _Etcd:
        return _Etcd(address, self._stack)


class _Sql(Store):
    """A row of a SQL database."""

    name = "stored x"

    def __init__(self, base: Base) -> None:
        self.base = base
        self.address = base.place.partition("@")[2].partition("/")[0]
        # A MariaDB connection begins with SET AUTOCOMMIT; \x03 is the start of a query of its own.
        self.lost = {"match": b"COMMIT" if base.kind == "postgresql" else b"\x03COMMIT"}  # type: ignore[misc] # by kind

    def change(self, face: str, fn: Any, given: Mapping[str, Any]) -> Any:  # noqa: ANN401
        if face == "sync":
            with self.base.engine() as engine:
                return optimistic.update_row(engine, VALUES, "x", fn, **given)
        return self.base.aio(lambda engine: optimistic.update_row_async(engine, VALUES, "x", fn, **given))

    def value(self) -> str | None:
        return next((value for (value,) in self.base.rows("SELECT value FROM stored")), None)

    def put(self, value: str | None) -> None:
        if value is None:
            self.base.rows("DELETE FROM stored")
        elif self.value() is None:
            self.base.rows(f"INSERT INTO stored VALUES ('x', '{value}', 1)")  # noqa: S608 - a test's own
        else:
            self.base.rows(f"UPDATE stored SET value = '{value}', version = version + 1")  # noqa: S608 - see above

    def at(self, address: str) -> _Sql:
        return _Sql(Base(self.base.kind, self.base.place.replace(self.address, address)))

    def packed(self, value: Any) -> Any:  # noqa: ANN401
        return {"value": value} if isinstance(value, str) else value

    def unpacked(self, value: Any) -> Any:  # noqa: ANN401
        return value["value"] if isinstance(value, Mapping) else value


SERVERS: dict[str, tuple[Callable[[], Any], Callable[[Any, ExitStack], Store]]] = {
    "redis": (RedisServer, lambda server, _: _Redis(server.host, server.port)),
    "zookeeper": (ZooKeeperServer, lambda server, stack: ZooKeeperStore(server.address, stack)),
    "etcd": (EtcdServer, lambda server, stack: _Etcd(server.address, stack)),
}
DATABASES = ("postgresql", "mariadb", "sqlite")


@contextmanager
def opened(kind: str, bases: Mapping[str, Base]) -> Iterator[Store]:
    """A store of a kind, with its server running."""
    if kind in DATABASES:
        with bases[kind].engine() as engine:
            VALUES.drop(engine, checkfirst=True)
            VALUES.create(engine)
        yield _Sql(bases[kind])
        return
    require(kind, local=True)
    made, store = SERVERS[kind]
    with made() as server, ExitStack() as stack:
        yield store(server, stack)
