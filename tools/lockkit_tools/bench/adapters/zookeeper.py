"""ZooKeeper: the least requests by hand through kazoo as a baseline, and kazoo's recipes."""

from __future__ import annotations

import threading
from importlib import import_module
from urllib.parse import quote, urlsplit

from lockkit_tools.bench.adapters.base import Adapter, Bracket, Library

_ROOT = "/lockkit-bench"
_TOOZ = "/tooz/locks"
_START_SECONDS = 30.0


class KazooLock(Adapter):
    """kazoo's ``Lock``, and its other recipes. Its session is kept alive by kazoo's own heartbeats."""

    leaves_something = True

    async def open(self) -> None:
        parts = urlsplit(self.url)
        hosts = f"{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._client: Library = import_module("kazoo.client").KazooClient(hosts, timeout=self.ttl)
        self._client.start(_START_SECONDS)

    async def close(self) -> None:
        self._client.stop()
        self._client.close()

    async def erase(self) -> None:
        """Remove its nodes; also those of tooz, which has no call for that."""
        client = self._client
        of_tooz = client.get_children(_TOOZ) if client.exists(_TOOZ) else []
        for path in [_ROOT, *(f"{_TOOZ}/{name}" for name in of_tooz if name.startswith("lockkit-bench-"))]:
            if client.exists(path):
                client.delete(path, recursive=True)

    def lock(self, name: str) -> Library:
        return self._client.Lock(_path(name))

    def read(self, name: str) -> Library:
        return self._client.ReadLock(_path(name))

    def write(self, name: str) -> Library:
        return self._client.WriteLock(_path(name))

    def permit(self, name: str, count: int) -> Library:
        return self._client.Semaphore(_path(name), max_leases=count)

    def election(self, name: str) -> Library:
        """`Election.run` calls a function under ``Election.lock``, and no more."""
        return self._client.Election(_path(name)).lock


class RawZooKeeper(KazooLock):
    """
    ``create``, ``get_children`` and ``delete``, one after the other; who is not first watches the one before.

    Handles no lost answer and no lost session.
    """

    def lock(self, name: str) -> Library:
        client, path, node = self._client, _path(name), ""
        client.ensure_path(path)

        def enter() -> None:
            nonlocal node
            node = client.create(f"{path}/n", b"", ephemeral=True, sequence=True)
            while True:
                line = sorted(client.get_children(path))
                position = line.index(node.rpartition("/")[2])
                if position == 0:
                    return
                left = threading.Event()
                if client.exists(f"{path}/{line[position - 1]}", watch=lambda _, left=left: left.set()):
                    left.wait()

        return Bracket(enter, lambda: client.delete(node))


def _path(name: str) -> str:
    return f"{_ROOT}/{quote(name, safe='')}"
