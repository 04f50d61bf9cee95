"""ZooKeeper: the least requests by hand through kazoo as a baseline, and kazoo's recipes."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from importlib import import_module
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

from lockkit_tools.bench.adapters.base import BlockingAdapter
from lockkit_tools.bench.subject import Kind

_ROOT = "/lockkit-bench"
_TOOZ = "/tooz/locks"
_START_SECONDS = 30.0


class _Kazoo(BlockingAdapter):
    """A client of kazoo's."""

    leaves_something = True

    async def open(self) -> None:
        parts = urlsplit(self.url)
        hosts = f"{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._client: Any = import_module("kazoo.client").KazooClient(hosts, timeout=self.ttl)
        self._client.start(_START_SECONDS)

    async def close(self) -> None:
        self._client.stop()
        self._client.close()

    async def erase(self) -> None:
        """See `BlockingAdapter.erase`. Also the nodes of tooz, which has no call for that."""
        client = self._client
        of_tooz = client.get_children(_TOOZ) if client.exists(_TOOZ) else []
        for path in [_ROOT, *(f"{_TOOZ}/{name}" for name in of_tooz if name.startswith("lockkit-bench-"))]:
            if client.exists(path):
                client.delete(path, recursive=True)

    def _path(self, name: str) -> str:
        return f"{_ROOT}/{quote(name, safe='')}"


class KazooLock(_Kazoo):
    """kazoo's ``Lock``, and its other recipes. Its session is kept alive by kazoo's own heartbeats."""

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        lock: AbstractContextManager[Any] = self._client.Lock(self._path(name))
        return lock

    def primitive(self, kind: Kind, name: str, count: int = 1) -> AbstractContextManager[Any]:
        """See `BlockingAdapter.primitive`. `Election.run` calls a function under ``Election.lock``, and no more."""
        client, path = self._client, self._path(name)
        made: AbstractContextManager[Any]
        if kind == "read":
            made = client.ReadLock(path)
        elif kind == "write":
            made = client.WriteLock(path)
        elif kind == "permit":
            made = client.Semaphore(path, max_leases=count)
        elif kind == "election":
            made = client.Election(path).lock
        else:
            made = super().primitive(kind, name, count)
        return made


class RawZooKeeper(_Kazoo):
    """``create``, ``get_children`` and ``delete``, one after the other; who is not first watches the one before."""

    def lock(self, name: str, *, renew: bool = False) -> AbstractContextManager[Any]:
        del renew
        path = self._path(name)
        self._client.ensure_path(path)
        return _RawLock(self._client, path)


class _RawLock:
    """Handles no lost answer and no lost session."""

    def __init__(self, client: Any, path: str) -> None:  # noqa: ANN401 - kazoo has no types
        self._client = client
        self._path = path
        self._node = ""

    def __enter__(self) -> Self:
        client, path = self._client, self._path
        node = self._node = client.create(f"{path}/n", b"", ephemeral=True, sequence=True)
        while True:
            line = sorted(client.get_children(path))
            position = line.index(node.rpartition("/")[2])
            if position == 0:
                return self
            left = threading.Event()
            if client.exists(f"{path}/{line[position - 1]}", watch=lambda _, left=left: left.set()):
                left.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.delete(self._node)
